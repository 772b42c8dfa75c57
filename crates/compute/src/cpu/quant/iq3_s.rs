//! IQ3_S: 256 values in 110 bytes, points of a lattice of four magnitudes, with signs;
//! value = scale * (2 scales\[block\] + 1) * point, by blocks of 32.

use super::coded::{self, Coded};
use super::grids::IQ3_S;
use super::packed::packed_kernels;
use super::{Format, Simd};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    /// The low eight bits of the points' indices.
    points: [u8; 64],
    /// One more bit for each point, eight points in a byte.
    high: [u8; 8],
    /// A sign for each value.
    signs: [u8; 32],
    /// Four bits for each block, the first in the low half.
    scales: [u8; 4],
}

impl Coded for Block {
    const BITS: usize = 4;
    const MULTIPLIERS: usize = 8;
    /// The fourth bit is the sign.
    const TABLE: [i8; 16] = [1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15];

    fn scale(&self) -> [u8; 2] {
        self.scale
    }

    fn multipliers(&self) -> [i8; 16] {
        std::array::from_fn(|block| match block {
            0..8 => 2 * (self.scales[block / 2] >> (block % 2 * 4) & 15).cast_signed() + 1,
            _ => 0,
        })
    }

    fn codes(&self) -> [u8; 256] {
        let mut codes = [0; 256];
        for (index, codes) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let high = self.high[index / 8] >> (index % 8) & 1;
            let point = IQ3_S.four(usize::from(high) << 8 | usize::from(self.points[index]));
            let signs = self.signs[index / 2] >> (index % 2 * 4);
            *codes = std::array::from_fn(|i| point[i] | (signs >> i & 1) << 3);
        }
        codes
    }
}

pub(super) fn format(simd: Simd) -> Format {
    coded::format::<Block>(DType::IQ3_S, packed_kernels!(simd, quantised Block))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(IQ3_S, "iq3_s.bin");
}
