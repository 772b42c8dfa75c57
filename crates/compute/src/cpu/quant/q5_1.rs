//! Q5_1: 32 values in 24 bytes, value = scale * code + min.

use super::activations::Q8Block;
use super::{Activation, Dot, Format, Simd, block_pairs, blocks_and_values, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    min: [u8; 2],
    /// Bit i, counted from the lowest of the first byte, is bit 4 of code i.
    high: [u8; 4],
    /// Byte i holds the low four bits of code i in its low half and of code i + 16 in its high half.
    low: [u8; 16],
}

impl Block {
    /// 0..=31
    #[inline]
    fn codes(&self) -> [u8; 32] {
        let high = u32::from_le_bytes(self.high);
        let bit_4 = |i: usize| if high >> i & 1 == 1 { 16 } else { 0 };
        let mut codes = [0; 32];
        for (i, byte) in self.low.iter().enumerate() {
            codes[i] = byte & 15 | bit_4(i);
            codes[i + 16] = byte >> 4 | bit_4(i + 16);
        }
        codes
    }
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 32>(weights, out) {
        let (scale, min) = (f16(block.scale), f16(block.min));
        for (out, code) in out.iter_mut().zip(block.codes()) {
            *out = scale * f32::from(code) + min;
        }
    }
}

fn dot(weights: &[u8], activations: &[Q8Block]) -> f32 {
    let mut sum = 0.0;
    for (block, [a]) in block_pairs::<Block, 1>(weights, activations) {
        sum += f16(block.scale) * a.dot(&block.codes()) + f16(block.min) * a.sum;
    }
    sum
}

pub(super) fn format(simd: Simd) -> &'static Format {
    static SCALAR: Format = Format {
        dtype: DType::Q5_1,
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
    use super::super::avx2::{
        affine_32, avx2_dequantize, avx2_dot, bits_as_mask, halves, scale_pair, store_32,
    };
    use super::*;
    use core::arch::x86_64::*;

    pub(super) static FORMAT: Format = Format {
        dtype: DType::Q5_1,
        dequantize: avx2_dequantize!(self::dequantize),
        activation: Activation::Q8(avx2_dot!(dots)),
    };

    #[target_feature(enable = "avx2,fma,f16c")]
    fn dequantize(weights: &[u8], out: &mut [f32]) {
        for (block, out) in blocks_and_values::<Block, 32>(weights, out) {
            let (scale, min, codes) = unpack(block);
            store_32(out, codes, |code| _mm256_add_ps(_mm256_mul_ps(scale, code), min));
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn dots<const N: usize>(weights: &[u8], rows: [&[Q8Block]; N]) -> [f32; N] {
        affine_32(weights, rows, |block| unpack(block))
    }

    /// (scale, min, code)
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn unpack(block: &Block) -> (__m256, __m256, __m256i) {
        let (scale, min) = scale_pair(block.scale, block.min);
        let bit_4 = _mm256_and_si256(bits_as_mask(block.high), _mm256_set1_epi8(16));
        (scale, min, _mm256_or_si256(halves(&block.low), bit_4))
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q5_1, "q5_1.bin");
}
