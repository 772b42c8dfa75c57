//! Q4_1: 32 values in 20 bytes, value = scale * code + min.

#[cfg(target_arch = "aarch64")]
use super::bytes;
use super::lanes::Lanes;
use super::packed::{GROUP, NIBBLE_PAIRS, Packed, nibbles, packed_kernels, store_half, word};
use super::plain::{self, Plain};
use super::{Format, Simd, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    min: [u8; 2],
    /// Byte i holds code i in its low half and code i + 16 in its high half.
    codes: [u8; 16],
}

impl Plain for Block {
    fn scale(&self) -> f32 {
        f16(self.scale)
    }

    fn min(&self) -> Option<f32> {
        Some(f16(self.min))
    }

    /// 0..=15
    #[inline]
    fn codes(&self) -> [i8; 32] {
        bytemuck::cast([self.codes.map(|byte| byte & 15), self.codes.map(|byte| byte >> 4)])
    }
}

pub(super) fn format(simd: Simd) -> Format {
    plain::format::<Block>(DType::Q4_1, packed_kernels!(simd, quantised Block), None)
}

impl Packed for Block {
    const VALUES: usize = 32;
    const WORDS: usize = 4;
    const SCALE_BYTES: usize = 64;
    const MIN: bool = true;
    const PAIRS: [[usize; 4]; 4] = NIBBLE_PAIRS;

    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        for (words, bytes) in words.iter_mut().zip(self.codes.as_chunks().0) {
            words[row] = word(bytes);
        }
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
        unsafe { nibbles::<L>(codes.add((block * 4 + quarter) * 64)) }
    }

    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    unsafe fn bytes<const PART: usize, const FOUR: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [bytes::Bytes; 2] {
        // SAFETY: as the caller's.
        unsafe { bytes::nibbles(bytes::word::<FOUR>(codes.add((block * 4 + quarter) * 64))) }
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
    format_tests!(Q4_1, "q4_1.bin");
}
