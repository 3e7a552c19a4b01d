//! Multi-head latent attention in absorbed form (spec 3.4).
//!
//! Keys and values are never expanded. For a head with key rows `K` and value rows `V` of
//! `kv_b_proj`, a query `q` and the cached rows `(lat_t, kr_t)`:
//!
//! ```text
//! qa = K^T q_nope
//! score_t = ((qa, q_rope) . (lat_t, kr_t)) * (nope + rope)^-0.5      t = 0 ..= own position
//! m = sum_t softmax(score)_t lat_t
//! a = V m
//! ```
//!
//! There is no rotation anywhere in this model; the rope slots only take part in the dot product.

use super::softmax::softmax;
use crate::backend::{Backend, Layout, Panel};
use crate::exec::{Executor, Parts};
use crate::math::round;
use crate::view::{Bf16Matrix, F32Matrix};

/// Dimensions of one MLA layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Positions of the chunk.
    pub(crate) positions: usize,
    /// `num_attention_heads`.
    pub(crate) heads: usize,
    /// `qk_nope_head_dim`.
    pub(crate) nope: usize,
    /// `qk_rope_head_dim`.
    pub(crate) rope: usize,
    /// `v_head_dim`.
    pub(crate) value: usize,
    /// `kv_lora_rank`.
    pub(crate) rank: usize,
}

impl Shape {
    /// Elements of a cached row.
    #[must_use]
    pub(crate) const fn latent(self) -> usize {
        self.rank + self.rope
    }

    /// Rows of `kv_b_proj` for one head: its keys, then its values.
    #[must_use]
    pub(crate) const fn head_rows(self) -> usize {
        self.nope + self.value
    }
}

/// Scratch of the threads that attend at the same time.
#[derive(Debug)]
pub(crate) struct Scratch<'a> {
    /// Elements of `thread` per thread.
    pub(crate) thread_len: usize,
    pub(crate) thread: &'a mut [f32],
    pub(crate) panels: &'a mut [f64],
}

/// Attends with the heads whose rows of `kv_b_proj` are in `block`.
///
/// * `block`: whole heads, `[heads in block * (nope + value), rank]`; `first_head`: the first one;
/// * `q`: `[positions, heads, nope + rope]`;
/// * `cache`: `[seen + positions, rank + rope]`, the chunk's own rows included;
/// * `out`: `[heads, positions, value]`.
#[expect(clippy::too_many_arguments, reason = "one per quantity of the formula")]
pub(crate) fn attend<X: Executor>(
    backend: Backend,
    exec: &X,
    shape: Shape,
    block: Bf16Matrix<'_>,
    first_head: usize,
    q: &[f32],
    cache: F32Matrix<'_>,
    scratch: &mut Scratch<'_>,
    out: &mut [f32],
) {
    let Shape { positions, value, .. } = shape;
    let heads = block.rows() / shape.head_rows();
    // A thread's scratch is reused for all the heads of its group.
    let groups = scratch.thread.len() / scratch.thread_len;
    let per_group = heads.div_ceil(groups);
    let panel_len = scratch.panels.len() / groups;
    let out = &mut out[first_head * positions * value..][..heads * positions * value];
    let work = (
        Parts::new(out, per_group * positions * value),
        (Parts::new(&mut *scratch.thread, scratch.thread_len), Parts::new(&mut *scratch.panels, panel_len)),
    );
    exec.run(work, |group, (out, (thread, panel))| {
        for (i, out) in out.chunks_exact_mut(positions * value).enumerate() {
            let head = group * per_group + i;
            let rows = block.slice(head * shape.head_rows()..(head + 1) * shape.head_rows());
            one_head(backend, shape, rows, first_head + head, q, cache, thread, panel, out);
        }
    });
}

#[expect(clippy::too_many_arguments, reason = "one per quantity of the formula")]
fn one_head(
    backend: Backend,
    shape: Shape,
    rows: Bf16Matrix<'_>,
    head: usize,
    q: &[f32],
    cache: F32Matrix<'_>,
    thread: &mut [f32],
    panel: &mut [f64],
    out: &mut [f32],
) {
    let Shape { positions, nope, rope, value, rank, .. } = shape;
    let (attended, thread) = thread.split_at_mut(positions * rank);
    let (products, thread) = thread.split_at_mut(positions * value);
    let (query, scores) = thread.split_at_mut(shape.latent());
    let keys = rows.slice(0..nope);
    #[expect(clippy::cast_precision_loss, reason = "a head's width is far below 2^53")]
    let scale = round(1.0 / libm::sqrt((nope + rope) as f64));
    let seen = cache.rows() - positions;
    for (t, attended) in attended.chunks_exact_mut(rank).enumerate() {
        let q = &q[(t * shape.heads + head) * (nope + rope)..][..nope + rope];
        let (absorbed, rope_part) = query.split_at_mut(rank);
        backend.sum_rows_bf16(&q[..nope], keys, absorbed);
        rope_part.copy_from_slice(&q[nope..]);
        let cache = cache.slice(0..seen + t + 1);
        let scores = &mut scores[..cache.rows()];
        backend.matmul_f32(cache, query, scores);
        for score in &mut *scores {
            *score *= scale;
        }
        softmax(backend, scores);
        backend.sum_rows_f32(scores, cache.data(), shape.latent(), attended);
    }
    let x: Panel<'_> = backend.pack(Layout::Bf16, attended, rank, positions, panel);
    backend.matmul_bf16(rows.slice(nope..nope + value), &x, products);
    for (t, out) in out.chunks_exact_mut(value).enumerate() {
        for (o, products) in out.iter_mut().zip(products.chunks_exact(positions)) {
            *o = products[t];
        }
    }
}
