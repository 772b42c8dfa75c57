//! Q4_K: 256 values in 144 bytes, eight sub-blocks of 32 with 6-bit scales and minima;
//! value = scale * scales\[sub\] * code - min_scale * mins\[sub\].

use super::activations::IntBlock;
#[cfg(target_arch = "aarch64")]
use super::bytes;
use super::lanes::Lanes;
use super::packed::{GROUP, Packed, STRAIGHT_PAIRS, byte_nibbles, packed_kernels, store_half, word};
use super::{Format, Simd, block_pairs, blocks_and_values, f16};
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

fn dot(weights: &[u8], activations: &[IntBlock]) -> f32 {
    let mut sum = 0.0;
    for (block, a) in block_pairs::<Block, 8>(weights, activations) {
        sum = dot_sub_blocks(sum, (block.scale, block.min_scale), &block.sub_scales, &block.codes(), a);
    }
    sum
}

/// `sum` + the product of a block, sub-block by sub-block.
#[inline]
pub(super) fn dot_sub_blocks(
    mut sum: f32,
    (scale, min_scale): ([u8; 2], [u8; 2]),
    sub_scales: &SubScales,
    codes: &[[u8; 32]; 8],
    activations: &[IntBlock; 8],
) -> f32 {
    let (scales, mins) = sub_scales.unpack();
    for (sub, a) in activations.iter().enumerate() {
        let scale = f16(scale) * f32::from(scales[sub]);
        let min = f16(min_scale) * f32::from(mins[sub]);
        sum = scale.mul_add(a.dot(0, &codes[sub]), sum);
        sum = (-min).mul_add(a.sum, sum);
    }
    sum
}

pub(super) fn format(simd: Simd) -> Format {
    Format {
        dtype: DType::Q4_K,
        dequantize,
        dot: Some(dot),
        kernels: packed_kernels!(simd, quantised Block),
        runs: None,
    }
}

impl Packed for Block {
    const VALUES: usize = 256;
    const WORDS: usize = 32;
    const SCALE_BYTES: usize = SUB_SCALE_BYTES;
    const SHARING: usize = 2;
    const MIN: bool = true;
    const PAIRS: [[usize; 4]; 4] = STRAIGHT_PAIRS;

    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        for (words, bytes) in words.iter_mut().zip(self.codes.as_chunks().0) {
            words[row] = word(bytes);
        }
        pack_sub_scales(self.scale, self.min_scale, &self.sub_scales, row, scales);
    }

    #[inline(always)]
    unsafe fn quarter<L: Lanes, const PART: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [L::Pairs; 4] {
        // SAFETY: as the caller's.
        unsafe { byte_nibbles::<L, PART>(codes.add((block / 2 * 8 + quarter * 2) * 64)) }
    }

    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    unsafe fn bytes<const PART: usize, const FOUR: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [bytes::Bytes; 2] {
        // SAFETY: as the caller's.
        unsafe { bytes::part_nibbles::<PART, FOUR>(codes.add((block / 2 * 8 + quarter * 2) * 64)) }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, block: usize, _half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { sub_scale::<L>(scales, block) }
    }

    #[inline(always)]
    unsafe fn min<L: Lanes>(scales: *const u8, block: usize, _half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { sub_min::<L>(scales, block) }
    }
}

/// Scale, scale of the minima, eight scales and eight minima: the 6-bit ones are widened to bytes, 2.8 % more than the
/// file has.
pub(super) const SUB_SCALE_BYTES: usize = (2 + 2 + 8 + 8) * GROUP;

pub(super) fn pack_sub_scales(
    scale: [u8; 2],
    min_scale: [u8; 2],
    sub_scales: &SubScales,
    row: usize,
    out: &mut [u8],
) {
    store_half(out, 0, row, scale);
    store_half(out, 1, row, min_scale);
    let (scales, mins) = sub_scales.unpack();
    for (sub, (scale, min)) in scales.into_iter().zip(mins).enumerate() {
        out[(4 + sub) * GROUP + row] = scale;
        out[(12 + sub) * GROUP + row] = min;
    }
}

#[inline(always)]
pub(super) unsafe fn sub_scale<L: Lanes>(scales: *const u8, block: usize) -> L::Floats {
    // SAFETY: as the caller's.
    unsafe {
        let scales = scales.add(block / 8 * SUB_SCALE_BYTES);
        L::mul(L::halves(scales), L::bytes(scales.add((4 + block % 8) * GROUP)))
    }
}

#[inline(always)]
pub(super) unsafe fn sub_min<L: Lanes>(scales: *const u8, block: usize) -> L::Floats {
    // SAFETY: as the caller's.
    unsafe {
        let scales = scales.add(block / 8 * SUB_SCALE_BYTES);
        L::negated(L::mul(L::halves(scales.add(32)), L::bytes(scales.add((12 + block % 8) * GROUP))))
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q4_K, "q4_k.bin");
}
