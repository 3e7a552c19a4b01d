//! Header and table as bytes and back. Nothing is believed that was not checked.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::unwrap_used))]

use super::{Digests, PackFault};
use k3_core::checkpoint::{Dtype, GlobalTensor, LayerTensor, Tensor};
use k3_core::coded::coded_len;
use k3_core::view::LayerIndex;
use xxhash_rust::xxh3::xxh3_64;

/// Everything starts on a multiple of this (bytes).
pub(super) const PAGE: u64 = 4096;
const PAGE_LEN: usize = 4096;
/// Pieces start on a multiple of this in their segment (bytes).
pub(super) const PIECE_ALIGN: usize = 64;
const MAGIC: &[u8; 8] = b"K3TRUNK\0";
const VERSION: u32 = 1;
const CODED: u32 = 1;
/// A table is not longer than this (bytes); that of the released model has about 2 MB.
const MOST_TABLE: u64 = 64 << 20;
/// The layer of a tensor that belongs to none.
const NO_LAYER: u16 = u16::MAX;

/// Consecutive segments: the embedding, a layer, or the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The first of its segments.
    pub first_segment: usize,
    /// How many it has.
    pub segments: usize,
}

/// A tensor in a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorRecord {
    /// Which.
    pub tensor: Tensor,
    /// Its elements.
    pub dtype: Dtype,
    /// The first of its pieces.
    pub first_piece: usize,
    /// How many it has.
    pub pieces: usize,
    /// Rows; 1 for a vector.
    pub rows: u64,
    /// Elements of a row.
    pub cols: u64,
    /// Bytes its pieces take.
    pub stored: u64,
}

impl TensorRecord {
    /// Bytes in the shard.
    #[must_use]
    pub const fn raw(&self) -> u64 {
        self.rows.saturating_mul(self.cols).saturating_mul(self.dtype.size())
    }
}

/// A segment of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentRecord {
    /// Where it begins in the file (bytes).
    pub offset: u64,
    /// Its length, padding included (bytes).
    pub len: u32,
    /// The first of its pieces.
    pub first_piece: u32,
    /// XXH3 of all its bytes.
    pub sum: u64,
}

/// A piece of a tensor in a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PieceRecord {
    /// The tensor's record.
    pub tensor: u32,
    /// Its first row here.
    pub first_row: u32,
    /// Rows here.
    pub rows: u32,
    /// Where it begins in the segment (bytes).
    pub at: u32,
    /// Its length (bytes).
    pub len: u32,
    /// Whether it is a block of the code.
    pub coded: bool,
}

/// A header that was checked against its own checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) coded: bool,
    pub(super) file_len: u64,
    pub(super) table_at: u64,
    pub(super) table_len: u64,
    pub(super) table_sum: u64,
    pub(super) digests: Digests,
    pub(super) raw: u64,
    pub(super) layers: u32,
}

/// Bytes in order.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn usize(&mut self) -> Option<usize> {
        usize::try_from(self.u32()?).ok()
    }
}

impl Header {
    pub(super) fn emit(&self) -> [u8; PAGE_LEN] {
        let mut bytes = Vec::with_capacity(PAGE_LEN);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(if self.coded { CODED } else { 0 }).to_le_bytes());
        for n in [self.file_len, self.table_at, self.table_len, self.table_sum] {
            bytes.extend_from_slice(&n.to_le_bytes());
        }
        for digest in [&self.digests.config, &self.digests.headers, &self.digests.samples] {
            bytes.extend_from_slice(digest);
        }
        bytes.extend_from_slice(&self.raw.to_le_bytes());
        bytes.extend_from_slice(&self.layers.to_le_bytes());
        bytes.resize(PAGE_LEN.saturating_sub(8), 0);
        let sum = xxh3_64(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        let mut page = [0; PAGE_LEN];
        for (to, from) in page.iter_mut().zip(bytes) {
            *to = from;
        }
        page
    }

