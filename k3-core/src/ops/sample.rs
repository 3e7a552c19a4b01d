//! From logits to an id.
//!
//! The last step of a pass and the only one that decides anything. [`argmax`] is the greedy choice: the
//! largest logit, the lowest id among equals. A [`Sampler`] draws instead. A logit that is not finite is an
//! error that names it and never a choice.
//!
//! ```
//! use k3_core::ops::sample::{Candidate, Sampler, Settings, argmax};
//! use k3_core::view::TokenId;
//!
//! assert_eq!(argmax(&[0.5, 2.0, 2.0]), Ok(Some(TokenId(1))));
//! assert_eq!(argmax(&[0.5, f32::NAN]).unwrap_err().id, TokenId(1));
//!
//! let settings = Settings { temperature: 0.7, top_p: 0.9, seed: 42, ..Settings::GREEDY };
//! let sampler = Sampler::new(settings)?;
//! let mut scratch = [Candidate::EMPTY; 3];
//! let id = sampler.pick(17, &[], &[0.5, 2.0, 2.0], &mut scratch)?;
//! assert_eq!(id, TokenId(1)); // on every machine
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How an id is drawn
//!
//! In this order, each step on what the one before has left. Values are f64 and sums of weights are
//! integers, so there is nothing for a back end, a thread or an order of additions to change.
//!
//! 1. **Penalty.** The logit of each id that the history holds, however often, is divided by
//!    `repeat_penalty` if it is positive, and multiplied by it if not.
//! 2. **Bias.** The bias of an id is added; minus infinity takes the id out.
//! 3. Candidates are **ranked**: falling logit, and rising id among equals.
//! 4. **Temperature.** `w = exp((logit - best) / temperature)`, with the core's own `exp`, whose argument is
//!    held at -700. A temperature of 0 takes the first candidate, and nothing else is looked at. Where
//!    weights are added they are counted in units of 2^-94, cut off behind them; the sum is exact, and is
//!    rounded to f64 where it is compared. So the sum of all needs no order, and only as many candidates
//!    are sorted as the steps below look at.
//! 5. **Top-k** keeps the first `top_k` candidates.
//! 6. **Top-p** keeps the shortest beginning whose weights add up to `top_p` of all that are left.
//! 7. **Min-p** keeps those whose weight is at least `min_p` of the first one's.
//! 8. **Draw.** Weights are added up in rank order; the first candidate at which the running sum is greater
//!    than `u` times the sum of all that are left is taken.
//!
//! `u` is made of the first 53 bits that [`philox`] gives for the seed and the *position* in the sequence,
//! not for the count of calls. So a seed replays: whatever the budget, the threads or the cut into chunks,
//! whether tokens were guessed in advance, and across sessions.

use crate::math::exp64;
use crate::view::TokenId;

/// A logit that is not a number or not finite. It is never sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
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

/// How ids are chosen. [`Settings::GREEDY`] changes nothing and takes the best.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings<'a> {
    /// Flattens (above 1) or sharpens (below 1) the distribution; 0 takes the best.
    pub temperature: f64,
    /// Candidates that are kept at most; `None` keeps all.
    pub top_k: Option<u32>,
    /// Share of the probability that is kept, in (0, 1]; 1 keeps all.
    pub top_p: f64,
    /// Share of the best candidate's probability that a candidate must have, in \[0, 1]; 0 keeps all.
    pub min_p: f64,
    /// Makes ids that were there less likely (above 1) or more likely (below 1); positive.
    pub repeat_penalty: f64,
    /// Added to the logits of some ids, each named once. Finite, or minus infinity. If there are many, rising
    /// ids are checked faster.
    pub bias: &'a [(TokenId, f32)],
    /// Where the randomness comes from.
    pub seed: u64,
}

impl Settings<'_> {
    /// The best id, whatever the seed.
    pub const GREEDY: Self =
        Self { temperature: 0.0, top_k: None, top_p: 1.0, min_p: 0.0, repeat_penalty: 1.0, bias: &[], seed: 0 };
}

