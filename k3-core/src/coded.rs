//! Lossless coding of bf16 matrices: three quarters of the bytes, every bit preserved.
//!
//! A trained weight's sign and mantissa are noise and its exponent is not: of its eight bits about
//! 2.6 are information. The code keeps the *low byte* of a bf16 (lowest exponent bit and mantissa) as
//! it is and replaces the *top byte* (sign and upper seven exponent bits) by four bits: an index into
//! a table of the sixteen top bytes that the block has most of. A weight whose top byte is not among
//! them is a *misfit* (about 1.4e-4 of trained weights); its code is 0 and its place and whole value
//! stand in a list. Every bit pattern has a code, so zeros of either sign, subnormals, infinities and
//! the payloads of NaNs come back as they were.
//!
//! # A coded block
//!
//! Some whole rows of a matrix, decodable alone. Numbers are little-endian, `groups = ceil(cols / 32)`:
//!
//! | byte | length | content |
//! |---|---|---|
//! | 0 | 16 | the top byte of each code |
//! | 16 | 4 | `misfits` |
//! | 20 | 44 | zero: rows start on a cache line if the block does |
//! | 64 | `rows * groups * 48` | rows of groups |
//! | then | `misfits * 4` | their places, `row * cols + column`, rising |
//! | then | `misfits * 2` | their values, whole |
//!
//! A group is 32 weights of a row: 16 bytes of codes, byte `j` holding weight `j` in its low half and
//! weight `16 + j` in its high half, then the 32 low bytes in order. So sixteen codes decode to
//! sixteen top bytes by one table look-up of a byte shuffle, and one interleaving of bytes makes them
//! weights in their own order. A last group that the columns do not fill has zeros behind them.
//!
//! Rows have equal lengths whatever they hold, so a kernel walks several of them in step, and any row
//! is found without a list of offsets. [`Backend::matmul_coded`](crate::backend::Backend::matmul_coded)
//! multiplies this form directly.
//!
//! # Why this one
//!
//! The entropy of the exponents alone bounds any code of them to 0.66 of the raw size. What was weighed, with
//! the ratio on a trained sentence encoder (22.7 million weights rounded to bf16):
//!
//! | form | ratio | misfits | decoding |
//! |---|---|---|---|
//! | this one | 0.7505 | 1.4e-4 | one look-up and one interleaving of registers; multiplied directly |
//! | three bits, four pairs of exponents | 0.729 | 2.7e-2 | nearly every group has a misfit: slower than raw |
//! | Huffman-coded exponents | 0.668 | - | 2.9 GB/s a core, into a buffer: the cores are busy decoding |
//!
//! The denser forms were built as prototypes only. Normal random weights give 0.7511 with one weight in 4096 far
//! outside, 0.7502 without.
//!
//! `cargo bench -p k3-core --bench coded` on two cores of a Zen 1 server, AVX2, GB/s of raw bf16 out, best of
//! seven, all of one run:
//!
//! | threads | reading memory | raw product | coded product | coded, 8 positions (raw) |
//! |---|---|---|---|---|
//! | 1 | 13.6 | 6.0 | 5.7 | 1.20 (1.40) |
//! | 2 | 20.5 | 11.6 | 10.9 | 2.39 (2.77) |
//!
//! The scalar kernels make 0.41 (raw 0.93); decoding rows to memory makes 0.84. So with AVX2 the coded form saves
//! memory and disk and not arithmetic: it wins when bytes have to come from a disk slower than these products
//! read them, some 8 GB/s, or when more layers fit memory because of it. The AVX-512 kernel is the same text over
//! wider registers and was not timed.
//!
//! ```
//! use k3_core::coded::{CodedMatrix, encode};
//!
//! let weights: Vec<u8> = (0..64 * 96).flat_map(|i| (0x3c00u16 | i * 7 % 0x3ff).to_le_bytes()).collect();
//! let mut block = vec![0; weights.len()];
//! let len = encode(&weights, 64, 96, &mut block).expect("smaller than it was");
//! assert!(len < weights.len() * 77 / 100);
//! let coded = CodedMatrix::new(&block[..len], 64, 96)?;
//! let mut row = vec![0; 96 * 2];
//! coded.decode_row(5, &mut row);
//! assert_eq!(row, weights[5 * 192..][..192]);
//! # Ok::<(), k3_core::coded::CodedError>(())
//! ```
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::arithmetic_side_effects))]

