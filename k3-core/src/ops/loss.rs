//! How much a text surprised the model: negative log-likelihood, perplexity, bits per byte.
//!
//! Everything here is f64 and follows the floating-point contract: the maximum is subtracted first,
//! `sum exp(l - max)` goes over sixteen lanes by index, folded by the one tree, and `exp` and `ln`
//! are the core's own and `libm`'s pure Rust. So two machines that agree on the logits, and all do,
//! agree on the last bit of a perplexity.
//!
//! ```
//! use k3_core::ops::loss::{Loss, nll};
//! use k3_core::view::TokenId;
//!
//! // Four equal logits: each of the ids is one bit of surprise twice over.
//! let mut loss = Loss::default();
//! loss.add(nll(&[1.5; 4], TokenId(2))?.expect("an id there is a logit for"), 2);
//! assert_eq!((loss.perplexity(), loss.bits_per_byte()), (Some(4.0), Some(1.0)));
//! assert_eq!(nll(&[1.5; 4], TokenId(4))?, None);
//! # Ok::<(), k3_core::ops::sample::NonFiniteLogit>(())
//! ```

use super::sample::{NonFiniteLogit, argmax};
use crate::backend::{LANES, fold};
use crate::math::exp64;
use crate::view::TokenId;

/// `-ln softmax(logits)[target]` in nats, over all of `logits` (`[vocab_size]`); never negative.
/// `None` if there is no logit for `target`.
///
/// # Errors
/// [`NonFiniteLogit`] if any logit is infinite or NaN: such a row says nothing about its target.
pub fn nll(logits: &[f32], target: TokenId) -> Result<Option<f64>, NonFiniteLogit> {
    let wanted = logits.get(target.get()).copied().map(f64::from);
    // The maximum itself adds 1, so the logarithm is of a number from 1 to the vocabulary's size.
    Ok(log_sum_exp(logits)?.zip(wanted).map(|((max, log), wanted)| log + (max - wanted)))
}

/// The largest logit `m`, and `ln sum exp(l - m)`: the logarithm of the sum of all `exp(l)` is the sum of the
/// two. `None` if there are no logits.
///
/// # Errors
/// [`NonFiniteLogit`] if any logit is infinite or NaN.
pub fn log_sum_exp(logits: &[f32]) -> Result<Option<(f64, f64)>, NonFiniteLogit> {
    let Some(max) = argmax(logits)?.and_then(|id| logits.get(id.get()).copied()).map(f64::from) else {
        return Ok(None);
    };
    let mut lanes = [0.0; LANES];
    for block in logits.chunks(LANES) {
        for (lane, &logit) in lanes.iter_mut().zip(block) {
            *lane += exp64(f64::from(logit) - max);
        }
    }
    Ok(Some((max, libm::log(fold(lanes)))))
}

/// A running sum of [`nll`] over the tokens of a text, in their order.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Loss {
    /// The sum (nats).
    pub nll: f64,
    /// Tokens in it.
    pub tokens: u64,
    /// Bytes of these tokens.
    pub bytes: u64,
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
impl Loss {
    /// Counts a token of `bytes` bytes.
    pub fn add(&mut self, nll: f64, bytes: usize) {
        self.nll += nll;
        self.tokens += 1;
        self.bytes += bytes as u64;
    }

    /// Nats per token; `None` before the first.
    #[must_use]
    pub fn mean(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.nll / self.tokens as f64)
    }

    /// `e` to the mean: the size of a fair die that surprises as much; infinite beyond f64.
    #[must_use]
    pub fn perplexity(&self) -> Option<f64> {
        self.mean().map(libm::exp)
    }

    /// Bits per byte of text, which compares models of different vocabularies; `None` if the tokens
    /// have no bytes.
    #[must_use]
    pub fn bits_per_byte(&self) -> Option<f64> {
        (self.bytes > 0).then(|| self.nll / core::f64::consts::LN_2 / self.bytes as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(logits: &[f32], target: u32) -> Option<u64> {
        nll(logits, TokenId(target)).expect("finite").map(f64::to_bits)
    }

    #[test]
    fn simple_distributions_give_known_numbers() {
        // Uniform over n: ln n. Every n, because lanes and tails differ.
        for n in 1..=67u32 {
            let logits = std::vec![-3.25; n as usize];
            for target in [0, n / 2, n - 1] {
                assert_eq!(bits(&logits, target), Some(libm::log(f64::from(n)).to_bits()), "{n}");
            }
        }
        // One id far above the others is no surprise; the others are, by the distance.
        assert_eq!(bits(&[0.0, 1000.0, 5.0], 1), Some(0.0f64.to_bits()));
        assert_eq!(bits(&[0.0, 1000.0, 5.0], 0), Some(1000.0f64.to_bits()));
        assert_eq!(bits(&[f32::MAX, f32::MIN], 1), Some((2.0 * f64::from(f32::MAX)).to_bits()));
    }

    #[test]
    fn a_plain_sum_agrees_and_probabilities_add_up_to_one() {
        let logits: std::vec::Vec<f32> = (0..251u16).map(|i| f32::from(i * 97 % 251) / 16.0 - 9.0).collect();
        let sum: f64 = logits.iter().map(|&l| libm::exp(f64::from(l))).sum();
        let mut total = 0.0;
        for (id, &logit) in (0..).zip(&logits) {
            let found = nll(&logits, TokenId(id)).expect("finite").expect("in range");
            let expected = libm::log(sum) - f64::from(logit);
            assert!((found - expected).abs() < 1e-13, "{found} {expected}");
            total += libm::exp(-found);
        }
        assert!((total - 1.0).abs() < 1e-13, "{total}");
    }

    /// These bits are part of the promise: they must come out on every target.
    #[test]
    fn the_bits_are_pinned() {
        let logits: std::vec::Vec<f32> = (0..100u16).map(|i| f32::from(i * 37 % 101) / 8.0).collect();
        assert_eq!(bits(&logits, 17), Some(0x4027_87ab_9a37_9ca5));
    }

    #[test]
    fn what_has_no_meaning_has_no_number() {
        assert_eq!(nll(&[], TokenId(0)), Ok(None));
        assert_eq!(nll(&[1.0, 2.0], TokenId(2)), Ok(None));
        assert_eq!(nll(&[1.0, f32::NAN], TokenId(0)), Err(NonFiniteLogit { id: TokenId(1) }));
        let none = Loss::default();
        assert_eq!((none.mean(), none.perplexity(), none.bits_per_byte()), (None, None, None));
    }

    #[test]
    fn units_are_nats_per_token_and_bits_per_byte() {
        let mut loss = Loss::default();
        loss.add(libm::log(8.0), 1);
        loss.add(libm::log(2.0), 3);
        assert!((loss.perplexity().expect("tokens") - 4.0).abs() < 1e-12);
        assert!((loss.bits_per_byte().expect("bytes") - 1.0).abs() < 1e-12);
    }
}
