//! Sixteen f64 in four 256-bit registers: x86-64 with AVX2 and FMA.

mod mxfp4;

use super::coded::{self, Decode};
use super::lanes::{self, Lanes, instantiate};
use super::tiles::{Part, Tile};
use super::{KdaStep, Panel, tiles};
use crate::coded::CodedMatrix;
use crate::view::{Bf16Matrix, F32Matrix, Mxfp4Matrix};
use core::arch::x86_64::*;

cpufeatures::new!(features, "avx2", "fma");

/// Whether the CPU has the features of [`TABLE`] and the operating system keeps their registers.
pub(super) fn detected() -> bool {
    features::get()
}

instantiate!("avx2", "avx2,fma", V, bf16 tiles::matmul_bf16::<V, 2>,
    coded tiles::matmul_coded::<V, 2>, mxfp4 mxfp4::matmul, columns 2, chains 3);

#[derive(Clone, Copy)]
#[repr(transparent)]
struct V([__m256d; 4]);

/// High and low byte of the upper sixteen bits of the f64 of each E2M1 code; the rest is zero.
const E2M1_HIGH: [u8; 16] =
    [0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0];
const E2M1_LOW: [u8; 16] = [0, 0xe0, 0xf0, 0xf8, 0x00, 0x08, 0x10, 0x18, 0, 0xe0, 0xf0, 0xf8, 0x00, 0x08, 0x10, 0x18];
/// Moves words 0, 1 (first half) and 2, 3 (second half) to the top of an f64 each.
const SPREAD: [i64; 4] = [0x0100_8080_8080_8080, 0x0302_8080_8080_8080, 0x0504_8080_8080_8080, 0x0706_8080_8080_8080];

/// The last two steps of the fold: four lanes in order.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn fold4(x: __m256d) -> f64 {
    // SAFETY: the caller's promise.
    unsafe {
        let two = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd::<1>(x));
        _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)))
    }
}

/// Sixteen bf16 in two registers: the eight of even index, then the eight of odd index.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn split(a: __m128i, b: __m128i) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let upper = _mm_set1_epi32(!0xffff);
        V([
            _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32::<16>(a))),
            _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32::<16>(b))),
            _mm256_cvtps_pd(_mm_castsi128_ps(_mm_and_si128(a, upper))),
            _mm256_cvtps_pd(_mm_castsi128_ps(_mm_and_si128(b, upper))),
        ])
    }
}

// SAFETY of both blocks: the trait asks its caller for AVX2 and valid pointers.
impl Decode for V {
    #[inline(always)]
    unsafe fn load_coded_split(group: *const u8, table: *const u8) -> [Self; 2] {
        // SAFETY: as said above.
        unsafe {
            let [a, b, c, d] = coded::words(group, table);
            [split(a, b), split(c, d)]
        }
    }

    #[inline(always)]
    unsafe fn decode(group: *const u8, table: *const u8, out: *mut u8) {
        // SAFETY: as said above.
        unsafe { coded::store_words(group, table, out) }
    }
}

