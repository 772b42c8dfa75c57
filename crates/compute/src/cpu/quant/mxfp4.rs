//! MXFP4: 32 values in 17 bytes, 4-bit floats with a power of two for their scale; value = scale / 2 * table\[code\].

use super::activations::IntBlock;
use super::lanes::Lanes;
use super::packed::{GROUP, NIBBLE_PAIRS, Packed, looked_up, nibbles, packed_kernels, store_half, word};
use super::{Format, Run, Runs, Simd, block_pairs, blocks_and_runs, blocks_and_values};
use fornax_format::DType;

/// Twice the values of a float with two bits of exponent and one of mantissa; the fourth bit is the sign. In NVFP4, too.
pub(super) const TABLE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    /// The scale is two to the power of this less 127.
    exponent: u8,
    /// Byte i holds code i in its low half and code i + 16 in its high half.
    codes: [u8; 16],
}

impl Block {
    #[inline]
    fn integers(&self) -> [i8; 32] {
        std::array::from_fn(|i| TABLE[usize::from(self.codes[i % 16] >> (i / 16 * 4) & 15)])
    }

    /// Half the scale as bf16, which has every power of two that it takes: the lowest two are subnormal.
    #[inline]
    fn half_scale(&self) -> [u8; 2] {
        let bits = match self.exponent {
            0 => 0x20,
            1 => 0x40,
            exponent => u16::from(exponent - 1) << 7,
        };
        bits.to_le_bytes()
    }

    #[inline]
    fn scale(&self) -> f32 {
        let [low, high] = self.half_scale();
        f32::from_le_bytes([0, 0, low, high])
    }
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 32>(weights, out) {
        for (out, integer) in out.iter_mut().zip(block.integers()) {
            *out = block.scale() * f32::from(integer);
        }
    }
}

fn dot(weights: &[u8], activations: &[IntBlock]) -> f32 {
    let mut sum = 0.0;
    for (block, [a]) in block_pairs::<Block, 1>(weights, activations) {
        sum = block.scale().mul_add(a.dot(0, &block.integers()), sum);
    }
    sum
}

fn read_runs(weights: &[u8], out: &mut [Run]) {
    for (block, out) in blocks_and_runs::<Block, 2>(weights, out) {
        for (half, run) in out.iter_mut().enumerate() {
            let codes = block.codes.map(|byte| byte >> (half * 4) & 15);
            *run = Run { codes, scale: block.scale(), min: 0.0 };
        }
    }
}

pub(super) fn format(simd: Simd) -> Format {
    Format {
        dtype: DType::MXFP4,
        dequantize,
        dot: Some(dot),
        kernels: packed_kernels!(simd, quantised Block),
        runs: Some(Runs { table: TABLE, mins: false, read: read_runs }),
    }
}

impl Packed for Block {
    const VALUES: usize = 32;
    const WORDS: usize = 4;
    const SCALE_BYTES: usize = 32;
    const PAIRS: [[usize; 4]; 4] = NIBBLE_PAIRS;

    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        for (words, bytes) in words.iter_mut().zip(self.codes.as_chunks().0) {
            words[row] = word(bytes);
        }
        store_half(scales, 0, row, self.half_scale());
    }

    #[inline(always)]
    unsafe fn quarter<L: Lanes, const PART: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [L::Pairs; 4] {
        // SAFETY: as the caller's.
        unsafe { looked_up::<L>(nibbles::<L>(codes.add((block * 4 + quarter) * 64)), &TABLE) }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, block: usize, _half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { L::brains(scales.add(block * 32)) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(MXFP4, "mxfp4.bin");
}
