//! The stored weight formats: what their bytes mean, and how a row of them multiplies a row of activations.
//!
//! One file per format: the block as it lies in the file, a scalar `dequantize` and `dot` that read as the
//! specification, then the AVX2 version, which the tests at the foot hold against the scalar one and against the
//! `gguf` package. A format that is not here cannot be computed: [`format()`] answers `None`, and the caller refuses the
//! tensor by name.
//!
//! Two ways to multiply. *Float* activations: dequantise a weight row, then [`dot_f32`]. *Int8* activations: quantise
//! the activation row once ([`quantize_q8`]) and take the format's integer [`Dot`].
//!
//! Order of summation. Integers are exact among values that share a scale, and these are added in order to a running
//! f32 sum. Under AVX2 the sum has eight lanes, which a fixed tree folds at the end; [`dot_f32`] and the formats with a minimum per 32 values
//! have two such sums, added before the folding. Nothing depends on how many activation rows are multiplied at once, so
//! a row's result is the same bits alone and among others.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(test)]
mod check;
mod float;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod simd;

pub(crate) use activations::{Q8Block, quantize_q8};
pub(crate) use float::dot_f32;
pub use simd::Simd;

use fornax_format::DType;

/// What can be done with the rows of one stored type at one SIMD level.
pub(crate) struct Format {
    /// The stored type.
    pub(crate) dtype: DType,
    /// Expands whole blocks into as many f32 values as they hold; panics if the lengths do not match.
    pub(crate) dequantize: fn(&[u8], &mut [f32]),
    /// How int8 mode multiplies a row of this type.
    pub(crate) activation: Activation,
}

/// The form that activations take when int8 mode multiplies by a weight row.
pub(crate) enum Activation {
    /// The weight is not quantised: activations stay f32.
    Float,
    /// Int8 in blocks of 32, every four with their scale.
    Q8(Dot<u8, Q8Block>),
}

/// The product of one weight row with activation rows of the same length.
pub(crate) struct Dot<W: 'static, A: 'static> {
    one: fn(&[W], &[A]) -> f32,
    /// Four rows at once: weights are unpacked once; each result has the bits that `one` gives.
    four: fn(&[W], [&[A]; 4]) -> [f32; 4],
}

impl<W, A> Dot<W, A> {
    /// The product with one activation row.
    pub(crate) fn one(&self, weights: &[W], activations: &[A]) -> f32 {
        (self.one)(weights, activations)
    }

    /// The products with `out.len()` activation rows that lie one after the other.
    pub(crate) fn rows(&self, weights: &[W], activations: &[A], out: &mut [f32]) {
        let Some(len) = activations.len().checked_div(out.len()) else { return };
        assert_eq!(len * out.len(), activations.len(), "activations do not divide into {} rows", out.len());
        let row = |index: usize| &activations[index * len..][..len];
        let mut index = 0;
        let mut fours = out.chunks_exact_mut(4);
        for four in &mut fours {
            four.copy_from_slice(&(self.four)(weights, [0, 1, 2, 3].map(|lane| row(index + lane))));
            index += 4;
        }
        for one in fours.into_remainder() {
            *one = (self.one)(weights, row(index));
            index += 1;
        }
    }
}

/// What `simd` can do with `dtype`; `None` when it cannot be computed.
///
/// Panics if this machine lacks `simd`: the functions behind the table rely on it.
pub(crate) fn format(dtype: DType, simd: Simd) -> Option<&'static Format> {
    simd.assert_present();
    Some(match dtype {
        DType::F32 => float::f32_format(simd),
        DType::F16 => float::f16_format(simd),
        DType::BF16 => float::bf16_format(simd),
        DType::Q4_0 => q4_0::format(simd),
        DType::Q4_1 => q4_1::format(simd),
        DType::Q5_0 => q5_0::format(simd),
        DType::Q5_1 => q5_1::format(simd),
        DType::Q8_0 => q8_0::format(simd),
        DType::Q4_K => q4_k::format(simd),
        DType::Q5_K => q5_k::format(simd),
        DType::Q6_K => q6_k::format(simd),
        _ => return None,
    })
}

/// The f32 value of a stored f16 scale. In software, so that a thread that flushes subnormals still reads them.
#[inline]
fn f16(bytes: [u8; 2]) -> f32 {
    half::f16::from_le_bytes(bytes).to_f32_const()
}

/// `weights` as blocks, and `out` as the values that they hold; panics unless the lengths match.
#[inline]
fn blocks_and_values<'w, 'o, B: bytemuck::Pod, const VALUES: usize>(
    weights: &'w [u8],
    out: &'o mut [f32],
) -> impl Iterator<Item = (&'w B, &'o mut [f32; VALUES])> {
    let blocks: &[B] = bytemuck::cast_slice(weights);
    let (values, rest) = out.as_chunks_mut();
    assert!(rest.is_empty() && blocks.len() == values.len(), "dequantised values do not match the blocks");
    blocks.iter().zip(values)
}

/// `weights` as blocks of 32 x `PARTS` values beside the activation blocks that they multiply; panics unless there are
/// as many.
#[inline]
fn block_pairs<'w, 'a, B: bytemuck::Pod, const PARTS: usize>(
    weights: &'w [u8],
    activations: &'a [Q8Block],
) -> impl Iterator<Item = (&'w B, &'a [Q8Block; PARTS])> {
    let blocks: &[B] = bytemuck::cast_slice(weights);
    let (activations, rest) = activations.as_chunks();
    assert!(rest.is_empty() && blocks.len() == activations.len(), "weight and activation blocks");
    blocks.iter().zip(activations)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_as_long_as_the_format_crate_says_and_the_rest_is_refused() {
        let computed: Vec<_> = DType::all().filter(|&dtype| format(dtype, Simd::Scalar).is_some()).collect();
        assert_eq!(computed.len(), 11);
        for dtype in computed {
            for simd in Simd::present() {
                let format = format(dtype, simd).unwrap();
                assert_eq!(format.dtype, dtype);
                let mut values = vec![f32::NAN; dtype.block_values()];
                (format.dequantize)(&vec![0; dtype.block_bytes()], &mut values);
                assert!(values.iter().all(|&value| value == 0.0), "{dtype} {}", simd.name());
            }
        }
    }

    #[test]
    #[should_panic(expected = "weight and activation blocks")]
    fn rows_of_different_length_are_not_multiplied() {
        let Some(Format { activation: Activation::Q8(dot), .. }) = format(DType::Q8_0, Simd::detect()) else {
            panic!("Q8_0 takes Q8 activations")
        };
        dot.one(&[0; 34 * 2], &[bytemuck::Zeroable::zeroed(); 3]);
    }
}