// SAFETY of every block below: the trait asks its caller for AVX2, FMA and valid pointers.
impl Lanes for V {
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: as said above.
        unsafe { Self([_mm256_setzero_pd(); 4]) }
    }

    #[inline(always)]
    unsafe fn splat(x: f64) -> Self {
        // SAFETY: as said above.
        unsafe { Self([_mm256_set1_pd(x); 4]) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f64) -> Self {
        // SAFETY: as said above.
        unsafe {
            Self([_mm256_loadu_pd(p), _mm256_loadu_pd(p.add(4)), _mm256_loadu_pd(p.add(8)), _mm256_loadu_pd(p.add(12))])
        }
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> Self {
        // SAFETY: as said above.
        unsafe {
            Self([
                _mm256_cvtps_pd(_mm_loadu_ps(p)),
                _mm256_cvtps_pd(_mm_loadu_ps(p.add(4))),
                _mm256_cvtps_pd(_mm_loadu_ps(p.add(8))),
                _mm256_cvtps_pd(_mm_loadu_ps(p.add(12))),
            ])
        }
    }

    #[inline(always)]
    unsafe fn store_f32(self, p: *mut f32) {
        // SAFETY: as said above.
        unsafe {
            for (i, x) in self.0.into_iter().enumerate() {
                _mm_storeu_ps(p.add(4 * i), _mm256_cvtpd_ps(x));
            }
        }
    }

    #[inline(always)]
    unsafe fn rounded(mut self) -> Self {
        // SAFETY: as said above.
        unsafe {
            for x in &mut self.0 {
                *x = _mm256_cvtps_pd(_mm256_cvtpd_ps(*x));
            }
        }
        self
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: as said above.
        unsafe {
            let mut lanes = Self::zero();
            for (i, x) in lanes.0.iter_mut().enumerate() {
                let words = _mm_cvtepu16_epi32(_mm_loadl_epi64(p.add(8 * i).cast()));
                *x = _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32::<16>(words)));
            }
            lanes
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_split(p: *const u8) -> Self {
        // SAFETY: as said above.
        unsafe { split(_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(16).cast())) }
    }

    #[inline(always)]
    unsafe fn load_e2m1(p: *const u8) -> Self {
        // SAFETY: as said above.
        unsafe {
            let bytes = _mm_loadl_epi64(p.cast());
            let nibble = _mm_set1_epi8(15);
            let low = _mm_and_si128(bytes, nibble);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), nibble);
            let codes = _mm_unpacklo_epi8(low, high);
            let high = _mm_shuffle_epi8(_mm_loadu_si128(E2M1_HIGH.as_ptr().cast()), codes);
            let low = _mm_shuffle_epi8(_mm_loadu_si128(E2M1_LOW.as_ptr().cast()), codes);
            let a = _mm256_broadcastsi128_si256(_mm_unpacklo_epi8(low, high));
            let b = _mm256_broadcastsi128_si256(_mm_unpackhi_epi8(low, high));
            let first = _mm256_loadu_si256(SPREAD.as_ptr().cast());
            // Words 4..8 lie eight bytes further on; 0x80 keeps its top bit and so stays a zero.
            let second = _mm256_add_epi8(first, _mm256_set1_epi8(8));
            Self([
                _mm256_castsi256_pd(_mm256_shuffle_epi8(a, first)),
                _mm256_castsi256_pd(_mm256_shuffle_epi8(a, second)),
                _mm256_castsi256_pd(_mm256_shuffle_epi8(b, first)),
                _mm256_castsi256_pd(_mm256_shuffle_epi8(b, second)),
            ])
        }
    }

    #[inline(always)]
    unsafe fn add(mut self, b: Self) -> Self {
        // SAFETY: as said above.
        unsafe {
            for (a, b) in self.0.iter_mut().zip(b.0) {
                *a = _mm256_add_pd(*a, b);
            }
        }
        self
    }

    #[inline(always)]
    unsafe fn mul(mut self, b: Self) -> Self {
        // SAFETY: as said above.
        unsafe {
            for (a, b) in self.0.iter_mut().zip(b.0) {
                *a = _mm256_mul_pd(*a, b);
            }
        }
        self
    }

    #[inline(always)]
    unsafe fn mul_add(mut self, b: Self, c: Self) -> Self {
        // SAFETY: as said above.
        unsafe {
            for ((a, b), c) in self.0.iter_mut().zip(b.0).zip(c.0) {
                *a = _mm256_fmadd_pd(*a, b, c);
            }
        }
        self
    }

    #[inline(always)]
    unsafe fn fold(self) -> f64 {
        // SAFETY: as said above.
        unsafe {
            let [a, b, c, d] = self.0;
            fold4(_mm256_add_pd(_mm256_add_pd(a, c), _mm256_add_pd(b, d)))
        }
    }

    #[inline(always)]
    unsafe fn fold_split(self) -> f64 {
        // SAFETY: as said above.
        unsafe {
            let [a, b, c, d] = self.0;
            // Lanes 0 2 4 6 and 1 3 5 7: the steps of 4 and 2 stay inside each, the last joins them.
            fold4(_mm256_add_pd(a, b)) + fold4(_mm256_add_pd(c, d))
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch is a hint and may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

// SAFETY of both blocks: the traits ask their callers for AVX2, FMA and valid pointers.
impl Part for __m256d {
    #[inline(always)]
    unsafe fn load(p: *const f64) -> Self {
        // SAFETY: as said above.
        unsafe { _mm256_loadu_pd(p) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f64) {
        // SAFETY: as said above.
        unsafe { _mm256_storeu_pd(p, self) }
    }

    #[inline(always)]
    unsafe fn load_bf16<const Q: usize>(p: *const u8) -> Self {
        // SAFETY: as said above: eight words at `p` and at `p + 16`, even ones first, then odd ones.
        unsafe {
            let words = _mm_loadu_si128(p.add(Q % 2 * 16).cast());
            let words = if Q < 2 { _mm_slli_epi32::<16>(words) } else { _mm_and_si128(words, _mm_set1_epi32(!0xffff)) };
            _mm256_cvtps_pd(_mm_castsi128_ps(words))
        }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: as said above.
        unsafe { _mm256_add_pd(self, b) }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: as said above.
        unsafe { _mm256_mul_pd(self, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: as said above.
        unsafe { _mm256_fmadd_pd(self, b, c) }
    }
}

impl Tile for V {
    type Part = __m256d;
    type Decoder = mxfp4::Decoder;
    const PARTS: usize = 4;
    const AHEAD: usize = 1;

    #[inline(always)]
    unsafe fn decoder() -> mxfp4::Decoder {
        // SAFETY: as said above.
        unsafe { mxfp4::Decoder::new() }
    }

    #[inline(always)]
    unsafe fn load_scaled(decoder: &mxfp4::Decoder, p: *const u8, scale: u8) -> [Self; 2] {
        // SAFETY: as said above.
        unsafe { decoder.decode(p, scale) }
    }

    tiles::loops!("avx2,fma");
}
