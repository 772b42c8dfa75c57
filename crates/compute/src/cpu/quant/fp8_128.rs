//! FP8_128: 128 values in 132 bytes, an f32 scale and floats of 8 bits ([`float8`]); value = scale * float. It is what
//! matrices of FP8 checkpoints land in, with the bits of the file. Activations stay f32, as with the float types; those
//! that meet FP8_A8, which has the same bytes, are rounded before ([`super::eights`]).

use super::lanes::Lanes;
use super::packed::{GROUP, PackedFloat, packed_kernels};
use super::{Format, Simd, blocks_and_values};
use crate::float8;
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    scale: [u8; 4],
    codes: [[u8; 32]; 4],
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 128>(weights, out) {
        let scale = f32::from_le_bytes(block.scale);
        for (out, code) in out.iter_mut().zip(block.codes.as_flattened()) {
            *out = scale * float8::value(*code);
        }
    }
}

pub(super) fn format(dtype: DType, simd: Simd) -> Format {
    Format { dtype, dequantize, dot: None, kernels: packed_kernels!(simd, float Blocks), runs: None }
}

/// For each block of 128 columns: codes as in `mxfp8.rs`, 32 times; then each row's scale.
enum Blocks {}

const CODE_BYTES: usize = 128 * GROUP;

impl PackedFloat for Blocks {
    const VALUES: usize = 128;
    const STORED_BYTES: usize = 132;
    const PACKED_BYTES: usize = CODE_BYTES + 4 * GROUP;

    fn pack(stored: &[u8], row: usize, out: &mut [u8]) {
        let blocks: &[Block] = bytemuck::cast_slice(stored);
        for (block, out) in blocks.iter().zip(out.chunks_exact_mut(Self::PACKED_BYTES)) {
            let (codes, scales) = out.split_at_mut(CODE_BYTES);
            let fours = block.codes.as_flattened().as_chunks::<4>().0;
            for (codes, four) in codes.chunks_exact_mut(4 * GROUP).zip(fours) {
                codes[4 * row..][..4].copy_from_slice(&[four[0], four[2], four[1], four[3]]);
            }
            scales[4 * row..][..4].copy_from_slice(&block.scale);
        }
    }

    #[inline(always)]
    unsafe fn two<L: Lanes>(group: *const u8, pair: usize) -> [L::Floats; 2] {
        const BIASES: f32 = f32::from_bits((127 + 120) << 23);
        // SAFETY: as the caller's.
        unsafe {
            let block = group.add(pair / 64 * Self::PACKED_BYTES);
            let x = L::pairs(block.add(pair % 64 / 2 * 64));
            // As the bits of bf16, too small by the difference of the biases.
            let x = if pair.is_multiple_of(2) {
                L::or_masked(L::and(L::shl::<4>(x), 0x07f0), L::shl::<8>(x), 0x8000)
            } else {
                L::or_masked(L::and(L::shr::<4>(x), 0x07f0), x, 0x8000)
            };
            let (scale, biases) = (L::floats(block.add(CODE_BYTES).cast()), L::splat(&BIASES));
            let value = |x| L::mul(scale, L::mul(x, biases));
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
        for dtype in [DType::FP8_128, DType::FP8_A8] {
            check::values(dtype, include_bytes!("../../../tests/quant/fp8_128.bin"));
        }
    }
}
