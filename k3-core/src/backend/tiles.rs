//! Products with several positions, written once over [`Tile`]: lanes that are taken a part at a time.
//!
//! The sixteen lanes of a row and a position are two registers or four, and three rows with four
//! positions would need more of them than there are. Lanes never meet before the fold, so they are taken *a
//! register at a time*: one register for each row and position, the block of columns walked once for
//! each part, weights and panel in the first-level cache.
//!
//! ```text
//! bf16                                       MXFP4
//!   for each group of 3 rows:                  for each group of 2 rows:
//!                                                decode the block, scaled, into a scratch
//!     for each tile of <= 4 positions:           for each tile of <= 4 positions:
//!       for each part of the lanes:                for each part of the lanes:
//!         for each 16 columns:                       for each 32 columns:
//!           decode 3 registers of weights,             v0 x0 + v16 x16, added
//!           12 products
//! ```
//!
//! Thirty-two registers hold the lanes of two tiles, so with AVX-512 eight positions share what bf16
//! costs to decode. Coded bf16 is decoded into a scratch and then taken as bf16.
//!
//! Scaling a weight before its product is a change of exponents and commutes with the one rounding
//! of `v0 x0 + v16 x16`, see `lanes.rs`; `acc + p` instead of `scale * p + acc` then uses the adders,
//! which are idle, instead of the multipliers.
//!
//! # Prefetch
//!
//! A group asks for the bytes of the next one; with AVX-512 of the one after it, since a group with four
//! positions takes no longer there than memory does to answer. The last groups of a block of rows ask
//! for the first ones' in the next block of columns.

#![expect(clippy::needless_range_loop, reason = "tiles stay in registers if nothing is left of their loops")]

use super::coded::{self, Decode};
use super::lanes::{self, Lanes};
use super::{LANES, Panel, TILE};
use crate::coded::CodedMatrix;
use crate::math::round;
use crate::view::{Bf16Matrix, GROUP, Mxfp4Matrix};

/// Positions whose lanes are parked together.
const POSITIONS: usize = 16;
/// Columns of a block: the f64 of a tile of positions take 8 KiB, so that those of the next tile do not push
/// out the rows.
const COLUMNS: usize = 256;
/// Rows of a bf16 block.
const ROWS_BF16: usize = 24;
/// Rows of an MXFP4 block.
const ROWS_MXFP4: usize = 16;
/// Rows of a group.
const GROUP_BF16: usize = 3;
const GROUP_MXFP4: usize = 2;

/// One register of lanes.
///
/// # Safety
/// Every method needs the CPU features of the type. Pointers must be valid for as many elements as
/// the register has; none needs alignment.
pub(super) trait Part: Copy {
    /// Its f64.
    unsafe fn load(p: *const f64) -> Self;
    /// Writes its f64.
    unsafe fn store(self, p: *mut f64);
    /// Part `Q` of what [`Lanes::load_bf16_split`] loads from `p` (32 bytes).
    unsafe fn load_bf16<const Q: usize>(p: *const u8) -> Self;
    /// `self + b`.
    unsafe fn add(self, b: Self) -> Self;
    /// `self * b`.
    unsafe fn mul(self, b: Self) -> Self;
    /// `self * b + c`, the product exact.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
}

/// Lanes in parts, and what a backend knows of them.
///
/// The loops are those of this module. They are methods so that each is a function of its own with
/// the backend's features: inside one function for all shapes registers are spilled.
///
/// # Safety
/// As of [`Lanes`].
pub(super) trait Tile: Decode {
    /// A register.
    type Part: Part;
    /// Registers of sixteen lanes.
    const PARTS: usize;
    /// How many groups ahead to prefetch.
    const AHEAD: usize;
    /// Their type.
    type Decoder;
    /// The masks and tables that [`Tile::load_scaled`] keeps in registers.
    unsafe fn decoder() -> Self::Decoder;
    /// The 32 weights of an MXFP4 group (16 bytes at `p`), scaled, in order.
    unsafe fn load_scaled(decoder: &Self::Decoder, p: *const u8, scale: u8) -> [Self; 2];
    /// Adds part `Q` of the products of `R` rows and `P` positions to the parked lanes: [`bf16_part`].
    unsafe fn bf16_part<const R: usize, const P: usize, const Q: usize>(w: Rows, x: Columns, acc: *mut f64);
    /// Adds part `q` of the products of `R` decoded rows and `P` positions to the parked lanes: [`scaled_part`].
    unsafe fn scaled_part<const R: usize, const P: usize, const N: usize>(
        w: &Scratch<Self, R>,
        x: *const f64,
        groups: usize,
        q: usize,
        acc: *mut f64,
    );
}

