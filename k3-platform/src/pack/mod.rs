//! The packed trunk: one file with everything a pass reads besides experts, a quarter smaller.
//!
//! A pass reads the whole trunk, layer after layer, and where memory is small that is what a token
//! waits for. `k3 pack` copies it out of the shards into one file in the order in which it is read,
//! and codes its matrices ([`k3_core::coded`]): every bit is preserved, and the kernels multiply the
//! coded form as it is, so a layer that stays in memory stays small, too. The shards are needed for
//! the experts as before. Nothing needs a pack; it is a copy that can be deleted.
//!
//! # The file, version 1
//!
//! All numbers are little-endian. Everything starts on a multiple of 4096 bytes, and every byte of the
//! file is covered by a checksum (XXH3, 64 bits).
//!
//! ```text
//! [header, 4096][segment 0][segment 1] ... [segment n-1][table]
//! ```
//!
//! ## Header
//!
//! | byte | type | field | may be trusted |
//! |---|---|---|---|
//! | 0 | 8 bytes | `K3TRUNK` and a zero | |
//! | 8 | u32 | version, 1 | |
//! | 12 | u32 | flags: bit 0, matrices are coded; others 0 | once the header's checksum holds |
//! | 16 | u64 | length of the file | |
//! | 24 | u64 | where the table begins | |
//! | 32 | u64 | length of the table | |
//! | 40 | u64 | checksum of the table | |
//! | 48 | 16 bytes | digest of `config.json` | |
//! | 64 | 16 bytes | digest of the lengths and headers of the shards | |
//! | 80 | 16 bytes | digest of a sample of the weights of each layer | |
//! | 96 | u64 | bytes of all tensors in the shards | |
//! | 104 | u32 | layers | |
//! | 108 | zeros | | |
//! | 4088 | u64 | checksum of bytes 0 to 4087 | |
//!
//! The digests (XXH3, 128 bits) say what the file was made of. Two models of one family may agree in
//! config and headers and differ in their weights, therefore the third: the middle 4096 bytes of the
//! last tensor of each layer and of `lm_head`.
//!
//! ## Segments
//!
//! A segment is the unit of reading and of checking: some *pieces* in the order in which a pass asks
//! for them, each on a multiple of 64 bytes, and zeros up to the next multiple of 4096. A piece is a
//! whole vector or some rows of a matrix, either as in the shard or as one block of the code, and
//! means something alone. A segment belongs to one *group*: the embedding, a layer, or the head.
//! Segments of a group can be read together, for they lie end to end, or one by one where memory is
//! small: the largest has about 4 MiB in the released model, and [`LEAST_SEGMENT`] in small ones. Those of
//! the embedding, of which single rows are needed, have at most [`EMBED_SEGMENT`].
//!
//! ## Table
//!
//! Counts of groups, tensors, segments and pieces (four u32), then the records of each kind:
//!
//! | record | fields |
//! |---|---|
//! | group (8 bytes) | u32 first segment, u32 segments; the embedding, the layers, the head |
//! | tensor (40) | u16 layer (65535: none), u8 role, u8 dtype (0 bf16, 1 f32), u32 first piece, u32 pieces, u32 zero, u64 rows, u64 columns, u64 stored bytes |
//! | segment (24) | u64 offset, u32 length, u32 first piece, u64 checksum |
//! | piece (24) | u32 tensor, u32 first row, u32 rows, u32 place in the segment, u32 length, u32 form (0 raw, 1 coded) |
//!
//! A role is the place of the tensor in [`LayerTensor::ALL`](k3_core::checkpoint::LayerTensor::ALL) or
//! [`GlobalTensor::ALL`](k3_core::checkpoint::GlobalTensor::ALL). Records are in the order of the file:
//! groups take up all segments one after the other, segments all pieces, and tensors too. What the
//! table says is held against the file, against itself and, before anything is run, against the
//! config; a file that passes can be read without further questions.
//!
//! # How it is written
//!
//! `OUT.part` grows by whole segments, and `OUT.part.log` by a record for each segment that the disk
//! has confirmed; see [`write()`]. When all are there the table and the header are written, the file is
//! read back and checked, and renamed. The same model and form always give the same bytes.

mod format;
mod read;
mod source;
mod write;

pub use format::{Group, PieceRecord, SegmentRecord, TensorRecord};
pub use read::{Different, Pack, compare, verify};
pub use source::Digests;
pub use write::{Nominal, Options, Outcome, Progress, Stage, nominal_sizes, write};