/// A setting that has no meaning.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum SettingsError {
    /// `temperature` is negative or not finite.
    Temperature(f64),
    /// `top_k` is 0: nothing could be chosen.
    TopK,
    /// `top_p` is not in (0, 1].
    TopP(f64),
    /// `min_p` is not in \[0, 1].
    MinP(f64),
    /// `repeat_penalty` is not positive and finite.
    RepeatPenalty(f64),
    /// A bias is NaN or plus infinity.
    Bias(TokenId),
    /// An id has two biases.
    BiasTwice(TokenId),
}

impl core::fmt::Display for SettingsError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::Temperature(v) => write!(f, "temperature {v}: it must be 0 or a positive finite number"),
            Self::TopK => f.write_str("top-k 0: at least one candidate must be kept"),
            Self::TopP(v) => write!(f, "top-p {v}: it must be above 0 and at most 1"),
            Self::MinP(v) => write!(f, "min-p {v}: it must be from 0 to 1"),
            Self::RepeatPenalty(v) => write!(f, "repeat-penalty {v}: it must be a positive finite number"),
            Self::Bias(id) => write!(f, "logit-bias of id {}: it must be finite, or -inf", id.0),
            Self::BiasTwice(id) => write!(f, "logit-bias of id {}: it is given twice", id.0),
        }
    }
}

impl core::error::Error for SettingsError {}

/// Why no id was picked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SampleError {
    /// A logit is not finite.
    NonFinite(NonFiniteLogit),
    /// Biases have taken out every id, or there are no logits.
    Nothing,
    /// An id of a bias or of the history has no logit.
    Outside(TokenId),
    /// The scratch is shorter than the logits.
    Scratch {
        /// Candidates that are needed.
        needed: usize,
        /// Candidates that were given.
        given: usize,
    },
}

impl core::fmt::Display for SampleError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::NonFinite(error) => error.fmt(f),
            Self::Nothing => f.write_str("no id is left to choose from"),
            Self::Outside(id) => write!(f, "id {} has no logit", id.0),
            Self::Scratch { needed, given } => {
                write!(f, "the scratch has room for {given} candidates, {needed} are needed")
            }
        }
    }
}

impl core::error::Error for SampleError {}

impl From<NonFiniteLogit> for SampleError {
    fn from(error: NonFiniteLogit) -> Self {
        Self::NonFinite(error)
    }
}

/// An id that may be chosen: scratch memory of a [`Sampler`], one for each logit.
#[derive(Debug, Clone, Copy)]
pub struct Candidate {
    id: TokenId,
    seen: bool,
    /// The logit, with penalty and bias.
    value: f64,
}

impl Candidate {
    /// For building arrays.
    pub const EMPTY: Self = Self { id: TokenId(0), seen: false, value: 0.0 };

    /// Falling value, rising id: no two are equal.
    fn rank(a: &Self, b: &Self) -> core::cmp::Ordering {
        // Finite values: `total_cmp` would order the two zeros.
        b.value.partial_cmp(&a.value).unwrap_or(core::cmp::Ordering::Equal).then(a.id.cmp(&b.id))
    }
}

/// Chooses ids by checked settings. It has no state: the same arguments give the same id.
#[derive(Debug, Clone, Copy)]
pub struct Sampler<'a> {
    settings: Settings<'a>,
}

