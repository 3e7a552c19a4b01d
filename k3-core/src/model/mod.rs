//! The forward pass: token ids in, logits out, over buffers the caller owns.
//!
//! [`Model::forward`] reads top to bottom like section 3 of the specification. Weights come through
//! [`Weights`], threads through [`Executor`](crate::exec::Executor); what a sequence remembers is in
//! [`State`], what a pass scribbles on in [`Workspace`]. Everything mutable is an argument and
//! nothing else exists.
//!
//! [`Model::forward_many`] is the same for several sequences in one pass. [`Model::verify`] is the same
//! for ids that may be wrong: what would move the state on is noted in a [`Journal`], and
//! [`Model::commit`] takes the steps that were right.
//!
//! Sizes come first, as numbers; then the memory, which is the caller's; then a pass. (A whole one is in
//! the [crate's example](crate).)
//!
//! ```
//! use k3_core::carve::{BufferError, Line};
//! use k3_core::config::{ModelConfig, RELEASED_JSON};
//! use k3_core::model::{Extent, State, Workspace};
//!
//! let config = ModelConfig::parse(RELEASED_JSON.as_bytes())?;
//! let bytes = |lines: Option<usize>| lines.map(|n| n * Line::BYTES);
//! let extent = Extent { chunk: 1, context: 4096, width: 2 };
//! assert_eq!(bytes(State::lines(&config, extent.context)), Some(691_126_272));
//! assert!(bytes(Workspace::lines(&config, extent)).unwrap() < 20_000_000);
//!
//! // Too little memory is an error that says how much would do.
//! let error = State::new(&mut [Line::ZERO; 8], &config, extent.context).unwrap_err();
//! assert!(matches!(error, BufferError::TooSmall { given: 8, .. }));
//! # Ok::<(), k3_core::config::ConfigError>(())
//! ```

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
pub use state::{State, StateParts};
pub use weights::Weights;
pub use workspace::{Extent, Workspace};
