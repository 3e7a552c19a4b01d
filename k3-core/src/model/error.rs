//! Why a pass was refused or stopped.

use crate::checkpoint::Tensor;
use crate::view::{ExpertId, LayerIndex, TokenId};

/// Where in the pass a value was first seen that is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// The embedding row.
    Embedding,
    /// A vector of the weights.
    Weight(Tensor),
    /// The product of a matrix with its input.
    Product(Tensor),
    /// The inside of a routed expert.
    Expert(LayerIndex, ExpertId),
    /// The running sum after the attention of a layer.
    Attention(LayerIndex),
    /// The router's biased scores in a layer.
    Router(LayerIndex),
    /// The running sum after the MLP of a layer.
    Mlp(LayerIndex),
    /// The logit of an id.
    Logit(TokenId),
}

impl core::fmt::Display for Place {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::Embedding => f.write_str("in the embedding"),
            Self::Weight(tensor) => write!(f, "in {tensor}"),
            Self::Product(tensor) => write!(f, "in the product with {tensor}"),
            Self::Expert(l, e) => write!(f, "in expert {} of layer {}", e.0, l.0),
            Self::Attention(l) => write!(f, "after the attention of layer {}", l.0),
            Self::Router(l) => write!(f, "in the router of layer {}", l.0),
            Self::Mlp(l) => write!(f, "after the MLP of layer {}", l.0),
            Self::Logit(id) => write!(f, "in the logit of id {}", id.0),
        }
    }
}

/// A pass that was refused (the state is as before) or stopped (the state is torn and must be
/// reset). `E` is the [`Weights::Error`](crate::model::Weights::Error).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForwardError<E> {
    /// Refused: no ids were given.
    EmptyChunk,
    /// Refused: the model has no such layer.
    NoSuchLayer {
        /// The layer.
        layer: LayerIndex,
        /// `num_hidden_layers`.
        layers: usize,
    },
    /// Refused: inputs and outputs of a sub-layer are not whole vectors, as many of one as of the other.
    VectorLength {
        /// Elements of the inputs.
        x: usize,
        /// Elements of the outputs.
        y: usize,
        /// `hidden_size`.
        hidden: usize,
    },
    /// Refused: the ids are not as many as the sequences say.
    SequenceLengths {
        /// Ids given.
        given: usize,
        /// Positions of all sequences.
        positions: usize,
    },
    /// Refused: more ids than the workspace, or the journal, was made for.
    ChunkTooLong {
        /// Ids given.
        given: usize,
        /// [`Extent::chunk`](crate::model::Extent::chunk) or
        /// [`Journal::positions`](crate::model::Journal::positions).
        chunk: usize,
    },
    /// Refused: the state, or the workspace, has no room for these positions.
    ContextFull {
        /// Positions seen and given.
        needed: usize,
        /// Positions there is room for.
        context: usize,
    },
    /// Refused: an id that is not below `vocab_size`.
    TokenOutOfRange {
        /// Place in the chunk.
        index: usize,
        /// The id.
        id: TokenId,
    },
    /// Refused: the logits slice is not `m * vocab_size` long with `m` at most the chunk.
    LogitsLength {
        /// Elements given.
        found: usize,
        /// `vocab_size`.
        vocab: usize,
    },
    /// Refused: an earlier pass stopped half-way.
    TornState,
    /// Stopped: the weights could not be lent.
    Weights(E),
    /// Stopped: a tensor did not arrive, or arrived twice, or with another size than its config asks for, or
    /// its rows in another order than [`Weights`](crate::model::Weights) says.
    Incomplete {
        /// The tensor.
        tensor: Tensor,
    },
    /// Stopped: an expert did not arrive, or arrived twice, or with another shape.
    Expert {
        /// Its layer.
        layer: LayerIndex,
        /// The expert.
        expert: ExpertId,
    },
    /// Stopped: an expert arrived that was not asked for.
    StrayExpert {
        /// The layer.
        layer: LayerIndex,
    },
    /// Stopped: `A_log` has values past `num_heads`, so it is not what the config says.
    ALogTail {
        /// Its layer.
        layer: LayerIndex,
    },
    /// Stopped: a value is infinite or NaN. Nothing is sampled from such a pass.
    NonFinite {
        /// Which of the pass's sequences, from zero. Without meaning for [`Place::Weight`].
        sequence: usize,
        /// Position in the sequence, from zero. Without meaning for [`Place::Weight`].
        position: usize,
        /// Where it was first seen.
        place: Place,
    },
}

