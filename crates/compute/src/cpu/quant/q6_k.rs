//! Q6_K: 256 values in 210 bytes, sixteen sub-blocks of 16 with 8-bit scales;
//! value = scale * scales\[sub\] * (code - 32).

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
    /// The low four bits. 64 bytes for each 128 values: the low halves are the first 64, the high halves the others.
    low: [u8; 128],
    /// The high two bits. 32 bytes for each 128 values: byte i holds values i, i + 32, i + 64, i + 96, lowest first.
    high: [u8; 64],
    scales: [i8; 16],
    scale: [u8; 2],
}

impl Block {
    /// code - 32, in -32..=31.
    #[inline]
    fn codes(&self) -> [i8; 256] {
        let mut codes = [0; 256];
        for (i, code) in codes.iter_mut().enumerate() {
            let (half, within) = (i / 128, i % 128);
            let low = self.low[half * 64 + within % 64] >> (within / 64 * 4) & 15;
            let high = self.high[half * 32 + within % 32] >> (within / 32 * 2) & 3;
            *code = (high << 4 | low).cast_signed() - 32;
        }
        codes
    }
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 256>(weights, out) {
        let codes = block.codes();
        for (sub, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = f16(block.scale) * f32::from(block.scales[sub]);
            for (out, &code) in out.iter_mut().zip(&codes[sub * 16..]) {
                *out = scale * f32::from(code);
            }
        }
    }
}

fn dot(weights: &[u8], activations: &[IntBlock]) -> f32 {
    let mut sum = 0.0;
    for (block, activations) in block_pairs::<Block, 8>(weights, activations) {
        let codes = block.codes();
        for (index, a) in activations.iter().enumerate() {
            for half in 0..2 {
                let sub = index * 2 + half;
                let scale = f16(block.scale) * f32::from(block.scales[sub]);
                sum = scale.mul_add(a.dot(half * 16, &codes[sub * 16..][..16]), sum);
            }
        }
    }
    sum
}

pub(super) fn format(simd: Simd) -> Format {
    Format {
        dtype: DType::Q6_K,
        dequantize,
        dot: Some(dot),
        kernels: packed_kernels!(simd, quantised Block),
        runs: None,
    }
}

impl Packed for Block {
    const VALUES: usize = 256;
    const WORDS: usize = 48;
    const SCALE_BYTES: usize = (2 + 16) * GROUP;
    const SHARING: usize = 2;
    const HALVES: bool = true;
    const PAIRS: [[usize; 4]; 4] = STRAIGHT_PAIRS;

    /// For each 128 values: eight words of the low bits of their first two blocks of 32, eight of the other two (so
    /// that neighbours share words, as in Q4_K), eight of the high bits as filed.
    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        let halves = self.low.as_chunks::<64>().0.iter().zip(self.high.as_chunks::<32>().0);
        for (words, (low, high)) in words.chunks_exact_mut(24).zip(halves) {
            let (low, high) = (low.as_chunks().0, high.as_chunks().0);
            for i in 0..8 {
                // Low nibbles: blocks 0 and 1; high nibbles: blocks 2 and 3.
                let (even, odd) = (word(&low[i]), word(&low[i + 8]));
                words[i][row] = even & 0x0f0f_0f0f | odd << 4 & 0xf0f0_f0f0;
                words[8 + i][row] = even >> 4 & 0x0f0f_0f0f | odd & 0xf0f0_f0f0;
                words[16 + i][row] = word(&high[i]);
            }
        }
        store_half(scales, 0, row, self.scale);
        for (sub, scale) in self.scales.iter().enumerate() {
            scales[(2 + sub) * GROUP + row] = scale.cast_unsigned();
        }
    }

    #[inline(always)]
    unsafe fn quarter<L: Lanes, const PART: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [L::Pairs; 4] {
        // SAFETY: as the caller's.
        unsafe {
            let words = codes.add(block / 4 * 24 * 64);
            let [a, b, c, d] = byte_nibbles::<L, PART>(words.add((block % 4 / 2 * 8 + quarter * 2) * 64));
            // Block i of the four has bits 2i and 2i + 1 of each byte; they become bits 4 and 5.
            let high = words.add((16 + quarter * 2) * 64);
            let (x, y) = (L::pairs(high), L::pairs(high.add(64)));
            let (x, y) = (L::shr_by(x, block % 4 * 2), L::shr_by(y, block % 4 * 2));
            let [a, b, c, d] = if PART == 0 {
                [
                    L::or_masked(a, L::shl::<4>(x), 48),
                    L::or_masked(b, L::shr::<4>(x), 48),
                    L::or_masked(c, L::shl::<4>(y), 48),
                    L::or_masked(d, L::shr::<4>(y), 48),
                ]
            } else {
                [
                    L::or_masked(a, L::shl::<2>(x), 48),
                    L::or_masked(b, L::shr::<6>(x), 48),
                    L::or_masked(c, L::shl::<2>(y), 48),
                    L::or_masked(d, L::shr::<6>(y), 48),
                ]
            };
            [L::sub(a, 32), L::sub(b, 32), L::sub(c, 32), L::sub(d, 32)]
        }
    }

    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    unsafe fn bytes<const PART: usize, const FOUR: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [bytes::Bytes; 2] {
        // SAFETY: as the caller's.
        unsafe {
            let words = codes.add(block / 4 * 24 * 64);
            let low = words.add((block % 4 / 2 * 8 + quarter * 2) * 64);
            let [x, y] = bytes::part_nibbles::<PART, FOUR>(low);
            let high = words.add((16 + quarter * 2) * 64);
            let bit = (block % 4 + PART) * 2;
            [
                bytes::six_bits(x, bytes::word::<FOUR>(high), bit),
                bytes::six_bits(y, bytes::word::<FOUR>(high.add(64)), bit),
            ]
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, block: usize, half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe {
            let scales = scales.add(block / 8 * Self::SCALE_BYTES);
            L::mul(L::halves(scales), L::signed_bytes(scales.add((2 + block % 8 * 2 + half) * GROUP)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q6_K, "q6_k.bin");
}
