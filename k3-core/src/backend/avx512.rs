//! Sixteen f64 in two 512-bit registers: x86-64 with AVX-512 F, DQ, BW and VL.

use super::avx2::fold4;
use super::coded::{self, Decode};
use super::lanes::{self, Lanes, instantiate};
use super::scalar::E2M1;
use super::tiles::{Part, Tile};
use super::{KdaStep, Panel, tiles};
use crate::coded::CodedMatrix;
use crate::view::{Bf16Matrix, F32Matrix, Mxfp4Matrix};
use core::arch::x86_64::*;

cpufeatures::new!(features, "avx2", "fma", "avx512f", "avx512dq", "avx512bw", "avx512vl");

/// Whether the CPU has the features of [`TABLE`] and the operating system keeps their registers.
pub(super) fn detected() -> bool {
    features::get()
}

// Where 256-bit registers are faster, a product may be named from `avx2` instead: its features are here.
instantiate!("avx512", "avx2,fma,avx512f,avx512dq,avx512bw,avx512vl", V,
    bf16 tiles::matmul_bf16::<V, 4>, coded tiles::matmul_coded::<V, 4>, mxfp4 mxfp4, columns 4, chains 6);

#[derive(Clone, Copy)]
#[repr(transparent)]
struct V([__m512d; 2]);

/// # Safety
/// AVX-512; the shapes agree and `out` is not empty.
#[inline(always)]
unsafe fn mxfp4(w: Mxfp4Matrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        if x.positions == 1 {
            lanes::mxfp4_one::<V, 4>(w, x.data, out);
        } else {
            tiles::matmul_mxfp4::<V>(w, x, out);
        }
    }
}

/// The sum of the two halves.
///
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn halves(x: __m512d) -> __m256d {
    // SAFETY: the caller's promise.
    unsafe { _mm256_add_pd(_mm512_castpd512_pd256(x), _mm512_extractf64x4_pd::<1>(x)) }
}

/// Sixteen bf16 in order: the eight of even index, then the eight of odd index.
///
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn split(words: __m256i) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let even = _mm256_slli_epi32::<16>(words);
        let odd = _mm256_and_si256(words, _mm256_set1_epi32(!0xffff));
        V([_mm512_cvtps_pd(_mm256_castsi256_ps(even)), _mm512_cvtps_pd(_mm256_castsi256_ps(odd))])
    }
}

// SAFETY of both blocks: the trait asks its caller for AVX-512 and valid pointers.
impl Decode for V {
    #[inline(always)]
    unsafe fn load_coded_split(group: *const u8, table: *const u8) -> [Self; 2] {
        // SAFETY: as said above.
        unsafe {
            let [a, b, c, d] = coded::words(group, table);
            [split(_mm256_set_m128i(b, a)), split(_mm256_set_m128i(d, c))]
        }
    }

    #[inline(always)]
    unsafe fn decode(group: *const u8, table: *const u8, out: *mut u8) {
        // SAFETY: as said above.
        unsafe { coded::store_words(group, table, out) }
    }
}

