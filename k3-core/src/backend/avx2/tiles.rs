//! Products with a matrix where sixteen registers are all there is.
//!
//! The generic kernels hold the sixteen lanes of a row and a position together: four registers here,
//! so that three rows and four positions would need forty-eight. Lanes never meet before the fold, so
//! several positions take *a quarter of the lanes at a time*: one register for each row and position,
//! the column block walked once for each quarter, weights and panel in the first-level cache.
//!
//! ```text
//! bf16, several positions                    MXFP4, several positions
//!   for each group of 3 rows:                  for each group of 2 rows:
//!                                                decode the block, scaled, into a scratch
//!     for each tile of <= 4 positions:           for each tile of <= 4 positions:
//!       for each quarter of the lanes:             for each quarter of the lanes:
//!         for each 16 columns:                       for each 32 columns:
//!           decode 3 x 4 weights, 12 products          8 x (v0 x0 + v16 x16)
//! ```
//!
//! Coded bf16 is decoded into a scratch and then taken as bf16.
//!
//! # MXFP4
//!
//! The upper sixteen bits of an f64 hold all of a scaled E2M1 value, in two bytes, and a byte is what
//! AVX2 can look up. The two tables of a scale byte are 32 bytes. A permutation puts codes in such an
//! order that the words come out as a matrix of four by four, in qwords: its last column is one
//! `and`, the first one a shift, and only two need a shuffle. Codes of the same place in a register
//! are four elements apart, so the vectors are in the order of the panel.
//!
//! Scaling a weight before its product is a change of exponents and commutes with the one rounding
//! of `v0 x0 + v16 x16`, see `lanes.rs`; `acc + p` instead of `scale * p + acc` then uses the adders,
//! which are idle, instead of the multipliers.

#![expect(clippy::needless_range_loop, reason = "tiles stay in registers if nothing is left of their loops")]

use super::V;
use crate::backend::coded;
use crate::backend::lanes::{self, Lanes};
use crate::backend::{LANES, Panel, TILE};
use crate::coded::CodedMatrix;
use crate::math::round;
use crate::view::{Bf16Matrix, GROUP, Mxfp4Matrix};
use core::arch::x86_64::*;

/// Lanes of a register, and so of a quarter.
const QUARTER: usize = 4;
/// Positions whose lanes are parked together.
const POSITIONS: usize = 16;
/// Columns of a block: the f64 of a tile of positions take 8 KiB, so that those of the next tile do not push
/// out the rows.
const COLUMNS: usize = 256;
/// Rows of a bf16 block.
const ROWS_BF16: usize = 24;
/// Rows of an MXFP4 block.
const ROWS_MXFP4: usize = 16;

/// Parked lanes: a row for each row of a block, a column for each position.
type Parked = [V; POSITIONS];

/// A matrix of either encoding.
///
/// A trait and not closures: a closure would be compiled without the features of its caller.
trait Weights: Copy {
    /// Adds the columns `first..first + len` of the rows `row..row + acc.len()` to the lanes of the
    /// positions `start..end`.
    ///
    /// # Safety
    /// AVX2 and FMA; rows, columns and positions exist; `len <= COLUMNS`.
    unsafe fn add(self, row: usize, span: (usize, usize), x: &Panel<'_>, positions: (usize, usize), acc: &mut [Parked]);

    /// The fold for the order of the lanes.
    ///
    /// # Safety
    /// AVX2.
    unsafe fn fold(lanes: V) -> f64;
}

/// `out = w x` in blocks of up to `N` rows, [`POSITIONS`] positions and [`COLUMNS`] columns.
///
/// # Safety
/// AVX2 and FMA; `out` is `[rows, positions]`, `w` and `x` have `cols` columns.
#[target_feature(enable = "avx2,fma")]
unsafe fn several<const N: usize>(w: impl Weights, cols: usize, x: &Panel<'_>, out: &mut [f32]) {
    let positions = x.positions;
    for (chunk, out) in out.chunks_mut(N * positions).enumerate() {
        let rows = out.len() / positions;
        for start in (0..positions).step_by(POSITIONS) {
            let end = positions.min(start + POSITIONS);
            // SAFETY: rows, columns and positions exist by the bounds of the loops.
            unsafe {
                let mut acc = [[V::zero(); POSITIONS]; N];
                let acc = &mut acc[..rows];
                for first in (0..cols).step_by(COLUMNS) {
                    w.add(chunk * N, (first, COLUMNS.min(cols - first)), x, (start, end), acc);
                }
                fold_all(w, acc, out, positions, (start, end));
            }
        }
    }
}

/// Folds and rounds the parked lanes of the positions `start..end`.
///
/// # Safety
/// AVX2; `out` is `[acc.len(), positions]`.
#[inline(always)]
unsafe fn fold_all<W: Weights>(_: W, acc: &[Parked], out: &mut [f32], positions: usize, (start, end): (usize, usize)) {
    for (acc, out) in acc.iter().zip(out.chunks_exact_mut(positions)) {
        for (acc, out) in acc.iter().zip(&mut out[start..end]) {
            // SAFETY: the caller's promise.
            *out = unsafe { round(W::fold(*acc)) };
        }
    }
}

/// # Safety
/// AVX2 and FMA; the shapes agree and `out` is not empty.
#[inline(always)]
pub(super) unsafe fn matmul_bf16(w: Bf16Matrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        if x.positions == 1 {
            lanes::bf16_one::<V, 2>(w, x, out);
        } else {
            several::<ROWS_BF16>(w, w.cols(), x, out);
        }
    }
}

