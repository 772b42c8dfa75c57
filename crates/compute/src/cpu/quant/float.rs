//! F32, F16 and BF16: values stored as they are; and the f32 product that float activations use for every format.

use super::{Activation, Dot, Format, Simd, f16};
use fornax_format::DType;

#[inline(always)]
fn widen<const BYTES: usize>(weights: &[u8], out: &mut [f32], value: impl Fn([u8; BYTES]) -> f32) {
    let (stored, rest) = weights.as_chunks();
    assert!(rest.is_empty() && stored.len() == out.len(), "widened values do not match the stored ones");
    for (out, &bytes) in out.iter_mut().zip(stored) {
        *out = value(bytes);
    }
}

#[inline(always)]
fn dequantize_f32(weights: &[u8], out: &mut [f32]) {
    widen(weights, out, f32::from_le_bytes);
}

#[inline(always)]
fn dequantize_f16(weights: &[u8], out: &mut [f32]) {
    widen(weights, out, f16);
}

/// BF16 is the upper half of an f32.
#[inline(always)]
fn dequantize_bf16(weights: &[u8], out: &mut [f32]) {
    widen(weights, out, |[low, high]| f32::from_le_bytes([0, 0, low, high]));
}

/// One running sum, in order.
fn dot(weights: &[f32], activations: &[f32]) -> f32 {
    assert_eq!(weights.len(), activations.len(), "weights and activations");
    weights.iter().zip(activations).fold(0.0, |sum, (w, a)| sum + w * a)
}

/// The product of f32 rows: dequantised weights with float activations.
///
/// Panics if this machine lacks `simd`.
pub(crate) fn dot_f32(simd: Simd) -> &'static Dot<f32, f32> {
    static SCALAR: Dot<f32, f32> = Dot { one: dot, four: |w, rows| rows.map(|row| dot(w, row)) };
    simd.assert_present();
    match simd {
        Simd::Scalar => &SCALAR,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &SCALAR,
    }
}

pub(super) fn f32_format(simd: Simd) -> &'static Format {
    static SCALAR: Format =
        Format { dtype: DType::F32, dequantize: dequantize_f32, activation: Activation::Float };
    match simd {
        Simd::Scalar => &SCALAR,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &SCALAR,
    }
}

pub(super) fn f16_format(simd: Simd) -> &'static Format {
    static SCALAR: Format =
        Format { dtype: DType::F16, dequantize: dequantize_f16, activation: Activation::Float };
    match simd {
        Simd::Scalar => &SCALAR,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &SCALAR,
    }
}

pub(super) fn bf16_format(simd: Simd) -> &'static Format {
    static SCALAR: Format =
        Format { dtype: DType::BF16, dequantize: dequantize_bf16, activation: Activation::Float };
    match simd {
        Simd::Scalar => &SCALAR,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &SCALAR,
    }
}
