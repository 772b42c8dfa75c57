//! IQ1_S: 256 values in 50 bytes, points of a lattice of eight values of -1, 0 or 1, all moved by an eighth;
//! value = scale * (2 scales\[block\] + 1) * (point +- 1/8), by blocks of 32.

use super::coded::{self, Coded};
use super::grids::IQ1_S;
use super::packed::packed_kernels;
use super::{Format, Simd};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    /// The low eight bits of the points' indices.
    points: [u8; 32],
    /// For each block: three more bits of its four points, three bits of scale, and whether it is moved down.
    high: [[u8; 2]; 8],
}

impl Coded for Block {
    const BITS: usize = 3;
    const MULTIPLIERS: usize = 8;
    const UNIT: f32 = 0.125;
    /// Eight times the value; the third bit says that it is moved down.
    const TABLE: [i8; 16] = [-7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    fn scale(&self) -> [u8; 2] {
        self.scale
    }

    fn multipliers(&self) -> [i8; 16] {
        std::array::from_fn(|block| match block {
            0..8 => (2 * (u16::from_le_bytes(self.high[block]) >> 12 & 7) + 1) as i8,
            _ => 0,
        })
    }

    fn codes(&self) -> [u8; 256] {
        let mut codes = [0; 256];
        for (index, (codes, &low)) in codes.as_chunks_mut::<8>().0.iter_mut().zip(&self.points).enumerate() {
            let high = u16::from_le_bytes(self.high[index / 4]);
            let point = usize::from(high >> (index % 4 * 3) & 7) << 8 | usize::from(low);
            let down = (high >> 15) as u8;
            *codes = IQ1_S.eight(point).map(|code| code | down << 2);
        }
        codes
    }
}

pub(super) fn format(simd: Simd) -> Format {
    coded::format::<Block>(DType::IQ1_S, packed_kernels!(simd, quantised Block))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(IQ1_S, "iq1_s.bin");
}