use crate::view::Bf16Matrix;
use core::ops::Range;

/// Weights that are coded together.
pub const GROUP: usize = 32;
/// Bytes of the codes of a group.
pub(crate) const CODES: usize = 16;
/// Bytes of a coded group.
pub(crate) const GROUP_BYTES: usize = CODES + GROUP;
/// Bytes before the first row.
const HEADER: usize = 64;
/// Where the header has the number of misfits.
const MISFITS: Range<usize> = 16..20;

/// Why bytes are not a coded block of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CodedError {
    /// The shape has more weights than the places of misfits can name, or than fit the address space.
    TooLarge {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// The block is shorter or longer than its shape and its misfits ask for.
    Length {
        /// Bytes asked for.
        expected: u64,
        /// Bytes given.
        found: usize,
    },
    /// Places of misfits that do not rise, or that leave the matrix.
    Place {
        /// Which misfit.
        index: usize,
    },
}

impl core::fmt::Display for CodedError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::TooLarge { rows, cols } => write!(f, "{rows} x {cols} weights are too many for one coded block"),
            Self::Length { expected, found } => write!(f, "a coded block of {expected} bytes has {found}"),
            Self::Place { index } => write!(f, "misfit {index} of a coded block is out of place"),
        }
    }
}

impl core::error::Error for CodedError {}

/// Bytes of a row; `None` if that overflows.
const fn stride(cols: usize) -> Option<usize> {
    cols.div_ceil(GROUP).checked_mul(GROUP_BYTES)
}

/// Bytes of a block with so many misfits; `None` if that overflows or has more weights than a place
/// can name.
#[must_use]
pub const fn coded_len(rows: usize, cols: usize, misfits: usize) -> Option<usize> {
    let Some(weights) = rows.checked_mul(cols) else { return None };
    let Some(stride) = stride(cols) else { return None };
    if weights as u64 > 1 << 32 {
        return None;
    }
    let (Some(codes), Some(list)) = (rows.checked_mul(stride), misfits.checked_mul(6)) else { return None };
    let Some(len) = codes.checked_add(list) else { return None };
    len.checked_add(HEADER)
}

/// Codes a bf16 matrix into the front of `out` and says how many bytes that took; `None` if `out` is
/// shorter than the block, or if `raw` is not `rows * cols * 2` bytes.
///
/// `out` as long as `raw` therefore answers whether coding is worth it. The same matrix always gives
/// the same bytes.
#[must_use]
pub fn encode(raw: &[u8], rows: usize, cols: usize, out: &mut [u8]) -> Option<usize> {
    let matrix = Bf16Matrix::new(raw, rows, cols).ok()?;
    let (weights, _) = raw.as_chunks::<2>();
    let mut counts = [0u32; 256];
    for &[_, top] in weights {
        let count = &mut counts[usize::from(top)];
        *count = count.saturating_add(1);
    }
    let table = commonest(&counts);
    let fits: u64 = table.iter().map(|&top| u64::from(counts[usize::from(top)])).sum();
    let misfits = usize::try_from((weights.len() as u64).saturating_sub(fits)).ok()?;
    let len = coded_len(rows, cols, misfits)?;
    let block = out.get_mut(..len)?;
    block.fill(0);
    let (head, rest) = block.split_at_mut_checked(HEADER)?;
    head.get_mut(..table.len())?.copy_from_slice(&table);
    head.get_mut(MISFITS)?.copy_from_slice(&u32::try_from(misfits).ok()?.to_le_bytes());
    let (groups, lists) = rest.split_at_mut_checked(rows.checked_mul(stride(cols)?)?)?;
    let (places, values) = lists.split_at_mut_checked(misfits.checked_mul(4)?)?;
    let mut places = places.as_chunks_mut::<4>().0.iter_mut();
    let mut values = values.as_chunks_mut::<2>().0.iter_mut();

    // The code of each top byte; a misfit's has a bit above the four.
    const MISFIT: u8 = 16;
    let mut codes = [MISFIT; 256];
    for (code, &top) in (0..MISFIT).zip(&table) {
        codes[usize::from(top)] = code;
    }
    let mut place = 0u32;
    let mut groups = groups.as_chunks_mut::<GROUP_BYTES>().0.iter_mut();
    for r in 0..rows {
        for weights in matrix.row(r).as_chunks::<2>().0.chunks(GROUP) {
            let group = groups.next()?;
            let mut any = 0;
            for (j, &[low, top]) in weights.iter().enumerate() {
                let code = codes[usize::from(top)];
                any |= code;
                group[CODES..][j] = low;
                group[j % CODES] |= (code & (MISFIT - 1)) << (if j < CODES { 0 } else { 4 });
            }
            if any & MISFIT != 0 {
                for (at, weight) in (place..).zip(weights) {
                    if codes[usize::from(weight[1])] == MISFIT {
                        *places.next()? = at.to_le_bytes();
                        *values.next()? = *weight;
                    }
                }
            }
            place = place.wrapping_add(u32::try_from(weights.len()).ok()?);
        }
    }
    Some(len)
}

