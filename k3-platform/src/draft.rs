//! Guesses of what comes next, and whether guessing pays.
//!
//! A text repeats itself: names, quotations, code. If its last ids were there before, what followed them
//! then is a guess of what follows now. The ids of a guess go through one pass together, which reads
//! the trunk once for all of them, and are kept as long as each is the id that is picked anyway. So a
//! guess decides how many ids a pass yields and never which.
//!
//! # When it pays
//!
//! A pass over several positions costs more than one over one: more experts, more arithmetic. [`Gate`]
//! measures both, in seconds, and guesses only while that is the cheaper way to a token:
//!
//! * a guess has one id at first; after one that was right from end to end the next may be twice as long,
//!   after another it is one longer than what was right of it;
//! * of the seconds per token with guesses and without, running means are kept (a new value counts an
//!   eighth);
//! * after at least four guesses, if the mean with them is above the other one, the gate rests: for 16
//!   tokens, twice as long each time, up to 1024. Then it begins again. A rest after guesses that have paid
//!   for 64 passes is of 16 tokens again.

use k3_core::view::TokenId;
use std::time::Duration;

/// Ids that must have been there before, in this order. A single one says little.
const LEAST: usize = 2;

/// More ids in common make no better guess, only a longer search.
const MOST: usize = 32;

/// Guesses before they are judged.
const TRIALS: u32 = 4;

/// Tokens of the first rest, and of the longest.
const RESTS: (u32, u32) = (16, 1024);

/// Passes with guesses that have paid, after which the next rest is a short one.
const PROVEN: u32 = 64;

/// Guesses up to `most` ids that follow `ids`: those that followed the longest run of ids with which `ids`
/// also ends; the latest of several. Empty if no run of two was there before.
///
/// A run that overlaps its own repetition goes on repeating.
pub fn guess(ids: &[TokenId], most: usize, out: &mut Vec<TokenId>) {
    out.clear();
    let mut best = (LEAST - 1, 0);
    for end in (1..ids.len()).rev() {
        let common = ids[..end].iter().rev().zip(ids.iter().rev()).take(MOST).take_while(|(a, b)| a == b).count();
        if common > best.0 {
            best = (common, end);
            if common == MOST {
                break;
            }
        }
    }
    let (_, from) = best;
    if from > 0 {
        out.extend((0..most).map(|i| ids[from + i % (ids.len() - from)]));
    }
}

/// What came of guessing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Guesses {
    /// Passes that tried a guess.
    pub passes: u64,
    /// Ids guessed.
    pub drafted: u64,
    /// Of these, ids that were right.
    pub accepted: u64,
    /// Times it was given up for a while because it did not pay.
    pub rests: u64,
}

/// A mean in which the past fades.
#[derive(Debug, Clone, Copy, Default)]
struct Mean(Option<f64>);

impl Mean {
    fn add(&mut self, value: f64) {
        self.0 = Some(self.0.map_or(value, |mean| mean + (value - mean) / 8.0));
    }
}

/// Decides how many ids to guess.
#[derive(Debug)]
pub struct Gate {
    most: usize,
    length: usize,
    /// Seconds of a token without a guess, and with one.
    plain: Mean,
    tried: Mean,
    /// Guesses since the gate last opened.
    trials: u32,
    /// Tokens left to rest, and the length of the next rest.
    resting: u32,
    rest: u32,
    guesses: Guesses,
}

impl Gate {
    /// For guesses of up to `most` ids; with 0 there are none.
    #[must_use]
    pub const fn new(most: usize) -> Self {
        let guesses = Guesses { passes: 0, drafted: 0, accepted: 0, rests: 0 };
        let (plain, tried) = (Mean(None), Mean(None));
        Self { most, length: 1, plain, tried, trials: 0, resting: 0, rest: RESTS.0, guesses }
    }

    /// What came of it so far.
    #[must_use]
    pub const fn guesses(&self) -> Guesses {
        self.guesses
    }

