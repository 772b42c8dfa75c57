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
        Simd::Avx2 => &avx2::DOT,
    }
}

pub(super) fn f32_format(simd: Simd) -> &'static Format {
    static SCALAR: Format =
        Format { dtype: DType::F32, dequantize: dequantize_f32, activation: Activation::Float };
    match simd {
        Simd::Scalar => &SCALAR,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &avx2::F32,
    }
}

pub(super) fn f16_format(simd: Simd) -> &'static Format {
    static SCALAR: Format =
        Format { dtype: DType::F16, dequantize: dequantize_f16, activation: Activation::Float };
    match simd {
        Simd::Scalar => &SCALAR,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &avx2::F16,
    }
}

pub(super) fn bf16_format(simd: Simd) -> &'static Format {
    static SCALAR: Format =
        Format { dtype: DType::BF16, dequantize: dequantize_bf16, activation: Activation::Float };
    match simd {
        Simd::Scalar => &SCALAR,
        #[cfg(target_arch = "x86_64")]
        Simd::Avx2 => &avx2::BF16,
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::super::avx2::{avx2_dequantize, avx2_dot, folded, load_16};
    use super::*;
    use core::arch::x86_64::*;

    pub(super) static F32: Format = Format {
        dtype: DType::F32,
        dequantize: avx2_dequantize!(dequantize_f32),
        activation: Activation::Float,
    };
    pub(super) static F16: Format = Format {
        dtype: DType::F16,
        dequantize: avx2_dequantize!(dequantize_f16),
        activation: Activation::Float,
    };
    pub(super) static BF16: Format = Format {
        dtype: DType::BF16,
        dequantize: avx2_dequantize!(dequantize_bf16),
        activation: Activation::Float,
    };
    pub(super) static DOT: Dot<f32, f32> = avx2_dot!(dots);

    #[target_feature(enable = "avx2,f16c")]
    fn dequantize_f16(weights: &[u8], out: &mut [f32]) {
        assert_eq!(weights.len(), out.len() * 2, "widened values do not match the stored ones");
        let (stored, stored_rest) = weights.as_chunks::<16>();
        let (out, out_rest) = out.as_chunks_mut::<8>();
        for (out, stored) in out.iter_mut().zip(stored) {
            let values = _mm256_cvtph_ps(load_16(stored));
            // SAFETY: eight writable f32; the store needs no alignment.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), values) };
        }
        super::dequantize_f16(stored_rest, out_rest);
    }

    /// Sixteen values a turn: eight into each of two sums, which are added before the lanes are folded. What is left
    /// at the end is filled up with zeros.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn dots<const N: usize>(weights: &[f32], rows: [&[f32]; N]) -> [f32; N] {
        for row in rows {
            assert_eq!(weights.len(), row.len(), "weights and activations");
        }
        let mut sums = [[_mm256_setzero_ps(); 2]; N];
        let (turns, rest) = weights.as_chunks();
        let chunks = rows.map(|row| &row.as_chunks().0[..turns.len()]);
        for (index, weights) in turns.iter().enumerate() {
            let weights = load(weights);
            for (sums, row) in sums.iter_mut().zip(chunks) {
                *sums = multiply_add(weights, load(&row[index]), *sums);
            }
        }
        if !rest.is_empty() {
            let padded = |values: &[f32]| {
                let mut padded = [0.0; 16];
                padded[..values.len()].copy_from_slice(values);
                load(&padded)
            };
            let weights = padded(rest);
            for (sums, row) in sums.iter_mut().zip(rows) {
                *sums = multiply_add(weights, padded(&row[turns.len() * 16..]), *sums);
            }
        }
        let mut added = [_mm256_setzero_ps(); N];
        for (added, [even, odd]) in added.iter_mut().zip(sums) {
            *added = _mm256_add_ps(even, odd);
        }
        folded(added)
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load(values: &[f32; 16]) -> [__m256; 2] {
        // SAFETY: sixteen readable f32; the loads need no alignment.
        unsafe { [_mm256_loadu_ps(values.as_ptr()), _mm256_loadu_ps(values[8..].as_ptr())] }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn multiply_add(weights: [__m256; 2], values: [__m256; 2], sums: [__m256; 2]) -> [__m256; 2] {
        [_mm256_fmadd_ps(weights[0], values[0], sums[0]), _mm256_fmadd_ps(weights[1], values[1], sums[1])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::quant::check::{self, Random};

    #[test]
    fn every_value_has_the_bits_that_gguf_gives() {
        check::values(DType::F32, include_bytes!("../../../tests/quant/f32.bin"));
        check::values(DType::F16, include_bytes!("../../../tests/quant/f16.bin"));
        check::values(DType::BF16, include_bytes!("../../../tests/quant/bf16.bin"));
    }

    #[test]
    fn every_f16_widens_to_the_same_bits_at_every_level() {
        let stored: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let widen = |simd| {
            let mut values = vec![0.0f32; 1 << 16];
            (f16_format(simd).dequantize)(&stored, &mut values);
            values
        };
        let scalar = widen(Simd::Scalar);
        for simd in Simd::present() {
            for (index, (value, want)) in widen(simd).iter().zip(&scalar).enumerate() {
                assert!(
                    value.to_bits() == want.to_bits() || value.is_nan() && want.is_nan(),
                    "{}: {index:#06x} is {value}, scalar {want}",
                    simd.name()
                );
            }
        }
    }

    #[test]
    fn f32_products_agree_with_f64_and_do_not_depend_on_the_number_of_rows() {
        let mut random = Random(7);
        for len in [0, 1, 7, 8, 15, 16, 17, 64, 100, 576, 2048] {
            let weights: Vec<f32> = (0..len).map(|_| random.value()).collect();
            let rows: Vec<f32> = (0..len * 7).map(|_| random.value()).collect();
            for simd in Simd::present() {
                let dot = dot_f32(simd);
                let mut products = [f32::NAN; 7];
                dot.rows(&weights, &rows, &mut products);
                for (index, product) in products.into_iter().enumerate() {
                    let row = &rows[index * len..][..len];
                    assert_eq!(product.to_bits(), dot.one(&weights, row).to_bits(), "{} {len}", simd.name());
                    let terms = || weights.iter().zip(row).map(|(&w, &a)| f64::from(w) * f64::from(a));
                    let (want, magnitude) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                    let error = (f64::from(product) - want).abs();
                    assert!(error <= 1e-6 * magnitude, "{} {len}: {product} for {want}", simd.name());
                }
            }
        }
    }
}