// SAFETY of every block below: the trait asks its caller for AVX-512 and valid pointers.
impl Lanes for V {
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: as said above.
        unsafe { Self([_mm512_setzero_pd(); 2]) }
    }

    #[inline(always)]
    unsafe fn splat(x: f64) -> Self {
        // SAFETY: as said above.
        unsafe { Self([_mm512_set1_pd(x); 2]) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f64) -> Self {
        // SAFETY: as said above.
        unsafe { Self([_mm512_loadu_pd(p), _mm512_loadu_pd(p.add(8))]) }
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> Self {
        // SAFETY: as said above.
        unsafe { Self([_mm512_cvtps_pd(_mm256_loadu_ps(p)), _mm512_cvtps_pd(_mm256_loadu_ps(p.add(8)))]) }
    }

    #[inline(always)]
    unsafe fn store_f32(self, p: *mut f32) {
        // SAFETY: as said above.
        unsafe {
            _mm256_storeu_ps(p, _mm512_cvtpd_ps(self.0[0]));
            _mm256_storeu_ps(p.add(8), _mm512_cvtpd_ps(self.0[1]));
        }
    }

    #[inline(always)]
    unsafe fn rounded(self) -> Self {
        // SAFETY: as said above.
        unsafe { Self([_mm512_cvtps_pd(_mm512_cvtpd_ps(self.0[0])), _mm512_cvtps_pd(_mm512_cvtpd_ps(self.0[1]))]) }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: as said above.
        unsafe {
            let mut lanes = Self::zero();
            for (i, x) in lanes.0.iter_mut().enumerate() {
                let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16 * i).cast()));
                *x = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)));
            }
            lanes
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_split(p: *const u8) -> Self {
        // SAFETY: as said above.
        unsafe { split(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_e2m1(p: *const u8) -> Self {
        // SAFETY: as said above.
        unsafe {
            let codes = _mm512_set1_epi64(p.cast::<i64>().read_unaligned());
            let (t0, t1) = (_mm512_loadu_pd(E2M1.as_ptr()), _mm512_loadu_pd(E2M1.as_ptr().add(8)));
            // The permutation reads four bits of each index, so the nibbles above need no mask.
            let low = _mm512_srlv_epi64(codes, _mm512_setr_epi64(0, 4, 8, 12, 16, 20, 24, 28));
            let high = _mm512_srlv_epi64(codes, _mm512_setr_epi64(32, 36, 40, 44, 48, 52, 56, 60));
            Self([_mm512_permutex2var_pd(t0, low, t1), _mm512_permutex2var_pd(t0, high, t1)])
        }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: as said above.
        unsafe { Self([_mm512_add_pd(self.0[0], b.0[0]), _mm512_add_pd(self.0[1], b.0[1])]) }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: as said above.
        unsafe { Self([_mm512_mul_pd(self.0[0], b.0[0]), _mm512_mul_pd(self.0[1], b.0[1])]) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: as said above.
        unsafe { Self([_mm512_fmadd_pd(self.0[0], b.0[0], c.0[0]), _mm512_fmadd_pd(self.0[1], b.0[1], c.0[1])]) }
    }

    #[inline(always)]
    unsafe fn fold(self) -> f64 {
        // SAFETY: as said above.
        unsafe { fold4(halves(_mm512_add_pd(self.0[0], self.0[1]))) }
    }

    #[inline(always)]
    unsafe fn fold_split(self) -> f64 {
        // SAFETY: as said above. Lanes 0 2 .. 14 and 1 3 .. 15: the steps of 8, 4 and 2 stay inside
        // each register, the last joins them.
        unsafe { fold4(halves(self.0[0])) + fold4(halves(self.0[1])) }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch is a hint and may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

// SAFETY of both blocks: the traits ask their callers for AVX-512 and valid pointers.
impl Part for __m512d {
    #[inline(always)]
    unsafe fn load(p: *const f64) -> Self {
        // SAFETY: as said above.
        unsafe { _mm512_loadu_pd(p) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f64) {
        // SAFETY: as said above.
        unsafe { _mm512_storeu_pd(p, self) }
    }

    #[inline(always)]
    unsafe fn load_bf16<const Q: usize>(p: *const u8) -> Self {
        // SAFETY: as said above: sixteen words, even ones first, then odd ones.
        unsafe {
            let words = _mm256_loadu_si256(p.cast());
            let words = if Q == 0 {
                _mm256_slli_epi32::<16>(words)
            } else {
                _mm256_and_si256(words, lanes::opaque(_mm256_set1_epi32(!0xffff)))
            };
            _mm512_cvtps_pd(_mm256_castsi256_ps(words))
        }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: as said above.
        unsafe { _mm512_add_pd(self, b) }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: as said above.
        unsafe { _mm512_mul_pd(self, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: as said above.
        unsafe { _mm512_fmadd_pd(self, b, c) }
    }
}

impl Tile for V {
    type Part = __m512d;
    type Decoder = ();
    const PARTS: usize = 2;
    const AHEAD: usize = 2;

    #[inline(always)]
    unsafe fn decoder() {}

    #[inline(always)]
    unsafe fn load_scaled((): &(), p: *const u8, scale: u8) -> [Self; 2] {
        // SAFETY: as said above; there is a scale for each byte.
        unsafe {
            let scale = Self::splat(lanes::SCALES[usize::from(scale)]);
            [Self::load_e2m1(p).mul(scale), Self::load_e2m1(p.add(8)).mul(scale)]
        }
    }

    tiles::loops!("avx2,fma,avx512f,avx512dq,avx512bw,avx512vl");
}
