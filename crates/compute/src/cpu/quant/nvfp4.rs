//! NVFP4: 64 values in 36 bytes, 4-bit floats as in MXFP4, each 16 with an 8-bit float for their scale;
//! value = scale / 2 * table\[code\].

use super::activations::IntBlock;
use super::lanes::Lanes;
use super::mxfp4::TABLE;
use super::packed::{
    GROUP, Packed, STRAIGHT_PAIRS, byte_nibbles, looked_up, packed_kernels, store_half, word,
};
use super::{Format, Run, Runs, Simd, block_pairs, blocks_and_runs, blocks_and_values};
use fornax_format::DType;
use half::f16;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    /// Four bits of exponent (bias 7), three of mantissa; the top bit is not read, and 127 is zero.
    scales: [u8; 4],
    /// Eight bytes for each 16 values: byte i holds code i in its low half and code i + 8 in its high half.
    codes: [[u8; 8]; 4],
}

impl Block {
    #[inline]
    fn codes(&self) -> [u8; 64] {
        std::array::from_fn(|i| self.codes[i / 16][i % 8] >> (i % 16 / 8 * 4) & 15)
    }

    /// Half the scale of 16 values: f16 has all of them.
    #[inline]
    fn half_scale(&self, run: usize) -> f16 {
        let (exponent, mantissa) = (self.scales[run] >> 3 & 15, f32::from(self.scales[run] & 7));
        f16::from_f32_const(match (exponent, self.scales[run]) {
            (_, 127) => 0.0,
            (0, _) => mantissa / 1024.0,
            // 2^(exponent - 7) / 2 as the bits of an f32.
            _ => (1.0 + mantissa / 8.0) * f32::from_bits((u32::from(exponent) + 119) << 23),
        })
    }
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 64>(weights, out) {
        let codes = block.codes();
        for (index, (out, code)) in out.iter_mut().zip(codes).enumerate() {
            *out = block.half_scale(index / 16).to_f32_const() * f32::from(TABLE[usize::from(code)]);
        }
    }
}

fn dot(weights: &[u8], activations: &[IntBlock]) -> f32 {
    let mut sum = 0.0;
    for (block, activations) in block_pairs::<Block, 2>(weights, activations) {
        let integers = block.codes().map(|code| TABLE[usize::from(code)]);
        for (run, integers) in integers.as_chunks::<16>().0.iter().enumerate() {
            let product = activations[run / 2].dot(run % 2 * 16, integers);
            sum = block.half_scale(run).to_f32_const().mul_add(product, sum);
        }
    }
    sum
}

fn read_runs(weights: &[u8], out: &mut [Run]) {
    for (block, out) in blocks_and_runs::<Block, 4>(weights, out) {
        for (index, (run, codes)) in out.iter_mut().zip(block.codes().as_chunks().0).enumerate() {
            *run = Run { codes: *codes, scale: block.half_scale(index).to_f32_const(), min: 0.0 };
        }
    }
}

pub(super) fn format(simd: Simd) -> Format {
    Format {
        dtype: DType::NVFP4,
        dequantize,
        dot: Some(dot),
        kernels: packed_kernels!(simd, quantised Block),
        runs: Some(Runs { table: TABLE, mins: false, read: read_runs }),
    }
}

impl Packed for Block {
    const VALUES: usize = 64;
    const WORDS: usize = 8;
    const SCALE_BYTES: usize = 128;
    const SHARING: usize = 2;
    const HALVES: bool = true;
    const PAIRS: [[usize; 4]; 4] = STRAIGHT_PAIRS;

    /// Byte i has the codes of values i and i + 32.
    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        let codes = self.codes();
        for (w, words) in words.iter_mut().enumerate() {
            words[row] = word(&std::array::from_fn(|i| codes[4 * w + i] | codes[32 + 4 * w + i] << 4));
        }
        for run in 0..4 {
            store_half(scales, run, row, self.half_scale(run).to_le_bytes());
        }
    }

    #[inline(always)]
    unsafe fn quarter<L: Lanes, const PART: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [L::Pairs; 4] {
        // SAFETY: as the caller's.
        unsafe {
            let words = codes.add((block / 2 * 8 + quarter * 2) * 64);
            looked_up::<L>(byte_nibbles::<L, PART>(words), &TABLE)
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, block: usize, half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { L::halves(scales.add(block / 2 * 128 + (block % 2 * 2 + half) * 32)) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(NVFP4, "nvfp4.bin");
}