impl<E> ForwardError<E> {
    /// The error as one that has no weights' part, or that part.
    ///
    /// # Errors
    /// The [`Weights::Error`](crate::model::Weights::Error) of a pass that stopped for it.
    pub fn split<F>(self) -> Result<ForwardError<F>, E> {
        Ok(match self {
            Self::Weights(e) => return Err(e),
            Self::EmptyChunk => ForwardError::EmptyChunk,
            Self::NoSuchLayer { layer, layers } => ForwardError::NoSuchLayer { layer, layers },
            Self::VectorLength { x, y, hidden } => ForwardError::VectorLength { x, y, hidden },
            Self::SequenceLengths { given, positions } => ForwardError::SequenceLengths { given, positions },
            Self::ChunkTooLong { given, chunk } => ForwardError::ChunkTooLong { given, chunk },
            Self::ContextFull { needed, context } => ForwardError::ContextFull { needed, context },
            Self::TokenOutOfRange { index, id } => ForwardError::TokenOutOfRange { index, id },
            Self::LogitsLength { found, vocab } => ForwardError::LogitsLength { found, vocab },
            Self::TornState => ForwardError::TornState,
            Self::Incomplete { tensor } => ForwardError::Incomplete { tensor },
            Self::Expert { layer, expert } => ForwardError::Expert { layer, expert },
            Self::StrayExpert { layer } => ForwardError::StrayExpert { layer },
            Self::ALogTail { layer } => ForwardError::ALogTail { layer },
            Self::NonFinite { sequence, position, place } => ForwardError::NonFinite { sequence, position, place },
        })
    }
}

impl<E: core::fmt::Display> core::fmt::Display for ForwardError<E> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::EmptyChunk => f.write_str("there are no token ids"),
            Self::NoSuchLayer { layer, layers } => write!(f, "there is no layer {} of {layers}", layer.0),
            Self::VectorLength { x, y, hidden } => {
                write!(f, "{x} inputs and {y} outputs are not as many vectors of {hidden}")
            }
            Self::SequenceLengths { given, positions } => {
                write!(f, "{given} token ids in a pass whose sequences have {positions} positions")
            }
            Self::ChunkTooLong { given, chunk } => {
                write!(f, "{given} token ids in one pass, the workspace holds {chunk}")
            }
            Self::ContextFull { needed, context } => {
                write!(f, "{needed} positions are needed, the context holds {context}")
            }
            Self::TokenOutOfRange { index, id } => {
                write!(f, "token id {} at place {index} is not in the vocabulary", id.0)
            }
            Self::LogitsLength { found, vocab } => {
                write!(f, "room for {found} logits is not a whole number of {vocab} for positions of this pass")
            }
            Self::TornState => f.write_str("an earlier pass stopped half-way: the state must be reset"),
            Self::Weights(e) => e.fmt(f),
            Self::Incomplete { tensor } => write!(f, "{tensor} did not arrive whole, once and in order"),
            Self::Expert { layer, expert } => {
                write!(f, "expert {} of layer {} did not arrive whole and once", expert.0, layer.0)
            }
            Self::StrayExpert { layer } => write!(f, "an expert of layer {} arrived unasked", layer.0),
            Self::ALogTail { layer } => {
                write!(f, "A_log of layer {} has values past num_heads, so it belongs to another config", layer.0)
            }
            Self::NonFinite { place: place @ Place::Weight(_), .. } => {
                write!(f, "a value that is not finite first appeared {place}")
            }
            Self::NonFinite { position, place, .. } => {
                write!(f, "a value that is not finite first appeared at position {position} {place}")
            }
        }
    }
}

impl<E: core::error::Error + 'static> core::error::Error for ForwardError<E> {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            // What is shown is the inner error itself.
            Self::Weights(e) => e.source(),
            _ => None,
        }
    }
}