/// The sixteen values of which there are most, rising; among equals the lower ones.
fn commonest(counts: &[u32; 256]) -> [u8; CODES] {
    let mut order: [u8; 256] = core::array::from_fn(|i| u8::try_from(i).unwrap_or(u8::MAX));
    order.sort_unstable_by_key(|&top| (core::cmp::Reverse(counts[usize::from(top)]), top));
    let mut table: [u8; CODES] = core::array::from_fn(|code| order[code]);
    table.sort_unstable();
    table
}

/// Some rows of a coded bf16 matrix: a view that is only constructible checked.
#[derive(Debug, Clone, Copy)]
pub struct CodedMatrix<'a> {
    table: &'a [u8; CODES],
    /// `rows * stride` bytes.
    groups: &'a [[u8; GROUP_BYTES]],
    /// Misfits of these rows, places rising.
    places: &'a [[u8; 4]],
    values: &'a [[u8; 2]],
    /// The row of the block that is row 0 here.
    first: usize,
    rows: usize,
    cols: usize,
}

impl<'a> CodedMatrix<'a> {
    /// Views a block as `[rows, cols]`. Whatever the bytes are, a view that is given out decodes to
    /// some matrix of that shape.
    ///
    /// # Errors
    /// [`CodedError`] if the block is not one of that shape.
    pub fn new(block: &'a [u8], rows: usize, cols: usize) -> Result<Self, CodedError> {
        let least = coded_len(rows, cols, 0).ok_or(CodedError::TooLarge { rows, cols })?;
        let short = CodedError::Length { expected: least as u64, found: block.len() };
        let (head, rest) = block.split_at_checked(HEADER).ok_or(short)?;
        let (table, _) = head.split_first_chunk().ok_or(short)?;
        let misfits =
            head.get(MISFITS).and_then(|m| <[u8; 4]>::try_from(m).ok()).map(u32::from_le_bytes).ok_or(short)?;
        let lists = u64::from(misfits).saturating_mul(6);
        let expected = (least as u64).saturating_add(lists);
        if block.len() as u64 != expected {
            return Err(CodedError::Length { expected, found: block.len() });
        }
        let (groups, lists) = rest.split_at_checked(least.saturating_sub(HEADER)).ok_or(short)?;
        let (places, values) = lists.split_at_checked((lists.len() / 6).saturating_mul(4)).ok_or(short)?;
        let (places, values) = (places.as_chunks().0, values.as_chunks().0);
        let mut next = 0;
        for (index, &place) in places.iter().enumerate() {
            let place = u64::from(u32::from_le_bytes(place));
            if place < next || place >= (rows as u64).saturating_mul(cols as u64) {
                return Err(CodedError::Place { index });
            }
            next = place.saturating_add(1);
        }
        Ok(Self { table, groups: groups.as_chunks().0, places, values, first: 0, rows, cols })
    }

    /// Number of rows (outputs).
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns (inputs).
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Weights that stand in the list and not in the codes.
    #[must_use]
    pub const fn misfits(&self) -> usize {
        self.places.len()
    }