/// [`Tile`]'s loops for lanes of one type under the features it needs.
macro_rules! loops {
    ($features:literal) => {
        #[inline(always)]
        unsafe fn bf16_part<const R: usize, const P: usize, const Q: usize>(
            w: $crate::backend::tiles::Rows,
            x: $crate::backend::tiles::Columns,
            acc: *mut f64,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn inner<const R: usize, const P: usize, const Q: usize>(
                w: $crate::backend::tiles::Rows,
                x: $crate::backend::tiles::Columns,
                acc: *mut f64,
            ) {
                // SAFETY: this function has the features; the rest is the caller's promise.
                unsafe { $crate::backend::tiles::bf16_part::<V, R, P, Q>(w, x, acc) }
            }
            // SAFETY: the caller's promise.
            unsafe { inner::<R, P, Q>(w, x, acc) }
        }

        #[inline(always)]
        unsafe fn scaled_part<const R: usize, const P: usize, const N: usize>(
            w: &$crate::backend::tiles::Scratch<Self, R>,
            x: *const f64,
            groups: usize,
            q: usize,
            acc: *mut f64,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn inner<const R: usize, const P: usize, const N: usize>(
                w: &$crate::backend::tiles::Scratch<V, R>,
                x: *const f64,
                groups: usize,
                q: usize,
                acc: *mut f64,
            ) {
                // SAFETY: this function has the features; the rest is the caller's promise.
                unsafe { $crate::backend::tiles::scaled_part::<V, R, P, N>(w, x, groups, q, acc) }
            }
            // SAFETY: the caller's promise.
            unsafe { inner::<R, P, N>(w, x, groups, q, acc) }
        }
    };
}
pub(super) use loops;

/// Parked lanes: a row for each row of a block, a column for each position.
type Parked<T> = [T; POSITIONS];

/// Decoded and scaled weights of a block of columns.
pub(super) type Scratch<T, const R: usize> = [[T; COLUMNS / LANES]; R];

/// Where the bf16 rows of a group lie.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// The first row's bytes at the block's first column.
    first: *const u8,
    /// The distance of rows in bytes.
    stride: usize,
    /// Where to prefetch, likewise.
    later: *const u8,
}

/// Where the panel of a group lies.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    /// The tile at the block's first column.
    first: *const f64,
    /// The distance to the next tile in elements.
    tile: usize,
    /// Blocks of sixteen columns.
    blocks: usize,
}

/// A matrix of either encoding.
///
/// A trait and not closures: a closure would be compiled without the features of its caller.
trait Weights<T>: Copy {
    /// Adds the columns `first..first + len` of the rows `row..row + acc.len()` to the lanes of the
    /// positions `start..end`.
    ///
    /// # Safety
    /// The features of `T`; rows, columns and positions exist; `len <= COLUMNS`.
    unsafe fn add(
        self,
        row: usize,
        span: (usize, usize),
        x: &Panel<'_>,
        positions: (usize, usize),
        acc: &mut [Parked<T>],
    );

    /// The fold for the order of the lanes.
    ///
    /// # Safety
    /// The features of `T`.
    unsafe fn fold(lanes: T) -> f64;
}

/// `out = w x` in blocks of up to `N` rows, [`POSITIONS`] positions and [`COLUMNS`] columns.
///
/// # Safety
/// The features of `T`; `out` is `[rows, positions]`, `w` and `x` have `cols` columns.
#[inline(always)]
unsafe fn several<T: Tile, W: Weights<T>, const N: usize>(w: W, cols: usize, x: &Panel<'_>, out: &mut [f32]) {
    let positions = x.positions;
    for (chunk, out) in out.chunks_mut(N * positions).enumerate() {
        let rows = out.len() / positions;
        for start in (0..positions).step_by(POSITIONS) {
            let end = positions.min(start + POSITIONS);
            // SAFETY: rows, columns and positions exist by the bounds of the loops.
            unsafe {
                let mut acc = [[T::zero(); POSITIONS]; N];
                let acc = &mut acc[..rows];
                for first in (0..cols).step_by(COLUMNS) {
                    w.add(chunk * N, (first, COLUMNS.min(cols - first)), x, (start, end), acc);
                }
                for (acc, out) in acc.iter().zip(out.chunks_exact_mut(positions)) {
                    for (acc, out) in acc.iter().zip(&mut out[start..end]) {
                        *out = round(W::fold(*acc));
                    }
                }
            }
        }
    }
}

