//! Softmax by the floating-point contract.
//!
//! Maximum first; `w = exp(s - max)` in f32; the sum in f64 by the lane rule over the index;
//! `p = f32(w / sum)`. A NaN among the scores makes every probability NaN, which the forward pass
//! reports; nothing is hidden.
//!
//! ```
//! use k3_core::backend::Backend;
//! use k3_core::ops::softmax::softmax;
//!
//! let mut scores = [7.0, 7.0, f32::NEG_INFINITY];
//! softmax(Backend::detect(), &mut scores);
//! assert_eq!(scores, [0.5, 0.5, 0.0]);
//! ```

use crate::backend::Backend;
use crate::math::round;

/// Replaces scores by probabilities.
pub fn softmax(backend: Backend, scores: &mut [f32]) {
    let max = scores.iter().fold(f32::NEG_INFINITY, |m, &s| if s > m { s } else { m });
    backend.exp_sub(scores, max);
    let sum = backend.sum(scores);
    for p in scores {
        *p = round(f64::from(*p) / sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_scores_do_not_overflow_and_nan_is_not_hidden() {
        let mut s = [1000.0, 1000.0, -1000.0];
        softmax(Backend::SCALAR, &mut s);
        assert_eq!(s.map(f32::to_bits), [0.5, 0.5, 0.0].map(f32::to_bits));
        let mut s = [1.0, f32::NAN, 2.0];
        softmax(Backend::SCALAR, &mut s);
        assert!(s.iter().all(|p| p.is_nan()));
    }
}
