//! Activations as int8: blocks of 32 for the plain formats, of 256 for the K formats.
//!
//! A block's scale is its largest magnitude / 127, and a value is `x / magnitude * 127` rounded to nearest, ties to
//! even: always in -127..=127, so that a negated value and a sum of two products fit where the kernels put them.
//! A block of zeros has scale 0. A NaN or an infinity makes the scale NaN: every product with the block is NaN, and
//! the fault is seen downstream instead of turning into zeros.

use super::Simd;

/// 32 activations.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Q8Block {
    /// activation = scale * value
    pub(crate) scale: f32,
    /// Sum of the values, for formats whose blocks carry an offset.
    pub(crate) sum: i32,
    /// The values, never -128.
    pub(crate) values: [i8; 32],
}

/// 256 activations.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Q8KBlock {
    /// activation = scale * value
    pub(crate) scale: f32,
    /// Sums of each 16 values, for formats whose sub-blocks carry an offset.
    pub(crate) sums: [i16; 16],
    /// The values, never -128.
    pub(crate) values: [i8; 256],
}

/// Quantises whole blocks of 32; panics unless `out` has a block for each. All levels give the same bits.
pub(crate) fn quantize_q8(simd: Simd, activations: &[f32], out: &mut [Q8Block]) {
    let (blocks, rest) = activations.as_chunks();
    assert!(rest.is_empty() && blocks.len() == out.len(), "activations do not match the blocks of 32");
    for (values, out) in blocks.iter().zip(out) {
        out.scale = quantize(simd, values, &mut out.values);
        out.sum = out.values.iter().map(|&value| i32::from(value)).sum();
    }
}

/// Quantises whole blocks of 256; panics unless `out` has a block for each. All levels give the same bits.
pub(crate) fn quantize_q8k(simd: Simd, activations: &[f32], out: &mut [Q8KBlock]) {
    let (blocks, rest) = activations.as_chunks();
    assert!(rest.is_empty() && blocks.len() == out.len(), "activations do not match the blocks of 256");
    for (values, out) in blocks.iter().zip(out) {
        out.scale = quantize(simd, values, &mut out.values);
        let (sixteens, _) = out.values.as_chunks::<16>();
        for (sum, values) in out.sums.iter_mut().zip(sixteens) {
            *sum = values.iter().map(|&value| i16::from(value)).sum();
        }
    }
}

/// Fills `out` and answers the block's scale.
fn quantize<const N: usize>(_simd: Simd, values: &[f32; N], out: &mut [i8; N]) -> f32 {
    quantize_scalar(values, out)
}

fn quantize_scalar<const N: usize>(values: &[f32; N], out: &mut [i8; N]) -> f32 {
    // As bits, magnitudes order like the values, with infinity and then NaN above every finite one.
    let magnitude = values.iter().map(|value| value.abs().to_bits()).max().map_or(0.0, f32::from_bits);
    if magnitude == 0.0 || !magnitude.is_finite() {
        out.fill(0);
        return if magnitude == 0.0 { 0.0 } else { f32::NAN };
    }
    for (out, value) in out.iter_mut().zip(values) {
        *out = (value / magnitude * 127.0).round_ties_even() as i8;
    }
    magnitude / 127.0
}

/// Exact product of small integers: `codes` within -128..=255, `values` activations.
#[inline]
pub(super) fn integer_dot<C: Copy + Into<i32>>(codes: &[C], values: &[i8]) -> i32 {
    codes.iter().zip(values).map(|(&code, &value)| code.into() * i32::from(value)).sum()
}
