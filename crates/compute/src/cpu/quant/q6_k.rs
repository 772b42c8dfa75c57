//! Q6_K: 256 values in 210 bytes, sixteen sub-blocks of 16 with 8-bit scales;
//! value = scale * scales\[sub\] * (code - 32).

use super::activations::{Q8KBlock, integer_dot};
use super::{Activation, Dot, Format, Simd, block_pairs, blocks_and_values, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    /// The low four bits. 64 bytes for each 128 values: the low halves are the first 64, the high halves the others.
    low: [u8; 128],
    /// The high two bits. 32 bytes for each 128 values: byte i holds values i, i + 32, i + 64, i + 96, lowest first.
    high: [u8; 64],
    scales: [i8; 16],
    scale: [u8; 2],
}

impl Block {
    /// code - 32, in -32..=31.
    #[inline]
    fn codes(&self) -> [i8; 256] {
        let mut codes = [0; 256];
        for (i, code) in codes.iter_mut().enumerate() {
            let (half, within) = (i / 128, i % 128);
            let low = self.low[half * 64 + within % 64] >> (within / 64 * 4) & 15;
            let high = self.high[half * 32 + within % 32] >> (within / 32 * 2) & 3;
            *code = (high << 4 | low).cast_signed() - 32;
        }
        codes
    }
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 256>(weights, out) {
        let codes = block.codes();
        for (sub, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = f16(block.scale) * f32::from(block.scales[sub]);
            for (out, &code) in out.iter_mut().zip(&codes[sub * 16..]) {
                *out = scale * f32::from(code);
            }
        }
    }
}

fn dot(weights: &[u8], activations: &[Q8KBlock]) -> f32 {
    let mut sum = 0.0;
    for (block, a) in block_pairs::<Block, _>(weights, activations) {
        let codes = block.codes();
        // At most 256 * 32 * 127 * 128 = 1.3e8.
        let mut products = 0;
        for (sub, &scale) in block.scales.iter().enumerate() {
            let values = sub * 16..(sub + 1) * 16;
            products += i32::from(scale) * integer_dot(&codes[values.clone()], &a.values[values]);
        }
        sum += f16(block.scale) * a.scale * products as f32;
    }
    sum
}

pub(super) fn format(simd: Simd) -> &'static Format {
    static SCALAR: Format = Format {
        dtype: DType::Q6_K,
        dequantize,
        activation: Activation::Q8K(Dot { one: dot, four: |w, rows| rows.map(|row| dot(w, row)) }),
    };
    match simd {
        Simd::Scalar => &SCALAR,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &avx2::FORMAT,
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::super::avx2::{
        avx2_dequantize, avx2_dot, folded, load_16, load_32, same_length, scale, store_16,
    };
    use super::*;
    use core::arch::x86_64::*;

    pub(super) static FORMAT: Format = Format {
        dtype: DType::Q6_K,
        dequantize: avx2_dequantize!(self::dequantize),
        activation: Activation::Q8K(avx2_dot!(dots)),
    };

    #[target_feature(enable = "avx2,fma,f16c")]
    fn dequantize(weights: &[u8], out: &mut [f32]) {
        for (block, out) in blocks_and_values::<Block, 256>(weights, out) {
            let mut signed = [0; 256];
            for (signed, codes) in signed.as_chunks_mut::<32>().0.iter_mut().zip(codes(block)) {
                *signed = bytemuck::cast(_mm256_sub_epi8(codes, _mm256_set1_epi8(32)));
            }
            let subs = out.as_chunks_mut().0.iter_mut().zip(signed.as_chunks::<16>().0);
            for ((out, codes), sub_scale) in subs.zip(block.scales) {
                let scale = _mm256_mul_ps(scale(block.scale), _mm256_set1_ps(sub_scale.into()));
                store_16(out, load_16::<i8>(codes), |code| _mm256_mul_ps(scale, code));
            }
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn dots<const N: usize>(weights: &[u8], rows: [&[Q8KBlock]; N]) -> [f32; N] {
        let (blocks, rows) = same_length::<Block, _, N>(weights, rows);
        let mut sums = [_mm256_setzero_ps(); N];
        for (index, block) in blocks.iter().enumerate() {
            let sub_scales = load_16(&block.scales);
            let mut products = [_mm256_setzero_si256(); N];
            for (group, codes) in codes(block).into_iter().enumerate() {
                // Scale 2 * group for the first 16 codes, the next one for the others.
                let pair =
                    _mm_add_epi8(_mm_set1_epi8(2 * group as i8), _mm_set_epi64x(0x0101_0101_0101_0101, 0));
                let scales = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(sub_scales, pair));
                for (products, row) in products.iter_mut().zip(rows) {
                    // Two products: 2 * 63 * 127 = 16002; then four of them by a scale: 4.1e6, 3.3e7 a block.
                    let pairs = _mm256_maddubs_epi16(codes, load_32(&row[index].values.as_chunks().0[group]));
                    *products = _mm256_add_epi32(*products, _mm256_madd_epi16(pairs, scales));
                }
            }
            let scale = scale(block.scale);
            let sub_scales = _mm256_cvtepi8_epi16(sub_scales);
            for ((sum, products), row) in sums.iter_mut().zip(products).zip(rows) {
                let a = &row[index];
                // The codes are still 0..=63: take 32 * scales * activations away again.
                let offsets =
                    _mm256_madd_epi16(sub_scales, load_32(bytemuck::cast_ref::<_, [u8; 32]>(&a.sums)));
                let products = _mm256_sub_epi32(products, _mm256_slli_epi32::<5>(offsets));
                *sum = _mm256_fmadd_ps(
                    _mm256_mul_ps(scale, _mm256_set1_ps(a.scale)),
                    _mm256_cvtepi32_ps(products),
                    *sum,
                );
            }
        }
        folded(sums)
    }

    /// 0..=63, 32 at a time.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn codes(block: &Block) -> [__m256i; 8] {
        let mut codes = [_mm256_setzero_si256(); 8];
        let halves = block.low.as_chunks::<64>().0.iter().zip(block.high.as_chunks().0);
        for (codes, (low, high)) in codes.as_chunks_mut::<4>().0.iter_mut().zip(halves) {
            let (low, mut high) = (low.as_chunks().0, load_32(high));
            let (even, odd) = (load_32(&low[0]), load_32(&low[1]));
            let lows = [even, odd, _mm256_srli_epi16::<4>(even), _mm256_srli_epi16::<4>(odd)];
            for (codes, low) in codes.iter_mut().zip(lows) {
                let low = _mm256_and_si256(low, _mm256_set1_epi8(15));
                let bits_4_5 = _mm256_and_si256(_mm256_slli_epi16::<4>(high), _mm256_set1_epi8(48));
                *codes = _mm256_or_si256(low, bits_4_5);
                high = _mm256_srli_epi16::<2>(high);
            }
        }
        codes
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q6_K, "q6_k.bin");
}
