//! The operations of a layer, each over buffers it is given (spec section 3).
//!
//! ```text
//! residual  attention-residual mix (3.1)      norm     RMSNorm and friends (3.2)
//! kda       Kimi delta attention (3.3)        router   which experts, and how much (3.6)
//! linear    a streamed matrix times a chunk   softmax  by the contract
//! sample    logits -> id                      loss     logits -> surprise
//! ```
//!
//! Two are only called by the forward pass and are not public: latent attention (3.4), and the grouping of
//! picks by expert.
//!
//! An operation never allocates, never knows which layer it serves, and gives the same bits for a
//! chunk of positions as for one position at a time.
//!
//! ```
//! use k3_core::backend::Backend;
//! use k3_core::ops::{norm, sample, softmax};
//!
//! let (backend, mut x) = (Backend::detect(), [3.0, -1.0, 2.0]);
//! norm::rms_norm_in_place(backend, &mut x, &[1.0, 1.0, 1.0], 1e-5);
//! softmax::softmax(backend, &mut x);
//! assert_eq!(sample::argmax(&x)?.map(|id| id.0), Some(0));
//! # Ok::<(), sample::NonFiniteLogit>(())
//! ```

pub mod kda;
pub mod linear;
pub mod loss;
pub(crate) mod mla;
pub(crate) mod moe;
pub mod norm;
pub mod residual;
pub mod router;
pub mod sample;
pub mod softmax;