impl<'a> Sampler<'a> {
    /// Checks the settings.
    ///
    /// # Errors
    /// [`SettingsError`] naming the field.
    pub fn new(settings: Settings<'a>) -> Result<Self, SettingsError> {
        let Settings { temperature, top_k, top_p, min_p, repeat_penalty, bias, .. } = settings;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(SettingsError::Temperature(temperature));
        }
        if top_k == Some(0) {
            return Err(SettingsError::TopK);
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(SettingsError::TopP(top_p));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err(SettingsError::MinP(min_p));
        }
        if !(repeat_penalty.is_finite() && repeat_penalty > 0.0) {
            return Err(SettingsError::RepeatPenalty(repeat_penalty));
        }
        if let Some(&(id, _)) = bias.iter().find(|(_, value)| value.is_nan() || *value == f32::INFINITY) {
            return Err(SettingsError::Bias(id));
        }
        // In rising order equals are neighbours: a whole vocabulary would take its square otherwise.
        let twice = if bias.is_sorted_by_key(|(id, _)| *id) {
            bias.windows(2).find(|pair| pair[0].0 == pair[1].0).map(|pair| &pair[0])
        } else {
            let mut all = bias.iter().enumerate();
            all.find(|(i, (id, _))| bias.iter().take(*i).any(|(other, _)| other == id)).map(|(_, one)| one)
        };
        if let Some(&(id, _)) = twice {
            return Err(SettingsError::BiasTwice(id));
        }
        Ok(Self { settings })
    }

    /// Whether every pick is the [`argmax`] of the logits as they are, which needs no scratch.
    #[must_use]
    #[expect(clippy::float_cmp, reason = "the exact values that mean: not used")]
    pub const fn is_plain(&self) -> bool {
        self.settings.temperature == 0.0 && self.settings.repeat_penalty == 1.0 && self.settings.bias.is_empty()
    }

    /// Candidates of scratch that [`Sampler::pick`] needs for a vocabulary.
    #[must_use]
    pub const fn scratch_len(&self, vocab_size: usize) -> usize {
        if self.is_plain() { 0 } else { vocab_size }
    }

    /// The id for `position` (tokens before it) after `history`, from `logits` (`[vocab_size]`).
    ///
    /// # Errors
    /// [`SampleError`].
    #[expect(clippy::float_cmp, reason = "1 is the exact value that means: not used")]
    pub fn pick(
        &self,
        position: u64,
        history: &[TokenId],
        logits: &[f32],
        scratch: &mut [Candidate],
    ) -> Result<TokenId, SampleError> {
        let Settings { temperature, top_k, top_p, min_p, repeat_penalty, bias, seed } = self.settings;
        let best = argmax(logits)?.ok_or(SampleError::Nothing)?;
        if self.is_plain() {
            return Ok(best);
        }
        let (needed, given) = (logits.len(), scratch.len());
        let all = scratch.get_mut(..needed).ok_or(SampleError::Scratch { needed, given })?;
        for ((id, &logit), candidate) in (0u32..).map(TokenId).zip(logits).zip(all.iter_mut()) {
            *candidate = Candidate { id, seen: false, value: f64::from(logit) };
        }
        if repeat_penalty != 1.0 {
            for &id in history {
                let candidate = all.get_mut(id.get()).ok_or(SampleError::Outside(id))?;
                if !core::mem::replace(&mut candidate.seen, true) {
                    let value = candidate.value;
                    let changed = if value > 0.0 { value / repeat_penalty } else { value * repeat_penalty };
                    // A penalty of 1e-308 is positive and finite, what it makes of a logit may not be.
                    candidate.value = changed.clamp(f64::MIN, f64::MAX);
                }
            }
        }
        let mut out = 0;
        for &(id, more) in bias {
            let candidate = all.get_mut(id.get()).ok_or(SampleError::Outside(id))?;
            candidate.value += f64::from(more);
            out += usize::from(more == f32::NEG_INFINITY);
        }
        // Ids that were taken out rank last.
        let mut count = needed - out;
        if count == 0 {
            return Err(SampleError::Nothing);
        }
        let most = top_k.map_or(count, |k| usize::try_from(k).unwrap_or(usize::MAX).min(count));
        if temperature == 0.0 || most == 1 {
            let first = all.iter().min_by(|a, b| Candidate::rank(a, b));
            return first.map(|c| c.id).ok_or(SampleError::Nothing);
        }
        if most < needed {
            all.select_nth_unstable_by(most, Candidate::rank);
            count = most;
        }
        let mut kept = Ranked::new(&mut all[..count]);
        let best = kept.get(0).ok_or(SampleError::Nothing)?.value;
        let weight = |candidate: Candidate| exp64((candidate.value - best) / temperature);
        let mut total = kept.all.iter().fold(0, |sum, c| sum + units(weight(*c)));
        if top_p < 1.0 || min_p > 0.0 {
            // The best one has the weight 1.
            let (enough, mut sum, mut left) = (top_p * to_f64(total), 0, 0);
            while let Some(candidate) = kept.get(left) {
                let weight = weight(candidate);
                if left > 0 && weight < min_p {
                    break;
                }
                sum += units(weight);
                left += 1;
                if top_p < 1.0 && to_f64(sum) >= enough {
                    break;
                }
            }
            (count, total) = (left, sum);
        }
        let (mut sum, bar) = (0, uniform(seed, position) * to_f64(total));
        let mut drawn = TokenId(0);
        for candidate in (0..count).map_while(|i| kept.get(i)) {
            drawn = candidate.id;
            sum += units(weight(candidate));
            if to_f64(sum) > bar {
                break;
            }
        }
        Ok(drawn)
    }
}

