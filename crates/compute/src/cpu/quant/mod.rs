//! The stored weight formats: what their bytes mean, and how rows of them multiply rows of activations.
//!
//! One file per format: the block as it lies in the file, a scalar `dequantize` and `dot` that read as the
//! specification, then how it is packed for the vector kernels ([`packed`]). The kernels themselves are written once
//! over [`lanes`], which a set of vector instructions implements. The tests at the foot of a format hold every level
//! against the `gguf` package, and against the scalar code bit by bit. A format that is not here cannot be computed:
//! [`format()`] answers `None`, and the caller refuses the tensor by name.
//!
//! Two ways to multiply. *Float* activations: dequantise the weights, then multiply and add column by column in one
//! running f32 sum ([`dot_f32`]). *Integer* activations: quantise the activation row once ([`quantize`]; the module
//! [`activations`] is the specification) and take the format's product of integers.
//!
//! Nothing depends on how many activation rows are multiplied at once, so a row's result is the same bits alone and
//! among others; nor on the instruction set.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod bytes;
#[cfg(test)]
mod check;
mod coded;
mod eights;
mod float;
mod fp8_128;
mod grids;
mod halves;
mod iq1_m;
mod iq1_s;
mod iq2_s;
mod iq2_xs;
mod iq2_xxs;
mod iq3_s;
mod iq3_xxs;
mod iq4_nl;
mod iq4_xs;
mod lanes;
mod mxfp4;
mod mxfp8;
#[cfg(target_arch = "aarch64")]
mod neon;
mod nibbles;
mod nvfp4;
mod packed;
mod plain;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod simd;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod tq1_0;
mod tq2_0;

pub(crate) use activations::{BLOCK, IntBlock, quantize};
#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use eights::round_row_to_eights;
pub(crate) use float::{dot_f32, f32_kernels};
pub(crate) use halves::{round_row, round_weights};
pub(crate) use lanes::Lanes;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
#[cfg(target_arch = "x86_64")]
pub(crate) use packed::AHEAD_BYTES;
pub(crate) use packed::{GROUP, Kernels, PANEL_BLOCK_BYTES, WIDTHS, store_block};
pub use simd::Simd;

use fornax_format::DType;

/// What can be done with one stored type at one SIMD level.
#[derive(Clone, Copy)]
pub(crate) struct Format {
    /// The stored type. With [`DType::FP8_A8`] activations are 8-bit floats, whatever they are elsewhere.
    pub(crate) dtype: DType,
    /// Expands whole stored blocks into as many f32 values as they hold; panics if the lengths do not match.
    pub(crate) dequantize: fn(&[u8], &mut [f32]),
    /// The product of a stored row with integer activations; `None` for float types, whose activations stay f32.
    pub(crate) dot: Option<StoredDot>,
    /// Packed weights and their products; `None` where weights stay as they are stored.
    pub(crate) kernels: Option<&'static Kernels>,
    /// How it reads as integers out of a table, if it is made of them.
    runs: Option<Runs>,
}

/// Sixteen values of a format whose values are integers out of a table: value = scale * table\[code\] - min.
#[derive(Clone, Copy, Debug, Default)]
pub struct Run {
    /// Below 16.
    pub codes: [u8; 16],
    /// What the integers are multiplied by.
    pub scale: f32,
    /// Zero where the format has no minima.
    pub min: f32,
}

/// The rarer formats in the one form that all of them have: a backend that knows it knows every one of them.
#[derive(Clone, Copy)]
pub struct Runs {
    /// What the codes stand for.
    pub table: [i8; 16],
    /// Whether there are minima.
    pub mins: bool,
    read: fn(&[u8], &mut [Run]),
}

impl Runs {
    /// How a type reads in this form; `None` for those that are made otherwise.
    pub fn of(dtype: DType) -> Option<Runs> {
        format(dtype, Simd::Scalar)?.runs
    }

    /// Reads whole stored blocks; panics unless they hold as many values as `out`.
    pub fn read(&self, stored: &[u8], out: &mut [Run]) {
        (self.read)(stored, out);
    }
}

/// The product of a stored row with a row of integer activations.
type StoredDot = fn(&[u8], &[IntBlock]) -> f32;

/// What `simd` can do with `dtype`; `None` when it cannot be computed.
///
/// Panics if this machine lacks `simd`: the functions behind the table rely on it.
pub(crate) fn format(dtype: DType, simd: Simd) -> Option<Format> {
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
        DType::Q2_K => q2_k::format(simd),
        DType::Q3_K => q3_k::format(simd),
        DType::Q4_K => q4_k::format(simd),
        DType::Q5_K => q5_k::format(simd),
        DType::Q6_K => q6_k::format(simd),
        DType::IQ1_S => iq1_s::format(simd),
        DType::IQ1_M => iq1_m::format(simd),
        DType::IQ2_XXS => iq2_xxs::format(simd),
        DType::IQ2_XS => iq2_xs::format(simd),
        DType::IQ2_S => iq2_s::format(simd),
        DType::IQ3_XXS => iq3_xxs::format(simd),
        DType::IQ3_S => iq3_s::format(simd),
        DType::IQ4_NL => iq4_nl::format(simd),
        DType::IQ4_XS => iq4_xs::format(simd),
        DType::TQ1_0 => tq1_0::format(simd),
        DType::TQ2_0 => tq2_0::format(simd),
        DType::MXFP4 => mxfp4::format(simd),
        DType::NVFP4 => nvfp4::format(simd),
        DType::MXFP8 => mxfp8::format(simd),
        DType::FP8_128 | DType::FP8_A8 => fp8_128::format(dtype, simd),
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

/// `weights` as blocks, and `out` as the runs that they hold; panics unless the lengths match.
#[inline]
fn blocks_and_runs<'w, 'o, B: bytemuck::Pod, const RUNS: usize>(
    weights: &'w [u8],
    out: &'o mut [Run],
) -> impl Iterator<Item = (&'w B, &'o mut [Run; RUNS])> {
    let blocks: &[B] = bytemuck::cast_slice(weights);
    let (runs, rest) = out.as_chunks_mut();
    assert!(rest.is_empty() && blocks.len() == runs.len(), "runs do not match the blocks");
    blocks.iter().zip(runs)
}

/// `weights` as blocks of 32 x `PARTS` values beside the activation blocks that they multiply; panics unless there are
/// as many.
#[inline]
fn block_pairs<'w, 'a, B: bytemuck::Pod, const PARTS: usize>(
    weights: &'w [u8],
    activations: &'a [IntBlock],
) -> impl Iterator<Item = (&'w B, &'a [IntBlock; PARTS])> {
    let blocks: &[B] = bytemuck::cast_slice(weights);
    let (activations, rest) = activations.as_chunks();
    assert!(rest.is_empty() && blocks.len() == activations.len(), "weight and activation blocks");
    blocks.iter().zip(activations)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WEIGHT_TYPES;

    #[test]
    fn a_block_is_as_long_as_the_format_crate_says_and_the_rest_is_refused() {
        let computed: Vec<_> = DType::all().filter(|&dtype| format(dtype, Simd::Scalar).is_some()).collect();
        let mut known = WEIGHT_TYPES;
        known.sort();
        assert_eq!(computed, known, "the conformance suite has every type");
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
        let dot = format(DType::Q8_0, Simd::Scalar).unwrap().dot.unwrap();
        dot(&[0; 34 * 2], &[bytemuck::Zeroable::zeroed(); 3]);
    }
}
