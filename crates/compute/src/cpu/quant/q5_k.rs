//! Q5_K: 256 values in 176 bytes: Q4_K with a fifth bit for each code.

use super::activations::IntBlock;
use super::lanes::Lanes;
use super::packed::{GROUP, Packed, STRAIGHT_PAIRS, byte_nibbles, packed_kernels, paired_bits, word};
use super::q4_k::{
    SUB_SCALE_BYTES, SubScales, dequantize_sub_blocks, dot_sub_blocks, pack_sub_scales, sub_min, sub_scale,
};
use super::{Format, Simd, block_pairs, blocks_and_values};
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

fn dot(weights: &[u8], activations: &[IntBlock]) -> f32 {
    let mut sum = 0.0;
    for (block, a) in block_pairs::<Block, 8>(weights, activations) {
        sum = dot_sub_blocks(sum, (block.scale, block.min_scale), &block.sub_scales, &block.codes(), a);
    }
    sum
}

pub(super) fn format(simd: Simd) -> Format {
    Format {
        dtype: DType::Q5_K,
        dequantize,
        dot: Some(dot),
        kernels: packed_kernels!(simd, quantised Block),
        runs: None,
    }
}

impl Packed for Block {
    const VALUES: usize = 256;
    const WORDS: usize = 40;
    const SCALE_BYTES: usize = SUB_SCALE_BYTES;
    const SHARING: usize = 2;
    const MIN: bool = true;
    const PAIRS: [[usize; 4]; 4] = STRAIGHT_PAIRS;

    /// For each two sub-blocks: eight words of low bits, then a word of high bits for each.
    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        let low = self.low.as_chunks::<32>().0;
        for (pair, (words, low)) in words.chunks_exact_mut(10).zip(low).enumerate() {
            for (words, bytes) in words.iter_mut().zip(low.as_chunks().0) {
                words[row] = word(bytes);
            }
            for part in 0..2 {
                let bit = |byte: &u8| u32::from(byte >> (pair * 2 + part) & 1);
                let bits = self.high.iter().enumerate().fold(0, |bits, (i, byte)| bits | bit(byte) << i);
                words[8 + part][row] = paired_bits(bits);
            }
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
        unsafe {
            let words = codes.add(block / 2 * 10 * 64);
            let [a, b, c, d] = byte_nibbles::<L, PART>(words.add(quarter * 2 * 64));
            // The pairs of this quarter have the bits 4q to 4q + 3; they become bit 4.
            let high = L::shr_by(L::pairs(words.add((8 + PART) * 64)), 4 * quarter);
            [
                L::or_masked(a, L::shl::<4>(high), 16),
                L::or_masked(b, L::shl::<3>(high), 16),
                L::or_masked(c, L::shl::<2>(high), 16),
                L::or_masked(d, L::shl::<1>(high), 16),
            ]
        }
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

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q5_K, "q5_k.bin");
}
