//! Q5_K: 256 values in 176 bytes: Q4_K with a fifth bit for each code.

use super::activations::Q8Block;
use super::q4_k::{SubScales, dequantize_sub_blocks, dot_sub_blocks};
use super::{Activation, Dot, Format, Simd, block_pairs, blocks_and_values};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    min_scale: [u8; 2],
    sub_scales: SubScales,
    /// Bit s of byte i is bit 4 of code i of sub-block s.
    high: [u8; 32],
    /// 32 bytes for each two sub-blocks: the low halves are the first one's low bits, the high halves the second one's.
    low: [u8; 128],
}

impl Block {
    /// 0..=31, by sub-block.
    #[inline]
    fn codes(&self) -> [[u8; 32]; 8] {
        let mut codes = [[0; 32]; 8];
        for (sub, codes) in codes.iter_mut().enumerate() {
            let low = &self.low[sub / 2 * 32..][..32];
            for ((code, low), high) in codes.iter_mut().zip(low).zip(&self.high) {
                *code = low >> (sub % 2 * 4) & 15 | (high >> sub & 1) << 4;
            }
        }
        codes
    }
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 256>(weights, out) {
        dequantize_sub_blocks(block.scale, block.min_scale, &block.sub_scales, &block.codes(), out);
    }
}

fn dot(weights: &[u8], activations: &[Q8Block]) -> f32 {
    let mut sum = 0.0;
    for (block, a) in block_pairs::<Block, 8>(weights, activations) {
        sum += dot_sub_blocks(block.scale, block.min_scale, &block.sub_scales, &block.codes(), a);
    }
    sum
}

pub(super) fn format(simd: Simd) -> &'static Format {
    static SCALAR: Format = Format {
        dtype: DType::Q5_K,
        dequantize,
        activation: Activation::Q8(Dot { one: dot, four: |w, rows| rows.map(|row| dot(w, row)) }),
    };
    match simd {
        Simd::Scalar => &SCALAR,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &avx2::FORMAT,
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::super::avx2::{Affine256, affine_256, avx2_dequantize, avx2_dot, load_32, scale_pair};
    use super::*;
    use core::arch::x86_64::*;

    pub(super) static FORMAT: Format = Format {
        dtype: DType::Q5_K,
        dequantize: avx2_dequantize!(self::dequantize),
        activation: Activation::Q8(avx2_dot!(dots)),
    };

    #[target_feature(enable = "avx2,fma,f16c")]
    fn dequantize(weights: &[u8], out: &mut [f32]) {
        for (block, out) in blocks_and_values::<Block, 256>(weights, out) {
            unpack(block).store(out);
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn dots<const N: usize>(weights: &[u8], rows: [&[Q8Block]; N]) -> [f32; N] {
        affine_256(weights, rows, |block| unpack(block))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn unpack(block: &Block) -> Affine256 {
        let mut codes = [_mm256_setzero_si256(); 8];
        // Shifted right by one for each sub-block: its bit is then the lowest of each byte. What crosses from one
        // byte into its neighbour never gets that far.
        let mut high = load_32(&block.high);
        for (codes, bytes) in codes.as_chunks_mut::<2>().0.iter_mut().zip(block.low.as_chunks().0) {
            let bytes = load_32(bytes);
            for (codes, low) in codes.iter_mut().zip([bytes, _mm256_srli_epi16::<4>(bytes)]) {
                let low = _mm256_and_si256(low, _mm256_set1_epi8(15));
                let bit_4 = _mm256_and_si256(_mm256_slli_epi16::<4>(high), _mm256_set1_epi8(16));
                *codes = _mm256_or_si256(low, bit_4);
                high = _mm256_srli_epi16::<1>(high);
            }
        }
        let (scale, min_scale) = scale_pair(block.scale, block.min_scale);
        Affine256 { scale, min_scale, sub_scales: block.sub_scales.unpack(), codes }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q5_K, "q5_k.bin");
}
