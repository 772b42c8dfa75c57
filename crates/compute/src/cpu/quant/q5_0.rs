//! Q5_0: 32 values in 22 bytes, value = scale * (code - 16).

use super::activations::IntBlock;
use super::lanes::Lanes;
use super::packed::{GROUP, NIBBLE_PAIRS, Packed, nibbles, packed_kernels, paired_bits, store_half, word};
use super::{Format, Simd, block_pairs, blocks_and_values, f16};
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

fn dot(weights: &[u8], activations: &[IntBlock]) -> f32 {
    let mut sum = 0.0;
    for (block, [a]) in block_pairs::<Block, 1>(weights, activations) {
        sum = f16(block.scale).mul_add(a.dot(0, &block.codes()), sum);
    }
    sum
}

pub(super) fn format(simd: Simd) -> Format {
    Format {
        dtype: DType::Q5_0,
        dequantize,
        dot: Some(dot),
        kernels: packed_kernels!(simd, quantised Block),
        runs: None,
    }
}

impl Packed for Block {
    const VALUES: usize = 32;
    const WORDS: usize = 5;
    const SCALE_BYTES: usize = 32;
    const PAIRS: [[usize; 4]; 4] = NIBBLE_PAIRS;

    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        pack_five_bits(&self.low, self.high, row, words);
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
            let [a, b, c, d] = five_bits::<L>(codes.add(block * 5 * 64), quarter);
            [L::sub(a, 16), L::sub(b, 16), L::sub(c, 16), L::sub(d, 16)]
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, block: usize, _half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { L::halves(scales.add(block * 32)) }
    }
}

/// Four words of low bits and one of high bits, as in Q5_0 and Q5_1.
#[inline]
pub(super) fn pack_five_bits(low: &[u8; 16], high: [u8; 4], row: usize, words: &mut [[u32; GROUP]]) {
    for (words, bytes) in words.iter_mut().zip(low.as_chunks().0) {
        words[row] = word(bytes);
    }
    words[4][row] = paired_bits(word(&high));
}

/// A quarter of a block's codes, 0..=31, from the block's five words.
#[inline(always)]
pub(super) unsafe fn five_bits<L: Lanes>(words: *const u8, quarter: usize) -> [L::Pairs; 4] {
    // SAFETY: as the caller's.
    unsafe {
        let [a, b, c, d] = nibbles::<L>(words.add(quarter * 64));
        // The pairs of this quarter have the bits 2q, 2q + 8, 2q + 1 and 2q + 9; they become bit 4.
        let high = L::shr_by(L::pairs(words.add(4 * 64)), 2 * quarter);
        [
            L::or_masked(a, L::shl::<4>(high), 16),
            L::or_masked(b, L::shr::<4>(high), 16),
            L::or_masked(c, L::shl::<3>(high), 16),
            L::or_masked(d, L::shr::<5>(high), 16),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q5_0, "q5_0.bin");
}
