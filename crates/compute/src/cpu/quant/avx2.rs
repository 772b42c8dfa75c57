//! What the AVX2 kernels share: loading, unpacking of halves, and the loops over blocks.
//!
//! A loop takes `N` activation rows (one or four): a weight block is unpacked once and multiplied with each row in
//! turn. A row has its own accumulator of eight lanes, which sees the same operations for every `N`.

use super::activations::Q8Block;
use core::arch::x86_64::*;

/// A [`Dot`](super::Dot) of a function `fn<const N: usize>(&[W], [&[A]; N]) -> [f32; N]` compiled for AVX2.
macro_rules! avx2_dot {
    ($dots:path) => {
        $crate::cpu::quant::Dot {
            one: |weights, row| {
                // SAFETY: AVX2 tables are handed out only after `Simd::assert_present`.
                let [product] = unsafe { $dots(weights, [row]) };
                product
            },
            four: |weights, rows| {
                // SAFETY: as above.
                unsafe { $dots(weights, rows) }
            },
        }
    };
}
pub(super) use avx2_dot;

/// A `dequantize` of a function compiled for AVX2, or of scalar code that is inlined here and so compiled for it once
/// more. Rust never contracts a product and a sum into one rounding, so both have the bits of the specification.
macro_rules! avx2_dequantize {
    ($dequantize:path) => {
        |weights, out| {
            #[target_feature(enable = "avx2,fma,f16c")]
            fn compiled(weights: &[u8], out: &mut [f32]) {
                $dequantize(weights, out)
            }
            // SAFETY: AVX2 tables are handed out only after `Simd::assert_present`.
            unsafe { compiled(weights, out) }
        }
    };
}
pub(super) use avx2_dequantize;

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_16<T: bytemuck::Pod>(bytes: &[T; 16]) -> __m128i {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: 16 readable bytes; the load needs no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_32<T: bytemuck::Pod>(bytes: &[T; 32]) -> __m256i {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// The scales of a block's fours: lane i has that of the values whose products lane i sums.
#[inline]
#[target_feature(enable = "avx2")]
fn load_scales(block: &Q8Block) -> __m256 {
    // SAFETY: eight readable f32; the load needs no alignment.
    unsafe { _mm256_loadu_ps(block.scales.as_ptr()) }
}

/// A stored f16 as f32 in every lane; by instruction, which reads subnormals in every mode.
///
/// In every lane, because a scalar costs more: the compiler then inserts it into whatever register is at hand, often an
/// accumulator, and each block waits for the one before (measured: 17 cycles a block instead of 5).
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn scale(bytes: [u8; 2]) -> __m256 {
    _mm256_cvtph_ps(_mm_set1_epi16(i16::from_le_bytes(bytes)))
}

/// Two neighbouring [`scale`]s with one conversion.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn scale_pair(first: [u8; 2], second: [u8; 2]) -> (__m256, __m256) {
    let pair = u32::from(u16::from_le_bytes(first)) | u32::from(u16::from_le_bytes(second)) << 16;
    let pairs = _mm256_cvtph_ps(_mm_set1_epi32(pair.cast_signed()));
    (_mm256_moveldup_ps(pairs), _mm256_movehdup_ps(pairs))
}

/// The low halves of 16 bytes, then their high halves.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn halves(bytes: &[u8; 16]) -> __m256i {
    let both = _mm256_srlv_epi64(_mm256_broadcastsi128_si256(load_16(bytes)), _mm256_setr_epi64x(0, 0, 4, 4));
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// -1 in byte i where bit i is set, else 0.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn bits_as_mask(bits: [u8; 4]) -> __m256i {
    // Byte i gets the byte of its bit, then keeps that bit alone.
    let spread = _mm256_shuffle_epi8(
        _mm256_set1_epi32(i32::from_le_bytes(bits)),
        _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303),
    );
    let bit = _mm256_set1_epi64x(i64::from_le_bytes([1, 2, 4, 8, 16, 32, 64, 128]));
    _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit)
}

/// `value` of each of 32 codes in -128..=127.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn store_32(out: &mut [f32; 32], codes: __m256i, value: impl Fn(__m256) -> __m256) {
    let halves = [_mm256_castsi256_si128(codes), _mm256_extracti128_si256::<1>(codes)];
    for (out, codes) in out.as_chunks_mut().0.iter_mut().zip(halves) {
        store_16(out, codes, &value);
    }
}

/// `value` of each of 16 codes in -128..=127.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn store_16(out: &mut [f32; 16], codes: __m128i, value: impl Fn(__m256) -> __m256) {
    for (out, codes) in out.as_chunks_mut::<8>().0.iter_mut().zip([codes, _mm_unpackhi_epi64(codes, codes)]) {
        let values = value(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)));
        // SAFETY: eight writable f32; the store needs no alignment.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), values) };
    }
}

/// The eight lanes added by a fixed tree: i with i + 4, then i + 2, then i + 1.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn fold(lanes: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

/// Blocks of 32 with value = scale * code; `unpack` answers (scale, codes).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn symmetric_32<B: bytemuck::Pod, const N: usize>(
    weights: &[u8],
    rows: [&[Q8Block]; N],
    unpack: impl Fn(&B) -> (__m256, __m256i),
) -> [f32; N] {
    let (blocks, rows) = same_length::<B, 1, N>(weights, rows);
    let mut sums = [_mm256_setzero_ps(); N];
    for (index, block) in blocks.iter().enumerate() {
        add_symmetric(&mut sums, unpack(block), rows.map(|row| &row[index][0]));
    }
    folded(sums)
}

