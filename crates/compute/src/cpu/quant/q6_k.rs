//! Q6_K: 256 values in 210 bytes, sixteen sub-blocks of 16 with 8-bit scales;
//! value = scale * scales\[sub\] * (code - 32).

use super::activations::{Q8KBlock, integer_dot};
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

#[inline(always)]
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

fn dot(weights: &[u8], activations: &[Q8KBlock]) -> f32 {
    let mut sum = 0.0;
    for (block, a) in block_pairs::<Block, _>(weights, activations) {
        let codes = block.codes();
        // At most 256 * 32 * 127 * 128 = 1.3e8.
        let mut products = 0;
        for (sub, &scale) in block.scales.iter().enumerate() {
            let values = sub * 16..(sub + 1) * 16;
            products += i32::from(scale) * integer_dot(&codes[values.clone()], &a.values[values]);
        }
        sum += f16(block.scale) * a.scale * products as f32;
    }
    sum
}

pub(super) fn format(simd: Simd) -> &'static Format {
    static SCALAR: Format = Format {
        dtype: DType::Q6_K,
        dequantize,
        activation: Activation::Q8K(Dot { one: dot, four: |w, rows| rows.map(|row| dot(w, row)) }),
    };
    match simd {
        Simd::Scalar => &SCALAR,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &SCALAR,
    }
}