    /// Groups of a row.
    pub(crate) const fn groups_per_row(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }

    /// The groups of all rows, row after row: what the SIMD kernels read.
    #[cfg(all(target_arch = "x86_64", target_feature = "sse2"))]
    pub(crate) const fn groups(&self) -> &'a [[u8; GROUP_BYTES]] {
        self.groups
    }

    /// The top byte of each code: what the SIMD kernels look up.
    #[cfg(all(target_arch = "x86_64", target_feature = "sse2"))]
    pub(crate) const fn table(&self) -> &'a [u8; CODES] {
        self.table
    }

    /// The misfits of row `r` from `column` on.
    #[inline]
    pub(crate) fn misfits_from(&self, r: usize, column: usize) -> Misfits<'a> {
        let (places, values) = (self.places, self.values);
        if places.is_empty() {
            return Misfits { places, values, start: 0, next: usize::MAX };
        }
        // A row's place may not fit the word of a small machine if the row is the one behind the last.
        let start = self.first.wrapping_add(r).wrapping_mul(self.cols);
        let from = start.wrapping_add(column);
        let from = places.partition_point(|at| (u32::from_le_bytes(*at) as usize) < from);
        let mut misfits = Misfits { places: &places[from..], values: &values[from..], start, next: 0 };
        misfits.find();
        misfits
    }

    /// Decodes group `g` of row `r` and says how many weights of it the row has.
    ///
    /// # Panics
    /// If there is no such group: a bug of the caller.
    pub(crate) fn decode_group(&self, r: usize, g: usize, out: &mut [u8; 2 * GROUP]) -> usize {
        let first = g.saturating_mul(GROUP);
        let count = GROUP.min(self.cols.saturating_sub(first));
        let (codes, lows) = self.groups[r.saturating_mul(self.groups_per_row()).saturating_add(g)].split_at(CODES);
        let (out, _) = out.as_chunks_mut::<2>();
        for (j, (out, &low)) in out.iter_mut().zip(lows).enumerate() {
            let code = codes[j % CODES] >> (if j < CODES { 0 } else { 4 }) & 15;
            *out = [low, self.table[usize::from(code)]];
        }
        let mut misfits = self.misfits_from(r, first);
        while let Some(out) = misfits.next().checked_sub(first).and_then(|j| out.get_mut(j)) {
            *out = misfits.take();
        }
        count
    }

    /// Decodes row `r` into `out`, two bytes a weight.
    ///
    /// # Panics
    /// If `r` is not a row, or `out` is not as long as one: a bug of the caller.
    pub fn decode_row(&self, r: usize, out: &mut [u8]) {
        assert!(r < self.rows && out.len() == self.cols.saturating_mul(2), "a row of another length");
        for (g, out) in out.chunks_mut(2 * GROUP).enumerate() {
            let mut group = [0; 2 * GROUP];
            self.decode_group(r, g, &mut group);
            out.copy_from_slice(&group[..out.len()]);
        }
    }

    /// The rows of `range` as a view of their own.
    ///
    /// # Panics
    /// If `range` leaves the matrix: a bug of the caller.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows that are not there");
        let per_row = self.groups_per_row();
        let groups = &self.groups[range.start.saturating_mul(per_row)..range.end.saturating_mul(per_row)];
        let first = self.first.saturating_add(range.start);
        let rows = range.end.saturating_sub(range.start);
        let end = first.saturating_add(rows);
        let before = |row: usize| {
            let start = (row as u64).saturating_mul(self.cols as u64);
            self.places.partition_point(|at| u64::from(u32::from_le_bytes(*at)) < start)
        };
        let misfits = if self.places.is_empty() { 0..0 } else { before(first)..before(end) };
        Self { groups, places: &self.places[misfits.clone()], values: &self.values[misfits], first, rows, ..*self }
    }
}

/// What is left of a row's misfits (and of those of the rows behind it, which no column reaches).
#[derive(Debug)]
pub(crate) struct Misfits<'a> {
    places: &'a [[u8; 4]],
    values: &'a [[u8; 2]],
    /// The place of the row's first column.
    start: usize,
    next: usize,
}

