//! F32, F16 and BF16: values stored as they are; and the f32 product that float activations use for every format.

use super::lanes::Lanes;
use super::packed::{GROUP, Kernels, PackedFloat, packed_kernels};
use super::{Format, Simd, f16};
use fornax_format::DType;

fn widen<const BYTES: usize>(weights: &[u8], out: &mut [f32], value: impl Fn([u8; BYTES]) -> f32) {
    let (stored, rest) = weights.as_chunks();
    assert!(rest.is_empty() && stored.len() == out.len(), "widened values do not match the stored ones");
    for (out, &bytes) in out.iter_mut().zip(stored) {
        *out = value(bytes);
    }
}

/// BF16 is the upper half of an f32.
fn brain([low, high]: [u8; 2]) -> f32 {
    f32::from_le_bytes([0, 0, low, high])
}

/// The product of f32 rows: one running sum, in order, products not rounded before they are added.
pub(crate) fn dot_f32(weights: &[f32], activations: &[f32]) -> f32 {
    assert_eq!(weights.len(), activations.len(), "weights and activations");
    weights.iter().zip(activations).fold(0.0, |sum, (w, a)| w.mul_add(*a, sum))
}

pub(super) fn f32_format(simd: Simd) -> Format {
    let dequantize = |weights: &[u8], out: &mut [f32]| widen(weights, out, f32::from_le_bytes);
    Format { dtype: DType::F32, dequantize, dot: None, kernels: f32_kernels(simd), runs: None }
}

pub(super) fn f16_format(simd: Simd) -> Format {
    let dequantize = |weights: &[u8], out: &mut [f32]| widen(weights, out, f16);
    Format {
        dtype: DType::F16,
        dequantize,
        dot: None,
        kernels: packed_kernels!(simd, float Half),
        runs: None,
    }
}

pub(super) fn bf16_format(simd: Simd) -> Format {
    let dequantize = |weights: &[u8], out: &mut [f32]| widen(weights, out, brain);
    Format {
        dtype: DType::BF16,
        dequantize,
        dot: None,
        kernels: packed_kernels!(simd, float Brain),
        runs: None,
    }
}

/// The kernels that dequantised weights use too: their groups are plain (column, row) arrays of f32.
pub(crate) fn f32_kernels(simd: Simd) -> Option<&'static Kernels> {
    packed_kernels!(simd, float Single)
}

enum Single {}
enum Half {}
enum Brain {}

/// Places a row's values at (column, row).
fn pack_columns<const BYTES: usize>(stored: &[u8], row: usize, out: &mut [u8]) {
    let values = out.as_chunks_mut::<BYTES>().0.as_chunks_mut::<GROUP>().0;
    for (column, value) in values.iter_mut().zip(stored.as_chunks().0) {
        column[row] = *value;
    }
}

impl PackedFloat for Single {
    const VALUES: usize = 1;
    const STORED_BYTES: usize = 4;
    const PACKED_BYTES: usize = 4 * GROUP;

    fn pack(stored: &[u8], row: usize, out: &mut [u8]) {
        pack_columns::<4>(stored, row, out);
    }

    #[inline(always)]
    unsafe fn two<L: Lanes>(group: *const u8, pair: usize) -> [L::Floats; 2] {
        // SAFETY: as the caller's.
        unsafe {
            let column = group.add(pair * 2 * GROUP * 4).cast::<f32>();
            [L::floats(column), L::floats(column.add(GROUP))]
        }
    }
}

impl PackedFloat for Half {
    const VALUES: usize = 1;
    const STORED_BYTES: usize = 2;
    const PACKED_BYTES: usize = 2 * GROUP;

    fn pack(stored: &[u8], row: usize, out: &mut [u8]) {
        pack_columns::<2>(stored, row, out);
    }

    #[inline(always)]
    unsafe fn two<L: Lanes>(group: *const u8, pair: usize) -> [L::Floats; 2] {
        // SAFETY: as the caller's.
        unsafe {
            let column = group.add(pair * 2 * GROUP * 2);
            [L::halves(column), L::halves(column.add(GROUP * 2))]
        }
    }
}

impl PackedFloat for Brain {
    const VALUES: usize = 1;
    const STORED_BYTES: usize = 2;
    const PACKED_BYTES: usize = 2 * GROUP;

    /// (two columns, row, which of the two): a register holds two columns of every row, which widen without moving.
    fn pack(stored: &[u8], row: usize, out: &mut [u8]) {
        let pairs = out.as_chunks_mut::<2>().0.as_chunks_mut::<2>().0.as_chunks_mut::<GROUP>().0;
        for (pair, values) in pairs.iter_mut().zip(stored.chunks(4)) {
            for (to, value) in pair[row].iter_mut().zip(values.as_chunks().0) {
                *to = *value;
            }
        }
    }

    #[inline(always)]
    unsafe fn two<L: Lanes>(group: *const u8, pair: usize) -> [L::Floats; 2] {
        // SAFETY: as the caller's.
        unsafe {
            let pairs = L::pairs(group.add(pair * 2 * GROUP * 2));
            [L::first_brain(pairs), L::second_brain(pairs)]
        }
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
        let mut scalar = vec![0.0f32; 1 << 16];
        (f16_format(Simd::Scalar).dequantize)(&stored, &mut scalar);
        for simd in Simd::present() {
            let Some(kernels) = f16_format(simd).kernels else { continue };
            let group = check::packed(kernels, 1 << 16, std::iter::repeat_n(&stored[..], 3));
            let mut values = vec![[0.0f32; GROUP]; 1 << 16];
            kernels.dequantize(&group, 1 << 16, 0, &mut values);
            for (index, (values, want)) in values.iter().zip(&scalar).enumerate() {
                let value = values[2];
                assert!(
                    value.to_bits() == want.to_bits() || value.is_nan() && want.is_nan(),
                    "{}: {index:#06x} is {value}, scalar {want}",
                    simd.name()
                );
            }
        }
    }

    #[test]
    fn f32_products_agree_with_f64() {
        let mut random = Random(7);
        for len in [0, 1, 7, 8, 15, 16, 17, 64, 100, 576, 2048] {
            let weights: Vec<f32> = (0..len).map(|_| random.value()).collect();
            let row: Vec<f32> = (0..len).map(|_| random.value()).collect();
            let terms = || weights.iter().zip(&row).map(|(&w, &a)| f64::from(w) * f64::from(a));
            let (want, magnitude) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            let product = dot_f32(&weights, &row);
            assert!((f64::from(product) - want).abs() <= 1e-6 * magnitude, "{len}: {product} for {want}");
        }
    }
}
