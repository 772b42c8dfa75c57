//! IQ2_XXS: 256 values in 66 bytes, points of a lattice of eight magnitudes, with signs;
//! value = scale * (scales\[block\] + 1/2) / 4 * point, by blocks of 32.

use super::coded::{self, Coded};
use super::grids::{IQ2_XXS, even_signs};
use super::packed::packed_kernels;
use super::{Format, Simd, iq2_xs};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    /// For each block of 32: the indices of four points, then a word of four times seven signs and four bits of scale.
    blocks: [[u8; 8]; 8],
}

impl Coded for Block {
    const BITS: usize = 3;
    const MULTIPLIERS: usize = 8;
    const UNIT: f32 = 0.125;
    const TABLE: [i8; 16] = iq2_xs::TABLE;

    fn scale(&self) -> [u8; 2] {
        self.scale
    }

    fn multipliers(&self) -> [i8; 16] {
        std::array::from_fn(|block| match block {
            0..8 => 2 * (self.blocks[block][7] >> 4).cast_signed() + 1,
            _ => 0,
        })
    }

    fn codes(&self) -> [u8; 256] {
        let mut codes = [0; 256];
        for (index, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let [points, signs] = bytemuck::cast::<_, [[u8; 4]; 2]>(self.blocks[index / 4]);
            let signs = even_signs(u32::from_le_bytes(signs) >> (index % 4 * 7));
            let point = IQ2_XXS.eight(points[index % 4].into());
            *codes = std::array::from_fn(|i| point[i] | (signs >> i & 1) << 2);
        }
        codes
    }
}

pub(super) fn format(simd: Simd) -> Format {
    coded::format::<Block>(DType::IQ2_XXS, packed_kernels!(simd, quantised Block))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(IQ2_XXS, "iq2_xxs.bin");
}
