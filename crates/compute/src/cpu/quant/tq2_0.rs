//! TQ2_0: 256 values in 66 bytes, two bits each; value = scale * (code - 1).

use super::coded::{self, Coded};
use super::packed::packed_kernels;
use super::{Format, Simd};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    /// 32 bytes for each 128 values: byte i holds values i, i + 32, i + 64, i + 96, lowest first.
    codes: [u8; 64],
    scale: [u8; 2],
}

impl Coded for Block {
    const BITS: usize = 2;
    const MULTIPLIERS: usize = 1;
    const TABLE: [i8; 16] = [-1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    fn scale(&self) -> [u8; 2] {
        self.scale
    }

    fn codes(&self) -> [u8; 256] {
        std::array::from_fn(|i| self.codes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3)
    }
}

pub(super) fn format(simd: Simd) -> Format {
    coded::format::<Block>(DType::TQ2_0, packed_kernels!(simd, quantised Block))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(TQ2_0, "tq2_0.bin");
}
