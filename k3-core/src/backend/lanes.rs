//! The SIMD kernels, written once over [`Lanes`]: sixteen f64 in whatever registers a CPU has.
//!
//! ```text
//! product of a bf16 matrix and one position, for 48 rows at a time (for several positions see `tiles.rs`;
//! MXFP4 rows are walked whole, group of 32 by group):
//!   for each block of columns:              its part of the panel stays in cache, see `cache.rs`
//!     for each group of R rows:             load the group's lanes, or zeros
//!       for each 16 columns:                decode weights, add R products
//!       park the lanes
//!   fold the lanes of every row, round
//! ```
//!
//! # Why the bits are those of `scalar.rs`
//!
//! * The product of two f32 values (and of an f32 and a weight) is exact in f64, so a fused
//!   multiply-add rounds where the unfused one does, at the addition. Only the order of the additions
//!   matters. Storing lanes and loading them again is exact, so blocking columns does not change it.
//! * Accumulators start at +0 and therefore never become -0: adding a product of padding zeros changes
//!   nothing. A tail is copied to a zeroed buffer and never read past its end, where a NaN of the
//!   next row could lie.
//! * E8M0 scales are built as f64 bits: 2^-127 is subnormal in f32. Multiplying weights by the scale
//!   first (several positions) commutes with the rounding of `p`, because no f64 over- or underflows:
//!   |scale * v * x| is below 2^(127 + 3 + 128) and above 2^(-127 - 1 - 149). With a scale of 0 and an
//!   infinite `x` both orders give NaN.
//! * Across outputs there is one accumulator for each, in the order of the definition.
//!
//! # Prefetch
//!
//! Rows of a matrix are too short for the hardware to follow once several are walked together, so a
//! group asks for the next group's bytes at its own column. A prefetch past the end of the matrix is
//! only a hint, and its address is computed without leaving the rules for pointers (`wrapping_add`).

use super::{Backend, KdaStep, LANES, cache};
use crate::math::round;
use crate::view::{Bf16Matrix, F32Matrix, GROUP, Mxfp4Matrix};

/// Sixteen f64 accumulators.
///
/// # Safety
/// Every method needs the CPU features of the type it is implemented for. Pointers must be valid for
/// the sixteen elements that are read or written there; none needs alignment.
pub(super) trait Lanes: Copy {
    /// Sixteen times +0.
    unsafe fn zero() -> Self;
    /// Sixteen times `x`.
    unsafe fn splat(x: f64) -> Self;
    /// Sixteen f64.
    unsafe fn load(p: *const f64) -> Self;
    /// Sixteen f32, widened.
    unsafe fn load_f32(p: *const f32) -> Self;
    /// Rounds to f32 and writes sixteen.
    unsafe fn store_f32(self, p: *mut f32);
    /// Rounds to f32 and widens again.
    unsafe fn rounded(self) -> Self;
    /// Sixteen bf16 (32 bytes), in order.
    unsafe fn load_bf16(p: *const u8) -> Self;
    /// Sixteen bf16 (32 bytes): the eight of even index, then the eight of odd index.
    unsafe fn load_bf16_split(p: *const u8) -> Self;
    /// Sixteen E2M1 codes (8 bytes), in order, low nibble first.
    unsafe fn load_e2m1(p: *const u8) -> Self;
    /// `self + b`.
    unsafe fn add(self, b: Self) -> Self;
    /// `self * b`.
    unsafe fn mul(self, b: Self) -> Self;
    /// `self * b + c` where the product is exact, so fused or not is one.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// The tree of the contract over lanes in order.
    unsafe fn fold(self) -> f64;
    /// The tree of the contract over lanes in the order of [`Lanes::load_bf16_split`].
    unsafe fn fold_split(self) -> f64;
    /// Asks for the cache line of `p`, which may be any address.
    unsafe fn prefetch(p: *const u8);
}

/// `x`, of which the compiler then knows nothing.
///
/// It makes a blend with zeros of an `and` with a constant, and the pipes that blend are those that widen and
/// shuffle.
///
/// # Safety
/// AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn opaque(mut x: core::arch::x86_64::__m256i) -> core::arch::x86_64::__m256i {
    // SAFETY: no instruction at all.
    unsafe {
        core::arch::asm!("/* {0} */", inout(ymm_reg) x, options(pure, nomem, nostack, preserves_flags));
    }
    x
}