impl Misfits<'_> {
    /// The column of the next one; larger than any column if there is none.
    #[inline(always)]
    pub(crate) const fn next(&self) -> usize {
        self.next
    }

    /// The value of the next one, which is then behind.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> [u8; 2] {
        let value = self.values.first().copied().unwrap_or_default();
        self.places = self.places.get(1..).unwrap_or_default();
        self.values = self.values.get(1..).unwrap_or_default();
        self.find();
        value
    }

    #[inline(always)]
    fn find(&mut self) {
        let place = self.places.first().map(|at| u32::from_le_bytes(*at) as usize);
        self.next = place.map_or(usize::MAX, |place| place.wrapping_sub(self.start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;
    use std::{format, vec};

    fn random(seed: &mut u64) -> u64 {
        *seed ^= *seed >> 12;
        *seed ^= *seed << 25;
        *seed ^= *seed >> 27;
        seed.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Codes, views and decodes, whole and in slices; the number of misfits.
    fn round_trip(raw: &[u8], rows: usize, cols: usize) -> usize {
        let case = format!("{rows} x {cols}");
        let mut block = vec![0xa5; coded_len(rows, cols, rows * cols).unwrap()];
        let len = encode(raw, rows, cols, &mut block).unwrap();
        let coded = CodedMatrix::new(&block[..len], rows, cols).unwrap();
        assert_eq!(coded_len(rows, cols, coded.misfits()), Some(len), "{case}");
        let mut row = vec![0x5a; cols * 2];
        for r in 0..rows {
            coded.decode_row(r, &mut row);
            assert!(row == raw[r * cols * 2..][..cols * 2], "{case}: row {r}");
        }
        for (from, to) in [(0, rows), (rows / 3, rows), (rows / 3, 2 * rows / 3), (rows, rows)] {
            let part = coded.slice(from..to).slice(0..to - from);
            for r in 0..to - from {
                part.decode_row(r, &mut row);
                assert!(row == raw[(from + r) * cols * 2..][..cols * 2], "{case}: row {r} of {from}..{to}");
            }
        }
        let misfits = coded.misfits();
        // No room, no block.
        assert_eq!(encode(raw, rows, cols, &mut block[..len - 1]), None);
        misfits
    }

    #[test]
    fn every_bit_pattern_comes_back() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for cols in [1, 32, 256, 4096, 65536] {
            let rows = 65536 / cols;
            assert_eq!(round_trip(&all[..rows * cols * 2], rows, cols), rows * cols - 16 * 256);
        }
        // Each top byte alone, with all its low bytes: no misfits, whatever it means as a number.
        for top in 0..=255u8 {
            let raw: Vec<u8> = (0..=255u8).flat_map(|low| [low, top]).collect();
            assert_eq!(round_trip(&raw, 4, 64), 0);
        }
    }

    #[test]
    fn any_matrix_comes_back() {
        let mut seed = 1;
        for case in 0..400 {
            let rows = usize::try_from(random(&mut seed) % 9).unwrap();
            let cols = usize::try_from(random(&mut seed) % 200).unwrap();
            // From no misfits to almost only misfits.
            let wild = [0, 1, 50, 100][case % 4];
            let raw: Vec<u8> = (0..rows * cols)
                .flat_map(|_| {
                    let bits = random(&mut seed);
                    let plain = [u8::try_from(bits & 255).unwrap(), 0x3c + u8::try_from(bits >> 8 & 7).unwrap()];
                    if bits >> 32 & 127 < wild { u16::try_from(bits >> 48).unwrap().to_le_bytes() } else { plain }
                })
                .collect();
            round_trip(&raw, rows, cols);
        }
    }

    #[test]
    fn the_same_matrix_has_one_code_and_the_table_is_of_the_commonest() {
        let raw: Vec<u8> = (0..4096u16).flat_map(|i| [0, u8::try_from(i % 18).unwrap()]).collect();
        let (mut a, mut b) = (vec![1; 9999], vec![2; 9999]);
        let len = encode(&raw, 64, 64, &mut a).unwrap();
        assert_eq!(encode(&raw, 64, 64, &mut b), Some(len));
        assert!(a[..len] == b[..len]);
        // 4096 = 227 * 18 + 10: the first ten occur once more than the others.
        assert_eq!(a[..16], core::array::from_fn::<u8, 16, _>(|i| u8::try_from(i).unwrap()));
        assert_eq!(CodedMatrix::new(&a[..len], 64, 64).unwrap().misfits(), 2 * 227);
    }

    #[test]
    fn blocks_of_other_shapes_are_refused() {
        let raw: Vec<u8> = (0..=u16::MAX).rev().take(640).flat_map(u16::to_le_bytes).collect();
        let mut block = vec![0; 4096];
        let len = encode(&raw, 10, 64, &mut block).unwrap();
        let fault = |block: &[u8], rows, cols| CodedMatrix::new(block, rows, cols).unwrap_err();
        for wrong in [0, 15, 16, 63, 64, len - 1] {
            assert!(matches!(fault(&block[..wrong], 10, 64), CodedError::Length { .. }), "{wrong}");
        }
        assert_eq!(fault(&block[..len + 1], 10, 64), CodedError::Length { expected: len as u64, found: len + 1 });
        assert!(matches!(fault(&block[..len], 9, 64), CodedError::Length { .. }));
        assert!(matches!(fault(&block[..len], usize::MAX, 64), CodedError::TooLarge { .. }));
        assert!(matches!(fault(&block[..len], 1 << 20, 1 << 20), CodedError::TooLarge { .. }));
        block[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(fault(&block[..len], 10, 64), CodedError::Length { .. }));
        assert_eq!(encode(&raw, 10, 63, &mut block), None);
        assert_eq!(encode(&raw, usize::MAX, 2, &mut block), None);
    }

    #[test]
    fn misfits_out_of_place_are_refused() {
        let mut raw = vec![0; 640 * 2];
        (0..20).for_each(|i| raw[i * 60 + 1] = u8::try_from(i + 1).unwrap());
        let mut block = vec![0; 4096];
        let len = encode(&raw, 10, 64, &mut block).unwrap();
        let misfits = CodedMatrix::new(&block[..len], 10, 64).unwrap().misfits();
        assert_eq!(misfits, 5);
        let places = len - misfits * 6;
        for (index, place) in [(4, 640u32), (4, u32::MAX), (3, 0), (1, 0)] {
            let mut bad = block[..len].to_vec();
            bad[places + index * 4..][..4].copy_from_slice(&place.to_le_bytes());
            assert_eq!(CodedMatrix::new(&bad, 10, 64).unwrap_err(), CodedError::Place { index });
        }
        let mut bad = block[..len].to_vec();
        bad.copy_within(places..places + 4, places + 4);
        assert_eq!(CodedMatrix::new(&bad, 10, 64).unwrap_err(), CodedError::Place { index: 1 });
    }

    #[test]
    fn random_bytes_decode_or_are_refused() {
        let mut seed = 7;
        let (mut fine, mut refused) = (0, 0);
        for _ in 0..20_000 {
            let (rows, cols) = (random(&mut seed) % 4, random(&mut seed) % 70);
            let (rows, cols) = (usize::try_from(rows).unwrap(), usize::try_from(cols).unwrap());
            let misfits = usize::try_from(random(&mut seed) % 3).unwrap();
            let mut block: Vec<u8> = vec![0; coded_len(rows, cols, misfits).unwrap()];
            block.iter_mut().for_each(|b| *b = random(&mut seed).to_le_bytes()[7]);
            block[16..20].copy_from_slice(&u32::try_from(misfits).unwrap().to_le_bytes());
            if misfits > 0 && random(&mut seed).is_multiple_of(2) && rows * cols > 0 {
                let places = block.len() - misfits * 6;
                for (i, at) in block[places..][..misfits * 4].as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    *at = u32::try_from(rows * cols / misfits * i).unwrap().to_le_bytes();
                }
            }
            match CodedMatrix::new(&block, rows, cols) {
                Ok(coded) => {
                    fine += 1;
                    let mut row = vec![0; cols * 2];
                    (0..rows).for_each(|r| coded.decode_row(r, &mut row));
                }
                Err(_) => refused += 1,
            }
        }
        assert!(fine > 1000 && refused > 1000, "{fine} {refused}");
    }
}
