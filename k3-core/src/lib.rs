//! Kimi K3 inference over buffers the caller owns.
//!
//! (The guided tour of this crate follows with the forward pass.)
#![no_std]
#![deny(unsafe_code)]
#![warn(clippy::std_instead_of_core, clippy::alloc_instead_of_core)]

#[cfg(test)]
extern crate std;

pub mod backend;
pub mod carve;
pub mod checkpoint;
pub mod config;
pub mod exec;
pub mod json;
pub mod math;
pub mod model;
pub mod ops;
pub mod safetensors;
pub mod tokenizer;
pub mod view;
