//! exp, sigmoid, tanh and what the model builds from them: one definition, the same bits everywhere.
//!
//! Functions take f32 values and work in f64. [`exp`], [`sigmoid`], [`tanh`] and [`situ`] round to f32 once,
//! [`silu`] and [`kda_alpha`] at the steps that they name. The inner bodies use only
//! additions, multiplications, divisions, selections and operations on bits, in one fixed order and
//! without a fused multiply-add, so their result depends on nothing but IEEE 754. They have no
//! branches: the SIMD back ends compile these very bodies for wider registers, and a lane computes
//! what the scalar code computes. Nothing here calls the platform's libm.
//!
//! ```text
//! e^y:   n = round(y / ln 2)                 by adding and subtracting 1.5 * 2^52
//!        r = (y - n * LN2_HI) - n * LN2_LO   |r| <= 0.3466, the first product is exact
//!        p = r + r^2 * Q(r) = e^r - 1        Taylor to r^13: the cut is below 5e-18
//!        e^y = 2^n * (1 + p)                 2^n built from bits, an exact factor
//!        e^y - 1 = 2^n * p + (2^n - 1)       no cancellation near 0, which tanh needs
//! ```
//!
//! ```
//! use k3_core::math::{canonical_bits, exp, sigmoid, tanh};
//!
//! assert_eq!((exp(0.0), sigmoid(0.0), tanh(-0.0).to_bits()), (1.0, 0.5, (-0.0_f32).to_bits()));
//! assert_eq!(canonical_bits(exp(f32::NAN)), 0x7fc0_0000);
//! ```
//!
//! # Error
//!
//! [`exp`], [`sigmoid`], [`tanh`] and [`situ`] are at most 0.5000001 ulp from the true value: the f64
//! bodies are good to a few units of 2^-53, so the result is the correctly rounded one except where
//! the true value all but lies in the middle between two f32. The tests at the foot of the file
//! measure it against libm's f64 functions, on every 997th bit pattern and, on request, on all.

/// Rounds to f32: the one place where precision is given up on purpose.
#[expect(clippy::cast_possible_truncation, reason = "rounding to nearest is the purpose")]
#[must_use]
#[inline(always)]
pub const fn round(x: f64) -> f32 {
    x as f32
}

/// The bits of `x`, with every NaN mapped to one value.
///
/// Instruction sets differ in the payload and the sign of the NaN they produce, so comparisons,
/// hashes and stored states go through this function.
#[must_use]
pub const fn canonical_bits(x: f32) -> u32 {
    if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }
}

const LOG2_E: f64 = core::f64::consts::LOG2_E;
/// ln 2 to 32 bits, so that its product with a small integer is exact.
const LN2_HI: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
/// What [`LN2_HI`] lacks.
const LN2_LO: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);
/// 1.5 * 2^52: added to a small f64 it leaves the nearest integer in the low bits.
const ROUNDER: f64 = 6_755_399_441_055_744.0;
/// Beyond +-700 every function here has reached its limit in f32, and 2^n is still a normal f64.
const LIMIT: f64 = 700.0;

/// Splits `y`, |y| <= 700 or NaN, into `(2^n, p)` with `e^y = 2^n * (1 + p)`.
#[inline(always)]
fn split_exp(y: f64) -> (f64, f64) {
    let shifted = y * LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let scale = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    let r = (y - n * LN2_HI) - n * LN2_LO;
    let q = 1.0 / 6_227_020_800.0;
    let q = q * r + 1.0 / 479_001_600.0;
    let q = q * r + 1.0 / 39_916_800.0;
    let q = q * r + 1.0 / 3_628_800.0;
    let q = q * r + 1.0 / 362_880.0;
    let q = q * r + 1.0 / 40_320.0;
    let q = q * r + 1.0 / 5_040.0;
    let q = q * r + 1.0 / 720.0;
    let q = q * r + 1.0 / 120.0;
    let q = q * r + 1.0 / 24.0;
    let q = q * r + 1.0 / 6.0;
    let q = q * r + 0.5;
    (scale, r + (r * r) * q)
}

/// e^y in f64, within a few units of 2^-53; the argument is held within +-700.
#[inline(always)]
pub(crate) fn exp64(y: f64) -> f64 {
    let (scale, p) = split_exp(y.clamp(-LIMIT, LIMIT));
    scale * (1.0 + p)
}

#[inline(always)]
fn sigmoid64(x: f64) -> f64 {
    1.0 / (1.0 + exp64(-x))
}

#[inline(always)]
fn tanh64(x: f64) -> f64 {
    let a = x.abs();
    // tanh is 1 to the last bit of an f64 from 19.1 on. The comparison is false for a NaN, which stays.
    let a = if a > 20.0 { 20.0 } else { a };
    let (scale, p) = split_exp(a + a);
    let e = scale * p + (scale - 1.0);
    (e / (e + 2.0)).copysign(x)
}

/// e^x. Overflows to infinity, underflows through the subnormals to 0.
#[must_use]
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    round(exp64(f64::from(x)))
}

/// 1 / (1 + e^-x).
#[must_use]
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    round(sigmoid64(f64::from(x)))
}

/// The hyperbolic tangent; the sign of a zero is kept.
#[must_use]
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    round(tanh64(f64::from(x)))
}

/// `x * sigmoid(x)`, the sigmoid rounded to f32 first. At minus infinity this is NaN, as written.
#[must_use]
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// SiTU-GLU of a gate and an up value (spec 3.5): `b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2)`,
/// rounded once.
///
/// The sigmoid sees the uncapped gate. `b1` and `b2` are the config's `activation_situ_beta` and
/// `activation_situ_linear_beta`, positive and finite.
#[must_use]
#[inline(always)]
pub fn situ(g: f32, u: f32, b1: f32, b2: f32) -> f32 {
    let (g, u, b1, b2) = (f64::from(g), f64::from(u), f64::from(b1), f64::from(b2));
    round(((b1 * tanh64(g / b1)) * sigmoid64(g)) * (b2 * tanh64(u / b2)))
}

