//! Q6_K: 256 values in 210 bytes, sixteen sub-blocks of 16 with 8-bit scales;
//! value = scale * scales\[sub\] * (code - 32).

use super::activations::Q8Block;
use super::{Activation, Dot, Format, Simd, block_pairs, blocks_and_values, f16};
use fornax_format::DType;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Block {
    /// The low four bits. 64 bytes for each 128 values: the low halves are the first 64, the high halves the others.
    low: [u8; 128],
    /// The high two bits. 32 bytes for each 128 values: byte i holds values i, i + 32, i + 64, i + 96, lowest first.
    high: [u8; 64],
    scales: [i8; 16],
    scale: [u8; 2],
}

impl Block {
    /// code - 32, in -32..=31.
    #[inline]
    fn codes(&self) -> [i8; 256] {
        let mut codes = [0; 256];
        for (i, code) in codes.iter_mut().enumerate() {
            let (half, within) = (i / 128, i % 128);
            let low = self.low[half * 64 + within % 64] >> (within / 64 * 4) & 15;
            let high = self.high[half * 32 + within % 32] >> (within / 32 * 2) & 3;
            *code = (high << 4 | low).cast_signed() - 32;
        }
        codes
    }
}

fn dequantize(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<Block, 256>(weights, out) {
        let codes = block.codes();
        for (sub, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let scale = f16(block.scale) * f32::from(block.scales[sub]);
            for (out, &code) in out.iter_mut().zip(&codes[sub * 16..]) {
                *out = scale * f32::from(code);
            }
        }
    }
}

fn dot(weights: &[u8], activations: &[Q8Block]) -> f32 {
    let mut sum = 0.0;
    for (block, activations) in block_pairs::<Block, 8>(weights, activations) {
        let codes = block.codes();
        for (index, a) in activations.iter().enumerate() {
            let [first, second] = a.dot_halves(&codes.as_chunks().0[index]);
            let scale = |half: usize| f16(block.scale) * f32::from(block.scales[index * 2 + half]);
            sum += scale(0) * first + scale(1) * second;
        }
    }
    sum
}

pub(super) fn format(simd: Simd) -> &'static Format {
    static SCALAR: Format = Format {
        dtype: DType::Q6_K,
        dequantize,
        activation: Activation::Q8(Dot { one: dot, four: |w, rows| rows.map(|row| dot(w, row)) }),
    };
    match simd {
        Simd::Scalar => &SCALAR,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &avx2::FORMAT,
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::super::avx2::{
        add_symmetric, avx2_dequantize, avx2_dot, folded, load_16, load_32, same_length, scale, store_16,
    };
    use super::*;
    use core::arch::x86_64::*;

    pub(super) static FORMAT: Format = Format {
        dtype: DType::Q6_K,
        dequantize: avx2_dequantize!(self::dequantize),
        activation: Activation::Q8(avx2_dot!(dots)),
    };

    #[target_feature(enable = "avx2,fma,f16c")]
    fn dequantize(weights: &[u8], out: &mut [f32]) {
        for (block, out) in blocks_and_values::<Block, 256>(weights, out) {
            let mut signed = [0; 256];
            for (signed, codes) in signed.as_chunks_mut::<32>().0.iter_mut().zip(codes(block)) {
                *signed = bytemuck::cast(_mm256_sub_epi8(codes, _mm256_set1_epi8(32)));
            }
            let subs = out.as_chunks_mut().0.iter_mut().zip(signed.as_chunks::<16>().0);
            for ((out, codes), sub_scale) in subs.zip(block.scales) {
                let scale = _mm256_mul_ps(scale(block.scale), _mm256_set1_ps(sub_scale.into()));
                store_16(out, load_16::<i8>(codes), |code| _mm256_mul_ps(scale, code));
            }
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn dots<const N: usize>(weights: &[u8], rows: [&[Q8Block]; N]) -> [f32; N] {
        let (blocks, rows) = same_length::<Block, 8, N>(weights, rows);
        let mut sums = [_mm256_setzero_ps(); N];
        for (index, block) in blocks.iter().enumerate() {
            let block_scale = scale(block.scale);
            for (group, codes) in codes(block).into_iter().enumerate() {
                let codes = _mm256_sub_epi8(codes, _mm256_set1_epi8(32));
                // The first four lanes sum the first 16 codes, which have a scale of their own.
                let [first, second] = [0, 1].map(|half| f32::from(block.scales[group * 2 + half]));
                let sub_scales = _mm256_set_m128(_mm_set1_ps(second), _mm_set1_ps(first));
                let scale = _mm256_mul_ps(block_scale, sub_scales);
                add_symmetric(&mut sums, (scale, codes), rows.map(|row| &row[index][group]));
            }
        }
        folded(sums)
    }

    /// 0..=63, 32 at a time.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn codes(block: &Block) -> [__m256i; 8] {
        let mut codes = [_mm256_setzero_si256(); 8];
        let halves = block.low.as_chunks::<64>().0.iter().zip(block.high.as_chunks().0);
        for (codes, (low, high)) in codes.as_chunks_mut::<4>().0.iter_mut().zip(halves) {
            let (low, mut high) = (low.as_chunks().0, load_32(high));
            let (even, odd) = (load_32(&low[0]), load_32(&low[1]));
            let lows = [even, odd, _mm256_srli_epi16::<4>(even), _mm256_srli_epi16::<4>(odd)];
            for (codes, low) in codes.iter_mut().zip(lows) {
                let low = _mm256_and_si256(low, _mm256_set1_epi8(15));
                let bits_4_5 = _mm256_and_si256(_mm256_slli_epi16::<4>(high), _mm256_set1_epi8(48));
                *codes = _mm256_or_si256(low, bits_4_5);
                high = _mm256_srli_epi16::<2>(high);
            }
        }
        codes
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::format_tests;
    format_tests!(Q6_K, "q6_k.bin");
}
