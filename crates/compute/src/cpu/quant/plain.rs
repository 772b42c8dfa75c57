//! What the formats have in common whose blocks are 32 codes that share a scale, and maybe a minimum:
//! value = scale * code + min.

use super::activations::IntBlock;
use super::packed::Kernels;
use super::{Format, Runs, block_pairs, blocks_and_values};
use fornax_format::DType;

/// Such a block as it lies in the file.
pub(super) trait Plain: bytemuck::Pod {
    fn scale(&self) -> f32;
    /// `None` where the format has no minima.
    fn min(&self) -> Option<f32> {
        None
    }
    /// What the scale multiplies, in order.
    fn codes(&self) -> [i8; 32];
}

fn dequantize<B: Plain>(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<B, 32>(weights, out) {
        let (scale, min) = (block.scale(), block.min());
        for (out, code) in out.iter_mut().zip(block.codes()) {
            let product = scale * f32::from(code);
            *out = min.map_or(product, |min| product + min);
        }
    }
}

fn dot<B: Plain>(weights: &[u8], activations: &[IntBlock]) -> f32 {
    let mut sum = 0.0;
    for (block, [a]) in block_pairs::<B, 1>(weights, activations) {
        sum = block.scale().mul_add(a.dot(0, &block.codes()), sum);
        if let Some(min) = block.min() {
            sum = min.mul_add(a.sum, sum);
        }
    }
    sum
}

/// What can be done with such a format.
pub(super) fn format<B: Plain>(
    dtype: DType,
    kernels: Option<&'static Kernels>,
    runs: Option<Runs>,
) -> Format {
    Format { dtype, dequantize: dequantize::<B>, dot: Some(dot::<B>), kernels, runs }
}
