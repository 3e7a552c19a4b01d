//! From logits to an id.
//!
//! The last step of a pass and the only one that decides anything: the largest logit, the lowest id
//! among equals. A logit that is not finite is an error that names it and never a choice.
//!
//! ```
//! use k3_core::ops::sample::argmax;
//! use k3_core::view::TokenId;
//!
//! assert_eq!(argmax(&[0.5, 2.0, 2.0]), Ok(Some(TokenId(1))));
//! assert_eq!(argmax(&[0.5, f32::NAN]).unwrap_err().id, TokenId(1));
//! ```

use crate::view::TokenId;

/// A logit that is not a number or not finite. It is never sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NonFiniteLogit {
    /// The first id whose logit is not finite.
    pub id: TokenId,
}

impl core::fmt::Display for NonFiniteLogit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "the logit of id {} is not finite", self.id.0)
    }
}

impl core::error::Error for NonFiniteLogit {}

/// The id with the largest logit; the lowest id among equals. `None` if there are no logits.
///
/// # Errors
/// [`NonFiniteLogit`] if any logit is infinite or NaN, wherever it stands.
pub fn argmax(logits: &[f32]) -> Result<Option<TokenId>, NonFiniteLogit> {
    let mut best: Option<(TokenId, f32)> = None;
    for (id, &logit) in (0u32..).map(TokenId).zip(logits) {
        if !logit.is_finite() {
            return Err(NonFiniteLogit { id });
        }
        if best.is_none_or(|(_, b)| logit > b) {
            best = Some((id, logit));
        }
    }
    Ok(best.map(|(id, _)| id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_id_wins_and_a_non_finite_logit_never_does() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, -0.0]), Ok(Some(TokenId(1))));
        assert_eq!(argmax(&[-0.0, 0.0]), Ok(Some(TokenId(0))));
        assert_eq!(argmax(&[]), Ok(None));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(argmax(&[0.0, bad, 9.0]), Err(NonFiniteLogit { id: TokenId(1) }));
        }
    }
}
