//! What a pass reads of the trunk, in the order in which it asks: from the shards or from a pack.

use crate::error::Error;
use crate::pack::{EMBED_SEGMENT, Pack, PackError, PackFault};
use crate::segment::{Segment, Source, block, cut, least_slot};
use k3_core::coded::CodedError;
use std::sync::Arc;

/// Segments that are held as lists at the same time. The released trunk in slots of 270 kB has
/// 415,000: it is cut layer by layer, as the walk comes to it.
pub(crate) const LISTED: usize = 8192;

/// Bytes a listed segment takes, with its pieces and reads.
const LISTED_BYTES: u64 = 384;

/// The layers, and the head as the last one. Clones are cheap.
#[derive(Debug, Clone)]
pub enum Walk {
    /// The tensors of each, where they lie in the shards.
    Shards(Arc<[Vec<Source>]>),
    /// A pack, and its number in the set of files.
    Packed(Arc<Pack>, u16),
}

impl Walk {
    /// How many layers there are, the head being one.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Shards(walk) => walk.len(),
            Self::Packed(pack, _) => pack.groups().len().saturating_sub(1),
        }
    }

    /// Whether there is nothing to read: never, of a model.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What is read together of a layer, in segments of at most `slot` bytes, which is at least
    /// [`Walk::least_slot`]; nothing behind the last.
    #[must_use]
    pub fn cut(&self, layer: usize, slot: usize) -> Vec<Segment> {
        match self {
            Self::Shards(walk) => walk.get(layer).map(|sources| cut(sources, slot)).unwrap_or_default(),
            Self::Packed(pack, file) => pack.cut(layer, slot, *file),
        }
    }

    /// The smallest slot that can hold any part (bytes).
    #[must_use]
    pub fn least_slot(&self) -> usize {
        match self {
            Self::Shards(walk) => least_slot(&walk.iter().flatten().copied().collect::<Vec<_>>()),
            Self::Packed(pack, _) => pack.least_slot(),
        }
    }

    /// Bytes of a buffer that a row of the embedding is read into, at most: the blocks a row of `row` bytes
    /// lies in, or the segment of a pack that holds it.
    #[must_use]
    pub fn row_buffer(&self, row: usize) -> usize {
        let read = match self {
            Self::Shards(_) => row.saturating_add(block()),
            Self::Packed(..) => EMBED_SEGMENT.max(row),
        };
        read.saturating_add(2 * block())
    }

    /// Bytes of the largest layer.
    #[must_use]
    pub fn largest_layer(&self) -> usize {
        match self {
            Self::Shards(walk) => {
                walk.iter().map(|w| w.iter().map(|s| s.rows * s.row_bytes).sum::<usize>()).max().unwrap_or(0)
            }
            Self::Packed(pack, _) => pack.largest_layer(),
        }
    }

    /// Bytes that lists of segments take at most, for the ledger.
    #[must_use]
    pub fn list_bytes(&self, slot: usize) -> u64 {
        let count = |layer: usize| match self {
            Self::Shards(walk) => {
                let sources = walk.get(layer).map(Vec::as_slice).unwrap_or_default();
                let bytes: u64 = sources.iter().map(|s| s.rows as u64 * s.row_bytes as u64).sum();
                // `cut` fills a slot at least half; and each list ends with what is left.
                bytes / (slot / 2).max(block()) as u64 + sources.len() as u64
            }
            // Segments may have many pieces, and both are listed however they are joined.
            Self::Packed(pack, _) => pack.piece_count(layer) as u64,
        };
        let (all, largest) = (0..self.len()).map(count).fold((0, 0), |(all, most), n| (all + n, n.max(most)));
        let listed = match self {
            Self::Shards(_) => all.min(LISTED as u64 + 2 * largest),
            Self::Packed(..) => all,
        };
        listed * LISTED_BYTES
    }

    /// The error of a coded block that is none.
    pub(crate) fn block_error(&self, source: CodedError) -> Error {
        match self {
            Self::Shards(_) => Error::Order,
            Self::Packed(pack, _) => {
                PackError { path: pack.path().to_owned(), fault: PackFault::Block { source } }.into()
            }
        }
    }
}
