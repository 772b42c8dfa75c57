//! Q8_0: 32 values in 34 bytes, value = scale * code.

#[cfg(target_arch = "aarch64")]
use super::bytes;
use super::lanes::Lanes;
use super::packed::{GROUP, Packed, STRAIGHT_PAIRS, packed_kernels, store_half, word};
use super::plain::{self, Plain};
use super::{Format, Simd, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    codes: [i8; 32],
}

impl Plain for Block {
    fn scale(&self) -> f32 {
        f16(self.scale)
    }

    fn codes(&self) -> [i8; 32] {
        self.codes
    }
}

pub(super) fn format(simd: Simd) -> Format {
    plain::format::<Block>(DType::Q8_0, packed_kernels!(simd, quantised Block), None)
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

    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    unsafe fn bytes<const PART: usize, const FOUR: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [bytes::Bytes; 2] {
        // SAFETY: as the caller's.
        unsafe {
            let words = codes.add((block * 8 + quarter * 2) * 64);
            [bytes::word::<FOUR>(words), bytes::word::<FOUR>(words.add(64))]
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