impl Weights for Bf16Matrix<'_> {
    #[inline(always)]
    unsafe fn add(
        self,
        row: usize,
        span: (usize, usize),
        x: &Panel<'_>,
        (start, end): (usize, usize),
        acc: &mut [Parked],
    ) {
        for tile in (start..end).step_by(TILE) {
            let (data, count) = x.tile(tile);
            // SAFETY: the caller's promise; the tile has `count` positions of all columns.
            unsafe {
                let data = data.as_ptr().add(span.0 * count);
                match count {
                    1 => bf16_rows::<1>(self, row, span, data, acc, tile - start),
                    2 => bf16_rows::<2>(self, row, span, data, acc, tile - start),
                    3 => bf16_rows::<3>(self, row, span, data, acc, tile - start),
                    _ => bf16_rows::<4>(self, row, span, data, acc, tile - start),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn fold(lanes: V) -> f64 {
        // SAFETY: the caller's promise.
        unsafe { lanes.fold_split() }
    }
}

/// The columns `first..first + len` of all rows of `acc`, from `row` on, with a tile of `P` positions.
///
/// # Safety
/// AVX2 and FMA; the rows and columns exist; `x` is the tile from column `first` on.
#[target_feature(enable = "avx2,fma")]
unsafe fn bf16_rows<const P: usize>(
    w: Bf16Matrix<'_>,
    row: usize,
    (first, len): (usize, usize),
    x: *const f64,
    acc: &mut [Parked],
    position: usize,
) {
    const R: usize = 3;
    let stride = w.cols() * 2;
    let (blocks, tail) = (len / LANES, len % LANES);
    let mut r = 0;
    while r < acc.len() {
        let n = if r + R <= acc.len() { R } else { 1 };
        let lanes = acc[r..r + n].as_flattened_mut()[position..].as_mut_ptr();
        // SAFETY: the group's rows and the columns exist; the panel is padded to whole blocks. A tail
        // is copied, with zeros behind it, so that nothing past the row's end is read.
        unsafe {
            let start = w.bytes().as_ptr().add((row + r) * stride + first * 2);
            if position == 0 {
                for k in 0..n {
                    for line in (0..len * 2).step_by(64) {
                        V::prefetch(start.wrapping_add((n + k) * stride + line));
                    }
                }
            }
            if n == R {
                bf16_group::<R, P>(start, stride, x, blocks, lanes);
            } else {
                bf16_group::<1, P>(start, stride, x, blocks, lanes);
            }
            if tail > 0 {
                let x = x.add(blocks * P * LANES);
                for k in 0..n {
                    let mut padded = [0u8; 2 * LANES];
                    let from = start.add(k * stride + blocks * 2 * LANES);
                    core::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), tail * 2);
                    bf16_group::<1, P>(padded.as_ptr(), 0, x, 1, lanes.add(k * POSITIONS));
                }
            }
        }
        r += n;
    }
}

/// `blocks` blocks of sixteen columns of `R` rows, `stride` bytes apart, with a tile of `P` positions.
///
/// # Safety
/// AVX2 and FMA; the rows have `32 * blocks` bytes, `x` has `16 * P * blocks` elements; `acc` is valid
/// for `P` parked positions of `R` rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn bf16_group<const R: usize, const P: usize>(
    w: *const u8,
    stride: usize,
    x: *const f64,
    blocks: usize,
    acc: *mut V,
) {
    // SAFETY: eight words at `w` and at `w + 16` of every block, even ones first, then odd ones: the
    // four quarters, which the panel holds in the same order.
    unsafe {
        bf16_quarter::<R, P, 0>(w, stride, x, blocks, acc);
        bf16_quarter::<R, P, 1>(w, stride, x, blocks, acc);
        bf16_quarter::<R, P, 2>(w, stride, x, blocks, acc);
        bf16_quarter::<R, P, 3>(w, stride, x, blocks, acc);
    }
}