/// 2^(byte - 127) for every scale byte; 0 for the NaN of E8M0.
pub(super) static SCALES: [f64; 256] = {
    let mut scales = [0.0; 256];
    let mut bits = (1023 - 127) << 52;
    let mut byte = 0;
    while byte < 255 {
        scales[byte] = f64::from_bits(bits);
        bits += 1 << 52;
        byte += 1;
    }
    scales
};

/// The first `n <= 16` f32 at `p`, then zeros.
///
/// # Safety
/// The features of `L`; `p` is valid for `n` elements.
#[inline(always)]
unsafe fn load_part<L: Lanes>(p: *const f32, n: usize) -> L {
    let mut part = [0.0f32; LANES];
    // SAFETY: the caller's promise; the buffer holds sixteen.
    unsafe {
        core::ptr::copy_nonoverlapping(p, part.as_mut_ptr(), n.min(LANES));
        L::load_f32(part.as_ptr())
    }
}

/// Rounds to f32 and writes the first `n <= 16` to `p`.
///
/// # Safety
/// The features of `L`; `p` is valid for writing `n` elements.
#[inline(always)]
unsafe fn store_part<L: Lanes>(lanes: L, p: *mut f32, n: usize) {
    let mut part = [0.0f32; LANES];
    // SAFETY: the caller's promise; the buffer holds sixteen.
    unsafe {
        lanes.store_f32(part.as_mut_ptr());
        core::ptr::copy_nonoverlapping(part.as_ptr(), p, n.min(LANES));
    }
}

/// Lanes of the products of `R` rows with `x`: rows start at `rows`, `stride` elements apart.
///
/// # Safety
/// The features of `L`; every row is valid for `x.len()` elements.
#[inline(always)]
unsafe fn dot_rows<L: Lanes, const R: usize>(rows: *const f32, stride: usize, x: &[f32]) -> [L; R] {
    let whole = x.len() / LANES * LANES;
    // SAFETY: `i + 16 <= whole <= x.len()` in the loop, `whole + n == x.len()` after it.
    unsafe {
        let mut acc = [L::zero(); R];
        let mut i = 0;
        while i < whole {
            let x = L::load_f32(x.as_ptr().add(i));
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = L::load_f32(rows.add(r * stride + i)).mul_add(x, *acc);
            }
            i += LANES;
        }
        let n = x.len() - whole;
        if n > 0 {
            let x = load_part::<L>(x.as_ptr().add(whole), n);
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = load_part::<L>(rows.add(r * stride + whole), n).mul_add(x, *acc);
            }
        }
        acc
    }
}

/// # Safety
/// The features of `L`; equal lengths.
#[inline(always)]
pub(super) unsafe fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { round(dot_rows::<L, 1>(a.as_ptr(), 0, b)[0].fold()) }
}

/// # Safety
/// The features of `L`.
#[inline(always)]
pub(super) unsafe fn sum_squares<L: Lanes>(x: &[f32]) -> f64 {
    // SAFETY: the caller's promise; a vector is as long as itself.
    unsafe { dot_rows::<L, 1>(x.as_ptr(), 0, x)[0].fold() }
}

/// # Safety
/// The features of `L`.
#[inline(always)]
pub(super) unsafe fn sum<L: Lanes>(x: &[f32]) -> f64 {
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    // SAFETY: a chunk has sixteen elements, the rest as many as it says.
    unsafe {
        let mut acc = L::zero();
        for chunk in chunks {
            acc = L::load_f32(chunk.as_ptr()).add(acc);
        }
        load_part::<L>(rest.as_ptr(), rest.len()).add(acc).fold()
    }
}

/// # Safety
/// The features of `L`; `x` is a row long, `out` a column.
#[inline(always)]
pub(super) unsafe fn matmul_f32<L: Lanes, const R: usize>(w: F32Matrix<'_>, x: &[f32], out: &mut [f32]) {
    let cols = w.cols();
    let mut r = 0;
    // SAFETY: rows `r..r + R` (`r..r + 1`) exist by the loop bounds and are `cols` long, as is `x`.
    unsafe {
        while r + R <= out.len() {
            let acc = dot_rows::<L, R>(w.data().as_ptr().add(r * cols), cols, x);
            for (acc, out) in acc.iter().zip(&mut out[r..]) {
                *out = round(acc.fold());
            }
            r += R;
        }
        while r < out.len() {
            out[r] = round(dot_rows::<L, 1>(w.data().as_ptr().add(r * cols), cols, x)[0].fold());
            r += 1;
        }
    }
}