    pub(super) fn parse(page: &[u8; PAGE_LEN], file_len: u64) -> Result<Self, PackFault> {
        let mut c = Cursor(page);
        if c.take::<8>().as_ref() != Some(MAGIC) {
            return Err(PackFault::NotAPack);
        }
        // A version this code does not know may have its checksum elsewhere.
        match c.u32() {
            Some(VERSION) => {}
            Some(version) => return Err(PackFault::Version(version)),
            None => return Err(PackFault::Header),
        }
        let (body, sum) = page.split_at(PAGE_LEN.saturating_sub(8));
        if xxh3_64(body).to_le_bytes() != *sum {
            return Err(PackFault::Header);
        }
        let read = |c: &mut Cursor<'_>| {
            let flags = c.u32()?;
            let header = Self {
                coded: flags == CODED,
                file_len: c.u64()?,
                table_at: c.u64()?,
                table_len: c.u64()?,
                table_sum: c.u64()?,
                digests: Digests { config: c.take()?, headers: c.take()?, samples: c.take()? },
                raw: c.u64()?,
                layers: c.u32()?,
            };
            (flags & !CODED == 0).then_some(header)
        };
        let header = read(&mut c).ok_or(PackFault::Header)?;
        if header.file_len != file_len {
            return Err(PackFault::Length { expected: header.file_len, found: file_len });
        }
        let ends = header.table_at.checked_add(header.table_len) == Some(file_len);
        if !ends || !header.table_at.is_multiple_of(PAGE) || header.table_len > MOST_TABLE {
            return Err(PackFault::Header);
        }
        Ok(header)
    }
}

/// What the table says, checked against itself and the file's length.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) groups: Vec<Group>,
    pub(super) tensors: Vec<TensorRecord>,
    pub(super) segments: Vec<SegmentRecord>,
    pub(super) pieces: Vec<PieceRecord>,
}

fn role(tensor: Tensor) -> (u16, u8) {
    let place = |at: Option<usize>| at.and_then(|at| u8::try_from(at).ok()).unwrap_or(u8::MAX);
    match tensor {
        Tensor::Global(t) => (NO_LAYER, place(GlobalTensor::ALL.iter().position(|x| *x == t))),
        Tensor::Layer(l, t) => (l.0, place(LayerTensor::ALL.iter().position(|x| *x == t))),
        Tensor::Expert(l, ..) => (l.0, u8::MAX),
    }
}

fn tensor(layer: u16, role: u8) -> Option<Tensor> {
    if layer == NO_LAYER {
        GlobalTensor::ALL.get(usize::from(role)).copied().map(Tensor::Global)
    } else {
        LayerTensor::ALL.get(usize::from(role)).copied().map(|t| Tensor::Layer(LayerIndex(layer), t))
    }
}

/// A count or place as the file has it; what does not fit is refused when it is read back.
fn word(n: usize) -> [u8; 4] {
    u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes()
}

impl Table {
    pub(super) fn emit(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for n in [self.groups.len(), self.tensors.len(), self.segments.len(), self.pieces.len()] {
            bytes.extend_from_slice(&word(n));
        }
        for g in &self.groups {
            bytes.extend_from_slice(&word(g.first_segment));
            bytes.extend_from_slice(&word(g.segments));
        }
        for t in &self.tensors {
            let (layer, role) = role(t.tensor);
            bytes.extend_from_slice(&layer.to_le_bytes());
            bytes.extend_from_slice(&[role, u8::from(t.dtype == Dtype::F32)]);
            bytes.extend_from_slice(&word(t.first_piece));
            bytes.extend_from_slice(&word(t.pieces));
            bytes.extend_from_slice(&[0; 4]);
            for n in [t.rows, t.cols, t.stored] {
                bytes.extend_from_slice(&n.to_le_bytes());
            }
        }
        for s in &self.segments {
            bytes.extend_from_slice(&s.offset.to_le_bytes());
            bytes.extend_from_slice(&s.len.to_le_bytes());
            bytes.extend_from_slice(&s.first_piece.to_le_bytes());
            bytes.extend_from_slice(&s.sum.to_le_bytes());
        }
        for p in &self.pieces {
            for n in [p.tensor, p.first_row, p.rows, p.at, p.len, u32::from(p.coded)] {
                bytes.extend_from_slice(&n.to_le_bytes());
            }
        }
        bytes
    }

