//! IQ2_S: 256 values in 82 bytes, points of a lattice of eight magnitudes, with signs;
//! value = scale * (scales\[run\] + 1/2) / 4 * point, by runs of 16.

use super::coded::{self, Coded};
use super::grids::IQ2_S;
use super::packed::packed_kernels;
use super::{Format, Simd, iq2_xs};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    /// The low eight bits of the points' indices.
    points: [u8; 32],
    /// Eight signs for each point.
    signs: [u8; 32],
    /// Two more bits for each point, four points in a byte.
    high: [u8; 8],
    /// Four bits for each run, the first in the low half.
    scales: [u8; 8],
}

impl Coded for Block {
    const BITS: usize = 3;
    const MULTIPLIERS: usize = 16;
    const UNIT: f32 = 0.125;
    const TABLE: [i8; 16] = iq2_xs::TABLE;

    fn scale(&self) -> [u8; 2] {
        self.scale
    }

    fn multipliers(&self) -> [i8; 16] {
        iq2_xs::odd_multipliers(&self.scales)
    }

    fn codes(&self) -> [u8; 256] {
        let mut codes = [0; 256];
        for (index, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let high = self.high[index / 4] >> (index % 4 * 2) & 3;
            let point = IQ2_S.eight(usize::from(high) << 8 | usize::from(self.points[index]));
            *codes = std::array::from_fn(|i| point[i] | (self.signs[index] >> i & 1) << 2);
        }
        codes
    }
}

pub(super) fn format(simd: Simd) -> Format {
    coded::format::<Block>(DType::IQ2_S, packed_kernels!(simd, quantised Block))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(IQ2_S, "iq2_s.bin");
}