/// Rows whose lanes are parked together.
const ROWS: usize = 48;

/// Blocks `first..end` of sixteen columns of `R` bf16 rows, `stride` bytes apart from `w` on; asks for the same
/// columns of as many rows that are `ahead` bytes further on.
///
/// # Safety
/// The features of `L`; the rows have `32 * blocks` bytes, `x` has `16 * blocks` elements.
#[inline(always)]
unsafe fn bf16_group<L: Lanes, const R: usize>(
    w: *const u8,
    (stride, ahead): (usize, usize),
    x: *const f64,
    blocks: usize,
    acc: &mut [L],
) {
    // SAFETY: `b < blocks` and `r < R` everywhere; see above for what is valid.
    unsafe {
        let mut sums = [L::zero(); R];
        sums.copy_from_slice(acc);
        let mut b = 0;
        while b < blocks {
            let n = if b + 2 <= blocks { 2 } else { 1 };
            for r in 0..R {
                L::prefetch(w.wrapping_add(r * stride + b * 32 + ahead));
            }
            for b in b..b + n {
                let x = L::load(x.add(b * LANES));
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = L::load_bf16_split(w.add(r * stride + b * 32)).mul_add(x, *sum);
                }
            }
            b += n;
        }
        acc.copy_from_slice(&sums);
    }
}

/// The columns `first..first + len` of all rows of `acc`, from `row` on.
///
/// # Safety
/// The features of `L`; the rows and columns exist; `x` is the panel.
#[inline(always)]
unsafe fn bf16_rows<L: Lanes, const R: usize>(
    w: Bf16Matrix<'_>,
    row: usize,
    (first, len): (usize, usize),
    x: &[f64],
    acc: &mut [L],
) {
    let stride = w.cols() * 2;
    let (blocks, tail) = (len / LANES, len % LANES);
    let mut r = 0;
    while r < acc.len() {
        let n = if r + R <= acc.len() { R } else { 1 };
        let group = &mut acc[r..r + n];
        // SAFETY: the group's rows and the columns exist; the panel is padded to whole blocks. A tail
        // is copied, with zeros behind it, so that nothing past the row's end is read.
        unsafe {
            let start = w.bytes().as_ptr().add((row + r) * stride + first * 2);
            let x = x.as_ptr().add(first);
            if n == R {
                bf16_group::<L, R>(start, (stride, n * stride), x, blocks, group);
            } else {
                bf16_group::<L, 1>(start, (stride, n * stride), x, blocks, group);
            }
            if tail > 0 {
                let x = x.add(blocks * LANES);
                for (k, acc) in group.iter_mut().enumerate() {
                    let mut padded = [0u8; 2 * LANES];
                    let from = start.add(k * stride + blocks * 2 * LANES);
                    core::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), tail * 2);
                    bf16_group::<L, 1>(padded.as_ptr(), (0, 0), x, 1, core::slice::from_mut(acc));
                }
            }
        }
        r += n;
    }
}

/// The product with one position.
///
/// # Safety
/// The features of `L`; the shapes agree.
#[inline(always)]
pub(super) unsafe fn bf16_one<L: Lanes, const R: usize>(w: Bf16Matrix<'_>, x: &[f64], out: &mut [f32]) {
    let (cols, columns) = (w.cols(), cache::columns());
    for (chunk, out) in out.chunks_mut(ROWS).enumerate() {
        // SAFETY: rows and columns exist by the bounds of the loops.
        unsafe {
            let mut acc = [L::zero(); ROWS];
            let acc = &mut acc[..out.len()];
            for first in (0..cols).step_by(columns) {
                bf16_rows::<L, R>(w, chunk * ROWS, (first, columns.min(cols - first)), x, acc);
            }
            for (acc, out) in acc.iter().zip(out) {
                *out = round(acc.fold_split());
            }
        }
    }
}

/// The product with one position.
///
/// # Safety
/// The features of `L`; the shapes agree.
#[inline(always)]
pub(super) unsafe fn mxfp4_one<L: Lanes, const R: usize>(w: Mxfp4Matrix<'_>, x: &[f64], out: &mut [f32]) {
    let mut r = 0;
    // SAFETY: the rows exist by the loop bounds.
    unsafe {
        while r + R <= out.len() {
            mxfp4_group::<L, R>(w, r, x, &mut out[r..r + R]);
            r += R;
        }
        while r < out.len() {
            mxfp4_group::<L, 1>(w, r, x, &mut out[r..r + 1]);
            r += 1;
        }
    }
}