    /// Reads a table whose checksum held, and holds it against itself and the place where it begins.
    pub(super) fn parse(bytes: &[u8], table_at: u64) -> Result<Self, PackFault> {
        let mut c = Cursor(bytes);
        let counts = [c.usize(), c.usize(), c.usize(), c.usize()];
        let [Some(groups), Some(tensors), Some(segments), Some(pieces)] = counts else { return Err(PackFault::Table) };
        let sizes = [(groups, 8u64), (tensors, 40), (segments, 24), (pieces, 24)];
        let total = sizes.iter().fold(16u64, |sum, (n, size)| sum.saturating_add((*n as u64).saturating_mul(*size)));
        if total != bytes.len() as u64 {
            return Err(PackFault::Table);
        }
        let mut table = Self::default();
        let bad = |kind, index| PackFault::Record { kind, index };
        for i in 0..groups {
            let group = (|| Some(Group { first_segment: c.usize()?, segments: c.usize()? }))();
            table.groups.push(group.ok_or(bad("group", i))?);
        }
        for i in 0..tensors {
            let record = (|| {
                let layer = c.u16()?;
                let [role, dtype] = c.take()?;
                let (first_piece, pieces, zero) = (c.usize()?, c.usize()?, c.u32()?);
                let dtype = match dtype {
                    0 => Dtype::Bf16,
                    1 => Dtype::F32,
                    _ => return None,
                };
                let tensor = tensor(layer, role)?;
                let (rows, cols, stored) = (c.u64()?, c.u64()?, c.u64()?);
                (zero == 0).then_some(TensorRecord { tensor, dtype, first_piece, pieces, rows, cols, stored })
            })();
            table.tensors.push(record.ok_or(bad("tensor", i))?);
        }
        for i in 0..segments {
            let record = (|| {
                let (offset, len, first_piece) = (c.u64()?, c.u32()?, c.u32()?);
                Some(SegmentRecord { offset, len, first_piece, sum: c.u64()? })
            })();
            table.segments.push(record.ok_or(bad("segment", i))?);
        }
        for i in 0..pieces {
            let record = (|| {
                let (tensor, first_row, rows, at, len) = (c.u32()?, c.u32()?, c.u32()?, c.u32()?, c.u32()?);
                let coded = match c.u32()? {
                    0 => false,
                    1 => true,
                    _ => return None,
                };
                Some(PieceRecord { tensor, first_row, rows, at, len, coded })
            })();
            table.pieces.push(record.ok_or(bad("piece", i))?);
        }
        table.check(table_at)?;
        Ok(table)
    }

    /// The pieces of a segment.
    pub(super) fn pieces_of(&self, segment: usize) -> &[PieceRecord] {
        let start = |s: usize| self.segments.get(s).map_or(self.pieces.len(), |s| s.first_piece as usize);
        self.pieces.get(start(segment)..start(segment.saturating_add(1))).unwrap_or_default()
    }

    /// The segments of a group.
    pub(super) fn segments_of(&self, group: usize) -> &[SegmentRecord] {
        let Some(g) = self.groups.get(group) else { return &[] };
        self.segments.get(g.first_segment..g.first_segment.saturating_add(g.segments)).unwrap_or_default()
    }

    fn check(&self, table_at: u64) -> Result<(), PackFault> {
        let bad = |kind, index| PackFault::Record { kind, index };
        // Groups take up the segments, segments the file and the pieces, tensors the pieces.
        let mut next = 0usize;
        for (i, g) in self.groups.iter().enumerate() {
            if g.first_segment != next || g.segments == 0 {
                return Err(bad("group", i));
            }
            next = next.saturating_add(g.segments);
        }
        if next != self.segments.len() {
            return Err(bad("group", self.groups.len()));
        }
        let mut offset = PAGE;
        let mut piece = 0usize;
        for (i, s) in self.segments.iter().enumerate() {
            let len = u64::from(s.len);
            if s.offset != offset || len == 0 || !len.is_multiple_of(PAGE) || s.first_piece as usize != piece {
                return Err(bad("segment", i));
            }
            offset = offset.saturating_add(len);
            let pieces = self.pieces_of(i);
            let mut end = 0u32;
            for p in pieces {
                if p.at < end || !(p.at as usize).is_multiple_of(PIECE_ALIGN) || p.len == 0 {
                    return Err(bad("piece", piece));
                }
                end = p.at.checked_add(p.len).filter(|end| *end <= s.len).ok_or(bad("piece", piece))?;
                piece = piece.saturating_add(1);
            }
            if pieces.is_empty() {
                return Err(bad("segment", i));
            }
        }
        if offset != table_at || piece != self.pieces.len() {
            return Err(bad("segment", self.segments.len()));
        }
        let mut first = 0usize;
        for (i, t) in self.tensors.iter().enumerate() {
            let end = first.saturating_add(t.pieces);
            let pieces = self.pieces.get(first..end).filter(|p| !p.is_empty() && t.first_piece == first);
            let mut row = 0u64;
            let mut stored = 0u64;
            for (j, p) in (first..).zip(pieces.ok_or(bad("tensor", i))?) {
                let fits = || {
                    let (rows, cols) = (usize::try_from(p.rows).ok()?, usize::try_from(t.cols).ok()?);
                    if p.coded {
                        let least = coded_len(rows, cols, 0)?;
                        return Some(t.dtype == Dtype::Bf16 && t.tensor.may_be_coded() && p.len as usize >= least);
                    }
                    Some(u64::from(p.len) == (rows as u64).checked_mul(t.cols)?.checked_mul(t.dtype.size())?)
                };
                let follows = p.tensor as usize == i && u64::from(p.first_row) == row && p.rows > 0;
                if !follows || fits() != Some(true) {
                    return Err(bad("piece", j));
                }
                row = row.saturating_add(u64::from(p.rows));
                stored = stored.saturating_add(u64::from(p.len));
            }
            if row != t.rows || stored != t.stored {
                return Err(bad("tensor", i));
            }
            first = end;
        }
        if first != self.pieces.len() {
            return Err(bad("tensor", self.tensors.len()));
        }
        Ok(())
    }

