//! What a pass on trial would do to a state.
//!
//! Ids that may be wrong must be read before anybody knows. A latent cache is simply cut: rows from the
//! position on are never read. KDA matrices and convolution history have no way back, so such a pass
//! leaves them alone: it takes its steps on a copy of *one* layer's matrices at a time, and notes the
//! inputs of the steps. When it is known how many ids were right, the steps of these are taken on the
//! state itself, by the same kernel with the same inputs: the same bits.
//!
//! For the released model a position takes 20.4 MB (69 layers x (6 x 12,288 + 96) values) and the copy
//! of a layer 6.3 MB. A copy of the whole state would be 465 MB, which is more up to 22 positions.
//!
//! A pass that breaks off leaves the state as it was: only a commit writes to it.

use super::layout::{Walker, product};
use crate::carve::{BufferError, Carver, Line, Tally, enough};
use crate::config::ModelConfig;
use crate::ops::kda::Shape;

/// Inputs of the steps of some positions, in every KDA layer: what [`Model::verify`](super::Model::verify) notes
/// and [`Model::commit`](super::Model::commit) takes.
// In the shapes below `n` is the number of positions, and `P` the KDA width.
#[derive(Debug)]
pub struct Journal<'a> {
    /// `[heads, head_dim, head_dim]`: the matrices of the layer at hand.
    matrices: &'a mut [f32],
    /// `[kda layers, 3 (q, k, v), n, P]`: before the convolution.
    inputs: &'a mut [f32],
    /// `[kda layers, 2 (k, v), n, P]`: after it.
    kv: &'a mut [f32],
    /// `[kda layers, n, P]`.
    alpha: &'a mut [f32],
    /// `[kda layers, n, heads]`.
    beta: &'a mut [f32],
    positions: usize,
    width: usize,
    /// Position and [`State::moves`](super::State) before the pass that is noted; `None` if there is none.
    pub(super) start: Option<(usize, u64)>,
    /// Positions of that pass.
    pub(super) held: usize,
}

/// What the recurrence of a layer reads; see [`crate::ops::kda::recur`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps<'s> {
    pub(super) shape: Shape,
    /// `[3, positions, P]`.
    pub(super) qkv: &'s [f32],
    /// `[positions, P]`.
    pub(super) alpha: &'s [f32],
    /// `[positions, heads]`.
    pub(super) beta: &'s [f32],
}

impl<'a> Journal<'a> {
    /// Lines needed for passes of up to `positions`; `None` if that overflows.
    #[must_use]
    pub fn lines(config: &ModelConfig, positions: usize) -> Option<usize> {
        let mut tally = Tally::new();
        Self::walk(&mut tally, config, positions).ok()?;
        Some(tally.lines())
    }

    /// Splits the front of the caller's memory, whose contents need not be zero. The journal is empty.
    ///
    /// # Errors
    /// [`BufferError`] if `memory` is shorter than [`Journal::lines`].
    pub fn new(memory: &'a mut [Line], config: &ModelConfig, positions: usize) -> Result<Self, BufferError> {
        enough(memory, Self::lines(config, positions))?;
        Self::walk(&mut Carver::new(memory), config, positions)
    }

    fn walk(w: &mut impl Walker<'a>, c: &ModelConfig, n: usize) -> Result<Self, BufferError> {
        let layers = c.num_kda_layers();
        let width = if layers == 0 { 0 } else { c.kda_width() };
        Ok(Self {
            matrices: w.part(product(&[width, c.kda_head_dim]))?,
            inputs: w.part(product(&[layers, 3, n, width]))?,
            kv: w.part(product(&[layers, 2, n, width]))?,
            alpha: w.part(product(&[layers, n, width]))?,
            beta: w.part(product(&[layers, n, c.kda_num_heads]))?,
            positions: n,
            width,
            start: None,
            held: 0,
        })
    }

