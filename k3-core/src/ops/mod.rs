//! The operations of a layer, each over buffers it is given (spec section 3).
//!
//! ```text
//! residual  attention-residual mix (3.1)      norm     RMSNorm and friends (3.2)
//! kda       Kimi delta attention (3.3)        mla      absorbed latent attention (3.4)
//! router    which experts, and how much (3.6) moe      picks grouped by expert
//! softmax   by the contract                   sample   logits -> id
//! linear    a streamed matrix times a chunk   loss     logits -> surprise
//! ```
//!
//! An operation never allocates, never knows which layer it serves, and gives the same bits for a
//! chunk of positions as for one position at a time.

pub mod kda;
pub mod linear;
pub mod loss;
pub mod mla;
pub mod moe;
pub mod norm;
pub mod residual;
pub mod router;
pub mod sample;
pub mod softmax;