    /// Bytes that are kept.
    pub(super) fn bytes(&self) -> u64 {
        let bytes = [
            size_of_val(self.groups.as_slice()),
            size_of_val(self.tensors.as_slice()),
            size_of_val(self.segments.as_slice()),
            size_of_val(self.pieces.as_slice()),
        ];
        bytes.iter().fold(0, |sum: u64, n| sum.saturating_add(*n as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let tensor = |tensor, first_piece, pieces, rows, stored| TensorRecord {
            tensor,
            dtype: Dtype::Bf16,
            first_piece,
            pieces,
            rows,
            cols: 64,
            stored,
        };
        let piece = |tensor, first_row, rows, at, len, coded| PieceRecord { tensor, first_row, rows, at, len, coded };
        let len = u32::try_from(coded_len(20, 64, 1).unwrap()).unwrap();
        let segment = |offset, len, first_piece| SegmentRecord { offset, len, first_piece, sum: offset };
        let layer = |t| Tensor::Layer(LayerIndex(3), t);
        Table {
            groups: vec![Group { first_segment: 0, segments: 1 }, Group { first_segment: 1, segments: 1 }],
            tensors: vec![
                tensor(layer(LayerTensor::InputNorm), 0, 1, 1, 128),
                tensor(layer(LayerTensor::Q), 1, 2, 21, u64::from(len) + 128),
            ],
            segments: vec![segment(4096, 4096, 0), segment(8192, 4096, 2)],
            pieces: vec![
                piece(0, 0, 1, 0, 128, false),
                piece(1, 0, 20, 128, len, true),
                piece(1, 20, 1, 0, 128, false),
            ],
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let table = table();
        let bytes = table.emit();
        assert_eq!(Table::parse(&bytes, 12288).unwrap(), table);
        assert_eq!(table.pieces_of(0).len(), 2);
        let digests = Digests { config: [1; 16], headers: [2; 16], samples: [3; 16] };
        let header = Header {
            coded: true,
            file_len: 12288 + bytes.len() as u64,
            table_at: 12288,
            table_len: bytes.len() as u64,
            table_sum: 7,
            digests,
            raw: 5,
            layers: 1,
        };
        let page = header.emit();
        assert_eq!(Header::parse(&page, header.file_len).unwrap(), header);
        assert!(matches!(Header::parse(&page, 5), Err(PackFault::Length { found: 5, .. })));
        for at in 0..PAGE_LEN {
            let mut page = page;
            page[at] ^= 1;
            assert!(Header::parse(&page, header.file_len).is_err(), "byte {at}");
        }
    }

    #[test]
    fn no_table_that_contradicts_itself_passes() {
        let bytes = table().emit();
        for end in 0..bytes.len() {
            assert!(Table::parse(&bytes[..end], 12288).is_err(), "{end}");
        }
        // Every number of the table one more or one less; only checksums may be anything. A raw block
        // may not say that it is coded, nor of another tensor.
        let sums = 16 + 16 + 80;
        let mut other = 0;
        for at in (0..bytes.len()).step_by(4) {
            for add in [1u32, u32::MAX, 1 << 31] {
                let mut bad = bytes.clone();
                let word = u32::from_le_bytes(bad[at..at + 4].try_into().unwrap()).wrapping_add(add);
                bad[at..at + 4].copy_from_slice(&word.to_le_bytes());
                if Table::parse(&bad, 12288).is_ok() {
                    let sum = at >= sums && at < sums + 48 && (at - sums) % 24 >= 16;
                    // Which tensor of which layer it is, the model will say.
                    let name = at == 32 || at == 72;
                    assert!(sum || name, "byte {at} + {add}");
                    other += 1;
                }
            }
        }
        assert!(other > 0);
        assert!(Table::parse(&bytes, 8192).is_err());
        let mut seed = 9u64;
        for _ in 0..20_000 {
            let mut bad = bytes.clone();
            for _ in 0..3 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = usize::try_from(seed >> 33).unwrap() % bad.len();
                bad[at] = seed.to_le_bytes()[3];
            }
            let _whatever_but_no_panic = Table::parse(&bad, 12288);
        }
    }
}
