//! MXFP8: 32 values in 33 bytes, a power of two and floats of 8 bits ([`float8`]); value = power * float. No file has
//! it: it is what float matrices are quantised to. Activations stay f32, as with the float types: the codes are no
//! small integers.

use super::lanes::Lanes;
use super::packed::{GROUP, PackedFloat, packed_kernels};
use super::{Format, Simd, blocks_and_values};
use crate::float8;
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    exponent: u8,
    codes: [u8; 32],
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 32>(weights, out) {
        for (out, code) in out.iter_mut().zip(block.codes) {
            *out = float8::power(block.exponent) * float8::value(code);
        }
    }
}

pub(super) fn format(simd: Simd) -> Format {
    Format {
        dtype: DType::MXFP8,
        dequantize,
        dot: None,
        kernels: packed_kernels!(simd, float Blocks),
        runs: None,
    }
}

/// For each block of 32 columns: the codes of four columns in a word of each row, those of the first and the third in
/// the lower bytes of its halves, eight times; then each row's power of two as bf16.
enum Blocks {}

const CODE_BYTES: usize = 32 * GROUP;

impl PackedFloat for Blocks {
    const VALUES: usize = 32;
    const STORED_BYTES: usize = 33;
    const PACKED_BYTES: usize = CODE_BYTES + 2 * GROUP;

    fn pack(stored: &[u8], row: usize, out: &mut [u8]) {
        let blocks: &[Block] = bytemuck::cast_slice(stored);
        for (block, out) in blocks.iter().zip(out.chunks_exact_mut(Self::PACKED_BYTES)) {
            let (codes, powers) = out.split_at_mut(CODE_BYTES);
            for (codes, four) in codes.chunks_exact_mut(4 * GROUP).zip(block.codes.as_chunks::<4>().0) {
                codes[4 * row..][..4].copy_from_slice(&[four[0], four[2], four[1], four[3]]);
            }
            // Exact: a bf16 has every power of two that an f32 has.
            let [_, _, low, high] = float8::power(block.exponent).to_le_bytes();
            powers[2 * row..][..2].copy_from_slice(&[low, high]);
        }
    }

    #[inline(always)]
    unsafe fn two<L: Lanes>(group: *const u8, pair: usize) -> [L::Floats; 2] {
        const BIASES: f32 = f32::from_bits((127 + 120) << 23);
        // SAFETY: as the caller's.
        unsafe {
            let block = group.add(pair / 16 * Self::PACKED_BYTES);
            let x = L::pairs(block.add(pair % 16 / 2 * 64));
            // As the bits of bf16, too small by the difference of the biases.
            let x = if pair.is_multiple_of(2) {
                L::or_masked(L::and(L::shl::<4>(x), 0x07f0), L::shl::<8>(x), 0x8000)
            } else {
                L::or_masked(L::and(L::shr::<4>(x), 0x07f0), x, 0x8000)
            };
            let (power, biases) = (L::brains(block.add(CODE_BYTES)), L::splat(&BIASES));
            let value = |x| L::mul(power, L::mul(x, biases));
            [value(L::first_brain(x)), value(L::second_brain(x))]
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::cpu::quant::check;
    use fornax_format::DType;

    #[test]
    fn every_value_has_the_bits_that_ml_dtypes_gives() {
        check::values(DType::MXFP8, include_bytes!("../../../tests/quant/mxfp8.bin"));
    }
}
