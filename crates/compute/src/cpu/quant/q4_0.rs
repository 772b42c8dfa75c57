//! Q4_0: 32 values in 18 bytes, value = scale * (code - 8).

#[cfg(target_arch = "aarch64")]
use super::bytes;
use super::lanes::Lanes;
use super::packed::{GROUP, NIBBLE_PAIRS, Packed, packed_kernels, store_half, word};
use super::plain::{self, Plain};
use super::{Format, Simd, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    /// Byte i holds code i in its low half and code i + 16 in its high half.
    codes: [u8; 16],
}

impl Plain for Block {
    fn scale(&self) -> f32 {
        f16(self.scale)
    }

    /// code - 8, in -8..=7.
    #[inline]
    fn codes(&self) -> [i8; 32] {
        let low = self.codes.map(|byte| (byte & 15).cast_signed() - 8);
        let high = self.codes.map(|byte| (byte >> 4).cast_signed() - 8);
        bytemuck::cast([low, high])
    }
}

pub(super) fn format(simd: Simd) -> Format {
    plain::format::<Block>(DType::Q4_0, packed_kernels!(simd, quantised Block), None)
}

impl Packed for Block {
    const VALUES: usize = 32;
    const WORDS: usize = 4;
    const SCALE_BYTES: usize = 32;
    const PAIRS: [[usize; 4]; 4] = NIBBLE_PAIRS;

    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        for (words, bytes) in words.iter_mut().zip(self.codes.as_chunks().0) {
            // With bit 3 flipped, code - 8 is the nibble as a signed number.
            words[row] = word(bytes) ^ 0x8888_8888;
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
            let x = L::pairs(codes.add((block * 4 + quarter) * 64));
            [
                L::sar::<12>(L::shl::<12>(x)),
                L::sar::<12>(L::shl::<8>(x)),
                L::sar::<12>(L::shl::<4>(x)),
                L::sar::<12>(x),
            ]
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
        unsafe { bytes::signed_nibbles(bytes::word::<FOUR>(codes.add((block * 4 + quarter) * 64))) }
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
    format_tests!(Q4_0, "q4_0.bin");
}
