//! IQ3_XXS: 256 values in 98 bytes, points of a lattice of four magnitudes, with signs;
//! value = scale * (scales\[block\] + 1/2) / 2 * point, by blocks of 32.

use super::coded::{self, Coded};
use super::grids::{IQ3_XXS, even_signs};
use super::packed::packed_kernels;
use super::{Format, Simd};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    /// The points' indices.
    points: [u8; 64],
    /// For each block: four times seven signs, and four bits of scale.
    signs: [[u8; 4]; 8],
}

impl Coded for Block {
    const BITS: usize = 4;
    const MULTIPLIERS: usize = 8;
    const UNIT: f32 = 0.25;
    /// The fourth bit is the sign.
    const TABLE: [i8; 16] = [4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62];

    fn scale(&self) -> [u8; 2] {
        self.scale
    }

    fn multipliers(&self) -> [i8; 16] {
        std::array::from_fn(|block| match block {
            0..8 => 2 * (self.signs[block][3] >> 4).cast_signed() + 1,
            _ => 0,
        })
    }

    fn codes(&self) -> [u8; 256] {
        let mut codes = [0; 256];
        for (index, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let signs = even_signs(u32::from_le_bytes(self.signs[index / 4]) >> (index % 4 * 7));
            let points = [0, 1].map(|half| IQ3_XXS.four(self.points[index * 2 + half].into()));
            *codes = std::array::from_fn(|i| points[i / 4][i % 4] | (signs >> i & 1) << 3);
        }
        codes
    }
}

pub(super) fn format(simd: Simd) -> Format {
    coded::format::<Block>(DType::IQ3_XXS, packed_kernels!(simd, quantised Block))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(IQ3_XXS, "iq3_xxs.bin");
}