/// The decay of one KDA channel (spec 3.3 step 4): `exp(lower * sigmoid(rate * (z + dt_bias)))`,
/// where `rate` is `exp(A_log)` of the head. Every step is rounded to f32.
#[must_use]
#[inline(always)]
pub fn kda_alpha(z: f32, dt_bias: f32, rate: f32, lower: f32) -> f32 {
    exp(lower * sigmoid(rate * (z + dt_bias)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest error allowed, in f32 ulp. A correctly rounded function has at most 0.5.
    const ERROR_EXP: f64 = 0.5 + 1e-7;
    const ERROR_SIGMOID: f64 = 0.5 + 1e-7;
    const ERROR_TANH: f64 = 0.5 + 1e-7;
    const ERROR_SITU: f64 = 0.5 + 1e-7;

    /// The distance of `found` from `expected` in the spacing of f32 at `expected`.
    fn ulp(found: f32, expected: f64) -> f64 {
        if expected.is_nan() || found.is_nan() {
            return if expected.is_nan() && found.is_nan() { 0.0 } else { f64::INFINITY };
        }
        let spacing = if expected.abs() < f64::from(f32::MIN_POSITIVE) {
            f64::from(f32::from_bits(1))
        } else {
            f64::from_bits((expected.to_bits() & (0x7ff << 52)) - (23 << 52))
        };
        // Beyond the largest f32 infinity is the rounded value.
        if found.is_infinite() && round(expected).to_bits() == found.to_bits() {
            return 0.0;
        }
        (f64::from(found) - expected).abs() / spacing
    }

    fn worst(step: usize, found: impl Fn(f32) -> f32, expected: impl Fn(f64) -> f64) -> f64 {
        (0..=u32::MAX)
            .step_by(step)
            .map(f32::from_bits)
            .map(|x| ulp(found(x), expected(f64::from(x))))
            .fold(0.0, f64::max)
    }

    fn judge_sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + libm::exp(-x))
    }

    fn judge_situ(g: f64, u: f64) -> f64 {
        4.0 * libm::tanh(g / 4.0) * judge_sigmoid(g) * 25.0 * libm::tanh(u / 25.0)
    }

    fn check(step: usize) -> [f64; 4] {
        [
            worst(step, exp, libm::exp),
            worst(step, sigmoid, judge_sigmoid),
            worst(step, tanh, libm::tanh),
            worst(step, |g| situ(g, 40.0 - g, 4.0, 25.0), |g| judge_situ(g, f64::from(40.0 - round(g)))),
        ]
    }

    fn within(errors: [f64; 4]) {
        for (error, limit) in errors.into_iter().zip([ERROR_EXP, ERROR_SIGMOID, ERROR_TANH, ERROR_SITU]) {
            assert!(error <= limit, "{errors:?}");
        }
    }

    #[test]
    fn errors_stay_within_their_bounds() {
        // Other processors are usually emulated, floating point most slowly of all; that they give the
        // bits of this one is what the golden hashes show.
        let step = if cfg!(miri) {
            9_999_991
        } else if cfg!(target_arch = "x86_64") {
            997
        } else {
            99_991
        };
        within(check(step));
    }

    #[test]
    #[ignore = "all 2^32 arguments: minutes in a release build"]
    fn errors_stay_within_their_bounds_everywhere() {
        let errors = check(1);
        std::println!("{errors:?}");
        within(errors);
    }

    #[test]
    fn limits_are_met() {
        let cases = [
            (exp(f32::INFINITY), f32::INFINITY),
            (exp(f32::NEG_INFINITY), 0.0),
            (exp(-0.0), 1.0),
            (exp(88.722_84), f32::INFINITY),
            (exp(-103.9), f32::from_bits(1)),
            (exp(-104.0), 0.0),
            (sigmoid(f32::INFINITY), 1.0),
            (sigmoid(f32::NEG_INFINITY), 0.0),
            (sigmoid(-0.0), 0.5),
            (tanh(f32::INFINITY), 1.0),
            (tanh(f32::NEG_INFINITY), -1.0),
            (tanh(-0.0), -0.0),
            (tanh(f32::from_bits(0x8000_0001)), f32::from_bits(0x8000_0001)),
            (silu(-0.0), -0.0),
            (silu(f32::INFINITY), f32::INFINITY),
            (situ(f32::INFINITY, f32::NEG_INFINITY, 4.0, 25.0), -100.0),
            (situ(f32::NEG_INFINITY, f32::INFINITY, 4.0, 25.0), -0.0),
            (situ(1000.0, 1000.0, 4.0, 25.0), 100.0),
        ];
        for (i, (found, expected)) in cases.into_iter().enumerate() {
            assert_eq!(found.to_bits(), expected.to_bits(), "case {i}: {found:e} instead of {expected:e}");
        }
        for f in [exp, sigmoid, tanh, silu] {
            assert_eq!(canonical_bits(f(f32::NAN)), 0x7fc0_0000);
            assert_eq!(canonical_bits(f(-f32::NAN)), 0x7fc0_0000);
        }
        assert!((situ(8.0, 50.0, 4.0, 25.0) - 92.9038).abs() < 1e-4);
        assert!((situ(-1.0, 2.0, 4.0, 25.0) + 0.525_83).abs() < 1e-5);
        // The decay of spec 3.3 in its range (e^-5, 1].
        assert!((kda_alpha(0.5, -0.5, 1.0, -5.0) - exp(-2.5)).abs() == 0.0);
    }
}