/// `R` MXFP4 rows with one position.
///
/// # Safety
/// The features of `L`; the rows `row..row + R` exist, `x` is as long as a row.
#[inline(always)]
unsafe fn mxfp4_group<L: Lanes, const R: usize>(w: Mxfp4Matrix<'_>, row: usize, x: &[f64], out: &mut [f32]) {
    /// Groups whose nibbles fill a cache line.
    const LINE: usize = 64 / (GROUP / 2);
    let (stride, groups) = (w.cols() / 2, w.cols() / GROUP);
    // SAFETY: `g < groups` and `r < R`: 16 bytes, one scale and 32 elements of `x` for each group.
    unsafe {
        let packed = w.packed().as_ptr().add(row * stride);
        let scales = w.scales().as_ptr().add(row * groups);
        let mut acc = [L::zero(); R];
        let mut g = 0;
        while g < groups {
            let n = if g + LINE <= groups { LINE } else { 1 };
            for r in 0..R {
                L::prefetch(packed.wrapping_add((R + r) * stride + g * (GROUP / 2)));
            }
            for g in g..g + n {
                let x0 = L::load(x.as_ptr().add(g * GROUP));
                let x1 = L::load(x.as_ptr().add(g * GROUP + LANES));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let bytes = packed.add(r * stride + g * (GROUP / 2));
                    let scale = L::splat(SCALES[usize::from(*scales.add(r * groups + g))]);
                    let p = L::load_e2m1(bytes.add(8)).mul_add(x1, L::load_e2m1(bytes).mul(x0));
                    *acc = scale.mul_add(p, *acc);
                }
            }
            g += n;
        }
        for (acc, out) in acc.iter().zip(out) {
            *out = round(acc.fold());
        }
    }
}

/// Rows that are summed with coefficients.
trait Source: Copy {
    /// The `n <= 16` elements of row `j` from `e` on.
    ///
    /// # Safety
    /// The features of `L`; the elements exist.
    unsafe fn at<L: Lanes>(self, j: usize, e: usize, n: usize) -> L;
}

/// f32 rows, `stride` elements apart.
#[derive(Clone, Copy)]
struct F32Rows<'a>(&'a [f32], usize);

impl Source for F32Rows<'_> {
    #[inline(always)]
    unsafe fn at<L: Lanes>(self, j: usize, e: usize, n: usize) -> L {
        // SAFETY: the caller's promise.
        unsafe {
            let p = self.0.as_ptr().add(j * self.1 + e);
            if n == LANES { L::load_f32(p) } else { load_part(p, n) }
        }
    }
}

impl Source for Bf16Matrix<'_> {
    #[inline(always)]
    unsafe fn at<L: Lanes>(self, j: usize, e: usize, n: usize) -> L {
        // SAFETY: the caller's promise; the buffer holds sixteen.
        unsafe {
            let p = self.bytes().as_ptr().add((j * self.cols() + e) * 2);
            if n == LANES {
                return L::load_bf16(p);
            }
            let mut part = [0u8; 2 * LANES];
            core::ptr::copy_nonoverlapping(p, part.as_mut_ptr(), 2 * n);
            L::load_bf16(part.as_ptr())
        }
    }
}

/// # Safety
/// The features of `L`; `coef.len()` rows as long as `out`.
#[inline(always)]
unsafe fn sum_rows<L: Lanes, const C: usize>(coef: &[f32], rows: impl Source, out: &mut [f32]) {
    let mut e = 0;
    // SAFETY: `e + 16 * C <= out.len()` in the first loop; `e + n <= out.len()` in the second.
    unsafe {
        while e + LANES * C <= out.len() {
            let mut acc = [L::zero(); C];
            for (j, &c) in coef.iter().enumerate() {
                let c = L::splat(f64::from(c));
                for (i, acc) in acc.iter_mut().enumerate() {
                    *acc = rows.at::<L>(j, e + i * LANES, LANES).mul_add(c, *acc);
                }
            }
            for acc in acc {
                acc.store_f32(out.as_mut_ptr().add(e));
                e += LANES;
            }
        }
        while e < out.len() {
            let n = LANES.min(out.len() - e);
            let mut acc = L::zero();
            for (j, &c) in coef.iter().enumerate() {
                acc = rows.at::<L>(j, e, n).mul_add(L::splat(f64::from(c)), acc);
            }
            store_part(acc, out.as_mut_ptr().add(e), n);
            e += n;
        }
    }
}