use std::io;
use std::path::PathBuf;

/// The name under which a pack is found in a checkpoint's directory.
pub const FILE_NAME: &str = "trunk.k3";

/// A segment is not cut smaller than this where a layer has more (bytes).
pub const LEAST_SEGMENT: usize = 256 << 10;

/// A segment of the embedding (bytes).
pub const EMBED_SEGMENT: usize = 64 << 10;

/// A segment of a large model (bytes).
pub(crate) const MOST_SEGMENT: usize = 4 << 20;

/// Which part of a model differs from the one a pack was made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part {
    /// `config.json`.
    Config,
    /// Lengths or headers of the shards.
    Headers,
    /// The samples of the weights.
    Weights,
}

/// What is wrong with a pack, or with writing one.
#[derive(Debug)]
#[non_exhaustive]
pub enum PackFault {
    /// It does not begin as one.
    NotAPack,
    /// Another version of the format.
    Version(u32),
    /// The header is damaged.
    Header,
    /// The file is shorter or longer than its header says.
    Length {
        /// What the header says.
        expected: u64,
        /// What it is.
        found: u64,
    },
    /// The table is damaged.
    Table,
    /// The table is whole and says what cannot be.
    Record {
        /// Which kind.
        kind: &'static str,
        /// Which one.
        index: usize,
    },
    /// It was made of another model.
    OtherModel(Part),
    /// Its tensors are not those of the model.
    OtherTensors {
        /// The group in which they differ: 0 the embedding, then the layers, then the head.
        group: usize,
    },
    /// A coded block is none. The segment was whole, so whoever wrote it made it so.
    Block {
        /// What.
        source: k3_core::coded::CodedError,
    },
    /// There is a file already, and it is not this pack.
    Exists,
    /// Another process is writing it.
    Busy,
    /// There is not enough room.
    Space {
        /// Bytes that are still needed.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// It cannot be created.
    Create(io::Error),
    /// Writing failed. What was written before is kept.
    Write(io::Error),
    /// What was read back is not what was written.
    Verify {
        /// The first segment that differs.
        segment: usize,
    },
    /// A block that was coded did not decode to what it was made of: a bug.
    Codec,
}

/// A fault, and the file.
#[derive(Debug)]
pub struct PackError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong.
    pub fault: PackFault,
}

impl std::fmt::Display for PackError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ", self.path.display())?;
        match &self.fault {
            PackFault::NotAPack => f.write_str("this is no packed trunk"),
            PackFault::Version(version) => write!(f, "a packed trunk of version {version}; this k3 reads version 1"),
            PackFault::Header => f.write_str("the header of the packed trunk is damaged"),
            PackFault::Length { expected, found } => {
                write!(f, "the packed trunk has {found} bytes, its header says {expected}")
            }
            PackFault::Table => f.write_str("the table of the packed trunk is damaged"),
            PackFault::Record { kind, index } => write!(f, "{kind} {index} in the packed trunk's table cannot be"),
            PackFault::OtherModel(part) => {
                f.write_str("packed from another model: ")?;
                f.write_str(match part {
                    Part::Config => "config.json differs",
                    Part::Headers => "the shards' headers or lengths differ",
                    Part::Weights => "config and shards look the same, the weights differ",
                })
            }
            PackFault::OtherTensors { group } => {
                write!(f, "group {group} of the packed trunk has other tensors than the model")
            }
            PackFault::Block { source } => source.fmt(f),
            PackFault::Exists => f.write_str("there is a file already, and it is not this model packed in this form"),
            PackFault::Busy => f.write_str("another process is writing it"),
            PackFault::Space { needed, free } => write!(
                f,
                "{} are needed, {} are free on this file system",
                crate::units::human(*needed),
                crate::units::human(*free)
            ),
            PackFault::Create(source) => write!(f, "it cannot be created: {source}"),
            PackFault::Write(source) => write!(f, "writing failed: {source}"),
            PackFault::Verify { segment } => write!(f, "segment {segment} is not what was written: the disk lost it"),
            PackFault::Codec => f.write_str("a coded block does not decode to its weights: this is a bug"),
        }
    }
}

impl std::error::Error for PackError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.fault {
            PackFault::Create(source) | PackFault::Write(source) => Some(source),
            PackFault::Block { source } => Some(source),
            _ => None,
        }
    }
}

impl From<PackError> for crate::error::Error {
    fn from(error: PackError) -> Self {
        Self::Pack(Box::new(error))
    }
}