/// Quarter `Q` of [`bf16_group`].
///
/// # Safety
/// As there.
#[target_feature(enable = "avx2,fma")]
unsafe fn bf16_quarter<const R: usize, const P: usize, const Q: usize>(
    w: *const u8,
    stride: usize,
    x: *const f64,
    blocks: usize,
    acc: *mut V,
) {
    // SAFETY: `b < blocks`, `r < R`, `p < P`; see above for what is valid.
    unsafe {
        let mut sums = [[_mm256_setzero_pd(); P]; R];
        for r in 0..R {
            for p in 0..P {
                sums[r][p] = (*acc.add(r * POSITIONS + p)).0[Q];
            }
        }
        let (w, x) = (w.add(Q % 2 * 16), x.add(Q * QUARTER));
        for b in 0..blocks {
            let mut weights = [_mm256_setzero_pd(); R];
            for r in 0..R {
                let words = _mm_loadu_si128(w.add(r * stride + b * 2 * LANES).cast());
                let words =
                    if Q < 2 { _mm_slli_epi32::<16>(words) } else { _mm_and_si128(words, _mm_set1_epi32(!0xffff)) };
                weights[r] = _mm256_cvtps_pd(_mm_castsi128_ps(words));
            }
            for p in 0..P {
                let x = _mm256_loadu_pd(x.add((b * P + p) * LANES));
                for r in 0..R {
                    sums[r][p] = _mm256_fmadd_pd(weights[r], x, sums[r][p]);
                }
            }
        }
        for r in 0..R {
            for p in 0..P {
                (*acc.add(r * POSITIONS + p)).0[Q] = sums[r][p];
            }
        }
    }
}

/// # Safety
/// AVX2 and FMA; the shapes agree and `out` is not empty.
#[inline(always)]
pub(super) unsafe fn matmul_coded(w: CodedMatrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        // With two positions there is too little to do with a quarter of the lanes.
        if x.positions <= 2 {
            coded::matmul_coded::<V, 2, 1>(w, x, out);
        } else {
            several::<ROWS_BF16>(w, w.cols(), x, out);
        }
    }
}

