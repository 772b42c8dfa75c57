//! Q3_K: 256 values in 110 bytes, sixteen sub-blocks of 16 with 6-bit scales;
//! value = scale * (scales\[sub\] - 32) * (code - 4).

use super::coded::{self, Coded};
use super::packed::packed_kernels;
use super::{Format, Simd};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    /// The third bits: bit b of byte i is that of value 32 b + i.
    third: [u8; 32],
    /// The low two bits. 32 bytes for each 128 values: byte i holds values i, i + 32, i + 64, i + 96, lowest first.
    low: [u8; 64],
    /// The low four bits of scales 0..8 and, above them, of 8..16; then the high two of scales j, j + 4, j + 8, j + 12.
    scales: [u8; 12],
    scale: [u8; 2],
}

impl Coded for Block {
    const BITS: usize = 3;
    const MULTIPLIERS: usize = 16;
    const TABLE: [i8; 16] = [-4, -3, -2, -1, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0];

    fn scale(&self) -> [u8; 2] {
        self.scale
    }

    fn multipliers(&self) -> [i8; 16] {
        std::array::from_fn(|sub| {
            let low = self.scales[sub % 8] >> (sub / 8 * 4) & 15;
            let high = self.scales[8 + sub % 4] >> (sub / 4 * 2) & 3;
            (high << 4 | low).cast_signed() - 32
        })
    }

    fn codes(&self) -> [u8; 256] {
        std::array::from_fn(|i| {
            let low = self.low[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
            (self.third[i % 32] >> (i / 32) & 1) << 2 | low
        })
    }
}

pub(super) fn format(simd: Simd) -> Format {
    coded::format::<Block>(DType::Q3_K, packed_kernels!(simd, quantised Block))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q3_K, "q3_k.bin");
}
