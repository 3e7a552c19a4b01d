//! What is read together: pieces of tensors, gathered into ranges of files.
//!
//! A [`Segment`] is the unit in which weights move from disk to memory: one slot of the trunk's
//! ring, one pinned buffer, one expert. It holds *pieces* (a whole vector, some rows of a matrix, a
//! part of an expert) and the *reads* that fetch them. Reads start and end on the file system's
//! blocks so that they can bypass the page cache; pieces that lie close together share a read.

use crate::io::Check;
use k3_core::checkpoint::Tensor;

/// Reads begin and end on multiples of this (bytes); every file system in use divides it.
pub const BLOCK: u64 = 4096;

/// Two pieces this close in a file are fetched by one read: the gap costs less than a second
/// request (bytes).
const GAP: u64 = 64 * 1024;

/// Where bytes lie: a shard by number, and an offset in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The shard, as numbered by the checkpoint's index.
    pub shard: u16,
    /// Bytes from the start of the file.
    pub offset: u64,
}

/// What the bytes of a piece are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As in the release.
    Raw,
    /// A block of [`k3_core::coded`] with so many columns.
    Coded {
        /// Elements of a row.
        cols: usize,
    },
}

/// A run of bytes of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The tensor.
    pub tensor: Tensor,
    /// Its first row here; 0 for a vector.
    pub first_row: usize,
    /// Rows here; 1 for a vector.
    pub rows: usize,
    /// Where the bytes lie.
    pub place: Place,
    /// How many there are.
    pub len: usize,
    /// Where they will be in the segment's buffer.
    pub at: usize,
    /// What they are.
    pub form: Form,
}

/// One request to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read {
    /// Where it begins, a multiple of [`BLOCK`].
    pub place: Place,
    /// Bytes wanted, from the block of the first piece's first byte to the last piece's last byte.
    pub len: usize,
    /// Where it goes in the buffer, a multiple of [`BLOCK`].
    pub at: usize,
}

impl Read {
    /// Whether a piece whose first block is at `start` is near enough to come with this read.
    fn takes(&self, shard: u16, start: u64) -> bool {
        self.place.shard == shard && start <= (self.place.offset + self.len as u64).next_multiple_of(BLOCK) + GAP
    }
}

/// Pieces and the reads that fetch them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Segment {
    /// In the order in which they are used.
    pub pieces: Vec<Piece>,
    /// In file order.
    pub reads: Vec<Read>,
    /// Bytes of buffer, a multiple of [`BLOCK`].
    pub bytes: usize,
    /// Parts of the buffer that must have a checksum.
    pub checks: Vec<Check>,
}

impl Segment {
    /// Finds the reads for `pieces` and says where each piece lands.
    #[must_use]
    pub fn gather(mut pieces: Vec<Piece>) -> Self {
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        order.sort_unstable_by_key(|&i| (pieces[i].place, i));
        let (mut reads, mut bytes): (Vec<Read>, usize) = (Vec::new(), 0);
        for i in order {
            let Piece { place, len, .. } = pieces[i];
            let start = place.offset / BLOCK * BLOCK;
            let mut read = match reads.pop() {
                Some(last) if last.takes(place.shard, start) => last,
                last => {
                    reads.extend(last);
                    Read { place: Place { shard: place.shard, offset: start }, len: 0, at: bytes }
                }
            };
            let skip = to_usize(place.offset - read.place.offset);
            pieces[i].at = read.at + skip;
            read.len = read.len.max(skip + len);
            bytes = bytes.max((read.at + read.len).next_multiple_of(block()));
            reads.push(read);
        }
        // Hundreds of thousands of segments are listed in the course of a pass.
        pieces.shrink_to_fit();
        reads.shrink_to_fit();
        Self { pieces, reads, bytes, checks: Vec::new() }
    }

    /// Bytes that are asked of the disk.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.reads.iter().map(|r| (r.len as u64).next_multiple_of(BLOCK)).sum()
    }
}

/// [`BLOCK`] as a length.
#[must_use]
pub const fn block() -> usize {
    4096
}

/// A distance inside one segment; a segment fits memory.
fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// A tensor on disk, as the segmenter needs it.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// The tensor.
    pub tensor: Tensor,
    /// Where it begins.
    pub place: Place,
    /// Rows; 1 for what must come whole.
    pub rows: usize,
    /// Rows that must stay together.
    pub granule: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
}

