//! Attention residuals: what replaces the residual stream (spec 3.1).
//!
//! Every sub-layer reads a softmax mix of the finished blocks and the running sum. The keys are
//! normed, the values are raw:
//!
//! ```text
//! score_j = (fold . v_j) / sqrt(mean(v_j^2) + eps)      p = softmax(score)      mix = sum_j p_j v_j
//! ```
//!
//! The first source is the embedding. In a layer that is a multiple of `attn_res_block_size` the running
//! sum ends as a block: the attention's output begins a new one instead of being added.
//!
//! ```
//! use k3_core::backend::Backend;
//! use k3_core::exec::Serial;
//! use k3_core::ops::residual::mix;
//!
//! // Two sources of one position with equal keys: the mix is their mean.
//! let (values, mut scores, mut out) = ([1.0, 0.0, 0.0, 1.0], [0.0; 2], [0.0; 2]);
//! mix(Backend::detect(), &Serial, &values, 2, &[1.0, 1.0], 1e-5, &mut scores, &mut out);
//! assert_eq!(out, [0.5, 0.5]);
//! ```

use super::norm::inverse_rms;
use super::softmax::softmax;
use crate::backend::Backend;
use crate::exec::{Executor, Parts};
use crate::math::round;

/// `out[t] = sum_j p_j * v_j[t]` over `sources` vectors per position.
///
/// * `values`: `[sources, positions, hidden]`, of which the first `sources` count;
/// * `fold`: `[hidden]`, norm weight times projection weight;
/// * `scores`: scratch, at least `[positions, stride]` with `stride >= sources`;
/// * `out`: `[positions, hidden]`;
/// * `eps`: config `rms_norm_eps`.
///
/// # Panics
/// If `fold` or `out` is empty, or `values` or `scores` are shorter than that.
///
/// **Source.** Spec 3.1.
#[expect(clippy::too_many_arguments, reason = "one per quantity of the formula")]
pub fn mix<X: Executor>(
    backend: Backend,
    exec: &X,
    values: &[f32],
    sources: usize,
    fold: &[f32],
    eps: f64,
    scores: &mut [f32],
    out: &mut [f32],
) {
    let hidden = fold.len();
    let positions = out.len() / hidden;
    let stride = scores.len() / positions;
    exec.run((Parts::new(out, hidden), Parts::new(scores, stride)), |t, (out, scores)| {
        let scores = &mut scores[..sources];
        for (j, score) in scores.iter_mut().enumerate() {
            let v = &values[(j * positions + t) * hidden..][..hidden];
            *score = round(f64::from(backend.dot(fold, v)) * inverse_rms(backend, v, eps));
        }
        softmax(backend, scores);
        backend.sum_rows_f32(scores, &values[t * hidden..], positions * hidden, out);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Serial;

    #[test]
    fn a_zero_fold_is_the_plain_mean_of_raw_sources() {
        let values = [100.0, 300.0, 7.0, 8.0, 1.0, 2.0, 9.0, 10.0];
        let (mut scores, mut out) = ([0.0; 6], [0.0; 4]);
        mix(Backend::SCALAR, &Serial, &values, 2, &[0.0; 2], 1e-5, &mut scores, &mut out);
        assert_eq!(out.map(f32::to_bits), [50.5, 151.0, 8.0, 9.0].map(f32::to_bits));
    }

    #[test]
    fn keys_are_normed_and_values_are_not() {
        // Two sources of one direction and very different size get almost equal scores.
        let (mut scores, mut out) = ([0.0; 2], [0.0; 2]);
        mix(Backend::SCALAR, &Serial, &[1000.0, 1000.0, 1.0, 1.0], 2, &[1.0; 2], 1e-5, &mut scores, &mut out);
        assert!((out[0] - 500.5).abs() < 0.01, "{out:?}");
    }
}
