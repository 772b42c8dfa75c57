//! IQ2_XS: 256 values in 74 bytes, points of a lattice of eight magnitudes, with signs;
//! value = scale * (scales\[run\] + 1/2) / 4 * point, by runs of 16.

use super::coded::{self, Coded};
use super::grids::{IQ2_XS, even_signs};
use super::packed::packed_kernels;
use super::{Format, Simd};
use fornax_format::DType;

/// What the codes stand for, in IQ2_S and IQ2_XXS, too: the third bit is the sign.
pub(super) const TABLE: [i8; 16] = [8, 25, 43, 0, -8, -25, -43, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Twice what four bits say, and one; in IQ2_S, too.
pub(super) fn odd_multipliers(scales: &[u8; 8]) -> [i8; 16] {
    std::array::from_fn(|run| 2 * (scales[run / 2] >> (run % 2 * 4) & 15).cast_signed() + 1)
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    /// Nine bits of a point's index, and seven signs.
    points: [[u8; 2]; 32],
    /// Four bits for each run, the first in the low half.
    scales: [u8; 8],
}

impl Coded for Block {
    const BITS: usize = 3;
    const MULTIPLIERS: usize = 16;
    const UNIT: f32 = 0.125;
    const TABLE: [i8; 16] = TABLE;

    fn scale(&self) -> [u8; 2] {
        self.scale
    }

    fn multipliers(&self) -> [i8; 16] {
        odd_multipliers(&self.scales)
    }

    fn codes(&self) -> [u8; 256] {
        let mut codes = [0; 256];
        for (codes, &stored) in codes.as_chunks_mut::<8>().0.iter_mut().zip(&self.points) {
            let stored = u16::from_le_bytes(stored);
            let (point, signs) = (IQ2_XS.eight((stored & 511).into()), even_signs((stored >> 9).into()));
            *codes = std::array::from_fn(|i| point[i] | (signs >> i & 1) << 2);
        }
        codes
    }
}

pub(super) fn format(simd: Simd) -> Format {
    coded::format::<Block>(DType::IQ2_XS, packed_kernels!(simd, quantised Block))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(IQ2_XS, "iq2_xs.bin");
}