    /// The journal that an earlier one of the same config and size left in `memory`: of a pass of
    /// `held` positions from `start` on. Nothing is written. It is empty if it cannot have held so many.
    ///
    /// [`Model::commit`](super::Model::commit) takes it for the last pass over a [`State::attach`](super::State::attach)ed
    /// state, if the position is the same; whether it was is the caller's to know.
    ///
    /// # Errors
    /// [`BufferError`] if `memory` is shorter than [`Journal::lines`].
    pub fn attach(
        memory: &'a mut [Line],
        config: &ModelConfig,
        positions: usize,
        (start, held): (usize, usize),
    ) -> Result<Self, BufferError> {
        enough(memory, Self::lines(config, positions))?;
        let mut journal = Self::walk(&mut Carver::new(memory), config, positions)?;
        if held <= positions {
            (journal.start, journal.held) = (Some((start, 0)), held);
        }
        Ok(journal)
    }

    /// The largest number of positions that it has room for.
    #[must_use]
    pub const fn positions(&self) -> usize {
        self.positions
    }

    /// Forgets the pass.
    pub(super) const fn forget(&mut self) {
        (self.start, self.held) = (None, 0);
    }

    /// Notes q, k or v (`which`) before the convolution: `[positions, P]`.
    pub(super) fn note_inputs(&mut self, ordinal: usize, which: usize, rows: &[f32]) {
        self.inputs[(ordinal * 3 + which) * self.positions * self.width..][..rows.len()].copy_from_slice(rows);
    }

    /// Notes the steps of a layer, and gives a copy of its matrices to take them on.
    pub(super) fn note_steps(&mut self, ordinal: usize, steps: Steps<'_>, matrices: &[f32]) -> &mut [f32] {
        let Steps { shape, qkv, alpha, beta } = steps;
        let (n, len) = (self.positions, shape.positions * self.width);
        for (i, rows) in qkv[len..].chunks_exact(len).enumerate() {
            self.kv[(ordinal * 2 + i) * n * self.width..][..len].copy_from_slice(rows);
        }
        self.alpha[ordinal * n * self.width..][..len].copy_from_slice(alpha);
        self.beta[ordinal * n * shape.heads..][..beta.len()].copy_from_slice(beta);
        self.matrices.copy_from_slice(matrices);
        self.matrices
    }

    /// The first steps of a layer, as many as `shape` has positions. There is no q: k stands in its
    /// place, for what is read with it is not wanted.
    pub(super) fn steps(&self, ordinal: usize, shape: Shape, qkv: &mut [f32], alpha: &mut [f32], beta: &mut [f32]) {
        let (n, len) = (self.positions, shape.positions * self.width);
        for (rows, i) in qkv.chunks_exact_mut(len).zip([0, 0, 1]) {
            rows.copy_from_slice(&self.kv[(ordinal * 2 + i) * n * self.width..][..len]);
        }
        alpha.copy_from_slice(&self.alpha[ordinal * n * self.width..][..len]);
        beta.copy_from_slice(&self.beta[ordinal * n * shape.heads..][..beta.len()]);
    }

    /// Moves the convolution history `past` (`[3, kernel - 1, P]`) of a layer on by the first inputs.
    pub(super) fn inputs(&self, ordinal: usize, shape: Shape, past: &mut [f32]) {
        let (n, rows) = (self.positions, shape.kernel - 1);
        let fresh = shape.positions.min(rows);
        if rows == 0 {
            return;
        }
        for (i, past) in past.chunks_exact_mut(rows * self.width).enumerate() {
            past.copy_within(fresh * self.width.., 0);
            let from = ((ordinal * 3 + i) * n + shape.positions - fresh) * self.width;
            past[(rows - fresh) * self.width..].copy_from_slice(&self.inputs[from..][..fresh * self.width]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::test_configs::RELEASED;
    use crate::model::State;

    #[test]
    fn a_position_of_the_released_model_takes_what_the_module_says() {
        let config = ModelConfig::parse(RELEASED.as_bytes()).unwrap();
        let bytes = |positions| Journal::lines(&config, positions).unwrap() * Line::BYTES;
        assert_eq!(bytes(0), 6_291_456);
        for n in [1, 9, 22, 64] {
            assert_eq!(bytes(n) - bytes(0), n * 69 * (6 * 12_288 + 96) * 4);
        }
        let copy = State::lines(&config, 0).unwrap() * Line::BYTES;
        assert!(bytes(22) < copy && copy < bytes(23));
        assert!(Journal::lines(&config, usize::MAX / 8).is_none());
    }
}
