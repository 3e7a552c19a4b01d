//! E2M1 weights in 256-bit registers.
//!
//! The upper sixteen bits of an f64 hold all of a scaled E2M1 value, in two bytes, and a byte is what
//! AVX2 can look up. The two tables of a scale byte are 32 bytes. A permutation puts codes in such an
//! order that the words come out as a matrix of four by four, in qwords: its last column is one
//! `and`, the first one a shift, and only two need a shuffle. Codes of the same place in a register
//! are four elements apart, so the vectors are in the order of the panel.

use super::V;
use crate::backend::lanes::{Lanes, opaque};
use crate::backend::{LANES, Panel, tiles};
use crate::math::round;
use crate::view::{GROUP, Mxfp4Matrix};
use core::arch::x86_64::*;

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

/// What turns codes into weights, held in registers.
///
/// The masks are opaque, and so are the bytes of a group: a blend with zeros in place of an `and`, and a load and
/// a permutation in place of a broadcast from memory, need the two pipes that shuffle, which are what this
/// waits for: a product with one position takes an eighth longer.
#[derive(Clone, Copy)]
pub(super) struct Decoder {
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
    pub(super) unsafe fn new() -> Self {
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
    pub(super) unsafe fn decode(&self, p: *const u8, scale: u8) -> [V; 2] {
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
pub(super) unsafe fn matmul(w: Mxfp4Matrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise; rows exist by the loop's bounds.
    unsafe {
        if x.positions > 1 {
            return tiles::matmul_mxfp4::<V>(w, x, out);
        }
        for (r, out) in out.iter_mut().enumerate() {
            *out = round(Lanes::fold(one(w, r, x.data)));
        }
    }
}

/// The lanes of one row with one position.
///
/// # Safety
/// AVX2 and FMA; the row exists and `x` is as long.
#[target_feature(enable = "avx2,fma")]
unsafe fn one(w: Mxfp4Matrix<'_>, row: usize, x: &[f64]) -> V {
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