/// Adds the products of 32 values (scale, codes in -128..=127) with each row's 32 activations. The scale may differ
/// from lane to lane: a lane sums four values.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn add_symmetric<const N: usize>(
    sums: &mut [__m256; N],
    (scale, codes): (__m256, __m256i),
    activations: [&Q8Block; N],
) {
    // maddubs wants one side unsigned: the sign moves to the activation. Two products: 2 * 128 * 127 < 32768.
    let magnitudes = _mm256_abs_epi8(codes);
    for (sum, a) in sums.iter_mut().zip(activations) {
        let products = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(load_32(&a.values), codes));
        let products = _mm256_madd_epi16(products, _mm256_set1_epi16(1));
        *sum = _mm256_fmadd_ps(_mm256_mul_ps(scale, load_scales(a)), _mm256_cvtepi32_ps(products), *sum);
    }
}

/// Blocks of 32 with value = scale * code + min; `unpack` answers (scale, min, codes), a code in 0..=127.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn affine_32<B: bytemuck::Pod, const N: usize>(
    weights: &[u8],
    rows: [&[Q8Block]; N],
    unpack: impl Fn(&B) -> (__m256, __m256, __m256i),
) -> [f32; N] {
    let (blocks, rows) = same_length::<B, 1, N>(weights, rows);
    let mut sums = AffineSums::<N>::zero();
    for (index, block) in blocks.iter().enumerate() {
        sums.add(unpack(block), rows.map(|row| &row[index][0]));
    }
    sums.folded()
}

/// Running sums of values with a minimum.
struct AffineSums<const N: usize> {
    sums: [__m256; N],
    /// The minima have a running sum of their own, the same in all eight lanes.
    min_sums: [__m256; N],
}

impl<const N: usize> AffineSums<N> {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn zero() -> Self {
        AffineSums { sums: [_mm256_setzero_ps(); N], min_sums: [_mm256_setzero_ps(); N] }
    }

    /// Adds the products of 32 values (scale, min, codes in 0..=127) with each row's 32 activations.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn add(&mut self, (scale, min, codes): (__m256, __m256, __m256i), activations: [&Q8Block; N]) {
        for ((sum, min_sum), a) in self.sums.iter_mut().zip(&mut self.min_sums).zip(activations) {
            // Two products: 2 * 127 * 127 < 32768.
            let products = _mm256_maddubs_epi16(codes, load_32(&a.values));
            let products = _mm256_madd_epi16(products, _mm256_set1_epi16(1));
            let scale = _mm256_mul_ps(scale, load_scales(a));
            *sum = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(products), *sum);
            *min_sum = _mm256_fmadd_ps(min, _mm256_set1_ps(a.sum), *min_sum);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn folded(mut self) -> [f32; N] {
        for (sum, min_sum) in self.sums.iter_mut().zip(self.min_sums) {
            // Folding adds the lanes: an eighth of the sum in each, which is exact.
            *sum = _mm256_fmadd_ps(min_sum, _mm256_set1_ps(0.125), *sum);
        }
        folded(self.sums)
    }
}

/// A block of 256 in eight sub-blocks of 32, value = scale * scales\[sub\] * code - min_scale * mins\[sub\].
pub(super) struct Affine256 {
    pub(super) scale: __m256,
    pub(super) min_scale: __m256,
    /// (scales, minima), 0..=63 each.
    pub(super) sub_scales: ([u8; 8], [u8; 8]),
    /// 0..=31
    pub(super) codes: [__m256i; 8],
}

impl Affine256 {
    /// The values, with the operations of the scalar version.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn store(&self, out: &mut [f32; 256]) {
        let (scales, mins) = self.sub_scales;
        for (sub, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let scale = _mm256_mul_ps(self.scale, _mm256_set1_ps(scales[sub].into()));
            let min = _mm256_mul_ps(self.min_scale, _mm256_set1_ps(mins[sub].into()));
            store_32(out, self.codes[sub], |code| _mm256_sub_ps(_mm256_mul_ps(scale, code), min));
        }
    }
}

/// Blocks as [`Affine256`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn affine_256<B: bytemuck::Pod, const N: usize>(
    weights: &[u8],
    rows: [&[Q8Block]; N],
    unpack: impl Fn(&B) -> Affine256,
) -> [f32; N] {
    let (blocks, rows) = same_length::<B, 8, N>(weights, rows);
    let mut sums = AffineSums::<N>::zero();
    for (index, block) in blocks.iter().enumerate() {
        let Affine256 { scale, min_scale, sub_scales: (scales, mins), codes } = unpack(block);
        for (sub, codes) in codes.into_iter().enumerate() {
            let scale = _mm256_mul_ps(scale, _mm256_set1_ps(scales[sub].into()));
            let min = _mm256_mul_ps(min_scale, _mm256_set1_ps(-f32::from(mins[sub])));
            sums.add((scale, min, codes), rows.map(|row| &row[index][sub]));
        }
    }
    sums.folded()
}

/// `weights` as blocks of 32 x `PARTS` values, and rows as the activations of as many blocks, so that the loops need no
/// bounds checks.
#[inline]
pub(super) fn same_length<'w, 'a, B: bytemuck::Pod, const PARTS: usize, const N: usize>(
    weights: &'w [u8],
    rows: [&'a [Q8Block]; N],
) -> (&'w [B], [&'a [[Q8Block; PARTS]]; N]) {
    let blocks: &[B] = bytemuck::cast_slice(weights);
    let rows = rows.map(|row| {
        let (row, rest) = row.as_chunks();
        assert!(rest.is_empty() && blocks.len() == row.len(), "weight and activation blocks");
        &row[..blocks.len()]
    });
    (blocks, rows)
}

/// Each row's lanes as one number.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn folded<const N: usize>(sums: [__m256; N]) -> [f32; N] {
    let mut out = [0.0; N];
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = fold(sum);
    }
    out
}
