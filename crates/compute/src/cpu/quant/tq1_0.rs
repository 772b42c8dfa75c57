//! TQ1_0: 256 values in 54 bytes, five to a byte as digits of base 3; value = scale * (digit - 1).
//!
//! A byte is the number 0.digits in base 3, in units of 1/256: three times it carries its first digit out at the top.

use super::coded::{self, Coded};
use super::packed::packed_kernels;
use super::{Format, Simd};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    /// Bytes 0..32 have values i, i + 32, ..; bytes 32..48 then values 160 + i, 176 + i, ...
    digits: [u8; 48],
    /// Four digits each: values 240 + i, 244 + i, ...
    last: [u8; 4],
    scale: [u8; 2],
}

impl Coded for Block {
    const BITS: usize = 2;
    const MULTIPLIERS: usize = 1;
    const TABLE: [i8; 16] = [-1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    fn scale(&self) -> [u8; 2] {
        self.scale
    }

    fn codes(&self) -> [u8; 256] {
        const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
        std::array::from_fn(|i| {
            let (byte, digit) = match i {
                0..160 => (self.digits[i % 32], i / 32),
                160..240 => (self.digits[32 + i % 16], (i - 160) / 16),
                _ => (self.last[i % 4], (i - 240) / 4),
            };
            ((u16::from(byte.wrapping_mul(POWERS[digit])) * 3) >> 8) as u8
        })
    }
}

pub(super) fn format(simd: Simd) -> Format {
    coded::format::<Block>(DType::TQ1_0, packed_kernels!(simd, quantised Block))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(TQ1_0, "tq1_0.bin");
}