/// Candidates by rank, of which no more are sorted than somebody asks for: usually a few hundred of a
/// whole vocabulary.
struct Ranked<'c> {
    all: &'c mut [Candidate],
    /// So many at the front are those that rank first, in order.
    sorted: usize,
}

impl<'c> Ranked<'c> {
    const FIRST: usize = 64;

    const fn new(all: &'c mut [Candidate]) -> Self {
        Self { all, sorted: 0 }
    }

    /// The candidate that ranks behind `i` others.
    fn get(&mut self, i: usize) -> Option<Candidate> {
        while i >= self.sorted && self.sorted < self.all.len() {
            // Each block is three times what is there already, so all blocks together cost little more
            // than sorting at once.
            let rest = &mut self.all[self.sorted..];
            let block = (3 * self.sorted).max(Self::FIRST).min(rest.len());
            if block < rest.len() {
                rest.select_nth_unstable_by(block, Candidate::rank);
            }
            rest[..block].sort_unstable_by(Candidate::rank);
            self.sorted += block;
        }
        self.all.get(i).copied()
    }
}

/// A weight in [0, 1] as a count of 2^-94: so fine that what is cut off is far below what f64 can tell
/// from 1, so coarse that 2^32 of them fit.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "cut off on purpose; never negative")]
fn units(weight: f64) -> u128 {
    (weight * (1u128 << 94) as f64) as u128
}

/// A sum of weights, rounded once.
#[expect(clippy::cast_precision_loss, reason = "rounded on purpose")]
const fn to_f64(sum: u128) -> f64 {
    sum as f64
}

/// A number in [0, 1): the same for a seed and a position everywhere.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "halves of 64 bits; 53 bits are exact"
)]
fn uniform(seed: u64, position: u64) -> f64 {
    let counter = [position as u32, (position >> 32) as u32, 0, 0];
    let [a, b, ..] = philox(counter, [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(b) << 32) | u64::from(a);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Philox4x32 with ten rounds: 128 random bits for a counter and a key.
///
/// A counter-based generator: there is no state, so any position's bits can be had at once.
///
/// **Source.** Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011). The tests
/// hold the published vectors.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "halves of 64 bits")]
pub const fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k, mut l]) = (counter, key);
    let mut round = 0;
    while round < 10 {
        let (p, q) = (0xd251_1f53 * a as u64, 0xcd9e_8d57 * c as u64);
        (a, b, c, d) = ((q >> 32) as u32 ^ b ^ k, q as u32, (p >> 32) as u32 ^ d ^ l, p as u32);
        (k, l) = (k.wrapping_add(0x9e37_79b9), l.wrapping_add(0xbb67_ae85));
        round += 1;
    }
    [a, b, c, d]
}