/// The product with any number of positions; one is taken `R` rows at a time.
///
/// # Safety
/// The features of `T`; the shapes agree and `out` is not empty.
#[inline(always)]
pub(super) unsafe fn matmul_bf16<T: Tile, const R: usize>(w: Bf16Matrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        if x.positions == 1 {
            lanes::bf16_one::<T, R>(w, x.data, out);
        } else {
            several::<T, _, ROWS_BF16>(w, w.cols(), x, out);
        }
    }
}

/// The product with any number of positions; one is taken `R` rows at a time.
///
/// # Safety
/// As [`matmul_bf16`].
#[inline(always)]
pub(super) unsafe fn matmul_coded<T: Tile, const R: usize>(w: CodedMatrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        if x.positions == 1 {
            coded::coded_one::<T, R>(w, x.data, out);
        } else {
            several::<T, _, ROWS_BF16>(w, w.cols(), x, out);
        }
    }
}

/// The product with several positions.
///
/// # Safety
/// As [`matmul_bf16`].
#[inline(always)]
pub(super) unsafe fn matmul_mxfp4<T: Tile>(w: Mxfp4Matrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { several::<T, _, ROWS_MXFP4>(w, w.cols(), x, out) }
}

/// Where the group begins that is walked [`Tile::AHEAD`] groups later: the bytes of the block's first column of a row that is `n`-th of
/// `rows` lie at `at`, rows are `stride` bytes apart and `width` bytes of each belong to the block.
///
/// Only to be asked for: behind the last rows it is outside the matrix.
fn later<T: Tile>(at: *const u8, n: usize, group: usize, rows: usize, stride: usize, width: usize) -> *const u8 {
    let to = n + T::AHEAD * group;
    if to < rows {
        at.wrapping_add((to - n) * stride)
    } else {
        at.wrapping_sub(n * stride).wrapping_add((to - rows).min(n) * stride + width)
    }
}

/// Calls a function for each run of positions from `start` to `end` that are taken at once: with the panel
/// from column `first` on, how many there are, and which is the first.
macro_rules! each_tile {
    ($x:expr, $span:expr, ($start:expr, $end:expr), $most:expr, |$data:ident, $tile:ident, $position:ident| {
        $($count:literal => $one:expr,)* }) => {
        let mut $position = 0;
        while $position < $end - $start {
            let at = $start + $position;
            let count = if $most > TILE && $end - at >= $most { $most } else { TILE.min($x.positions - at) };
            let $tile = TILE * $x.padded();
            let $data = $x.data.as_ptr().add(at * $x.padded() + $span.0 * count.min(TILE));
            match count {
                $($count => $one,)*
                _ => {}
            }
            $position += count;
        }
    };
}

impl<T: Tile> Weights<T> for Bf16Matrix<'_> {
    #[inline(always)]
    unsafe fn add(
        self,
        row: usize,
        span: (usize, usize),
        x: &Panel<'_>,
        (start, end): (usize, usize),
        acc: &mut [Parked<T>],
    ) {
        // SAFETY: the caller's promise; a tile has `count` positions of all columns, padded to whole blocks.
        unsafe {
            each_tile!(x, span, (start, end), shared::<T>(), |data, tile, position| {
                1 => bf16_rows::<T, 1>(self, row, span, (data, tile), acc, position),
                2 => bf16_rows::<T, 2>(self, row, span, (data, tile), acc, position),
                3 => bf16_rows::<T, 3>(self, row, span, (data, tile), acc, position),
                4 => bf16_rows::<T, 4>(self, row, span, (data, tile), acc, position),
                8 => bf16_rows::<T, 8>(self, row, span, (data, tile), acc, position),
            });
        }
    }

    #[inline(always)]
    unsafe fn fold(lanes: T) -> f64 {
        // SAFETY: the caller's promise.
        unsafe { lanes.fold_split() }
    }
}

/// Positions that share the decoding of a bf16 weight, at most: half of the registers or more hold lanes.
const fn shared<T: Tile>() -> usize {
    if T::PARTS == 2 { 2 * TILE } else { TILE }
}

