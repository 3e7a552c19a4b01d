//! Products with a [`CodedMatrix`], which is never expanded to memory.
//!
//! ```text
//! one position: for 48 rows at a time, for each block of columns:
//!   for each group of R rows:           load the group's lanes, or zeros
//!     for each 32 columns without a misfit: codes -> top bytes -> weights in registers, multiply
//!     32 columns with a misfit, or with less than 32: weights to a buffer, mend them there, multiply
//!     park the lanes
//!
//! several: see `tiles.rs`; the weights of a group of rows go to a buffer in the first-level cache, are
//!   mended there, and are multiplied with all positions
//! ```
//!
//! Lanes receive the same products in the same order as from the matrix before it was coded, so the
//! bits are those of [`super::lanes::bf16_one`]; see there for the rest of the argument. Only
//! [`Decode`] knows about registers; a misfit costs its group of 32 a detour and nothing else.

use super::lanes::Lanes;
use super::{LANES, cache};
pub(super) use crate::coded::GROUP;
use crate::coded::{CODES, CodedMatrix, GROUP_BYTES};
use crate::math::round;

/// Bytes of a decoded group.
pub(super) const DECODED: usize = 2 * GROUP;
// The panel's padding of a tail is that of both codings.
const _: () = assert!(GROUP == crate::view::GROUP);
/// Rows whose lanes are parked together.
const ROWS: usize = 48;

/// Lanes that can be filled from codes.
///
/// # Safety
/// As of [`Lanes`]: the CPU features of the type. `group` is valid for the bytes of a group, `table`
/// for 16 bytes, `out` for 64.
pub(super) trait Decode: Lanes {
    /// The weights of a group, as two of [`Lanes::load_bf16_split`] would load them.
    unsafe fn load_coded_split(group: *const u8, table: *const u8) -> [Self; 2];
    /// Writes the weights of a group in order, two bytes each.
    unsafe fn decode(group: *const u8, table: *const u8, out: *mut u8);
}

/// The words of a group in order, eight in each register: what the types of x86 share.
///
/// # Safety
/// SSSE3; the pointers as for [`Decode`].
#[inline(always)]
pub(super) unsafe fn words(group: *const u8, table: *const u8) -> [core::arch::x86_64::__m128i; 4] {
    use core::arch::x86_64::*;
    // SAFETY: the caller's promise: 48 bytes of a group, 16 of a table.
    unsafe {
        let (codes, nibble) = (_mm_loadu_si128(group.cast()), _mm_set1_epi8(15));
        let table = _mm_loadu_si128(table.cast());
        let first = _mm_shuffle_epi8(table, _mm_and_si128(codes, nibble));
        let second = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16::<4>(codes), nibble));
        let (a, b) = (_mm_loadu_si128(group.add(CODES).cast()), _mm_loadu_si128(group.add(2 * CODES).cast()));
        [
            _mm_unpacklo_epi8(a, first),
            _mm_unpackhi_epi8(a, first),
            _mm_unpacklo_epi8(b, second),
            _mm_unpackhi_epi8(b, second),
        ]
    }
}

/// [`Decode::decode`] for the types of x86.
///
/// # Safety
/// SSSE3; the pointers as for [`Decode`].
#[inline(always)]
pub(super) unsafe fn store_words(group: *const u8, table: *const u8, out: *mut u8) {
    // SAFETY: the caller's promise: `out` has room for four times sixteen bytes.
    unsafe {
        for (i, words) in words(group, table).into_iter().enumerate() {
            core::arch::x86_64::_mm_storeu_si128(out.add(16 * i).cast(), words);
        }
    }
}

/// The product with one position.
///
/// # Safety
/// The features of `L`; the shapes agree.
#[inline(always)]
pub(super) unsafe fn coded_one<L: Decode, const R: usize>(w: CodedMatrix<'_>, x: &[f64], out: &mut [f32]) {
    let (all, columns) = (w.groups_per_row(), cache::columns() / GROUP);
    for (chunk, out) in out.chunks_mut(ROWS).enumerate() {
        let row = chunk * ROWS;
        // SAFETY: rows, groups and columns exist by the bounds of the loops; the panel is padded to
        // whole groups.
        unsafe {
            let mut acc = [L::zero(); ROWS];
            let acc = &mut acc[..out.len()];
            for first in (0..all).step_by(columns) {
                let span = (first, columns.min(all - first));
                let mut r = 0;
                while r + R <= acc.len() {
                    one_group::<L, R>(w, row + r, span, x, &mut acc[r..r + R]);
                    r += R;
                }
                while r < acc.len() {
                    one_group::<L, 1>(w, row + r, span, x, &mut acc[r..r + 1]);
                    r += 1;
                }
            }
            for (acc, out) in acc.iter().zip(out) {
                *out = round(acc.fold_split());
            }
        }
    }
}