/// The `most` best of `logits` by rank, with their log-probabilities: handed to `each`, best first.
///
/// `ln p` is [`nll`](super::loss::nll) negated: f64, of the logits as they are, before any setting of a
/// sampler. `scratch` needs room for all logits.
///
/// # Errors
/// [`SampleError`].
pub fn top_logprobs(
    logits: &[f32],
    most: usize,
    scratch: &mut [Candidate],
    mut each: impl FnMut(TokenId, f64),
) -> Result<(), SampleError> {
    let (needed, given) = (logits.len(), scratch.len());
    let all = scratch.get_mut(..needed).ok_or(SampleError::Scratch { needed, given })?;
    let log_sum = super::loss::log_sum_exp(logits)?;
    for ((id, &logit), candidate) in (0u32..).map(TokenId).zip(logits).zip(all.iter_mut()) {
        *candidate = Candidate { id, seen: false, value: f64::from(logit) };
    }
    let most = most.min(needed);
    if most < needed {
        all.select_nth_unstable_by(most, Candidate::rank);
    }
    all[..most].sort_unstable_by(Candidate::rank);
    if let Some((max, log)) = log_sum {
        all[..most].iter().for_each(|c| each(c.id, -(log + (max - c.value))));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString as _;
    use std::vec::Vec;

    #[test]
    fn the_lowest_id_wins_and_a_non_finite_logit_never_does() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, -0.0]), Ok(Some(TokenId(1))));
        assert_eq!(argmax(&[-0.0, 0.0]), Ok(Some(TokenId(0))));
        assert_eq!(argmax(&[]), Ok(None));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(argmax(&[0.0, bad, 9.0]), Err(NonFiniteLogit { id: TokenId(1) }));
            let sampler = Sampler::new(Settings { temperature: 1.0, ..Settings::GREEDY }).unwrap();
            let found = sampler.pick(0, &[], &[0.0, bad, 9.0], &mut [Candidate::EMPTY; 3]);
            assert_eq!(found, Err(SampleError::NonFinite(NonFiniteLogit { id: TokenId(1) })));
        }
    }

    /// The known answers that the authors publish with the generator.
    #[test]
    fn philox_gives_the_published_numbers() {
        let full = u32::MAX;
        for (counter, key, expected) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([full; 4], [full; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox(counter, key), expected);
        }
    }

    fn ramp(n: u16) -> Vec<f32> {
        (0..n).map(|i| f32::from(i * 97 % 251) / 16.0 - 7.0).collect()
    }

    fn pick(settings: Settings<'_>, position: u64, history: &[TokenId], logits: &[f32]) -> Result<u32, SampleError> {
        // What the scratch held must not matter.
        let dirt = Candidate { id: TokenId(7), seen: true, value: f64::NAN };
        let mut scratch = std::vec![dirt; logits.len() + 3];
        Sampler::new(settings).unwrap().pick(position, history, logits, &mut scratch).map(|id| id.0)
    }

    const WARM: Settings<'static> = Settings { temperature: 0.8, seed: 1, ..Settings::GREEDY };

    #[test]
    fn the_coldest_and_the_narrowest_choices_are_the_greedy_one() {
        for n in 1..=67u16 {
            let logits = ramp(n);
            let best = argmax(&logits).unwrap().map(|id| id.0).ok_or(SampleError::Nothing);
            for position in 0..40 {
                for settings in [
                    Settings::GREEDY,
                    Settings { top_k: Some(1), temperature: 5.0, ..WARM },
                    Settings { top_p: 1e-9, ..WARM },
                    Settings { min_p: 1.0, ..WARM },
                    Settings { temperature: 1e-300, ..WARM },
                    Settings { temperature: f64::MIN_POSITIVE, seed: 9, ..WARM },
                ] {
                    assert_eq!(pick(settings, position, &[], &logits), best, "{settings:?}");
                }
            }
        }
        // Equals: the lowest id.
        for settings in [Settings { top_k: Some(1), ..WARM }, Settings { top_p: 0.01, ..WARM }] {
            assert_eq!(pick(settings, 3, &[], &[1.0, 2.0, 2.0, 2.0]), Ok(1));
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let weights = logits.map(|l| libm::exp(f64::from(l) / 0.8));
        let total: f64 = weights.iter().sum();
        let mut counts = [0u32; 4];
        let draws = 20_000u32;
        for position in 0..u64::from(draws) {
            counts[pick(WARM, position, &[], &logits).unwrap() as usize] += 1;
        }
        for (count, weight) in counts.iter().zip(weights) {
            let (p, n) = (weight / total, f64::from(draws));
            // Five standard deviations; the draws are fixed, so this passes always or never.
            assert!((f64::from(*count) - n * p).abs() < 5.0 * libm::sqrt(n * p * (1.0 - p)), "{counts:?}");
        }
    }

    #[test]
    fn each_filter_keeps_what_it_says() {
        // Probabilities 1/2, 1/4, 1/8, 1/16, ... at temperature 1, ids in shuffled order.
        let place = [3usize, 0, 4, 1, 2];
        let mut logits = [0.0f32; 5];
        for (rank, &id) in place.iter().enumerate() {
            logits[id] = -(rank as f32) * core::f32::consts::LN_2;
        }
        let base = Settings { temperature: 1.0, ..WARM };
        let reached = |settings: Settings<'_>| {
            let mut ranks: Vec<usize> = (0..3000)
                .map(|p| pick(settings, p, &[], &logits).unwrap())
                .map(|id| place.iter().position(|&at| at == id as usize).unwrap())
                .collect();
            ranks.sort_unstable();
            ranks.dedup();
            ranks.len()
        };
        assert_eq!(reached(base), 5);
        for k in 1..=7 {
            assert_eq!(reached(Settings { top_k: Some(k), ..base }), (k as usize).min(5));
        }
        // Of 31/16: the first holds 0.516, two 0.774, three 0.903, four 0.968.
        for (top_p, kept) in [(0.5, 1), (0.52, 2), (0.77, 2), (0.78, 3), (0.95, 4), (0.99, 5), (1.0, 5)] {
            assert_eq!(reached(Settings { top_p, ..base }), kept, "{top_p}");
        }
        for (min_p, kept) in [(0.0, 5), (0.06, 5), (0.07, 4), (0.2, 3), (0.3, 2), (0.6, 1)] {
            assert_eq!(reached(Settings { min_p, ..base }), kept, "{min_p}");
        }
        // Top-k comes first: of the three that it leaves, the first has 4/7.
        assert_eq!(reached(Settings { top_k: Some(3), top_p: 0.57, ..base }), 1);
        assert_eq!(reached(Settings { top_p: 0.57, ..base }), 2);
    }

    /// The steps at the head of this file, on candidates that are all sorted.
    fn pick_sorted(settings: Settings<'_>, position: u64, logits: &[f32]) -> u32 {
        let mut all: Vec<Candidate> = (0..)
            .zip(logits)
            .map(|(id, &logit)| Candidate { id: TokenId(id), seen: false, value: f64::from(logit) })
            .filter(|c| !settings.bias.contains(&(c.id, f32::NEG_INFINITY)))
            .collect();
        all.sort_by(|a, b| b.value.total_cmp(&a.value).then(a.id.cmp(&b.id)));
        all.truncate(settings.top_k.map_or(usize::MAX, |k| k as usize));
        let best = all[0].value;
        all.iter_mut().for_each(|c| c.value = exp64((c.value - best) / settings.temperature));
        let up_to = |all: &[Candidate], n: usize| to_f64(all[..n].iter().map(|c| units(c.value)).sum());
        let shortest = |all: &[Candidate], found: &dyn Fn(f64) -> bool| {
            let (mut low, mut high) = (1, all.len());
            while low < high {
                let middle = low.midpoint(high);
                if found(up_to(all, middle)) { high = middle } else { low = middle + 1 }
            }
            low
        };
        let total = up_to(&all, all.len());
        if settings.top_p < 1.0 {
            all.truncate(shortest(&all, &|sum| sum >= settings.top_p * total));
        }
        let left = all.iter().take_while(|c| c.value >= settings.min_p).count();
        all.truncate(left);
        let bar = uniform(settings.seed, position) * up_to(&all, all.len());
        all[shortest(&all, &|sum| sum > bar) - 1].id.0
    }

    #[test]
    fn a_draw_is_the_one_of_candidates_that_are_all_sorted() {
        let out = [(TokenId(3), f32::NEG_INFINITY), (TokenId(0), f32::NEG_INFINITY)];
        // An emulator takes minutes for what a processor does in seconds.
        let positions = if cfg!(target_arch = "x86_64") { 6 } else { 1 };
        // Few levels and many equals; all equal; a peak over a long flat tail; as models give them.
        let texts: [(usize, &dyn Fn(u32) -> f32); 5] = [
            (1000, &|n| (n % 7) as f32),
            (700, &|_| -2.5),
            (5000, &|n| if n % 1000 == 3 { 9.0 } else { (n % 13) as f32 / 64.0 }),
            (3000, &|n| (n % 4096) as f32 / 256.0),
            (70, &|n| (n % 3) as f32),
        ];
        for (case, (len, level)) in texts.into_iter().enumerate() {
            let logits: Vec<f32> =
                (0..u32::try_from(len).unwrap()).map(|i| level(i.wrapping_mul(40_503) >> 3)).collect();
            for temperature in [0.05, 0.8, 1.0, 40.0] {
                for (top_k, top_p, min_p) in [
                    (None, 1.0, 0.0),
                    (None, 0.9, 0.0),
                    (None, 0.999_999, 0.0),
                    (None, 1.0, 0.3),
                    (None, 0.7, 0.001),
                    (Some(65), 1.0, 0.0),
                    (Some(900), 0.5, 0.1),
                ] {
                    for bias in [&out[..0], &out] {
                        let settings = Settings { temperature, top_k, top_p, min_p, bias, ..WARM };
                        for position in 0..positions {
                            let found = pick(settings, position, &[], &logits);
                            assert_eq!(found, Ok(pick_sorted(settings, position, &logits)), "case {case} {settings:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn no_more_is_sorted_than_is_asked_for() {
        let mut all: Vec<Candidate> = (0..163_840u32)
            .map(|i| Candidate { id: TokenId(i), seen: false, value: f64::from(i.wrapping_mul(2_654_435_761) >> 8) })
            .collect();
        let mut expected: Vec<TokenId> = {
            let mut sorted = all.clone();
            sorted.sort_by(Candidate::rank);
            sorted.iter().map(|c| c.id).collect()
        };
        let mut ranked = Ranked::new(&mut all);
        for (i, sorted) in [(0, 64), (63, 64), (64, 256), (300, 1024), (0, 1024), (20_000, 65_536), (163_839, 163_840)]
        {
            assert_eq!((ranked.get(i).unwrap().id, ranked.sorted), (expected[i], sorted));
        }
        assert!(ranked.get(163_840).is_none());
        expected.reverse();
        assert!((0..163_840).all(|i| ranked.get(i).map(|c| c.id) == expected.pop()));
    }

    #[test]
    fn penalty_and_bias_move_even_the_greedy_choice() {
        let logits = [1.0f32, 3.0, 2.0, -1.0];
        let history = [TokenId(1), TokenId(1), TokenId(3)];
        let settings = Settings { repeat_penalty: 2.0, ..Settings::GREEDY };
        assert_eq!(pick(settings, 0, &history, &logits), Ok(2), "3 / 2 is less than 2, once");
        assert_eq!(pick(Settings { repeat_penalty: 0.1, ..settings }, 0, &[TokenId(0)], &logits), Ok(0));
        assert_eq!(pick(Settings { repeat_penalty: 3.0, ..settings }, 0, &[TokenId(1)], &[-0.9, -0.4]), Ok(0));
        for position in 0..20 {
            let extreme = |penalty| {
                let settings = Settings { repeat_penalty: penalty, ..WARM };
                pick(settings, position, &history, &[-1.0, 3.0, 2.0, -90.0]).unwrap()
            };
            assert_eq!(extreme(1e-308), 1);
            assert_ne!(extreme(f64::MAX), 3);
        }
        let bias = [(TokenId(3), 4.5), (TokenId(1), f32::NEG_INFINITY)];
        assert_eq!(pick(Settings { bias: &bias, ..Settings::GREEDY }, 0, &[], &logits), Ok(3));
        let out: Vec<_> = (0..4).map(|id| (TokenId(id), f32::NEG_INFINITY)).collect();
        assert_eq!(pick(Settings { bias: &out[..3], ..WARM }, 0, &[], &logits), Ok(3));
        assert_eq!(pick(Settings { bias: &out, ..WARM }, 0, &[], &logits), Err(SampleError::Nothing));
        for position in 0..500 {
            assert_ne!(pick(Settings { bias: &out[1..2], ..WARM }, position, &[], &logits), Ok(1));
            assert_ne!(pick(Settings { bias: &out[1..2], top_k: Some(4), ..WARM }, position, &[], &logits), Ok(1));
        }
        // All but one id of the release's vocabulary: a square of it would take minutes.
        let many: Vec<_> = (0..163_839).map(|id| (TokenId(id), f32::NEG_INFINITY)).collect();
        assert_eq!(pick(Settings { bias: &many, ..WARM }, 0, &[], &std::vec![0.0; 163_840]), Ok(163_839));
        let strange = [(TokenId(4), 1.0)];
        assert_eq!(pick(Settings { bias: &strange, ..WARM }, 0, &[], &logits), Err(SampleError::Outside(TokenId(4))));
        assert_eq!(pick(settings, 0, &[TokenId(9)], &logits), Err(SampleError::Outside(TokenId(9))));
    }

    #[test]
    fn settings_without_meaning_are_refused_by_name() {
        let nan = f64::NAN;
        for (settings, name) in [
            (Settings { temperature: -0.1, ..WARM }, "temperature"),
            (Settings { temperature: nan, ..WARM }, "temperature"),
            (Settings { temperature: f64::INFINITY, ..WARM }, "temperature"),
            (Settings { top_k: Some(0), ..WARM }, "top-k"),
            (Settings { top_p: 0.0, ..WARM }, "top-p"),
            (Settings { top_p: 1.1, ..WARM }, "top-p"),
            (Settings { top_p: nan, ..WARM }, "top-p"),
            (Settings { min_p: -0.1, ..WARM }, "min-p"),
            (Settings { min_p: nan, ..WARM }, "min-p"),
            (Settings { repeat_penalty: 0.0, ..WARM }, "repeat-penalty"),
            (Settings { repeat_penalty: f64::INFINITY, ..WARM }, "repeat-penalty"),
            (Settings { bias: &[(TokenId(1), f32::NAN)], ..WARM }, "logit-bias"),
            (Settings { bias: &[(TokenId(1), 1.0), (TokenId(1), 2.0)], ..WARM }, "logit-bias"),
            (
                Settings { bias: &[(TokenId(1), 1.0), (TokenId(4), 2.0), (TokenId(4), 2.0)], ..WARM },
                "logit-bias of id 4",
            ),
            (
                Settings { bias: &[(TokenId(4), 1.0), (TokenId(1), 2.0), (TokenId(4), 2.0)], ..WARM },
                "logit-bias of id 4",
            ),
        ] {
            let message = Sampler::new(settings).unwrap_err().to_string();
            assert!(message.starts_with(name), "{message}");
        }
        let short = Sampler::new(WARM).unwrap().pick(0, &[], &[0.0; 3], &mut [Candidate::EMPTY; 2]);
        assert_eq!(short, Err(SampleError::Scratch { needed: 3, given: 2 }));
    }

    /// These ids are part of the promise: a seed gives them on every target, in this and later versions. A
    /// second implementation, in Python and with its `exp`, gave the same.
    #[test]
    fn golden_picks() {
        let logits = ramp(251);
        let bias = [(TokenId(17), 3.0), (TokenId(80), -2.5)];
        let history: Vec<TokenId> = (0..40).map(|i| TokenId(i * 5)).collect();
        let settings = Settings {
            temperature: 1.3,
            top_k: Some(60),
            top_p: 0.95,
            min_p: 0.01,
            repeat_penalty: 1.2,
            bias: &bias,
            seed: 0x0123_4567_89ab_cdef,
        };
        let found: Vec<u32> = (0..12).map(|p| pick(settings, p * 1_000_000_007, &history, &logits).unwrap()).collect();
        assert_eq!(found, GOLDEN);
        let found: Vec<u32> = (0..12).map(|p| pick(WARM, p, &[], &logits).unwrap()).collect();
        assert_eq!(found, GOLDEN_WARM);
    }

    const GOLDEN: [u32; 12] = [23, 36, 93, 194, 5, 238, 62, 173, 54, 23, 207, 106];
    const GOLDEN_WARM: [u32; 12] = [230, 67, 18, 207, 137, 31, 163, 106, 98, 137, 18, 93];

    #[test]
    fn log_probabilities_are_those_of_the_loss() {
        let logits = ramp(251);
        let mut scratch = std::vec![Candidate::EMPTY; 251];
        let mut found = Vec::new();
        top_logprobs(&logits, 5, &mut scratch, |id, value| found.push((id, value))).unwrap();
        assert_eq!(found.len(), 5);
        assert_eq!(Ok(Some(found[0].0)), argmax(&logits));
        assert!(found.is_sorted_by(|a, b| a.1 >= b.1));
        for (id, value) in found {
            assert_eq!((-value).to_bits(), super::super::loss::nll(&logits, id).unwrap().unwrap().to_bits());
        }
        let mut all = 0;
        top_logprobs(&[2.0, 2.0], 9, &mut scratch, |id, _| {
            assert_eq!(id, TokenId(all));
            all += 1;
        })
        .unwrap();
        assert_eq!(all, 2);
    }
}
