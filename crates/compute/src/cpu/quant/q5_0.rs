//! Q5_0: 32 values in 22 bytes, value = scale * (code - 16).

use super::lanes::Lanes;
use super::packed::{GROUP, NIBBLE_PAIRS, Packed, nibbles, packed_kernels, paired_bits, store_half, word};
use super::plain::{self, Plain};
use super::{Format, Simd, f16};
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

impl Plain for Block {
    fn scale(&self) -> f32 {
        f16(self.scale)
    }

    /// code - 16, in -16..=15.
    #[inline]
    fn codes(&self) -> [i8; 32] {
        five_bit_codes(&self.low, self.high).map(|code| code - 16)
    }
}

/// 0..=31, of four bits and one above them each.
#[inline]
pub(super) fn five_bit_codes(low: &[u8; 16], high: [u8; 4]) -> [i8; 32] {
    let high = u32::from_le_bytes(high);
    let bit_4 = |i: usize| if high >> i & 1 == 1 { 16 } else { 0 };
    std::array::from_fn(|i| (low[i % 16] >> (i / 16 * 4) & 15 | bit_4(i)).cast_signed())
}

pub(super) fn format(simd: Simd) -> Format {
    plain::format::<Block>(DType::Q5_0, packed_kernels!(simd, quantised Block), None)
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
