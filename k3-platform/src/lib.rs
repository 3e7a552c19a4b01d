//! The Linux side of k3: where the bytes of a checkpoint live while the core works on them.
//!
//! ```text
//! batch        many prompts at the same time
//! generate     from a prompt to its continuation
//! draft        guesses of what comes next
//! session      a sequence that survives the process
//! engine       owns every buffer; the only implementor of the core's `Weights`
//! plan         the ledger: config and budget -> sizes, or a refusal with the numbers
//! trunk        pinned layers and ring          experts   arena of experts
//! policy       which experts stay
//! trace        experts asked for, recorded and replayed
//! pack         the one-file trunk
//! walk         what a pass reads, in order
//! segment      tensors -> reads                fetch     reads in the background
//! measure      what memory, kernels and disk can do, and what a token takes then
//! checkpoint   a directory, opened             index     where each tensor lies
//! vocabulary   text <-> ids
//! inventory    what the bytes are                survey    all that is wrong with a directory
//! digest       SHA-256 of whole files            scales    NaN scales of all experts
//! reference    outputs of others, and how far ours are from them
//! exec         threads                         memory    what the machine has
//! io           files, direct or buffered       aligned   memory that goes back to the system
//! checksum     of what is written and read back       lock      files that one process at a time has
//! ladder       budgets worth trying one after another
//! synth        checkpoints without a download, for measuring and tests
//! ```
//!
//! Arrows point down this list. Nothing here does arithmetic on weights, and nothing prints.
#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "mapping memory is the one thing the standard library does not offer")]
pub mod aligned;
pub mod batch;
pub mod checkpoint;
pub mod checksum;
pub mod digest;
pub mod draft;
pub mod engine;
pub mod error;
pub mod exec;
pub mod experts;
pub mod fetch;
pub mod generate;
pub mod index;
pub mod inventory;
pub mod io;
pub mod ladder;
mod lock;
pub mod measure;
pub mod memory;
pub mod pack;
pub mod plan;
pub mod policy;
pub mod reference;
pub mod scales;
pub mod segment;
pub mod session;
pub mod survey;
pub mod synth;
pub mod trace;
pub mod trunk;
pub mod units;
pub mod vocabulary;
pub mod walk;