impl Weights for CodedMatrix<'_> {
    #[inline(always)]
    unsafe fn add(
        self,
        row: usize,
        span: (usize, usize),
        x: &Panel<'_>,
        positions: (usize, usize),
        acc: &mut [Parked],
    ) {
        for (i, acc) in acc.chunks_mut(3).enumerate() {
            let row = row + i * 3;
            // SAFETY: the caller's promise; a row for each one of `acc`.
            unsafe {
                match acc.len() {
                    3 => coded_group::<3>(self, row, span, x, positions, acc),
                    2 => coded_group::<2>(self, row, span, x, positions, acc),
                    _ => coded_group::<1>(self, row, span, x, positions, acc),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn fold(lanes: V) -> f64 {
        // SAFETY: the caller's promise.
        unsafe { lanes.fold_split() }
    }
}

/// The columns `first..first + len` of `R` rows from `row` on with the positions `start..end`: as bf16
/// weights, once they are decoded.
///
/// # Safety
/// AVX2 and FMA; rows, columns and positions exist; `first` starts a group and `len <= COLUMNS`.
#[target_feature(enable = "avx2,fma")]
unsafe fn coded_group<const R: usize>(
    w: CodedMatrix<'_>,
    row: usize,
    (first, len): (usize, usize),
    x: &Panel<'_>,
    (start, end): (usize, usize),
    acc: &mut [Parked],
) {
    const STRIDE: usize = 2 * COLUMNS;
    let groups = len.div_ceil(GROUP);
    let blocks = groups * (GROUP / LANES);
    let mut decoded = [[0u8; STRIDE]; R];
    // SAFETY: rows and groups exist; decoded rows and the panel are whole groups.
    unsafe {
        for (r, decoded) in decoded.iter_mut().enumerate() {
            let ahead = if start == 0 { R } else { 0 };
            coded::decode_row::<V>(w, row + r, first / GROUP, ahead, &mut decoded[..groups * coded::DECODED]);
        }
        let decoded = decoded.as_flattened().as_ptr();
        for tile in (start..end).step_by(TILE) {
            let (x, count) = x.tile(tile);
            let x = x.as_ptr().add(first * count);
            let lanes = acc.as_flattened_mut()[tile - start..].as_mut_ptr();
            match count {
                1 => bf16_group::<R, 1>(decoded, STRIDE, x, blocks, lanes),
                2 => bf16_group::<R, 2>(decoded, STRIDE, x, blocks, lanes),
                3 => bf16_group::<R, 3>(decoded, STRIDE, x, blocks, lanes),
                _ => bf16_group::<R, 4>(decoded, STRIDE, x, blocks, lanes),
            }
        }
    }
}

/// For each scale byte the upper sixteen bits of the f64 of each code, scaled: sixteen upper bytes,
/// then sixteen lower ones. All zero for the NaN of E8M0.
#[repr(align(32))]
struct Tables([[u8; 32]; 256]);

static TABLES: Tables = {
    const E2M1: [u16; 16] = [
        0, 0x3fe0, 0x3ff0, 0x3ff8, 0x4000, 0x4008, 0x4010, 0x4018, 0x8000, 0xbfe0, 0xbff0, 0xbff8, 0xc000, 0xc008,
        0xc010, 0xc018,
    ];
    let mut tables = [[0; 32]; 256];
    let (mut byte, mut exponent) = (0, 0u16.wrapping_sub(127));
    while byte < 255 {
        let mut code = 0;
        while code < 16 {
            let word = if code % 8 == 0 { E2M1[code] } else { E2M1[code].wrapping_add(exponent << 4) };
            let [low, high] = word.to_le_bytes();
            tables[byte][code] = high;
            tables[byte][16 + code] = low;
            code += 1;
        }
        byte += 1;
        exponent = exponent.wrapping_add(1);
    }
    Tables(tables)
};

/// Bytes of a group in the order in which their codes are looked up: those of elements 0 4 8 12, then
/// (the same bytes' upper nibbles) 1 5 9 13; in the second half of the register 2 6 10 14, 3 7 11 15.
const ORDER: [i64; 4] = [0x0604_0200_0604_0200, 0x0e0c_0a08_0e0c_0a08, 0x0705_0301_0705_0301, 0x0f0d_0b09_0f0d_0b09];
/// Moves the second (third) word of each half to its top.
const SECOND: [i64; 2] = [0x0302_8080_8080_8080, 0x0b0a_8080_8080_8080];
const THIRD: [i64; 2] = [0x0504_8080_8080_8080, 0x0d0c_8080_8080_8080];

/// The sixteen bytes at `p`, in both halves.
///
/// # Safety
/// AVX2; `p` is valid for sixteen bytes.
#[inline(always)]
unsafe fn both<T>(p: *const T) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast())) }
}

/// `x`, of which the compiler then knows nothing.
///
/// It would make a blend with zeros of an `and`, and a load and a permutation of a broadcast from
/// memory. Both are equal, but they need the two pipes that shuffle, which are what a [`Decoder`] waits for:
/// a product with one position takes an eighth longer.
///
/// # Safety
/// AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn opaque(mut x: __m256i) -> __m256i {
    // SAFETY: no instruction at all.
    unsafe {
        core::arch::asm!("/* {0} */", inout(ymm_reg) x, options(pure, nomem, nostack, preserves_flags));
    }
    x
}

/// What turns codes into weights, held in registers.
#[derive(Clone, Copy)]
struct Decoder {
    order: __m256i,
    shifts: __m256i,
    nibble: __m256i,
    second: __m256i,
    third: __m256i,
    fourth: __m256i,
}

