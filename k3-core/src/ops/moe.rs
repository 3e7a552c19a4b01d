//! Routed experts on the latent (spec 3.6): which positions need which expert.
//!
//! A chunk's picks are pairs (position, rank). Grouped by expert, each expert is asked for once and
//! multiplied with all the positions that chose it; every result goes to the slot of its pair, and
//! the slots of a position are summed in rank order. So the order in which experts arrive from the
//! disk cannot be seen in a result.

use crate::view::ExpertId;

/// The picks of a chunk, grouped by expert.
#[derive(Debug)]
pub(crate) struct Groups<'a> {
    /// Distinct experts, rising.
    pub(crate) distinct: &'a [ExpertId],
    starts: &'a [u32],
    pairs: &'a [u32],
}

impl<'a> Groups<'a> {
    /// Groups `ids` (`[positions, k]`, each below `starts.len() - 1`) by expert in linear time.
    ///
    /// * `starts`: one more than there are experts;
    /// * `pairs`: as long as `ids`;
    /// * `distinct`: as long as the number of different ids can be.
    #[must_use]
    pub(crate) fn new(
        ids: &[ExpertId],
        starts: &'a mut [u32],
        pairs: &'a mut [u32],
        distinct: &'a mut [ExpertId],
    ) -> Self {
        starts.fill(0);
        for &id in ids {
            starts[id.get()] += 1;
        }
        let (mut sum, mut found) = (0, 0);
        let (last, counts) = starts.split_last_mut().expect("one more than there are experts");
        for (id, start) in (0..=u16::MAX).map(ExpertId).zip(counts) {
            if *start > 0 {
                distinct[found] = id;
                found += 1;
            }
            sum += *start;
            *start = sum;
        }
        *last = sum;
        // Filling each group from its end leaves `starts` at the group's beginning and the pairs
        // of a group in rising order.
        for (pair, &id) in ids.iter().enumerate().rev() {
            let start = &mut starts[id.get()];
            *start -= 1;
            // Positions times picks fit a u32: `starts` has counted them.
            pairs[*start as usize] = u32::try_from(pair).unwrap_or(u32::MAX);
        }
        Self { distinct: &distinct[..found], starts, pairs: &pairs[..ids.len()] }
    }

    /// The pairs `position * k + rank` that chose the `i`-th distinct expert, rising.
    #[must_use]
    pub(crate) fn pairs(&self, i: usize) -> &'a [u32] {
        let id = self.distinct[i].get();
        &self.pairs[self.starts[id] as usize..self.starts[id + 1] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pick_is_in_its_expert_s_group() {
        let ids = [3, 0, 3, 1, 0, 3].map(ExpertId);
        let (mut starts, mut pairs, mut distinct) = ([9; 5], [9; 6], [ExpertId(9); 4]);
        let groups = Groups::new(&ids, &mut starts, &mut pairs, &mut distinct);
        assert_eq!(groups.distinct, [0, 1, 3].map(ExpertId));
        assert_eq!(groups.pairs(0), [1, 4]);
        assert_eq!(groups.pairs(1), [3]);
        assert_eq!(groups.pairs(2), [0, 2, 5]);
    }
}
