//! IQ1_M: 256 values in 56 bytes, points of IQ1_S's lattice with finer scales;
//! value = scale * (2 scales\[run\] + 1) * (point +- 1/8), by runs of 16; every eight are moved for themselves.

use super::coded::{self, Coded};
use super::grids::IQ1_S;
use super::packed::packed_kernels;
use super::{Format, Simd};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    /// The low eight bits of the points' indices.
    points: [u8; 32],
    /// Four bits for each point, the first in the low half: three more of its index, and whether it is moved down.
    high: [u8; 16],
    /// Four words: 3-bit scales of four runs, and above them four bits of the f16 scale, the lowest first.
    scales: [[u8; 2]; 4],
}

impl Coded for Block {
    const BITS: usize = 3;
    const MULTIPLIERS: usize = 16;
    const UNIT: f32 = 0.125;
    /// Eight times the value; the third bit says that it is moved down.
    const TABLE: [i8; 16] = [-7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    fn scale(&self) -> [u8; 2] {
        let bits = |word: usize| u16::from_le_bytes(self.scales[word]) >> 12 << (4 * word);
        (bits(0) | bits(1) | bits(2) | bits(3)).to_le_bytes()
    }

    fn multipliers(&self) -> [i8; 16] {
        std::array::from_fn(|run| {
            (2 * (u16::from_le_bytes(self.scales[run / 4]) >> (run % 4 * 3) & 7) + 1) as i8
        })
    }

    fn codes(&self) -> [u8; 256] {
        let mut codes = [0; 256];
        for (index, (codes, &low)) in codes.as_chunks_mut::<8>().0.iter_mut().zip(&self.points).enumerate() {
            let high = self.high[index / 2] >> (index % 2 * 4);
            let point = usize::from(high & 7) << 8 | usize::from(low);
            let down = high >> 3 & 1;
            *codes = IQ1_S.eight(point).map(|code| code | down << 2);
        }
        codes
    }
}

pub(super) fn format(simd: Simd) -> Format {
    coded::format::<Block>(DType::IQ1_M, packed_kernels!(simd, quantised Block))
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(IQ1_M, "iq1_m.bin");
}
