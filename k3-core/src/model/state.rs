//! What a sequence remembers between passes.

use super::layout::{Walker, product};
use crate::carve::{BufferError, Carver, Line, Tally, enough};
use crate::config::ModelConfig;

/// KDA matrices, convolution history and latent cache of one sequence.
///
/// For the released model: 434 MB of KDA matrices, 31 MB of history, and 55,296 bytes for each
/// position of `context` (spec section 6).
#[derive(Debug)]
pub struct State<'a> {
    /// `[kda layers, heads, head_dim (key), head_dim (value)]`.
    pub(crate) kda: &'a mut [f32],
    /// `[kda layers, 3 (q, k, v), kernel - 1, heads * head_dim]`: inputs before the convolution,
    /// oldest first.
    pub(crate) conv: &'a mut [f32],
    /// `[mla layers, context, kv_lora_rank + qk_rope_head_dim]`. Rows from `position` on have no
    /// meaning and are never read.
    pub(crate) latent: &'a mut [f32],
    context: usize,
    pub(crate) position: usize,
    pub(crate) torn: bool,
    /// Passes and resets since this value was made: what [`Journal`](super::Journal) tells a later one by.
    pub(super) moves: u64,
}

/// The arrays of a [`State`].
#[derive(Debug)]
pub struct StateParts<T> {
    /// `[kda layers, heads, head_dim (key), head_dim (value)]`.
    pub kda: T,
    /// `[kda layers, 3 (q, k, v), kernel - 1, heads * head_dim]`.
    pub conv: T,
    /// `[mla layers, context, kv_lora_rank + qk_rope_head_dim]`; rows from the position on mean nothing.
    pub latent: T,
}

impl<'a> State<'a> {
    /// Lines needed for sequences of up to `context` positions; `None` if that overflows.
    #[must_use]
    pub fn lines(config: &ModelConfig, context: usize) -> Option<usize> {
        let mut tally = Tally::new();
        Self::walk(&mut tally, config, context).ok()?;
        Some(tally.lines())
    }

    fn walk(walker: &mut impl Walker<'a>, c: &ModelConfig, context: usize) -> Result<Self, BufferError> {
        let (layers, width) = (c.num_kda_layers(), c.kda_width());
        Ok(Self {
            kda: walker.part(product(&[layers, width, c.kda_head_dim]))?,
            conv: walker.part(product(&[layers, 3, c.conv_kernel_size - 1, width]))?,
            latent: walker.part(product(&[c.num_mla_layers(), context, c.latent_width()]))?,
            context,
            position: 0,
            torn: false,
            moves: 0,
        })
    }

    /// The state before the first position, in the front of the caller's memory.
    ///
    /// Only the KDA matrices and the history are written; the pages of the latent cache are
    /// touched as positions come.
    ///
    /// # Errors
    /// [`BufferError`] if `memory` is shorter than [`State::lines`].
    pub fn new(memory: &'a mut [Line], config: &ModelConfig, context: usize) -> Result<Self, BufferError> {
        enough(memory, Self::lines(config, context))?;
        let mut state = Self::walk(&mut Carver::new(memory), config, context)?;
        state.reset();
        Ok(state)
    }

    /// The state that an earlier one of the same config and context left in `memory`, at `position`.
    ///
    /// Nothing is written. Memory that holds anything else is no danger to safety, only to sense.
    ///
    /// # Errors
    /// [`BufferError`] if `memory` is shorter than [`State::lines`].
    pub fn attach(
        memory: &'a mut [Line],
        config: &ModelConfig,
        context: usize,
        position: usize,
        torn: bool,
    ) -> Result<Self, BufferError> {
        enough(memory, Self::lines(config, context))?;
        let mut state = Self::walk(&mut Carver::new(memory), config, context)?;
        (state.position, state.torn) = (position, torn);
        Ok(state)
    }

    /// What is remembered, to be written down.
    #[must_use]
    pub const fn parts(&self) -> StateParts<&[f32]> {
        StateParts { kda: self.kda, conv: self.conv, latent: self.latent }
    }

    /// What is remembered, to be restored. A position is restored by [`State::attach`].
    #[must_use]
    pub const fn parts_mut(&mut self) -> StateParts<&mut [f32]> {
        StateParts { kda: self.kda, conv: self.conv, latent: self.latent }
    }

    /// Whether a pass stopped half-way; such a state can only be [`State::reset`].
    #[must_use]
    pub const fn is_torn(&self) -> bool {
        self.torn
    }

    /// Notes that a pass, a commit or a reset takes place: what a journal has noted before is of the past.
    pub(super) const fn moved(&mut self) {
        self.moves = self.moves.wrapping_add(1);
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.kda.fill(0.0);
        self.conv.fill(0.0);
        self.position = 0;
        self.torn = false;
        self.moved();
    }

    /// Positions seen so far.
    #[must_use]
    pub const fn position(&self) -> usize {
        self.position
    }

    /// The largest number of positions this state has room for.
    #[must_use]
    pub const fn context(&self) -> usize {
        self.context
    }
}