    /// Ids to guess now. None before it is known what a token costs without.
    #[must_use]
    pub fn length(&self) -> usize {
        if self.resting > 0 || self.plain.0.is_none() { 0 } else { self.length.min(self.most) }
    }

    /// A pass gave a token without a guess.
    pub fn plain(&mut self, took: Duration) {
        self.plain.add(took.as_secs_f64());
        self.resting = self.resting.saturating_sub(1);
    }

    /// A pass tried `drafted` ids, of which `accepted` were right, and gave `tokens`.
    pub fn tried(&mut self, drafted: usize, accepted: usize, tokens: usize, took: Duration) {
        self.guesses.passes += 1;
        self.guesses.drafted += drafted as u64;
        self.guesses.accepted += accepted as u64;
        self.length = if accepted == drafted { self.most.min(2 * drafted) } else { accepted + 1 };
        #[expect(clippy::cast_precision_loss, reason = "a few tokens")]
        self.tried.add(took.as_secs_f64() / tokens.max(1) as f64);
        self.trials += 1;
        let paid = self.tried.0 <= self.plain.0;
        if paid && self.trials >= PROVEN {
            self.rest = RESTS.0;
        }
        if !paid && self.trials >= TRIALS {
            self.guesses.rests += 1;
            (self.resting, self.rest) = (self.rest, RESTS.1.min(2 * self.rest));
            (self.length, self.tried, self.trials) = (1, Mean(None), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(ids: &[u32], most: usize) -> Vec<u32> {
        let ids: Vec<_> = ids.iter().copied().map(TokenId).collect();
        let mut out = vec![TokenId(9)];
        guess(&ids, most, &mut out);
        out.iter().map(|id| id.0).collect()
    }

    #[test]
    fn what_followed_the_longest_run_follows_again() {
        assert_eq!(after(&[], 4), [0; 0]);
        assert_eq!(after(&[1, 2, 3, 2], 4), [0; 0], "one id in common is not enough");
        assert_eq!(after(&[1, 2, 3, 4, 1, 2], 2), [3, 4]);
        assert_eq!(after(&[1, 2, 3, 4, 1, 2], 0), [0; 0]);
        // The latest of equal runs; a longer one before the latest.
        assert_eq!(after(&[1, 2, 3, 1, 2, 4, 1, 2], 1), [4]);
        assert_eq!(after(&[7, 1, 2, 3, 1, 2, 4, 7, 1, 2], 1), [3]);
        // A text that repeats goes on repeating, past its own end.
        assert_eq!(after(&[5, 5, 5], 4), [5, 5, 5, 5]);
        assert_eq!(after(&[1, 2, 3, 1, 2, 3], 7), [1, 2, 3, 1, 2, 3, 1]);
    }

    #[test]
    fn it_grows_while_right_and_rests_while_dear() {
        let s = Duration::from_secs;
        let mut gate = Gate::new(8);
        assert_eq!(gate.length(), 0);
        gate.plain(s(4));
        let mut lengths = Vec::new();
        for _ in 0..5 {
            lengths.push(gate.length());
            gate.tried(gate.length(), gate.length(), gate.length() + 1, s(5));
        }
        assert_eq!(lengths, [1, 2, 4, 8, 8]);
        gate.tried(8, 3, 4, s(5));
        assert_eq!(gate.length(), 4);
        // Now nothing is right, and each pass costs more than a plain one.
        for rest in [16, 32, 64] {
            while gate.length() > 0 {
                gate.tried(gate.length(), 0, 1, s(5));
            }
            let mut tokens = 0;
            while gate.length() == 0 {
                gate.plain(s(4));
                tokens += 1;
            }
            assert_eq!((tokens, gate.length()), (rest, 1));
        }
        assert_eq!(gate.guesses().rests, 3);
        for _ in 0..=PROVEN {
            gate.tried(1, 1, 2, s(5));
        }
        while gate.length() > 0 {
            gate.tried(1, 0, 1, s(500));
        }
        assert_eq!(gate.resting, RESTS.0);
        assert_eq!(Gate::new(0).length(), 0);
    }
}
