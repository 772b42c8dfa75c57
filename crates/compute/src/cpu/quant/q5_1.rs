//! Q5_1: 32 values in 24 bytes, value = scale * code + min.

use super::activations::IntBlock;
use super::lanes::Lanes;
use super::packed::{GROUP, NIBBLE_PAIRS, Packed, packed_kernels, store_half};
use super::q5_0::{five_bits, pack_five_bits};
use super::{Format, Simd, block_pairs, blocks_and_values, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    min: [u8; 2],
    /// Bit i, counted from the lowest of the first byte, is bit 4 of code i.
    high: [u8; 4],
    /// Byte i holds the low four bits of code i in its low half and of code i + 16 in its high half.
    low: [u8; 16],
}

impl Block {
    /// 0..=31
    #[inline]
    fn codes(&self) -> [u8; 32] {
        let high = u32::from_le_bytes(self.high);
        let bit_4 = |i: usize| if high >> i & 1 == 1 { 16 } else { 0 };
        let mut codes = [0; 32];
        for (i, byte) in self.low.iter().enumerate() {
            codes[i] = byte & 15 | bit_4(i);
            codes[i + 16] = byte >> 4 | bit_4(i + 16);
        }
        codes
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

fn dot(weights: &[u8], activations: &[IntBlock]) -> f32 {
    let mut sum = 0.0;
    for (block, [a]) in block_pairs::<Block, 1>(weights, activations) {
        sum = f16(block.scale).mul_add(a.dot(0, &block.codes()), sum);
        sum = f16(block.min).mul_add(a.sum, sum);
    }
    sum
}

pub(super) fn format(simd: Simd) -> Format {
    Format {
        dtype: DType::Q5_1,
        dequantize,
        dot: Some(dot),
        kernels: packed_kernels!(simd, quantised Block),
        runs: None,
    }
}

impl Packed for Block {
    const VALUES: usize = 32;
    const WORDS: usize = 5;
    const SCALE_BYTES: usize = 64;
    const MIN: bool = true;
    const PAIRS: [[usize; 4]; 4] = NIBBLE_PAIRS;

    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        pack_five_bits(&self.low, self.high, row, words);
        store_half(scales, 0, row, self.scale);
        store_half(scales, 1, row, self.min);
    }

    #[inline(always)]
    unsafe fn quarter<L: Lanes, const PART: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [L::Pairs; 4] {
        // SAFETY: as the caller's.
        unsafe { five_bits::<L>(codes.add(block * 5 * 64), quarter) }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, block: usize, _half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { L::halves(scales.add(block * 64)) }
    }

    #[inline(always)]
    unsafe fn min<L: Lanes>(scales: *const u8, block: usize, _half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { L::halves(scales.add(block * 64 + 32)) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q5_1, "q5_1.bin");
}
