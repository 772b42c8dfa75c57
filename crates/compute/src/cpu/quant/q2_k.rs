//! Q2_K: 256 values in 84 bytes, sixteen sub-blocks of 16 with 4-bit scales and minima;
//! value = scale * scales\[sub\] * code - min_scale * mins\[sub\].

use super::activations::IntBlock;
use super::coded::{crumbs, pack_crumbs};
use super::lanes::Lanes;
use super::packed::{GROUP, Packed, STRAIGHT_PAIRS, packed_kernels, store_half};
use super::{Format, Run, Runs, Simd, block_pairs, blocks_and_runs, blocks_and_values, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    /// Low half: scale; high half: minimum.
    subs: [u8; 16],
    /// 32 bytes for each 128 values: byte i holds values i, i + 32, i + 64, i + 96, lowest first.
    codes: [u8; 64],
    scale: [u8; 2],
    min_scale: [u8; 2],
}

impl Block {
    #[inline]
    fn codes(&self) -> [u8; 256] {
        std::array::from_fn(|i| self.codes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3)
    }

    /// (scale, minimum) of 16 values.
    #[inline]
    fn sub(&self, sub: usize) -> (f32, f32) {
        let (scale, min) = (self.subs[sub] & 15, self.subs[sub] >> 4);
        (f16(self.scale) * f32::from(scale), f16(self.min_scale) * f32::from(min))
    }
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 256>(weights, out) {
        for (index, (out, code)) in out.iter_mut().zip(block.codes()).enumerate() {
            let (scale, min) = block.sub(index / 16);
            *out = scale * f32::from(code) - min;
        }
    }
}

fn dot(weights: &[u8], activations: &[IntBlock]) -> f32 {
    let mut sum = 0.0f32;
    for (block, activations) in block_pairs::<Block, 8>(weights, activations) {
        for (sub, codes) in block.codes().as_chunks::<16>().0.iter().enumerate() {
            let ((scale, min), a) = (block.sub(sub), &activations[sub / 2]);
            sum = scale.mul_add(a.dot(sub % 2 * 16, codes), sum);
            sum = (-min).mul_add(a.dot(sub % 2 * 16, &[1u8; 16]), sum);
        }
    }
    sum
}

fn read_runs(weights: &[u8], out: &mut [Run]) {
    for (block, out) in blocks_and_runs::<Block, 16>(weights, out) {
        for (sub, (run, codes)) in out.iter_mut().zip(block.codes().as_chunks().0).enumerate() {
            let (scale, min) = block.sub(sub);
            *run = Run { codes: *codes, scale, min };
        }
    }
}

pub(super) fn format(simd: Simd) -> Format {
    Format {
        dtype: DType::Q2_K,
        dequantize,
        dot: Some(dot),
        kernels: packed_kernels!(simd, quantised Block),
        runs: Some(Runs {
            table: [0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            mins: true,
            read: read_runs,
        }),
    }
}

impl Packed for Block {
    const VALUES: usize = 256;
    const WORDS: usize = 16;
    /// The 4-bit scales and minima are widened to bytes: half a bit for a value more than the file has.
    const SCALE_BYTES: usize = (2 + 2 + 16 + 16) * GROUP;
    const HALVES: bool = true;
    const MIN: bool = true;
    const PAIRS: [[usize; 4]; 4] = STRAIGHT_PAIRS;

    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        pack_crumbs(&self.codes(), row, words);
        store_half(scales, 0, row, self.scale);
        store_half(scales, 1, row, self.min_scale);
        for (sub, both) in self.subs.iter().enumerate() {
            scales[(4 + sub) * GROUP + row] = both & 15;
            scales[(20 + sub) * GROUP + row] = both >> 4;
        }
    }

    #[inline(always)]
    unsafe fn quarter<L: Lanes, const PART: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [L::Pairs; 4] {
        // SAFETY: as the caller's.
        unsafe { crumbs::<L>(codes.add(block / 8 * Self::WORDS * 64), block % 8, quarter) }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, block: usize, half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe {
            let scales = scales.add(block / 8 * Self::SCALE_BYTES);
            L::mul(L::halves(scales), L::bytes(scales.add((4 + block % 8 * 2 + half) * GROUP)))
        }
    }

    #[inline(always)]
    unsafe fn min<L: Lanes>(scales: *const u8, block: usize, half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe {
            let scales = scales.add(block / 8 * Self::SCALE_BYTES);
            let min = L::bytes(scales.add((20 + block % 8 * 2 + half) * GROUP));
            L::negated(L::mul(L::halves(scales.add(32)), min))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q2_K, "q2_k.bin");
}