/// # Safety
/// The features of `L`; `coef.len()` rows as long as `out`, `stride` apart.
#[inline(always)]
pub(super) unsafe fn sum_rows_f32<L: Lanes, const C: usize>(
    coef: &[f32],
    rows: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe { sum_rows::<L, C>(coef, F32Rows(rows, stride), out) }
}

/// # Safety
/// The features of `L`; as many coefficients as rows, `out` is a row long.
#[inline(always)]
pub(super) unsafe fn sum_rows_bf16<L: Lanes, const C: usize>(coef: &[f32], rows: Bf16Matrix<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { sum_rows::<L, C>(coef, rows, out) }
}

/// # Safety
/// The features of `L`; `s` is `[dk, dv]` and the vectors have the lengths of the head.
#[inline(always)]
pub(super) unsafe fn kda_step<L: Lanes, const C: usize>(s: &mut [f32], step: &KdaStep<'_>, o: &mut [f32]) {
    let dv = o.len();
    let mut e = 0;
    // SAFETY: `e + 16 * C <= dv` in the first loop, `e + n <= dv` with `n <= 16` in the second.
    unsafe {
        while e + LANES * C <= dv {
            kda_columns::<L, C>(s, step, &mut o[e..e + LANES * C], e, dv);
            e += LANES * C;
        }
        while e < dv {
            let n = LANES.min(dv - e);
            kda_columns::<L, 1>(s, step, &mut o[e..e + n], e, dv);
            e += n;
        }
    }
}

/// The columns from `e` on, as many as `o` has.
///
/// # Safety
/// The features of `L`; `o` has `16 * C` elements, or up to sixteen if `C` is 1; the columns exist.
#[inline(always)]
unsafe fn kda_columns<L: Lanes, const C: usize>(s: &mut [f32], step: &KdaStep<'_>, o: &mut [f32], e: usize, dv: usize) {
    let whole = o.len() == LANES * C;
    let n = o.len();
    // SAFETY: `i` is a row of the state and `e + n <= dv`, so the columns lie inside the row.
    unsafe {
        let s = s.as_mut_ptr().add(e);
        let mut sums = [L::zero(); C];
        for (i, (&alpha, &k)) in step.alpha.iter().zip(step.k).enumerate() {
            let (alpha, k) = (L::splat(f64::from(alpha)), L::splat(f64::from(k)));
            for (c, sum) in sums.iter_mut().enumerate() {
                let p = s.add(i * dv + c * LANES);
                // The product is exact in f64, so this is the f32 product.
                let decayed = if whole { L::load_f32(p) } else { load_part(p, n) }.mul(alpha).rounded();
                if whole {
                    decayed.store_f32(p);
                } else {
                    store_part(decayed, p, n);
                }
                *sum = decayed.mul_add(k, *sum);
            }
        }
        let mut delta = [[0.0f32; LANES]; C];
        for (sum, delta) in sums.iter().zip(&mut delta) {
            sum.store_f32(delta.as_mut_ptr());
        }
        for (delta, &v) in delta.as_flattened_mut().iter_mut().zip(&step.v[e..e + n]) {
            *delta = step.beta * (v - *delta);
        }
        let mut deltas = [L::zero(); C];
        for (lanes, delta) in deltas.iter_mut().zip(&delta) {
            *lanes = L::load_f32(delta.as_ptr());
        }
        sums = [L::zero(); C];
        for (i, (&q, &k)) in step.q.iter().zip(step.k).enumerate() {
            let (q, k) = (L::splat(f64::from(q)), L::splat(f64::from(k)));
            for (c, (sum, delta)) in sums.iter_mut().zip(&deltas).enumerate() {
                let p = s.add(i * dv + c * LANES);
                let old: L = if whole { L::load_f32(p) } else { load_part(p, n) };
                let new = k.mul_add(*delta, old).rounded();
                if whole {
                    new.store_f32(p);
                } else {
                    store_part(new, p, n);
                }
                *sum = new.mul_add(q, *sum);
            }
        }
        for (c, sum) in sums.iter().enumerate() {
            let p = o.as_mut_ptr().add(c * LANES);
            if whole { sum.store_f32(p) } else { store_part(*sum, p, n) }
        }
    }
}

