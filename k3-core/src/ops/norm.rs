//! RMSNorm (spec 3.2) and the L2 norm of the delta attention (spec 3.3).
//!
//! Squares are summed in f64 by the lane rule; `1 / sqrt` is taken in f64 (`libm`'s is correctly
//! rounded everywhere); `w * x` is exact in f64, so an output is rounded once in f64, when that is
//! multiplied with the inverse, and once to f32, in the same way on every machine.
//!
//! ```
//! use k3_core::backend::Backend;
//! use k3_core::ops::norm::rms_norm;
//!
//! let mut out = [0.0; 2];
//! rms_norm(Backend::detect(), &[1.0, 7.0], &[1.0, -2.0], 0.0, &mut out);
//! assert_eq!(out, [0.2, -2.8]); // the root of the mean square is 5
//! ```

use crate::backend::Backend;
use crate::math::round;

/// Epsilon of the two norms inside MLA, `q_a_layernorm` and `kv_a_layernorm` (spec 3.4: the
/// released code builds them with its class default, not with `rms_norm_eps`).
pub const MLA_LORA_EPS: f64 = 1e-6;

/// Epsilon inside the square root of the q and k norms of KDA, added to the *sum* of squares.
pub const L2_EPS: f64 = 1e-6;

/// `1 / sqrt(mean(x^2) + eps)`, as f64. `eps` keeps a vector of zeros finite (config `rms_norm_eps`).
///
/// **Source.** Spec 3.2.
#[must_use]
pub fn inverse_rms(backend: Backend, x: &[f32], eps: f64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a width is far below 2^53")]
    let n = x.len() as f64;
    1.0 / libm::sqrt(backend.sum_squares(x) / n + eps)
}

/// `out = weight * x / sqrt(mean(x^2) + eps)`; all three of one length.
///
/// # Panics
/// If they are not.
///
/// **Source.** Spec 3.2.
pub fn rms_norm(backend: Backend, x: &[f32], weight: &[f32], eps: f64, out: &mut [f32]) {
    assert_eq!((x.len(), weight.len()), (out.len(), out.len()), "vectors of one length");
    let inverse = inverse_rms(backend, x, eps);
    for ((o, &x), &w) in out.iter_mut().zip(x).zip(weight) {
        *o = round(f64::from(w) * f64::from(x) * inverse);
    }
}

/// [`rms_norm`] of a vector onto itself.
///
/// # Panics
/// If `weight` is of another length.
pub fn rms_norm_in_place(backend: Backend, x: &mut [f32], weight: &[f32], eps: f64) {
    assert_eq!(x.len(), weight.len(), "vectors of one length");
    let inverse = inverse_rms(backend, x, eps);
    for (x, &w) in x.iter_mut().zip(weight) {
        *x = round(f64::from(w) * f64::from(*x) * inverse);
    }
}

/// `x *= scale / sqrt(sum(x^2) + 1e-6)`: sum and not mean.
///
/// **Source.** Spec 3.3 step 3.
pub fn l2_normalize(backend: Backend, x: &mut [f32], scale: f64) {
    let factor = scale / libm::sqrt(backend.sum_squares(x) + L2_EPS);
    for x in x {
        *x = round(f64::from(*x) * factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eps_is_inside_the_root_and_on_the_right_quantity() {
        let backend = Backend::SCALAR;
        let mut out = [0.0; 4];
        rms_norm(backend, &[1e-3; 4], &[2.0; 4], 1e-6, &mut out);
        assert!((f64::from(out[0]) - 2e-3 / libm::sqrt(2e-6)).abs() < 1e-7);
        let mut x = [1e-3; 4];
        l2_normalize(backend, &mut x, 0.5);
        assert!((f64::from(x[0]) - 0.5e-3 / libm::sqrt(4e-6 + 1e-6)).abs() < 1e-7);
    }
}
