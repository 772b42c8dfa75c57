//! Q4_K: 256 values in 144 bytes, eight sub-blocks of 32 with 6-bit scales and minima;
//! value = scale * scales\[sub\] * code - min_scale * mins\[sub\].

use super::activations::Q8Block;
use super::{Activation, Dot, Format, Simd, block_pairs, blocks_and_values, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    min_scale: [u8; 2],
    sub_scales: SubScales,
    /// 32 bytes for each two sub-blocks: the low halves are the first one's codes, the high halves the second one's.
    codes: [u8; 128],
}

impl Block {
    /// 0..=15, by sub-block.
    #[inline]
    fn codes(&self) -> [[u8; 32]; 8] {
        let mut codes = [[0; 32]; 8];
        for (codes, bytes) in codes.as_chunks_mut().0.iter_mut().zip(self.codes.as_chunks().0) {
            *codes = [bytes.map(|byte: u8| byte & 15), bytes.map(|byte| byte >> 4)];
        }
        codes
    }
}

/// Eight 6-bit scales and eight 6-bit minima in 12 bytes, as in Q4_K and Q5_K.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct SubScales {
    /// Scales 0..4 in the low six bits; the two high bits of scales 4..8 above them.
    scales: [u8; 4],
    /// Minima likewise.
    mins: [u8; 4],
    /// The low four bits of scales 4..8, and above them those of minima 4..8.
    low: [u8; 4],
}

impl SubScales {
    /// (scales, minima), 0..=63 each.
    #[inline]
    pub(super) fn unpack(&self) -> ([u8; 8], [u8; 8]) {
        // Four bytes at a time: masks keep the bits of each apart.
        let [scales, mins, low] = [self.scales, self.mins, self.low].map(u32::from_le_bytes);
        let eight = |first: u32, last: u32| (u64::from(last) << 32 | u64::from(first)).to_le_bytes();
        (
            eight(scales & 0x3f3f_3f3f, scales >> 2 & 0x3030_3030 | low & 0x0f0f_0f0f),
            eight(mins & 0x3f3f_3f3f, mins >> 2 & 0x3030_3030 | low >> 4 & 0x0f0f_0f0f),
        )
    }
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 256>(weights, out) {
        dequantize_sub_blocks(block.scale, block.min_scale, &block.sub_scales, &block.codes(), out);
    }
}

/// What Q4_K and Q5_K have in common: only the width of their codes differs.
pub(super) fn dequantize_sub_blocks(
    scale: [u8; 2],
    min_scale: [u8; 2],
    sub_scales: &SubScales,
    codes: &[[u8; 32]; 8],
    out: &mut [f32; 256],
) {
    let (scales, mins) = sub_scales.unpack();
    for (sub, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = f16(scale) * f32::from(scales[sub]);
        let min = f16(min_scale) * f32::from(mins[sub]);
        for (out, &code) in out.iter_mut().zip(&codes[sub]) {
            *out = scale * f32::from(code) - min;
        }
    }
}

fn dot(weights: &[u8], activations: &[Q8Block]) -> f32 {
    let mut sum = 0.0;
    for (block, a) in block_pairs::<Block, 8>(weights, activations) {
        sum += dot_sub_blocks(block.scale, block.min_scale, &block.sub_scales, &block.codes(), a);
    }
    sum
}

/// The product of a block, sub-block by sub-block.
#[inline]
pub(super) fn dot_sub_blocks(
    scale: [u8; 2],
    min_scale: [u8; 2],
    sub_scales: &SubScales,
    codes: &[[u8; 32]; 8],
    activations: &[Q8Block; 8],
) -> f32 {
    let (scales, mins) = sub_scales.unpack();
    let mut sum = 0.0;
    for (sub, a) in activations.iter().enumerate() {
        let scale = f16(scale) * f32::from(scales[sub]);
        let min = f16(min_scale) * f32::from(mins[sub]);
        sum += scale * a.dot(&codes[sub]) - min * a.sum;
    }
    sum
}

pub(super) fn format(simd: Simd) -> &'static Format {
    static SCALAR: Format = Format {
        dtype: DType::Q4_K,
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
        dtype: DType::Q4_K,
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
        for (codes, bytes) in codes.as_chunks_mut::<2>().0.iter_mut().zip(block.codes.as_chunks().0) {
            let bytes = load_32(bytes);
            let low_half = _mm256_set1_epi8(15);
            *codes = [
                _mm256_and_si256(bytes, low_half),
                _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low_half),
            ];
        }
        let (scale, min_scale) = scale_pair(block.scale, block.min_scale);
        Affine256 { scale, min_scale, sub_scales: block.sub_scales.unpack(), codes }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q4_K, "q4_k.bin");
}
