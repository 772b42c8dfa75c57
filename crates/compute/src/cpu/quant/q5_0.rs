//! Q5_0: 32 values in 22 bytes, value = scale * (code - 16).

use super::activations::Q8Block;
use super::{Activation, Dot, Format, Simd, block_pairs, blocks_and_values, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    /// Bit i, counted from the lowest of the first byte, is bit 4 of code i.
    high: [u8; 4],
    /// Byte i holds the low four bits of code i in its low half and of code i + 16 in its high half.
    low: [u8; 16],
}

impl Block {
    /// code - 16, in -16..=15.
    #[inline]
    fn codes(&self) -> [i8; 32] {
        let high = u32::from_le_bytes(self.high);
        let bit_4 = |i: usize| if high >> i & 1 == 1 { 16 } else { 0 };
        let mut codes = [0; 32];
        for (i, byte) in self.low.iter().enumerate() {
            codes[i] = (byte & 15 | bit_4(i)).cast_signed() - 16;
            codes[i + 16] = (byte >> 4 | bit_4(i + 16)).cast_signed() - 16;
        }
        codes
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
        dtype: DType::Q5_0,
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
        avx2_dequantize, avx2_dot, bits_as_mask, halves, scale, store_32, symmetric_32,
    };
    use super::*;
    use core::arch::x86_64::*;

    pub(super) static FORMAT: Format = Format {
        dtype: DType::Q5_0,
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

    /// (scale, code - 16)
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn unpack(block: &Block) -> (__m256, __m256i) {
        // Without bit 4, minus 16 sets the upper four bits; with it, the low bits are all that is left.
        let minus_16 = _mm256_andnot_si256(bits_as_mask(block.high), _mm256_set1_epi8(-16));
        (scale(block.scale), _mm256_or_si256(halves(&block.low), minus_16))
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q5_0, "q5_0.bin");
}
