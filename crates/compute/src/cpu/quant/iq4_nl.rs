//! IQ4_NL: 32 values in 18 bytes, codes that stand for sixteen integers, closer together near zero;
//! value = scale * table\[code\].

use super::activations::IntBlock;
use super::lanes::Lanes;
use super::packed::{GROUP, NIBBLE_PAIRS, Packed, looked_up, nibbles, packed_kernels, store_half, word};
use super::{Format, Run, Runs, Simd, block_pairs, blocks_and_runs, blocks_and_values, f16};
use fornax_format::DType;

/// What the codes stand for, in IQ4_XS, too.
pub(super) const TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 2],
    /// Byte i holds code i in its low half and code i + 16 in its high half.
    codes: [u8; 16],
}

impl Block {
    #[inline]
    fn integers(&self) -> [i8; 32] {
        std::array::from_fn(|i| TABLE[usize::from(self.codes[i % 16] >> (i / 16 * 4) & 15)])
    }
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 32>(weights, out) {
        let scale = f16(block.scale);
        for (out, integer) in out.iter_mut().zip(block.integers()) {
            *out = scale * f32::from(integer);
        }
    }
}

fn dot(weights: &[u8], activations: &[IntBlock]) -> f32 {
    let mut sum = 0.0;
    for (block, [a]) in block_pairs::<Block, 1>(weights, activations) {
        sum = f16(block.scale).mul_add(a.dot(0, &block.integers()), sum);
    }
    sum
}

fn read_runs(weights: &[u8], out: &mut [Run]) {
    for (block, out) in blocks_and_runs::<Block, 2>(weights, out) {
        for (half, run) in out.iter_mut().enumerate() {
            let codes = block.codes.map(|byte| byte >> (half * 4) & 15);
            *run = Run { codes, scale: f16(block.scale), min: 0.0 };
        }
    }
}

pub(super) fn format(simd: Simd) -> Format {
    Format {
        dtype: DType::IQ4_NL,
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
        store_half(scales, 0, row, self.scale);
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
        unsafe { L::halves(scales.add(block * 32)) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(IQ4_NL, "iq4_nl.bin");
}
