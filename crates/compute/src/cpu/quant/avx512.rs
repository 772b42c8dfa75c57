//! Sixteen rows in one register of AVX-512, integer products by VNNI.

use super::lanes::Lanes;
use core::arch::x86_64::*;

pub(crate) enum Avx512 {}

impl Lanes for Avx512 {
    type Pairs = __m512i;
    type Ints = __m512i;
    type Floats = __m512;
    /// Eight integer sums, eight running sums and the codes leave registers over. Sixteen unpack weights half as often,
    /// but half of the running sums then go to memory and back for each block, and a panel takes the first cache for
    /// itself: Q4_K, Q5_K and Q5_0 were 20 to 40 % slower for it.
    const WIDTH_MAX: usize = 8;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn pairs(from: *const u8) -> __m512i {
        // SAFETY: the caller has 64 readable bytes.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn and(x: __m512i, mask: u16) -> __m512i {
        _mm512_and_si512(x, _mm512_set1_epi16(mask.cast_signed()))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn shl<const BITS: u32>(x: __m512i) -> __m512i {
        _mm512_slli_epi16::<BITS>(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn shr<const BITS: u32>(x: __m512i) -> __m512i {
        _mm512_srli_epi16::<BITS>(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn sar<const BITS: u32>(x: __m512i) -> __m512i {
        _mm512_srai_epi16::<BITS>(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn shr_by(x: __m512i, bits: usize) -> __m512i {
        _mm512_srl_epi16(x, _mm_set1_epi64x(bits.cast_signed() as i64))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn or_masked(x: __m512i, y: __m512i, mask: u16) -> __m512i {
        // The truth table of a | b & c.
        _mm512_ternarylogic_epi32::<0b1111_1000>(x, y, _mm512_set1_epi16(mask.cast_signed()))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn sub(x: __m512i, y: u16) -> __m512i {
        _mm512_sub_epi16(x, _mm512_set1_epi16(y.cast_signed()))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn lookup(x: __m512i, table: &[i8; 16]) -> __m512i {
        // SAFETY: sixteen readable bytes.
        let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
        // The upper byte of each integer looks up something, too, and makes room for the sign.
        _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(_mm512_shuffle_epi8(table, x)))
    }

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        // SAFETY: asking for a line never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn no_ints() -> __m512i {
        _mm512_setzero_si512()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn dot(sum: __m512i, x: __m512i, activations: *const i16) -> __m512i {
        let mut sum = sum;
        // Not the intrinsic: where several of them add to one sum, the compiler takes each apart into a product and an
        // addition to shorten the chain, which doubles the work of the ports that are the bottleneck.
        // SAFETY: one instruction of features that the caller has, on registers and two readable integers.
        unsafe {
            std::arch::asm!(
                "vpdpwssd {sum}, {x}, dword ptr [{pair}]{{1to16}}",
                sum = inout(zmm_reg) sum,
                x = in(zmm_reg) x,
                pair = in(reg) activations,
                options(pure, readonly, nostack, preserves_flags)
            );
        }
        sum
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn first(x: __m512i) -> __m512i {
        _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(x))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn second(x: __m512i) -> __m512i {
        _mm512_srai_epi32::<16>(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn to_floats(x: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn floats(from: *const f32) -> __m512 {
        // SAFETY: the caller has sixteen readable f32.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn halves(from: *const u8) -> __m512 {
        // SAFETY: the caller has sixteen readable f16.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn bytes(from: *const u8) -> __m512 {
        // SAFETY: the caller has sixteen readable bytes.
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(from.cast()) }))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn signed_bytes(from: *const u8) -> __m512 {
        // SAFETY: the caller has sixteen readable bytes.
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(from.cast()) }))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn brains(from: *const u8) -> __m512 {
        // SAFETY: the caller has sixteen readable bf16.
        let wide = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(from.cast()) });
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn first_brain(x: __m512i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn second_brain(x: __m512i) -> __m512 {
        _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-0x1_0000)))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(x: __m512, to: *mut f32) {
        // SAFETY: the caller has sixteen writable f32.
        unsafe { _mm512_storeu_ps(to, x) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn splat(x: *const f32) -> __m512 {
        // SAFETY: the caller has a readable f32.
        _mm512_set1_ps(unsafe { x.read_unaligned() })
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(x: __m512, y: __m512) -> __m512 {
        _mm512_add_ps(x, y)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn mul(x: __m512, y: __m512) -> __m512 {
        _mm512_mul_ps(x, y)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn negated(x: __m512) -> __m512 {
        _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MIN)))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn fma(x: __m512, y: __m512, z: __m512) -> __m512 {
        _mm512_fmadd_ps(x, y, z)
    }
}
