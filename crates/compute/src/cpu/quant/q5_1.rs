//! Q5_1: 32 values in 24 bytes, value = scale * code + min.

use super::lanes::Lanes;
use super::packed::{GROUP, NIBBLE_PAIRS, Packed, packed_kernels, store_half};
use super::plain::{self, Plain};
use super::q5_0::{five_bit_codes, five_bits, pack_five_bits};
use super::{Format, Simd, f16};
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

impl Plain for Block {
    fn scale(&self) -> f32 {
        f16(self.scale)
    }

    fn min(&self) -> Option<f32> {
        Some(f16(self.min))
    }

    /// 0..=31
    #[inline]
    fn codes(&self) -> [i8; 32] {
        five_bit_codes(&self.low, self.high)
    }
}

pub(super) fn format(simd: Simd) -> Format {
    plain::format::<Block>(DType::Q5_1, packed_kernels!(simd, quantised Block), None)
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