impl Decoder {
    /// # Safety
    /// AVX2.
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: the caller's promise; the constants are as long as what is read.
        unsafe {
            Self {
                order: opaque(_mm256_loadu_si256(ORDER.as_ptr().cast())),
                shifts: opaque(_mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4)),
                nibble: opaque(_mm256_set1_epi8(15)),
                second: opaque(both(SECOND.as_ptr())),
                third: opaque(both(THIRD.as_ptr())),
                fourth: opaque(_mm256_set1_epi64x(!0 << 48)),
            }
        }
    }

    /// The 32 weights of a group (16 bytes at `p`), scaled, in order.
    ///
    /// # Safety
    /// AVX2; `p` is valid for sixteen bytes.
    #[inline(always)]
    unsafe fn decode(&self, p: *const u8, scale: u8) -> [V; 2] {
        // SAFETY: the caller's promise; there is a table for each byte.
        unsafe {
            let bytes = _mm256_shuffle_epi8(opaque(both(p)), self.order);
            let codes = _mm256_and_si256(_mm256_srlv_epi32(bytes, self.shifts), self.nibble);
            let table = TABLES.0.as_ptr().add(usize::from(scale)).cast::<u8>();
            let high = _mm256_shuffle_epi8(both(table), codes);
            let low = _mm256_shuffle_epi8(both(table.add(16)), codes);
            [self.spread(_mm256_unpacklo_epi8(low, high)), self.spread(_mm256_unpackhi_epi8(low, high))]
        }
    }

    /// Word `k` of every qword becomes the top of an f64 of register `k`.
    ///
    /// # Safety
    /// AVX2.
    #[inline(always)]
    unsafe fn spread(&self, words: __m256i) -> V {
        // SAFETY: the caller's promise.
        unsafe {
            V([
                _mm256_castsi256_pd(_mm256_slli_epi64::<48>(words)),
                _mm256_castsi256_pd(_mm256_shuffle_epi8(words, self.second)),
                _mm256_castsi256_pd(_mm256_shuffle_epi8(words, self.third)),
                _mm256_castsi256_pd(_mm256_and_si256(words, self.fourth)),
            ])
        }
    }
}

/// # Safety
/// AVX2 and FMA; the shapes agree and `out` is not empty.
#[inline(always)]
pub(super) unsafe fn matmul_mxfp4(w: Mxfp4Matrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise; rows exist by the loop's bounds.
    unsafe {
        if x.positions == 1 {
            for (r, out) in out.iter_mut().enumerate() {
                *out = round(Lanes::fold(mxfp4_row(w, r, x.data)));
            }
            return;
        }
        several::<ROWS_MXFP4>(w, w.cols(), x, out);
    }
}

