//! Kimi K3 inference over buffers the caller owns.
//!
//! Token ids go in, logits come out, and in between nothing is allocated, read, timed or spawned: no
//! std, no allocator, no I/O, no threads, no clocks. Weights are lent by whoever has them, memory is a
//! slice the caller made. What comes out is *the same, bit for bit*, on every machine, with every set
//! of kernels, for every number of threads and however a sequence is cut into chunks.
//!
//! # A tour along the data
//!
//! ```text
//! config.json --config--> ModelConfig            shards --safetensors, checkpoint--> which bytes are which tensor
//! prompt ------tokenizer::encode--> ids --Model::forward--> logits --ops::sample--> id --tokenizer::Decoder--> bytes
//!
//! Model::forward, for each layer:
//!     residual mix -> norm -> attention (KDA | MLA)                  -> add
//!     residual mix -> norm -> MLP       (dense | mixture of experts) -> add
//! then residual mix -> norm -> lm_head
//! ```
//!
//! 1. [`config`] reads the model's dimensions, strictly, with the [`json`] pull parser: a field that
//!    is missing is an error that names it, never a default.
//! 2. [`checkpoint`] knows every tensor's name, shape and place in the walk; [`safetensors`] reads the
//!    headers of the files that hold them.
//! 3. [`tokenizer`] turns text into ids and ids into bytes; [`chat`] turns a conversation into texts and
//!    control ids, and the model's ids back into thinking, answer and tool calls.
//! 4. [`model`] is the forward pass. It asks [`Weights`](model::Weights) for tensors in a fixed order
//!    and spreads work by an [`Executor`](exec::Executor); an embedder writes these two (the second
//!    may be [`Serial`](exec::Serial)). What a sequence remembers is a [`State`](model::State), what a
//!    pass scribbles on a [`Workspace`](model::Workspace): both are carved from plain slices by [`carve`].
//! 5. [`ops`] are the operations of a layer, over [`view`]s that are only constructible checked.
//! 6. [`coded`] keeps bf16 matrices in three quarters of their bytes, losslessly; kernels multiply that form.
//! 7. [`backend`] holds the kernels: a scalar definition, and AVX2 and AVX-512 forms of the same bits.
//!    [`math`] has the three functions no machine agrees on, in one form.
//!
//! "Spec 3.3" and the like are sections of a description of the model that was drawn up from the released
//! config and modelling code: 1 the config, 2 the tensors, 3 the forward pass, 4 MXFP4, 5 tokenizer and chat,
//! 6 sizes in memory, 7 open questions. It is not published with this crate; what is computed is said again
//! where it is computed.
//!
//! # Example
//!
//! A whole model in a few kilobytes of constants, which are in the package's `tests/tiny/mod.rs`. For a
//! checkpoint's, [`Weights`](model::Weights) shows an implementation to start from.
//!
//! ```
//! use k3_core::backend::Backend;
//! use k3_core::carve::Line;
//! use k3_core::config::ModelConfig;
//! use k3_core::exec::Serial;
//! use k3_core::model::{Extent, Model, State, Workspace};
//! use k3_core::ops::sample::argmax;
//! use k3_core::view::TokenId;
//!
//! mod tiny {
//!     // `CONFIG`, and `Tiny`, which implements `k3_core::model::Weights`.
//!     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tiny/mod.rs"));
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = ModelConfig::parse(tiny::CONFIG)?;
//! let mut weights = tiny::Tiny { config: &config, block: 16 };
//!
//! // All memory is the caller's. Here it is two vectors; it may be static, or on the stack.
//! let extent = Extent { chunk: 4, context: 32, width: 1 };
//! let mut remembered = vec![Line::ZERO; State::lines(&config, extent.context).unwrap()];
//! let mut scratch = vec![Line::ZERO; Workspace::lines(&config, extent).unwrap()];
//! let mut state = State::new(&mut remembered, &config, extent.context)?;
//! let mut workspace = Workspace::new(&mut scratch, &config, extent)?;
//!
//! // The prompt in one pass, then token by token; logits are those of the last position.
//! let model = Model { config: &config, backend: Backend::detect(), exec: &Serial };
//! let mut logits = vec![0.0; config.vocab_size];
//! let mut ids = vec![TokenId(3), TokenId(47), TokenId(0)];
//! let mut text = Vec::new();
//! for _ in 0..5 {
//!     model.forward(&mut weights, &mut state, &mut workspace, &ids, &mut logits, &mut ())?;
//!     let best = argmax(&logits)?.unwrap();
//!     text.push(best.0);
//!     ids = vec![best];
//! }
//! assert_eq!(text, [28, 17, 37, 23, 10]); // the same five on every machine
//! # Ok(())
//! # }
//! ```
//!
//! # Embedding
//!
//! Needs Rust 1.89. There are no Cargo features. The dependencies are bytemuck, half and libm, none with std,
//! and cpufeatures on x86-64; a build script makes a table of Unicode classes out of two crates that only it
//! needs. The licence is Apache-2.0.
//!
//! What an embedder writes is [`Weights`](model::Weights), and an [`Executor`](exec::Executor) if there
//! are threads. The way from files to ids, each step with the memory it takes:
//!
//! 1. [`ModelConfig::parse`](config::ModelConfig::parse) of `config.json`. The value is small and is
//!    asked for everywhere.
//! 2. For each shard, [`safetensors::header_len`] of its first eight bytes, then
//!    [`Header::parse`](safetensors::Header::parse) of so many that follow. For each entry,
//!    [`Tensor::parse_json`](checkpoint::Tensor::parse_json) says which tensor it is: skip one that is
//!    [`Ignored`](checkpoint::Named::Ignored), and refuse the checkpoint for one that is
//!    [`Unknown`](checkpoint::Named::Unknown), since config and files do not belong together.
//!    [`Tensor::accepts`](checkpoint::Tensor::accepts) says whether its shape is right, and
//!    [`checkpoint::slot`] under which number, below [`checkpoint::slot_count`], to keep its place.
//!    A slot that is taken already is the embedder's to refuse; [`checkpoint::expected`] lists what must be
//!    there. Headers say everything, so `model.safetensors.index.json` is only needed by who does not want to
//!    read them all.
//! 3. [`Vocab::required`](tokenizer::Vocab::required) lines for [`Vocab::load`](tokenizer::Vocab::load) of
//!    `tiktoken.model`; [`Specials::new`](tokenizer::Specials::new) above its ranks, which knows the released
//!    names, so that `tokenizer_config.json` is only needed where names were changed. Its
//!    [`end`](tokenizer::Specials::end) must be the config's `vocab_size`, or vocabulary and model do not belong
//!    together; nothing else compares them.
//!    [`tokenizer::scratch_len`] lines for [`tokenizer::encode`] of plain text, and room for as many ids as the
//!    text has bytes at most. A conversation is put into the model's form by [`chat::Prompt`].
//! 4. [`State::lines`](model::State::lines) and [`Workspace::lines`](model::Workspace::lines), and
//!    `vocab_size` logits. [`carve`] shows how one buffer serves for all.
//! 5. [`Model::forward`](model::Model::forward) over the prompt, in chunks of any size, then over one id
//!    at a time. A chunk whose logits nobody wants is given an empty slice for them, the last one a row for
//!    its last position. [`argmax`](ops::sample::argmax) of that row is the next id;
//!    [`Specials::is_stop`](tokenizer::Specials::is_stop) says whether it ends the text, and
//!    [`Decoder`](tokenizer::Decoder) its bytes.
//!
//! The unit of memory is a [`Line`](carve::Line) of 64 bytes, on a border of 64; what it holds before does
//! not matter. How many are needed depends on the config, and is not known when a `static` is compiled: its
//! length has to be guessed, and compared with the sum of the `lines`. Whoever gives too few gets a
//! [`BufferError`](carve::BufferError) that says how many would do; whoever gives more, has the front used.
//!
//! *Stack*, in an optimised build: a pass takes less than 128 KiB on each thread, whatever the model; all else
//! takes less, but for JSON in [`chat`] that is nested to the limit of [`json::MAX_DEPTH`], with which sorting
//! keys takes up to 256 KiB.
//!
//! Weights are lent as they lie in the shards, little-endian and at any alignment; a machine of
//! the other byte order does nothing about it. The folder `cross/embed` of the repository, which is not in this
//! package, is all of this as a C library and a wasm module.
//!
//! # Versions
//!
//! Semantic versioning, with one addition: *the bits are part of the interface.* A release that changes a
//! logit, or an id of an encoding, of any input that was accepted is a major one, whatever its signatures.
//! Errors and what they list are `#[non_exhaustive]`; a new one, a back end, or a file that is refused
//! with a better reason is minor. So is the need of a newer Rust, said in the change log. Before 1.0 the
//! middle number counts as the major one. Sizes ([`State::lines`](model::State::lines) and its like) are to
//! be asked for and not to be written down. One dependency shows: parts are carved as
//! `Pod` types of bytemuck 1.
//!
//! # The floating-point contract
//!
//! Activations and states are f32; weights are f32, bf16 or MXFP4, and each is exactly an f32.
//!
//! * **Dot products** have sixteen f64 accumulators: element `i` goes to lane `i mod 16`, in rising
//!   `i`; the lanes are folded by one tree and the result is rounded to f32 once. The product of two
//!   f32 is exact in f64, so a fused multiply-add cannot differ from a multiplication and an addition:
//!   only the order of the additions matters, and the rule fixes it.
//! * **Sums across rows** have one f64 accumulator for each output, terms in rising index, rounded
//!   once.
//! * **Everything else** rounds to f32 at places that are written down where it happens.
//! * **exp, sigmoid and tanh** are this crate's ([`math`]), never the platform's.
//! * **A NaN is one value.** Instruction sets differ in the payloads they produce, so "the same bits"
//!   means after [`math::canonical_bits`]. A logit that is not finite is never sampled: the pass stops
//!   and says where the first such value appeared.
//! * **Ties** go to the lowest index, in the choice of experts as in that of a token.
//!
//! The environment must round to nearest, ties to even, and must not flush subnormals to zero or read
//! them as zero (no FTZ, no DAZ). Rust assumes the same, so this only matters to a caller that changes
//! the floating-point control register or links code that does. 32-bit x86 needs SSE2 (`i686`, not `i586`),
//! for the x87 unit rounds in other places.
//!
//! # Errors and panics
//!
//! Whatever comes from outside - a file, a prompt, a size - is answered with a small typed error that
//! holds the facts. A panic is a bug: of this crate, or of a caller that gave a kernel slices of other
//! lengths than its documentation asks for, or a pass the state or the workspace of another config.
#![no_std]
#![deny(unsafe_code)]
#![warn(clippy::std_instead_of_core, clippy::alloc_instead_of_core)]

#[cfg(test)]
extern crate std;

pub mod backend;
pub mod carve;
pub mod chat;
pub mod checkpoint;
pub mod coded;
pub mod config;
pub mod exec;
pub mod json;
pub mod math;
pub mod model;
pub mod ops;
pub mod safetensors;
pub mod tokenizer;
pub mod view;
