//! Kimi delta attention between its projections (spec 3.3).
//!
//! ```text
//! window -> conv + SiLU -> q, k, v          z -> alpha = exp(lower * sig(exp(A_log) (z + dt)))
//! q = l2(q) / sqrt(d), k = l2(k)            beta = sig(b)
//! per head, position by position: S = alpha S;  S += k (beta (v - S^T k));  o = S^T q
//! out = rms(o) * sig(gate)
//! ```
//!
//! ```
//! use k3_core::backend::Backend;
//! use k3_core::exec::Serial;
//! use k3_core::ops::kda::{Shape, recur};
//!
//! // A state that forgets nothing learns that the key (1, 0) means the value (3, 4), and is asked for it.
//! let shape = Shape { positions: 1, heads: 1, head_dim: 2, kernel: 4 };
//! let (mut state, mut out) = ([0.0; 4], [0.0; 2]);
//! let qkv = [1.0, 0.0, 1.0, 0.0, 3.0, 4.0];
//! recur(Backend::detect(), &Serial, shape, &mut state, &qkv, &[1.0, 1.0], &[1.0], &mut out);
//! assert_eq!((state, out), ([3.0, 4.0, 0.0, 0.0], [3.0, 4.0]));
//! ```

use super::norm::{l2_normalize, rms_norm};
use crate::backend::Backend;
use crate::exec::{Executor, Parts};

/// Dimensions of one KDA layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Positions of the chunk.
    pub positions: usize,
    /// `linear_attn_config.num_heads`.
    pub heads: usize,
    /// `linear_attn_config.head_dim`.
    pub head_dim: usize,
    /// `linear_attn_config.short_conv_kernel_size`.
    pub kernel: usize,
}

impl Shape {
    /// All heads side by side.
    #[must_use]
    pub const fn width(self) -> usize {
        self.heads * self.head_dim
    }
}

/// Convolution, `SiLU`, and the norms of q and k.
///
/// * `window`: `[3, kernel - 1 + positions, width]`, history first;
/// * `taps`: `[3, width, kernel]`; the last tap meets the current input;
/// * `qkv`: `[3, positions, width]`.
///
/// # Panics
/// If a slice is shorter than that. So it is with the other three.
///
/// **Source.** Spec 3.3 steps 2 and 3.
pub fn convolve<X: Executor>(backend: Backend, exec: &X, shape: Shape, window: &[f32], taps: &[f32], qkv: &mut [f32]) {
    let Shape { positions, head_dim, kernel, .. } = shape;
    let width = shape.width();
    let rows = kernel - 1 + positions;
    #[expect(clippy::cast_precision_loss, reason = "a head's width is far below 2^53")]
    let scale = 1.0 / libm::sqrt(head_dim as f64);
    exec.run(Parts::new(qkv, width), |i, out| {
        let (which, t) = (i / positions, i % positions);
        let window = &window[(which * rows + t) * width..][..kernel * width];
        backend.conv_silu(&taps[which * width * kernel..][..width * kernel], window, out);
        if which < 2 {
            for head in out.chunks_exact_mut(head_dim) {
                l2_normalize(backend, head, if which == 0 { scale } else { 1.0 });
            }
        }
    });
}

/// The decay of every channel.
///
/// * `z`: `[positions, width]`, what `f_b_proj` gave; `dt_bias`: `[width]`; `a_log`: one per head;
/// * `lower`: config `gate_lower_bound`; `alpha`: `[positions, width]`.
///
/// **Source.** Spec 3.3 step 4.
#[expect(clippy::too_many_arguments, reason = "one per quantity of the formula")]
pub fn decay<X: Executor>(
    backend: Backend,
    exec: &X,
    shape: Shape,
    z: &[f32],
    dt_bias: &[f32],
    a_log: &[f32],
    lower: f32,
    alpha: &mut [f32],
) {
    let d = shape.head_dim;
    exec.run(Parts::new(alpha, d), |i, out| {
        let head = i % shape.heads;
        backend.kda_alpha(&z[i * d..][..d], &dt_bias[head * d..][..d], a_log[head], lower, out);
    });
}

/// The recurrence: each head on its own, position by position.
///
/// * `state`: `[heads, head_dim, head_dim]`, key by value, carried on;
/// * `qkv`: as [`convolve`] left it; `alpha`: `[positions, width]`; `beta`: `[positions, heads]`;
/// * `out`: `[heads, positions, head_dim]`.
///
/// **Source.** Spec 3.3 step 6.
#[expect(clippy::too_many_arguments, reason = "one per quantity of the formula")]
pub fn recur<X: Executor>(
    backend: Backend,
    exec: &X,
    shape: Shape,
    state: &mut [f32],
    qkv: &[f32],
    alpha: &[f32],
    beta: &[f32],
    out: &mut [f32],
) {
    let Shape { positions, heads, head_dim: d, .. } = shape;
    let work = (Parts::new(state, d * d), Parts::new(out, positions * d));
    exec.run(work, |head, (state, out)| {
        for (t, out) in out.chunks_exact_mut(d).enumerate() {
            let at = |which: usize| &qkv[((which * positions + t) * heads + head) * d..][..d];
            let alpha = &alpha[(t * heads + head) * d..][..d];
            backend.kda_step(state, alpha, beta[t * heads + head], at(0), at(1), at(2), out);
        }
    });
}

/// Norm and output gate: `out[t, h] = rms(o[h, t], o_norm) * sig(gate[t, h])`.
///
/// * `heads`: `[heads, positions, head_dim]`; `gate`, `out`: `[positions, width]`; `eps`: config `rms_norm_eps`.
///
/// **Source.** Spec 3.3 step 7.
#[expect(clippy::too_many_arguments, reason = "one per quantity of the formula")]
pub fn gated_norm<X: Executor>(
    backend: Backend,
    exec: &X,
    shape: Shape,
    heads: &[f32],
    o_norm: &[f32],
    eps: f64,
    gate: &[f32],
    out: &mut [f32],
) {
    let d = shape.head_dim;
    exec.run(Parts::new(out, d), |i, out| {
        let (t, head) = (i / shape.heads, i % shape.heads);
        rms_norm(backend, &heads[(head * shape.positions + t) * d..][..d], o_norm, eps, out);
        backend.mul_sigmoid(out, &gate[i * d..][..d]);
    });
}