/// The columns `first..first + len` of all rows of `acc`, from `row` on, with `P` positions.
///
/// # Safety
/// The features of `T`; the rows and columns exist; `x` is the tile from column `first` on, and how far it
/// is to the next one.
#[inline(always)]
unsafe fn bf16_rows<T: Tile, const P: usize>(
    w: Bf16Matrix<'_>,
    row: usize,
    (first, len): (usize, usize),
    (x, tile): (*const f64, usize),
    acc: &mut [Parked<T>],
    position: usize,
) {
    let stride = w.cols() * 2;
    let (blocks, tail) = (len / LANES, len % LANES);
    let rows = acc.len();
    let mut r = 0;
    while r < rows {
        let n = if r + GROUP_BF16 <= rows { GROUP_BF16 } else { 1 };
        let lanes = acc[r..r + n].as_flattened_mut()[position..].as_mut_ptr();
        // SAFETY: the group's rows and the columns exist; the panel is padded to whole blocks. A tail
        // is copied, with zeros behind it, so that nothing past the row's end is read.
        unsafe {
            let start = w.bytes().as_ptr().add((row + r) * stride + first * 2);
            let later = if position == 0 { later::<T>(start, r, n, rows, stride, len * 2) } else { start };
            let group = Rows { first: start, stride, later };
            let columns = Columns { first: x, tile, blocks };
            if n == GROUP_BF16 {
                bf16_group::<T, GROUP_BF16, P>(group, columns, lanes);
            } else {
                bf16_group::<T, 1, P>(group, columns, lanes);
            }
            if tail > 0 {
                let columns = Columns { first: x.add(blocks * P.min(TILE) * LANES), tile, blocks: 1 };
                for k in 0..n {
                    let mut padded = [0u8; 2 * LANES];
                    let from = start.add(k * stride + blocks * 2 * LANES);
                    core::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), tail * 2);
                    let row = Rows { first: padded.as_ptr(), stride: 0, later: padded.as_ptr() };
                    bf16_group::<T, 1, P>(row, columns, lanes.add(k * POSITIONS));
                }
            }
        }
        r += n;
    }
}

/// All parts of `R` rows with `P` positions.
///
/// # Safety
/// The features of `T`; rows and panel have the blocks; `acc` is valid for `P` parked positions of `R` rows.
#[inline(always)]
unsafe fn bf16_group<T: Tile, const R: usize, const P: usize>(w: Rows, x: Columns, acc: *mut T) {
    let acc = acc.cast::<f64>();
    // SAFETY: the caller's promise; there are as many parts.
    unsafe {
        T::bf16_part::<R, P, 0>(w, x, acc);
        T::bf16_part::<R, P, 1>(w, x, acc);
        if T::PARTS == 4 {
            T::bf16_part::<R, P, 2>(w, x, acc);
            T::bf16_part::<R, P, 3>(w, x, acc);
        }
    }
}

/// Part `Q` of `R` rows with `P` positions.
///
/// # Safety
/// The features of `T`; `32 * blocks` bytes of each row and `16 * P * blocks` elements of the panel exist;
/// `acc` is valid for `P` parked positions of `R` rows.
#[inline(always)]
pub(super) unsafe fn bf16_part<T: Tile, const R: usize, const P: usize, const Q: usize>(
    w: Rows,
    x: Columns,
    acc: *mut f64,
) {
    let count = if P < TILE { P } else { TILE };
    let offset = Q * (LANES / T::PARTS);
    // SAFETY: `b < blocks`, `r < R`, `p < P`; see above for what is valid.
    unsafe {
        let acc = acc.add(offset);
        let mut sums = [[T::Part::load(acc); P]; R];
        for r in 0..R {
            for p in 0..P {
                sums[r][p] = T::Part::load(acc.add((r * POSITIONS + p) * LANES));
            }
        }
        for b in 0..x.blocks {
            let mut weights = [sums[0][0]; R];
            for r in 0..R {
                let at = r * w.stride + b * 2 * LANES;
                if Q == 0 {
                    T::prefetch(w.later.wrapping_add(at));
                }
                weights[r] = T::Part::load_bf16::<Q>(w.first.add(at));
            }
            for p in 0..P {
                let x = T::Part::load(x.first.add(p / TILE * x.tile + (b * count + p % TILE) * LANES + offset));
                for r in 0..R {
                    sums[r][p] = weights[r].mul_add(x, sums[r][p]);
                }
            }
        }
        for r in 0..R {
            for p in 0..P {
                sums[r][p].store(acc.add((r * POSITIONS + p) * LANES));
            }
        }
    }
}

