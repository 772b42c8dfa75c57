//! Q8_0: 32 values in 34 bytes, value = scale * code.

use super::activations::IntBlock;
use super::lanes::Lanes;
use super::packed::{GROUP, Packed, STRAIGHT_PAIRS, packed_kernels, store_half, word};
use super::{Format, Simd, block_pairs, blocks_and_values, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    codes: [i8; 32],
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 32>(weights, out) {
        let scale = f16(block.scale);
        for (out, code) in out.iter_mut().zip(block.codes) {
            *out = scale * f32::from(code);
        }
    }
}

fn dot(weights: &[u8], activations: &[IntBlock]) -> f32 {
    let mut sum = 0.0;
    for (block, [a]) in block_pairs::<Block, 1>(weights, activations) {
        sum = f16(block.scale).mul_add(a.dot(0, &block.codes), sum);
    }
    sum
}

pub(super) fn format(simd: Simd) -> Format {
    Format {
        dtype: DType::Q8_0,
        dequantize,
        dot: Some(dot),
        kernels: packed_kernels!(simd, quantised Block),
        runs: None,
    }
}

impl Packed for Block {
    const VALUES: usize = 32;
    const WORDS: usize = 8;
    const SCALE_BYTES: usize = 32;
    const PAIRS: [[usize; 4]; 4] = STRAIGHT_PAIRS;

    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        let bytes: &[u8; 32] = bytemuck::cast_ref(&self.codes);
        for (words, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            words[row] = word(bytes);
        }
        store_half(scales, 0, row, self.scale);
    }

    #[inline(always)]
    unsafe fn quarter<L: Lanes, const PART: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [L::Pairs; 4] {
        // SAFETY: as the caller's.
        unsafe {
            let words = codes.add((block * 8 + quarter * 2) * 64);
            let (x, y) = (L::pairs(words), L::pairs(words.add(64)));
            [L::sar::<8>(L::shl::<8>(x)), L::sar::<8>(x), L::sar::<8>(L::shl::<8>(y)), L::sar::<8>(y)]
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, block: usize, _half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { L::halves(scales.add(block * 32)) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q8_0, "q8_0.bin");
}