impl Source {
    /// The smallest run of bytes that can be lent on its own.
    #[must_use]
    pub const fn least(&self) -> usize {
        self.row_bytes.saturating_mul(self.granule)
    }
}

/// The smallest slot that can hold any part of these tensors (bytes).
#[must_use]
pub fn least_slot(sources: &[Source]) -> usize {
    // An unaligned run touches at most one block more at each end.
    sources.iter().map(|s| s.least().saturating_add(2 * block())).max().unwrap_or(0).next_multiple_of(block())
}

/// Cuts tensors, in the order in which they are used, into segments of at most `slot` bytes.
/// `slot` is at least [`least_slot`].
#[must_use]
pub fn cut(sources: &[Source], slot: usize) -> Vec<Segment> {
    let mut segments = Vec::new();
    let mut open: Vec<Piece> = Vec::new();
    for source in sources {
        let mut row = 0;
        while row < source.rows {
            let piece = |rows: usize| Piece {
                tensor: source.tensor,
                first_row: row,
                rows,
                place: Place {
                    shard: source.place.shard,
                    offset: source.place.offset + row as u64 * source.row_bytes as u64,
                },
                len: rows * source.row_bytes,
                at: 0,
                form: Form::Raw,
            };
            let fits = |open: &[Piece], rows: usize| {
                let mut pieces = open.to_vec();
                pieces.push(piece(rows));
                Segment::gather(pieces).bytes <= slot
            };
            let rest = source.rows - row;
            if fits(&open, rest) {
                open.push(piece(rest));
                row = source.rows;
                continue;
            }
            // What is left of the slot, in whole granules. A tail worth less than half a slot is not
            // split off from a tensor: short reads are slow reads.
            let used = Segment::gather(open.clone()).bytes;
            let room = slot.saturating_sub(used + 2 * block()) / source.least().max(1) * source.granule;
            let rows = room.min(rest);
            if rows > 0 && (open.is_empty() || (used < slot / 2 && fits(&open, rows))) {
                open.push(piece(rows));
                row += rows;
            }
            segments.push(Segment::gather(std::mem::take(&mut open)));
        }
    }
    if !open.is_empty() {
        segments.push(Segment::gather(open));
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use k3_core::checkpoint::GlobalTensor;

    fn source(offset: u64, rows: usize, granule: usize, row_bytes: usize) -> Source {
        let tensor = Tensor::Global(GlobalTensor::LmHead);
        Source { tensor, place: Place { shard: 0, offset }, rows, granule, row_bytes }
    }

    #[test]
    fn every_byte_is_fetched_once_in_order_and_lands_inside_the_slot() {
        let sources = [
            source(13, 1, 1, 300),
            source(900_000, 100, 4, 1000),
            source(313, 1, 1, 77),
            source(2_000_001, 64, 1, 333),
        ];
        for slot in (least_slot(&sources)..400_000).step_by(4096 * 3) {
            let mut want = sources.iter().flat_map(|s| (0..s.rows).map(|r| s.place.offset + (r * s.row_bytes) as u64));
            for segment in cut(&sources, slot) {
                assert!(segment.bytes <= slot && !segment.pieces.is_empty(), "slot {slot}");
                for p in &segment.pieces {
                    let s = sources.iter().find(|s| p.place.offset >= s.place.offset && s.row_bytes * p.rows == p.len);
                    let s = s.expect("a piece belongs to a source");
                    assert!(p.rows.is_multiple_of(s.granule) || p.first_row + p.rows == s.rows);
                    for r in 0..p.rows {
                        assert_eq!(want.next(), Some(p.place.offset + (r * s.row_bytes) as u64));
                    }
                    let read = segment.reads.iter().find(|r| r.at <= p.at && p.at + p.len <= r.at + r.len);
                    let read = read.expect("a read covers the piece");
                    assert_eq!(read.place.offset + (p.at - read.at) as u64, p.place.offset);
                }
                for r in &segment.reads {
                    assert!(r.place.offset.is_multiple_of(BLOCK) && r.at.is_multiple_of(4096));
                    assert!(r.at + r.len.next_multiple_of(4096) <= segment.bytes);
                }
            }
            assert_eq!(want.next(), None);
        }
    }

    #[test]
    fn neighbours_share_a_read() {
        let s = cut(&[source(8, 1, 1, 100), source(108, 1, 1, 50), source(200_000, 1, 1, 50)], 1 << 20);
        assert_eq!(s.len(), 1);
        assert_eq!(s[0].reads.len(), 2);
        assert_eq!(s[0].bytes, 8192);
    }
}
