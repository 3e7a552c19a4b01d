//! The seam between arithmetic and storage.

use crate::checkpoint::Tensor;
use crate::view::{Expert, ExpertId, LayerIndex, MatrixRows, TokenId};

/// What the forward pass asks of whoever holds the weights.
///
/// Tensors are lent, as bytes, for the length of a closure. A matrix may arrive as any number of
/// blocks of rows: a resident one is one block, and one that is larger than all the memory there is
/// comes in many. The closure's return is the release of the block.
///
/// The forward pass asks in a fixed order, that of [`crate::checkpoint::layer_tensors`] for each
/// layer and then, if the pass was begun with `head`, that of [`crate::checkpoint::head_tensors`].
/// An implementation may therefore read ahead; one that holds everything may ignore the order.
///
/// An implementation answers for its bytes: a read that failed is an `Err`, never a missing call.
/// The core counts rows and experts and refuses a pass in which some are missing.
pub trait Weights {
    /// Why bytes could not be lent.
    type Error;

    /// A pass over all layers begins. `head`: whether `lm_head` will be asked for at its end.
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn begin(&mut self, head: bool) -> Result<(), Self::Error>;

    /// Lends the rows `ids` of `embed_tokens`, in any order, each as `each(index in ids, bytes)`.
    /// Bytes: bf16, `hidden_size` elements. The ids are below `vocab_size`.
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn embed(&mut self, ids: &[TokenId], each: &mut dyn FnMut(usize, &[u8])) -> Result<(), Self::Error>;

    /// Lends a whole vector, as stored (its dtype is [`Tensor::spec`]'s).
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn vector(&mut self, tensor: Tensor, each: &mut dyn FnMut(&[u8])) -> Result<(), Self::Error>;

    /// Lends a matrix as blocks `each(first row, rows)` in rising order. Each block has a multiple
    /// of [`Tensor::row_granule`] rows. A tensor for which [`Tensor::may_be_coded`] says no is lent
    /// raw; each block of another may be raw or coded, and no result depends on which.
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn matrix(&mut self, tensor: Tensor, each: &mut dyn FnMut(usize, MatrixRows<'_>)) -> Result<(), Self::Error>;

    /// Says which experts of a layer [`Weights::experts`] will ask for next, so that reading can
    /// start while the shared experts are computed. `ids` rise and have no duplicates.
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn request_experts(&mut self, layer: LayerIndex, ids: &[ExpertId]) -> Result<(), Self::Error>;

    /// Lends each of the experts requested last, once, in the order in which they arrive, as
    /// `each(index in ids, expert)`.
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn experts(
        &mut self,
        layer: LayerIndex,
        ids: &[ExpertId],
        each: &mut dyn FnMut(usize, Expert<'_>),
    ) -> Result<(), Self::Error>;
}