impl<T: Tile> Weights<T> for CodedMatrix<'_> {
    #[inline(always)]
    unsafe fn add(
        self,
        row: usize,
        span: (usize, usize),
        x: &Panel<'_>,
        positions: (usize, usize),
        acc: &mut [Parked<T>],
    ) {
        for (i, acc) in acc.chunks_mut(GROUP_BF16).enumerate() {
            let row = row + i * GROUP_BF16;
            // SAFETY: the caller's promise; a row for each one of `acc`.
            unsafe {
                match acc.len() {
                    GROUP_BF16 => coded_group::<T, GROUP_BF16>(self, row, span, x, positions, acc),
                    2 => coded_group::<T, 2>(self, row, span, x, positions, acc),
                    _ => coded_group::<T, 1>(self, row, span, x, positions, acc),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn fold(lanes: T) -> f64 {
        // SAFETY: the caller's promise.
        unsafe { lanes.fold_split() }
    }
}

/// The columns `first..first + len` of `R` rows from `row` on with the positions `start..end`: as bf16
/// weights, once they are decoded.
///
/// # Safety
/// The features of `T`; rows, columns and positions exist; `first` starts a group and `len <= COLUMNS`.
#[inline(always)]
unsafe fn coded_group<T: Tile, const R: usize>(
    w: CodedMatrix<'_>,
    row: usize,
    span: (usize, usize),
    x: &Panel<'_>,
    (start, end): (usize, usize),
    acc: &mut [Parked<T>],
) {
    const STRIDE: usize = 2 * COLUMNS;
    let groups = span.1.div_ceil(coded::GROUP);
    let blocks = groups * (coded::GROUP / LANES);
    let mut decoded = [[0u8; STRIDE]; R];
    // SAFETY: rows and groups exist; decoded rows and the panel are whole groups.
    unsafe {
        for (r, decoded) in decoded.iter_mut().enumerate() {
            let ahead = if start == 0 { R } else { 0 };
            coded::decode_row::<T>(w, row + r, span.0 / coded::GROUP, ahead, &mut decoded[..groups * coded::DECODED]);
        }
        let first = decoded.as_flattened().as_ptr();
        let rows = Rows { first, stride: STRIDE, later: first };
        let lanes = acc.as_flattened_mut().as_mut_ptr();
        each_tile!(x, span, (start, end), shared::<T>(), |data, tile, position| {
            1 => bf16_group::<T, R, 1>(rows, Columns { first: data, tile, blocks }, lanes.add(position)),
            2 => bf16_group::<T, R, 2>(rows, Columns { first: data, tile, blocks }, lanes.add(position)),
            3 => bf16_group::<T, R, 3>(rows, Columns { first: data, tile, blocks }, lanes.add(position)),
            4 => bf16_group::<T, R, 4>(rows, Columns { first: data, tile, blocks }, lanes.add(position)),
            8 => bf16_group::<T, R, 8>(rows, Columns { first: data, tile, blocks }, lanes.add(position)),
        });
    }
}

impl<T: Tile> Weights<T> for Mxfp4Matrix<'_> {
    #[inline(always)]
    unsafe fn add(
        self,
        row: usize,
        span: (usize, usize),
        x: &Panel<'_>,
        positions: (usize, usize),
        acc: &mut [Parked<T>],
    ) {
        let rows = acc.len();
        for (i, acc) in acc.chunks_mut(GROUP_MXFP4).enumerate() {
            let n = i * GROUP_MXFP4;
            // SAFETY: the caller's promise; a row for each one of `acc`.
            unsafe {
                match acc.len() {
                    GROUP_MXFP4 => mxfp4_group::<T, GROUP_MXFP4>(self, (row, n, rows), span, x, positions, acc),
                    _ => mxfp4_group::<T, 1>(self, (row, n, rows), span, x, positions, acc),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn fold(lanes: T) -> f64 {
        // SAFETY: the caller's promise.
        unsafe { Lanes::fold(lanes) }
    }
}

/// The columns `first..first + len` of `R` rows with the positions `start..end`: of the block of `rows` rows
/// from `row` on, those from the `n`-th on.
///
/// # Safety
/// The features of `T`; rows, columns and positions exist; whole groups; `len <= COLUMNS`.
#[inline(always)]
unsafe fn mxfp4_group<T: Tile, const R: usize>(
    w: Mxfp4Matrix<'_>,
    (row, n, rows): (usize, usize, usize),
    (first, len): (usize, usize),
    x: &Panel<'_>,
    (start, end): (usize, usize),
    acc: &mut [Parked<T>],
) {
    let (stride, groups) = (w.cols() / 2, w.cols() / GROUP);
    // SAFETY: `g` counts the groups of the block, so nibbles, scales, scratch and panel have them.
    unsafe {
        let decoder = T::decoder();
        let mut scratch = [[T::zero(); COLUMNS / LANES]; R];
        let start_of = w.packed().as_ptr().add((row + n) * stride + first / 2);
        let later = later::<T>(start_of, n, R, rows, stride, len / 2);
        for r in 0..R {
            let packed = start_of.add(r * stride);
            let scales = w.scales().as_ptr().add((row + n + r) * groups + first / GROUP);
            let lanes = scratch[r].as_mut_ptr();
            for g in 0..len / GROUP {
                let bytes = packed.add(g * (GROUP / 2));
                if g % 4 == 0 {
                    T::prefetch(later.wrapping_add(r * stride + g * (GROUP / 2)));
                }
                let [v0, v1] = T::load_scaled(&decoder, bytes, *scales.add(g));
                *lanes.add(2 * g) = v0;
                *lanes.add(2 * g + 1) = v1;
            }
        }
        let lanes = acc.as_flattened_mut().as_mut_ptr();
        each_tile!(x, (first, len), (start, end), TILE, |data, _tile, position| {
            1 => mxfp4_tile::<T, R, 1>(&scratch, data, len / GROUP, lanes.add(position)),
            2 => mxfp4_tile::<T, R, 2>(&scratch, data, len / GROUP, lanes.add(position)),
            3 => mxfp4_tile::<T, R, 3>(&scratch, data, len / GROUP, lanes.add(position)),
            4 => mxfp4_tile::<T, R, 4>(&scratch, data, len / GROUP, lanes.add(position)),
        });
    }
}

/// `groups` groups of `R` decoded rows with a tile of `P` positions, all four of them or two at a time: with the
/// products in flight that is what the registers hold.
///
/// # Safety
/// The features of `T`; `x` has `groups * P * 32` elements, the scratch as many groups; `acc` is valid for `P`
/// parked positions of `R` rows.
#[inline(always)]
unsafe fn mxfp4_tile<T: Tile, const R: usize, const P: usize>(
    scratch: &Scratch<T, R>,
    x: *const f64,
    groups: usize,
    acc: *mut T,
) {
    let mut p = 0;
    while p < P {
        let n = if T::PARTS == 2 && P == TILE { TILE } else { 2.min(P - p) };
        for q in 0..T::PARTS {
            // SAFETY: `n` positions from `p` on are of the tile.
            unsafe {
                let (x, acc) = (x.add(p * LANES), acc.add(p).cast::<f64>());
                match n {
                    1 => T::scaled_part::<R, P, 1>(scratch, x, groups, q, acc),
                    2 => T::scaled_part::<R, P, 2>(scratch, x, groups, q, acc),
                    _ => T::scaled_part::<R, P, TILE>(scratch, x, groups, q, acc),
                }
            }
        }
        p += n;
    }
}

/// Part `q` of `N` positions of a tile of `P`.
///
/// # Safety
/// As [`mxfp4_tile`], `x` and `acc` being those of the first position.
#[inline(always)]
pub(super) unsafe fn scaled_part<T: Tile, const R: usize, const P: usize, const N: usize>(
    scratch: &Scratch<T, R>,
    x: *const f64,
    groups: usize,
    q: usize,
    acc: *mut f64,
) {
    let offset = q * (LANES / T::PARTS);
    // SAFETY: `g < groups`, `p < N`, `r < R`; see above for what is valid.
    unsafe {
        let (x, acc) = (x.add(offset), acc.add(offset));
        let mut sums = [[T::Part::load(acc); N]; R];
        for r in 0..R {
            for p in 0..N {
                sums[r][p] = T::Part::load(acc.add((r * POSITIONS + p) * LANES));
            }
        }
        for g in 0..groups {
            for p in 0..N {
                let x0 = T::Part::load(x.add((2 * g * P + p) * LANES));
                let x1 = T::Part::load(x.add(((2 * g + 1) * P + p) * LANES));
                for r in 0..R {
                    let v = scratch[r].as_ptr().cast::<f64>().add(2 * g * LANES + offset);
                    let (v0, v1) = (T::Part::load(v), T::Part::load(v.add(LANES)));
                    sums[r][p] = v1.mul_add(x1, v0.mul(x0)).add(sums[r][p]);
                }
            }
        }
        for r in 0..R {
            for p in 0..N {
                sums[r][p].store(acc.add((r * POSITIONS + p) * LANES));
            }
        }
    }
}
