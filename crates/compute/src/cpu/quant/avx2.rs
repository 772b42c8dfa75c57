//! Sixteen rows in two registers of AVX2.

use super::lanes::Lanes;
use core::arch::x86_64::*;

pub(crate) enum Avx2 {}

impl Lanes for Avx2 {
    type Pairs = [__m256i; 2];
    type Ints = [__m256i; 2];
    type Floats = [__m256; 2];
    /// Eight registers of integer sums; the running sums stay in the first cache.
    const WIDTH_MAX: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn pairs(from: *const u8) -> [__m256i; 2] {
        // SAFETY: the caller has 64 readable bytes.
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())] }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn and([a, b]: [__m256i; 2], mask: u16) -> [__m256i; 2] {
        let mask = _mm256_set1_epi16(mask.cast_signed());
        [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn shl<const BITS: u32>([a, b]: [__m256i; 2]) -> [__m256i; 2] {
        let bits = _mm_set1_epi64x(BITS.into());
        [_mm256_sll_epi16(a, bits), _mm256_sll_epi16(b, bits)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn shr<const BITS: u32>([a, b]: [__m256i; 2]) -> [__m256i; 2] {
        let bits = _mm_set1_epi64x(BITS.into());
        [_mm256_srl_epi16(a, bits), _mm256_srl_epi16(b, bits)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sar<const BITS: u32>([a, b]: [__m256i; 2]) -> [__m256i; 2] {
        let bits = _mm_set1_epi64x(BITS.into());
        [_mm256_sra_epi16(a, bits), _mm256_sra_epi16(b, bits)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn shr_by([a, b]: [__m256i; 2], bits: usize) -> [__m256i; 2] {
        let bits = _mm_set1_epi64x(bits.cast_signed() as i64);
        [_mm256_srl_epi16(a, bits), _mm256_srl_epi16(b, bits)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn or_masked([a, b]: [__m256i; 2], [c, d]: [__m256i; 2], mask: u16) -> [__m256i; 2] {
        let mask = _mm256_set1_epi16(mask.cast_signed());
        [_mm256_or_si256(a, _mm256_and_si256(c, mask)), _mm256_or_si256(b, _mm256_and_si256(d, mask))]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub([a, b]: [__m256i; 2], y: u16) -> [__m256i; 2] {
        let y = _mm256_set1_epi16(y.cast_signed());
        [_mm256_sub_epi16(a, y), _mm256_sub_epi16(b, y)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn lookup([a, b]: [__m256i; 2], table: &[i8; 16]) -> [__m256i; 2] {
        // SAFETY: sixteen readable bytes.
        let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
        // The upper byte of each integer looks up something, too, and makes room for the sign.
        let extended = |x| _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(_mm256_shuffle_epi8(table, x)));
        [extended(a), extended(b)]
    }

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        // SAFETY: asking for a line never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn no_ints() -> [__m256i; 2] {
        [_mm256_setzero_si256(); 2]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn dot(
        [sum_a, sum_b]: [__m256i; 2],
        [a, b]: [__m256i; 2],
        activations: *const i16,
    ) -> [__m256i; 2] {
        // SAFETY: the caller has two readable integers.
        let pair = _mm256_set1_epi32(unsafe { activations.cast::<i32>().read_unaligned() });
        [
            _mm256_add_epi32(sum_a, _mm256_madd_epi16(a, pair)),
            _mm256_add_epi32(sum_b, _mm256_madd_epi16(b, pair)),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn first([a, b]: [__m256i; 2]) -> [__m256i; 2] {
        [
            _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(a)),
            _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(b)),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn second([a, b]: [__m256i; 2]) -> [__m256i; 2] {
        [_mm256_srai_epi32::<16>(a), _mm256_srai_epi32::<16>(b)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn to_floats([a, b]: [__m256i; 2]) -> [__m256; 2] {
        [_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn floats(from: *const f32) -> [__m256; 2] {
        // SAFETY: the caller has sixteen readable f32.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn halves(from: *const u8) -> [__m256; 2] {
        // SAFETY: the caller has sixteen readable f16.
        let (a, b) = unsafe { (_mm_loadu_si128(from.cast()), _mm_loadu_si128(from.add(16).cast())) };
        [_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn bytes(from: *const u8) -> [__m256; 2] {
        // SAFETY: the caller has sixteen readable bytes.
        let (a, b) = unsafe { (_mm_loadl_epi64(from.cast()), _mm_loadl_epi64(from.add(8).cast())) };
        [_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(a)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b))]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn signed_bytes(from: *const u8) -> [__m256; 2] {
        // SAFETY: the caller has sixteen readable bytes.
        let (a, b) = unsafe { (_mm_loadl_epi64(from.cast()), _mm_loadl_epi64(from.add(8).cast())) };
        [_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(a)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b))]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn brains(from: *const u8) -> [__m256; 2] {
        // SAFETY: the caller has sixteen readable bf16.
        let (a, b) = unsafe { (_mm_loadu_si128(from.cast()), _mm_loadu_si128(from.add(16).cast())) };
        [
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(a))),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(b))),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn first_brain([a, b]: [__m256i; 2]) -> [__m256; 2] {
        [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b))]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn second_brain([a, b]: [__m256i; 2]) -> [__m256; 2] {
        let mask = _mm256_set1_epi32(-0x1_0000);
        [_mm256_castsi256_ps(_mm256_and_si256(a, mask)), _mm256_castsi256_ps(_mm256_and_si256(b, mask))]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store([a, b]: [__m256; 2], to: *mut f32) {
        // SAFETY: the caller has sixteen writable f32.
        unsafe {
            _mm256_storeu_ps(to, a);
            _mm256_storeu_ps(to.add(8), b);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn splat(x: *const f32) -> [__m256; 2] {
        // SAFETY: the caller has a readable f32.
        [_mm256_set1_ps(unsafe { x.read_unaligned() }); 2]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn add([a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        [_mm256_add_ps(a, c), _mm256_add_ps(b, d)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn mul([a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        [_mm256_mul_ps(a, c), _mm256_mul_ps(b, d)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn negated([a, b]: [__m256; 2]) -> [__m256; 2] {
        let sign = _mm256_set1_ps(-0.0);
        [_mm256_xor_ps(a, sign), _mm256_xor_ps(b, sign)]
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn fma([a, b]: [__m256; 2], [c, d]: [__m256; 2], [e, f]: [__m256; 2]) -> [__m256; 2] {
        [_mm256_fmadd_ps(a, c, e), _mm256_fmadd_ps(b, d, f)]
    }
}
