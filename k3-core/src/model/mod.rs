//! The forward pass: token ids in, logits out, over buffers the caller owns.
//!
//! [`Model::forward`] reads top to bottom like section 3 of the specification. Weights come through
//! [`Weights`], threads through [`crate::exec::Executor`]; what a sequence remembers is in
//! [`State`], what a pass scribbles on in [`Workspace`]. Everything mutable is an argument and
//! nothing else exists.
//!
//! [`Model::forward_many`] is the same for several sequences in one pass. [`Model::verify`] is the same
//! for ids that may be wrong: what would move the state on is noted in a [`Journal`], and
//! [`Model::commit`] takes the steps that were right.

mod error;
mod forward;
mod journal;
mod layout;
mod state;
mod weights;
mod workspace;

pub use error::{ForwardError, Place};
pub use forward::{Model, Observer, Sequence};
pub use journal::Journal;
pub use state::{Parts, State};
pub use weights::Weights;
pub use workspace::{Extent, Workspace};
