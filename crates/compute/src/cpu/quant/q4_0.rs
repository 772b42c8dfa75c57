//! Q4_0: 32 values in 18 bytes, value = scale * (code - 8).

use super::activations::Q8Block;
use super::{Activation, Dot, Format, Simd, block_pairs, blocks_and_values, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    /// Byte i holds code i in its low half and code i + 16 in its high half.
    codes: [u8; 16],
}

impl Block {
    /// code - 8, in -8..=7.
    #[inline]
    fn codes(&self) -> [i8; 32] {
        let low = self.codes.map(|byte| (byte & 15).cast_signed() - 8);
        let high = self.codes.map(|byte| (byte >> 4).cast_signed() - 8);
        bytemuck::cast([low, high])
    }
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 32>(weights, out) {
        let scale = f16(block.scale);
        for (out, code) in out.iter_mut().zip(block.codes()) {
            *out = scale * f32::from(code);
        }
    }
}

fn dot(weights: &[u8], activations: &[Q8Block]) -> f32 {
    let mut sum = 0.0;
    for (block, [a]) in block_pairs::<Block, 1>(weights, activations) {
        sum += f16(block.scale) * a.dot(&block.codes());
    }
    sum
}

pub(super) fn format(simd: Simd) -> &'static Format {
    static SCALAR: Format = Format {
        dtype: DType::Q4_0,
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
    use super::super::avx2::{avx2_dequantize, avx2_dot, halves, scale, store_32, symmetric_32};
    use super::*;
    use core::arch::x86_64::*;

    pub(super) static FORMAT: Format = Format {
        dtype: DType::Q4_0,
        dequantize: avx2_dequantize!(self::dequantize),
        activation: Activation::Q8(avx2_dot!(dots)),
    };

    #[target_feature(enable = "avx2,fma,f16c")]
    fn dequantize(weights: &[u8], out: &mut [f32]) {
        for (block, out) in blocks_and_values::<Block, 32>(weights, out) {
            let (scale, codes) = unpack(block);
            store_32(out, codes, |code| _mm256_mul_ps(scale, code));
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn dots<const N: usize>(weights: &[u8], rows: [&[Q8Block]; N]) -> [f32; N] {
        symmetric_32(weights, rows, |block| unpack(block))
    }

    /// (scale, code - 8)
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn unpack(block: &Block) -> (__m256, __m256i) {
        (scale(block.scale), _mm256_sub_epi8(halves(&block.codes), _mm256_set1_epi8(8)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q4_0, "q4_0.bin");
}
