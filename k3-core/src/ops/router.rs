//! The router: which experts a position uses, and with what weight (spec 3.6).
//!
//! ```
//! use k3_core::ops::router::route;
//! use k3_core::view::ExpertId;
//!
//! // The bias brings the last expert in; its weight comes from its score alone.
//! let (mut ids, mut weights) = ([ExpertId(0); 2], [0.0; 2]);
//! assert!(route(&[0.75, 0.5, 0.25], &[0.0, 0.0, 1.0], true, 1.0, &mut ids, &mut weights));
//! assert_eq!((ids, weights), ([2, 0].map(ExpertId), [0.25, 0.75]));
//! ```

use crate::math::round;
use crate::view::ExpertId;

/// Chooses the `ids.len()` experts with the largest biased score, best first; the lowest index
/// among equals. `scores` are the sigmoids of the router's logits, without the bias: the bias
/// decides who is chosen and never how much.
///
/// * `scores`, `bias`: `[num_experts]`;
/// * `ids`, `weights`: `[num_experts_per_token]`, written in rank order;
/// * `renormalize`: config `moe_renormalize`; `scale`: config `routed_scaling_factor`.
///
/// A weight is the expert's score, divided by the sum of the chosen ones' if `renormalize` (but not where only
/// one is chosen: the reference divides only where there is something to share), times `scale`.
///
/// Returns `false`, with nothing of meaning written, if a biased score is not finite.
///
/// # Panics
/// If lengths differ, or more experts are to be chosen than there are.
///
/// **Source.** Spec 3.6.
#[must_use]
pub fn route(
    scores: &[f32],
    bias: &[f32],
    renormalize: bool,
    scale: f32,
    ids: &mut [ExpertId],
    weights: &mut [f32],
) -> bool {
    let chosen = ids.len();
    assert_eq!((bias.len(), weights.len()), (scores.len(), chosen), "a bias for each score, a weight for each id");
    assert!(chosen <= scores.len(), "{chosen} of {} experts", scores.len());
    let mut found = 0;
    // `weights` holds the biased scores while the best are being found.
    for ((expert, &score), &bias) in (0..=u16::MAX).map(ExpertId).zip(scores).zip(bias) {
        let biased = score + bias;
        if !biased.is_finite() {
            return false;
        }
        // Equal scores stay behind the earlier index.
        let rank = weights[..found].iter().rposition(|&w| w >= biased).map_or(0, |r| r + 1);
        if rank == chosen {
            continue;
        }
        found = (found + 1).min(chosen);
        ids.copy_within(rank..found - 1, rank + 1);
        weights.copy_within(rank..found - 1, rank + 1);
        (ids[rank], weights[rank]) = (expert, biased);
    }
    let mut sum = 0.0;
    for (weight, &id) in weights.iter_mut().zip(&*ids) {
        *weight = scores[id.get()];
        sum += f64::from(*weight);
    }
    for weight in weights {
        if renormalize && chosen > 1 {
            *weight = round(f64::from(*weight) / (sum + 1e-20));
        }
        *weight *= scale;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bias_chooses_and_does_not_weigh() {
        let (mut ids, mut weights) = ([ExpertId(0); 2], [0.0; 2]);
        assert!(route(&[0.5, 0.25, 0.75, 0.25], &[0.0, 1.0, 0.0, 0.0], true, 2.0, &mut ids, &mut weights));
        assert_eq!(ids, [1, 2].map(ExpertId));
        assert_eq!(weights.map(f32::to_bits), [0.5, 1.5].map(f32::to_bits));
    }

    #[test]
    fn a_lone_pick_keeps_its_score() {
        let (mut ids, mut weights) = ([ExpertId(0)], [0.0]);
        assert!(route(&[0.25, 0.5], &[0.0; 2], true, 2.0, &mut ids, &mut weights));
        assert_eq!((ids, weights.map(f32::to_bits)), ([ExpertId(1)], [1.0f32.to_bits()]));
    }

    #[test]
    fn ties_go_to_the_lowest_index() {
        let (mut ids, mut weights) = ([ExpertId(0); 3], [0.0; 3]);
        assert!(route(&[0.5, 0.5, 0.5, 0.5], &[0.0; 4], false, 1.0, &mut ids, &mut weights));
        assert_eq!(ids, [0, 1, 2].map(ExpertId));
        assert_eq!(weights.map(f32::to_bits), [0.5f32; 3].map(f32::to_bits));
    }

    #[test]
    fn equals_a_full_sort() {
        let mut seed = 1u32;
        for chosen in 1..=9 {
            let scores: [f32; 9] = core::array::from_fn(|_| {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f32::from(u8::try_from(seed >> 29).unwrap()) / 8.0
            });
            let mut order: std::vec::Vec<_> = (0..9).map(ExpertId).collect();
            order.sort_by(|&a, &b| scores[b.get()].total_cmp(&scores[a.get()]).then(a.cmp(&b)));
            let (mut ids, mut weights) = ([ExpertId(0); 9], [0.0; 9]);
            assert!(route(&scores, &[0.0; 9], true, 1.0, &mut ids[..chosen], &mut weights[..chosen]));
            assert_eq!(ids[..chosen], order[..chosen]);
        }
    }

    #[test]
    fn a_score_that_is_not_finite_is_told() {
        assert!(!route(&[0.5, 0.5], &[0.0, f32::NAN], true, 1.0, &mut [ExpertId(0)], &mut [0.0]));
    }
}
