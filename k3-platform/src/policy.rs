//! Which experts stay in memory.
//!
//! A token walks its experts in layer order, so below one token's working set (1,472 experts, 25.8 GB
//! in the released model) the least recently used expert is always the one that is needed next, and a
//! plain LRU hits nothing, for the same reason as it would on the trunk. What does repeat is *who* is
//! popular. [`Policy::Frequency`] scores each expert by how often it was asked for, forgets a part of
//! that with every pass, keeps those with the highest scores, and lets a newcomer pass through unkept
//! unless it has overtaken the weakest one that is kept.
//!
//! ```text
//! pass:    weight w /= decay             all scores age alike, so their order never changes by itself
//! request: score[e] += w
//! served:  kept < capacity           -> keep
//!          score[e] > min score kept -> keep, the weakest gives way
//!          else                      -> pass through
//! ```
//!
//! A policy decides what is read again. It never changes a result.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

/// What a score keeps from one pass to the next, while a pass asks for more than can be kept: who is
/// popular in the long run matters. Chosen, like the next one, by replaying a recorded trace of the
/// released model; 0.7 to 0.9 are within two points of each other there.
const SLOW: f64 = 0.8;

/// The same when more can be kept than a pass asks for: what was asked for last matters more.
const FAST: f64 = 0.5;

/// Scores are scaled down before they could overflow.
const LARGEST: f64 = 1e200;

/// How experts are chosen to stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Whatever was used last stays.
    Lru,
    /// Whatever is asked for most often stays; the rest passes through.
    #[default]
    Frequency,
}

/// What becomes of an expert that has been served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict<N> {
    /// It stays, and there was room.
    Keep,
    /// It stays in place of another.
    Replace(N),
    /// It does not stay.
    Pass,
}

/// A score that orders: scores are sums of positive weights and never NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Score(f64);

impl Eq for Score {}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// The names that are kept, and the scores that decide. Every call takes logarithmic time.
#[derive(Debug)]
pub struct Directory<N> {
    policy: Policy,
    capacity: usize,
    scores: HashMap<N, Score>,
    kept: BTreeSet<(Score, N)>,
    weight: f64,
    /// Names the running pass has asked for.
    asked: usize,
}

impl<N: Copy + Ord + Hash> Directory<N> {
    /// Bytes a name's score takes, for the ledger.
    pub const SCORE_BYTES: u64 = 64;

    /// Nothing is kept yet; at most `capacity` names ever will be.
    #[must_use]
    pub fn new(policy: Policy, capacity: usize) -> Self {
        Self { policy, capacity, scores: HashMap::new(), kept: BTreeSet::new(), weight: 1.0, asked: 0 }
    }

    /// Names that are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Whether a name is kept.
    #[must_use]
    pub fn contains(&self, name: N) -> bool {
        self.scores.get(&name).is_some_and(|&score| self.kept.contains(&(score, name)))
    }

    /// A pass over the layers begins.
    pub fn pass(&mut self) {
        if self.policy == Policy::Lru {
            return;
        }
        self.weight /= if self.capacity < self.asked { SLOW } else { FAST };
        self.asked = 0;
        if self.weight > LARGEST {
            let by = self.weight;
            self.scores.values_mut().for_each(|s| s.0 /= by);
            self.kept = std::mem::take(&mut self.kept).into_iter().map(|(s, n)| (Score(s.0 / by), n)).collect();
            self.weight = 1.0;
        }
    }

    /// A name is asked for. Says whether it is kept.
    pub fn request(&mut self, name: N) -> bool {
        self.asked += 1;
        let score = self.scores.entry(name).or_insert(Score(0.0));
        let kept = self.kept.remove(&(*score, name));
        match self.policy {
            // The larger, the later.
            Policy::Lru => {
                self.weight += 1.0;
                score.0 = self.weight;
            }
            Policy::Frequency => score.0 += self.weight,
        }
        if kept {
            self.kept.insert((*score, name));
        }
        kept
    }

    /// A name that was asked for has been served; `pinned` says which names must not give way now.
    pub fn admit(&mut self, name: N, pinned: impl Fn(N) -> bool) -> Verdict<N> {
        let Some(&score) = self.scores.get(&name) else { return Verdict::Pass };
        if self.kept.contains(&(score, name)) {
            return Verdict::Keep;
        }
        if self.kept.len() < self.capacity {
            self.kept.insert((score, name));
            return Verdict::Keep;
        }
        let weakest = self.kept.iter().copied().find(|&(_, n)| !pinned(n));
        match weakest {
            Some((least, victim)) if least < score => {
                self.kept.remove(&(least, victim));
                self.kept.insert((score, name));
                Verdict::Replace(victim)
            }
            _ => Verdict::Pass,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replays passes over cyclic requests and counts hits.
    fn replay(policy: Policy, capacity: usize, passes: &[Vec<u32>]) -> Vec<usize> {
        let mut directory = Directory::new(policy, capacity);
        let mut counts = Vec::new();
        for pass in passes {
            directory.pass();
            let mut hits = 0;
            for &name in pass {
                hits += usize::from(directory.request(name));
                directory.admit(name, |_| false);
                assert!(directory.len() <= capacity);
            }
            counts.push(hits);
        }
        counts
    }

    #[test]
    fn a_cycle_longer_than_the_cache_starves_lru_and_not_frequency() {
        let passes = vec![(0..100).collect::<Vec<u32>>(); 20];
        assert!(replay(Policy::Lru, 99, &passes).iter().all(|&h| h == 0));
        let hits = replay(Policy::Frequency, 40, &passes);
        assert_eq!(hits[0], 0);
        assert!(hits[2..].iter().all(|&h| h >= 38), "{hits:?}");
    }

    #[test]
    fn lru_keeps_what_was_used_last() {
        let mut d = Directory::new(Policy::Lru, 2);
        for name in [1, 2] {
            assert!(!d.request(name));
            assert_eq!(d.admit(name, |_| false), Verdict::Keep);
        }
        assert!(d.request(1));
        assert!(!d.request(3));
        assert_eq!(d.admit(3, |_| false), Verdict::Replace(2));
        assert!(d.contains(1) && d.contains(3) && !d.contains(2));
    }

    #[test]
    fn popularity_that_has_passed_is_forgotten() {
        let mut d = Directory::new(Policy::Frequency, 1);
        for _ in 0..10 {
            d.pass();
            d.request('a');
            d.admit('a', |_| false);
        }
        let mut until = 0;
        while d.contains('a') {
            d.pass();
            d.request('b');
            d.admit('b', |_| false);
            until += 1;
        }
        assert!((1..8).contains(&until), "{until}");
    }

    #[test]
    fn what_is_pinned_does_not_give_way_and_scores_do_not_overflow() {
        let mut d = Directory::new(Policy::Frequency, 2);
        for i in 0..20_000 {
            d.pass();
            d.request(i % 3);
            d.admit(i % 3, |n| n == 0);
            assert!(i == 0 || d.contains(0) || d.len() < 2);
        }
        assert!(d.kept.iter().all(|(s, _)| s.0.is_finite()));
    }

    #[test]
    fn an_empty_cache_lets_everything_pass() {
        let mut d = Directory::new(Policy::Frequency, 0);
        assert!(!d.request(1));
        assert_eq!(d.admit(1, |_| false), Verdict::Pass);
    }
}