/// The groups `first..first + len` of the rows `row..row + R` with one position.
///
/// # Safety
/// The features of `L`; the rows and groups exist, `x` is as long as a row of groups, `acc` has `R`.
#[inline(always)]
unsafe fn one_group<L: Decode, const R: usize>(
    w: CodedMatrix<'_>,
    row: usize,
    (first, len): (usize, usize),
    x: &[f64],
    acc: &mut [L],
) {
    let stride = w.groups_per_row() * GROUP_BYTES;
    let (end, whole) = (first + len, w.cols() / GROUP);
    let table = w.table().as_ptr();
    // SAFETY: `g < end` everywhere: the group exists in each row, and 32 elements of `x` with it.
    unsafe {
        let rows = w.groups().as_ptr().cast::<u8>().add(row * stride);
        let mut sums = [L::zero(); R];
        sums.copy_from_slice(acc);
        let mut misfits = core::array::from_fn::<_, R, _>(|r| w.misfits_from(row + r, first * GROUP));
        let mut g = first;
        loop {
            // The next group that is not as its codes say, in any of the rows.
            let stop = misfits.iter().map(|m| m.next() / GROUP).fold(whole, usize::min).min(end);
            while g < stop {
                let (x0, x1) = (L::load(x.as_ptr().add(g * GROUP)), L::load(x.as_ptr().add(g * GROUP + LANES)));
                for (r, sum) in sums.iter_mut().enumerate() {
                    let group = rows.add(r * stride + g * GROUP_BYTES);
                    L::prefetch(group.wrapping_add(R * stride));
                    let [a, b] = L::load_coded_split(group, table);
                    *sum = b.mul_add(x1, a.mul_add(x0, *sum));
                }
                g += 1;
            }
            if g == end {
                break;
            }
            let (x0, x1) = (L::load(x.as_ptr().add(g * GROUP)), L::load(x.as_ptr().add(g * GROUP + LANES)));
            for (r, (sum, misfits)) in sums.iter_mut().zip(&mut misfits).enumerate() {
                let mut decoded = [0u8; DECODED];
                L::decode(rows.add(r * stride + g * GROUP_BYTES), table, decoded.as_mut_ptr());
                mend(&mut decoded, g * GROUP, w.cols(), misfits);
                let (a, b) =
                    (L::load_bf16_split(decoded.as_ptr()), L::load_bf16_split(decoded.as_ptr().add(DECODED / 2)));
                *sum = b.mul_add(x1, a.mul_add(x0, *sum));
            }
            g += 1;
        }
        acc.copy_from_slice(&sums);
    }
}

/// Puts the misfits of a row among decoded weights, which start at column `start`, and zeros behind
/// the last column.
#[inline(always)]
fn mend(decoded: &mut [u8], start: usize, cols: usize, misfits: &mut crate::coded::Misfits<'_>) {
    let (weights, _) = decoded.as_chunks_mut::<2>();
    while let Some(weight) = misfits.next().checked_sub(start).and_then(|i| weights.get_mut(i)) {
        *weight = misfits.take();
    }
    if cols - start < weights.len() {
        weights[cols - start..].fill([0; 2]);
    }
}

/// Writes the weights of `row` from group `first` on, as many groups as `decoded` has room for, with
/// zeros behind the last column, and asks for those of the row that is `ahead` rows further on.
///
/// # Safety
/// The features of `L`; the row and the groups exist.
#[inline(always)]
pub(super) unsafe fn decode_row<L: Decode>(
    w: CodedMatrix<'_>,
    row: usize,
    first: usize,
    ahead: usize,
    decoded: &mut [u8],
) {
    let stride = w.groups_per_row() * GROUP_BYTES;
    let groups = w.groups().as_ptr().cast::<u8>().wrapping_add(row * stride + first * GROUP_BYTES);
    for (g, decoded) in decoded.chunks_exact_mut(DECODED).enumerate() {
        // SAFETY: the caller's promise: the group exists. The buffer has room for its weights.
        unsafe {
            let group = groups.add(g * GROUP_BYTES);
            if ahead > 0 {
                L::prefetch(group.wrapping_add(ahead * stride));
            }
            L::decode(group, w.table().as_ptr(), decoded.as_mut_ptr());
        }
    }
    mend(decoded, first * GROUP, w.cols(), &mut w.misfits_from(row, first * GROUP));
}
