//! IQ4_XS: 256 values in 136 bytes, eight blocks of 32 with 6-bit scales, codes that stand for IQ4_NL's integers;
//! value = scale * (scales\[block\] - 32) * table\[code\].

use super::coded::{self, Coded};
use super::iq4_nl;
use super::packed::packed_kernels;
use super::{Format, Simd};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    /// Two bits for each block, the first in the lowest.
    scales_high: [u8; 2],
    /// Four bits for each block, the first in the low half.
    scales_low: [u8; 4],
    /// 16 bytes for each block: byte i holds code i in its low half and code i + 16 in its high half.
    codes: [u8; 128],
}

impl Coded for Block {
    const BITS: usize = 4;
    const MULTIPLIERS: usize = 8;
    const TABLE: [i8; 16] = iq4_nl::TABLE;

    fn scale(&self) -> [u8; 2] {
        self.scale
    }

    fn multipliers(&self) -> [i8; 16] {
        let high = u16::from_le_bytes(self.scales_high);
        std::array::from_fn(|block| match block {
            0..8 => {
                let low = self.scales_low[block / 2] >> (block % 2 * 4) & 15;
                ((high >> (2 * block) & 3) as u8 * 16 + low).cast_signed() - 32
            }
            _ => 0,
        })
    }

    fn codes(&self) -> [u8; 256] {
        std::array::from_fn(|i| self.codes[i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4) & 15)
    }
}

pub(super) fn format(simd: Simd) -> Format {
    coded::format::<Block>(DType::IQ4_XS, packed_kernels!(simd, quantised Block))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(IQ4_XS, "iq4_xs.bin");
}