/// `N` chains, which are as many registers as hide the latency of a product.
///
/// # Safety
/// The features of `L`.
#[inline(always)]
pub(super) unsafe fn multiply_chain<L: Lanes, const N: usize>(rounds: usize) -> f64 {
    // SAFETY: the caller's promise.
    unsafe {
        let factor = L::splat(core::hint::black_box(0.5));
        let mut sums = [L::splat(core::hint::black_box(1.0)); N];
        for _ in 0..rounds * Backend::CHAIN_PRODUCTS / (N * LANES) {
            for sum in &mut sums {
                *sum = sum.mul_add(factor, factor);
            }
        }
        sums.iter().map(|sum| sum.fold()).sum()
    }
}

/// The functions of a backend: every kernel for lanes of one type under the features it needs.
///
/// Functions of single elements are the bodies of `scalar.rs`, compiled for wider registers. The
/// products with a matrix are named by the backend, which may take those of any whose features it has.
macro_rules! instantiate {
    ($name:literal, $features:literal, $lanes:ty, bf16 $bf16:expr, coded $coded:expr, mxfp4 $mxfp4:expr, columns $c:literal,
     chains $n:literal) => {
        pub(super) static TABLE: super::Table = super::Table {
            name: $name,
            dot,
            sum_squares,
            sum,
            matmul_bf16,
            matmul_coded,
            matmul_mxfp4,
            matmul_f32,
            sum_rows_f32,
            sum_rows_bf16,
            kda_step,
            conv_silu,
            situ,
            sigmoid,
            mul_sigmoid,
            exp_sub,
            kda_alpha,
            decode_bf16,
            multiply_chain,
        };
        $crate::backend::lanes::instantiate! { @vector $features
            dot(a: &[f32], b: &[f32]) -> f32 = lanes::dot::<$lanes>;
            sum_squares(x: &[f32]) -> f64 = lanes::sum_squares::<$lanes>;
            sum(x: &[f32]) -> f64 = lanes::sum::<$lanes>;
            matmul_bf16(w: Bf16Matrix<'_>, x: &Panel<'_>, out: &mut [f32]) -> () = $bf16;
            matmul_coded(w: CodedMatrix<'_>, x: &Panel<'_>, out: &mut [f32]) -> () = $coded;
            matmul_mxfp4(w: Mxfp4Matrix<'_>, x: &Panel<'_>, out: &mut [f32]) -> () = $mxfp4;
            matmul_f32(w: F32Matrix<'_>, x: &[f32], out: &mut [f32]) -> () = lanes::matmul_f32::<$lanes, 2>;
            sum_rows_f32(coef: &[f32], rows: &[f32], stride: usize, out: &mut [f32]) -> () = lanes::sum_rows_f32::<$lanes, $c>;
            sum_rows_bf16(coef: &[f32], rows: Bf16Matrix<'_>, out: &mut [f32]) -> () = lanes::sum_rows_bf16::<$lanes, $c>;
            kda_step(s: &mut [f32], step: &KdaStep<'_>, o: &mut [f32]) -> () = lanes::kda_step::<$lanes, $c>;
            multiply_chain(rounds: usize) -> f64 = lanes::multiply_chain::<$lanes, $n>;
        }
        $crate::backend::lanes::instantiate! { @element $features
            conv_silu(taps: &[f32], window: &[f32], out: &mut [f32]);
            situ(gate: &mut [f32], up: &[f32], b1: f32, b2: f32);
            sigmoid(x: &mut [f32]);
            mul_sigmoid(x: &mut [f32], gate: &[f32]);
            exp_sub(x: &mut [f32], max: f32);
            kda_alpha(z: &[f32], dt_bias: &[f32], rate: f32, lower: f32, out: &mut [f32]);
            decode_bf16(bytes: &[u8], out: &mut [f32]);
        }
    };
    (@vector $features:literal
     $($function:ident($($arg:ident: $type:ty),*) -> $result:ty = $body:expr;)*) => {$(
        /// # Safety
        /// The lengths that the method of the same name checks.
        #[target_feature(enable = $features)]
        unsafe fn $function($($arg: $type),*) -> $result {
            // SAFETY: this function has the features of its lanes; the lengths are the caller's promise.
            unsafe { $body($($arg),*) }
        }
    )*};
    (@element $features:literal $($function:ident($($arg:ident: $type:ty),*);)*) => {$(
        #[target_feature(enable = $features)]
        fn $function($($arg: $type),*) {
            $crate::backend::scalar::$function($($arg),*);
        }
    )*};
}
pub(super) use instantiate;