impl Weights for Mxfp4Matrix<'_> {
    #[inline(always)]
    unsafe fn add(
        self,
        row: usize,
        span: (usize, usize),
        x: &Panel<'_>,
        positions: (usize, usize),
        acc: &mut [Parked],
    ) {
        for (i, acc) in acc.chunks_mut(2).enumerate() {
            let row = row + i * 2;
            // SAFETY: the caller's promise; a row for each one of `acc`.
            unsafe {
                match acc.len() {
                    2 => mxfp4_group::<2>(self, row, span, x, positions, acc),
                    _ => mxfp4_group::<1>(self, row, span, x, positions, acc),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn fold(lanes: V) -> f64 {
        // SAFETY: the caller's promise.
        unsafe { Lanes::fold(lanes) }
    }
}

/// The lanes of one row with one position.
///
/// # Safety
/// AVX2 and FMA; the row exists and `x` is as long.
#[target_feature(enable = "avx2,fma")]
unsafe fn mxfp4_row(w: Mxfp4Matrix<'_>, row: usize, x: &[f64]) -> V {
    /// Groups whose nibbles fill a cache line.
    const LINE: usize = 64 / (GROUP / 2);
    let (stride, groups) = (w.cols() / 2, w.cols() / GROUP);
    // SAFETY: `g < groups`: 16 bytes, one scale and 32 elements of `x` for each group.
    unsafe {
        let packed = w.packed().as_ptr().add(row * stride);
        let scales = w.scales().as_ptr().add(row * groups);
        let decoder = Decoder::new();
        let mut acc = V::zero();
        let mut g = 0;
        while g < groups {
            let n = if g + LINE <= groups { LINE } else { 1 };
            V::prefetch(packed.wrapping_add(stride + g * (GROUP / 2)));
            for g in g..g + n {
                let [v0, v1] = decoder.decode(packed.add(g * (GROUP / 2)), *scales.add(g));
                let (x0, x1) = (V::load(x.as_ptr().add(g * GROUP)), V::load(x.as_ptr().add(g * GROUP + LANES)));
                acc = v1.mul_add(x1, v0.mul(x0)).add(acc);
            }
            g += n;
        }
        acc
    }
}

/// The columns `first..first + len` of `R` rows from `row` on with the positions `start..end`.
///
/// # Safety
/// AVX2 and FMA; rows, columns and positions exist; whole groups; `len <= COLUMNS`.
#[target_feature(enable = "avx2,fma")]
unsafe fn mxfp4_group<const R: usize>(
    w: Mxfp4Matrix<'_>,
    row: usize,
    (first, len): (usize, usize),
    x: &Panel<'_>,
    (start, end): (usize, usize),
    acc: &mut [Parked],
) {
    let (stride, groups) = (w.cols() / 2, w.cols() / GROUP);
    // SAFETY: `g` counts the groups of the block, so nibbles, scales, scratch and panel have them.
    unsafe {
        let decoder = Decoder::new();
        let mut scratch = [[V::zero(); COLUMNS / LANES]; R];
        for r in 0..R {
            let packed = w.packed().as_ptr().add((row + r) * stride + first / 2);
            let scales = w.scales().as_ptr().add((row + r) * groups + first / GROUP);
            let lanes = scratch[r].as_mut_ptr();
            for g in 0..len / GROUP {
                let bytes = packed.add(g * (GROUP / 2));
                if g % 4 == 0 {
                    V::prefetch(bytes.wrapping_add(R * stride));
                }
                let [v0, v1] = decoder.decode(bytes, *scales.add(g));
                *lanes.add(2 * g) = v0;
                *lanes.add(2 * g + 1) = v1;
            }
        }
        for tile in (start..end).step_by(TILE) {
            let (x, count) = x.tile(tile);
            let x = x.as_ptr().add(first * count);
            let lanes = acc.as_flattened_mut()[tile - start..].as_mut_ptr();
            match count {
                1 => mxfp4_tile::<R, 1>(&scratch, x, len / GROUP, lanes),
                2 => mxfp4_tile::<R, 2>(&scratch, x, len / GROUP, lanes),
                3 => mxfp4_tile::<R, 3>(&scratch, x, len / GROUP, lanes),
                _ => mxfp4_tile::<R, 4>(&scratch, x, len / GROUP, lanes),
            }
        }
    }
}

/// `groups` groups of `R` decoded rows with a tile of `P` positions, two of them at a time: with the
/// products in flight that is what the registers hold.
///
/// # Safety
/// AVX2 and FMA; `x` has `groups * P * 32` elements, the scratch as many groups; `acc` is valid for `P`
/// parked positions of `R` rows.
#[target_feature(enable = "avx2,fma")]
unsafe fn mxfp4_tile<const R: usize, const P: usize>(
    scratch: &[[V; COLUMNS / LANES]; R],
    x: *const f64,
    groups: usize,
    acc: *mut V,
) {
    for p in (0..P).step_by(2) {
        for q in 0..4 {
            // SAFETY: positions `p` and, if there is one more, `p + 1` of the tile.
            unsafe {
                let (x, acc) = (x.add(p * LANES + q * QUARTER), acc.add(p));
                if p + 1 < P {
                    mxfp4_quarter::<R, P, 2>(scratch, x, groups, acc, q);
                } else {
                    mxfp4_quarter::<R, P, 1>(scratch, x, groups, acc, q);
                }
            }
        }
    }
}

/// Quarter `q` of `N` positions of a tile of `P`.
///
/// # Safety
/// As [`mxfp4_tile`], `x` and `acc` being those of the first position, `x` that of the quarter.
#[target_feature(enable = "avx2,fma")]
unsafe fn mxfp4_quarter<const R: usize, const P: usize, const N: usize>(
    scratch: &[[V; COLUMNS / LANES]; R],
    x: *const f64,
    groups: usize,
    acc: *mut V,
    q: usize,
) {
    // SAFETY: `g < groups`, `p < N`, `r < R`; see above for what is valid.
    unsafe {
        let mut sums = [[_mm256_setzero_pd(); N]; R];
        for r in 0..R {
            for p in 0..N {
                sums[r][p] = (*acc.add(r * POSITIONS + p)).0[q];
            }
        }
        for g in 0..groups {
            for p in 0..N {
                let x0 = _mm256_loadu_pd(x.add((2 * g * P + p) * LANES));
                let x1 = _mm256_loadu_pd(x.add(((2 * g + 1) * P + p) * LANES));
                for r in 0..R {
                    let (v0, v1) = (scratch[r].get_unchecked(2 * g).0[q], scratch[r].get_unchecked(2 * g + 1).0[q]);
                    sums[r][p] = _mm256_add_pd(_mm256_fmadd_pd(v1, x1, _mm256_mul_pd(v0, x0)), sums[r][p]);
                }
            }
        }
        for r in 0..R {
            for p in 0..N {
                (*acc.add(r * POSITIONS + p)).0[q] = sums[r][p];
            }
        }
    }
}
