//! Q4_1: 32 values in 20 bytes, value = scale * code + min.

use super::activations::Q8Block;
use super::{Activation, Dot, Format, Simd, block_pairs, blocks_and_values, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    min: [u8; 2],
    /// Byte i holds code i in its low half and code i + 16 in its high half.
    codes: [u8; 16],
}

impl Block {
    /// 0..=15
    #[inline]
    fn codes(&self) -> [u8; 32] {
        bytemuck::cast([self.codes.map(|byte| byte & 15), self.codes.map(|byte| byte >> 4)])
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
        dtype: DType::Q4_1,
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
    use super::super::avx2::{affine_32, avx2_dequantize, avx2_dot, halves, scale_pair, store_32};
    use super::*;
    use core::arch::x86_64::*;

    pub(super) static FORMAT: Format = Format {
        dtype: DType::Q4_1,
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
        (scale, min, halves(&block.codes))
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q4_1, "q4_1.bin");
}
