//! Activations and weights as one f16 for each value: what tensor cores of GPUs multiply.
//!
//! **The specification of half activations.** A row is multiplied by the power of two that brings its largest magnitude
//! to [2^13, 2^14), each value is rounded to f16 (nearest, ties to even), and the sums are multiplied by the inverse of
//! that power (at most 2^126: rows below 2^-113 keep fewer bits). A row that holds a NaN or an infinity has products
//! that are NaN.
//!
//! A weight's value is rounded to f16 once, except that the scales of superblocks are rounded before they meet their
//! codes: Q4_K and Q5_K are `f16(f16(scale * scales[b]) * code - f16(min_scale * mins[b]))`, Q6_K is `f16(f16(scale *
//! scales[b]) * (code - 32))`, FP8_128 `f16(f16(256 * scale) * (float / 256))`. F16 is exact as it is; so is BF16,
//! whose part is multiplied by a power of two as rows are. F32 weights meet float activations. Products are added in
//! f32. A part of Q8_0, Q4_K, Q5_K or Q6_K is multiplied by a power of two as well, by its largest scale, so that what
//! is below 2^-12 of the largest value that it could hold may be rounded to a multiple of 2^-22 of that: nothing beside
//! the rest of a row, and not done here.
//!
//! Attention over latent rows of f16 and of 8-bit floats takes a query as such a row, and its weights, relative to the
//! largest so far of each page, as one f16 each; the sum that they are divided by is that of the rounded ones.
//!
//! Every rounding costs at most 2^-12 of a value. Against float activations a product's mean squared error is 4e-8 to
//! 8e-8 of its mean square, of which one half each is the activations' and the weights'.

use fornax_format::DType;
use half::f16;

use crate::float8;

/// Rounds a row in place to what products see of it; the result multiplies their sums.
pub(crate) fn round_row(row: &mut [f32]) -> f32 {
    // As bits, magnitudes order like the values, with infinity and then NaN above every finite one.
    let most = row.iter().fold(0, |most, value| most.max(value.to_bits() & 0x7fff_ffff));
    let exponent = (140 - (most >> 23).cast_signed()).min(126);
    let power = |exponent: i32| f32::from_bits((127 + exponent).cast_unsigned() << 23);
    let scale = power(exponent);
    for value in row {
        *value = rounded(*value * scale);
    }
    if most >= 0x7f80_0000 { f32::NAN } else { power(-exponent) }
}

/// Rounds the values of a stored row, which are its dequantised ones before.
pub(crate) fn round_weights(dtype: DType, stored: &[u8], values: &mut [f32]) {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => {}
        DType::Q4_K | DType::Q5_K => {
            let blocks = stored.chunks_exact(dtype.block_bytes());
            for (block, values) in blocks.zip(values.chunks_exact_mut(256)) {
                round_superblock(dtype == DType::Q5_K, block, values);
            }
        }
        DType::Q6_K => {
            for (block, values) in stored.chunks_exact(210).zip(values.chunks_exact_mut(256)) {
                let scale = half_at(block, 208);
                for (sub, values) in values.chunks_exact_mut(16).enumerate() {
                    let by = scale * f32::from(block[192 + sub].cast_signed());
                    for (i, value) in values.iter_mut().enumerate() {
                        let (side, within) = ((sub * 16 + i) / 128, (sub * 16 + i) % 128);
                        let low = block[side * 64 + within % 64] >> (within / 64 * 4) & 15;
                        let high = block[128 + side * 32 + within % 32] >> (within / 32 * 2) & 3;
                        *value = rounded(rounded(by) * (f32::from(high << 4 | low) - 32.0));
                    }
                }
            }
        }
        DType::FP8_128 => {
            for (block, values) in stored.chunks_exact(132).zip(values.chunks_exact_mut(128)) {
                let (scale, codes) = block.split_at(4);
                let scale = f32::from_le_bytes(scale.try_into().expect("four bytes"));
                for (value, &code) in values.iter_mut().zip(codes) {
                    *value = rounded(rounded(256.0 * scale) * (float8::value(code) / 256.0));
                }
            }
        }
        _ => values.iter_mut().for_each(|value| *value = rounded(*value)),
    }
}

/// Eight blocks of 32 with 6-bit scales and minima, and a fifth bit of each code where there is one.
fn round_superblock(fifth: bool, block: &[u8], values: &mut [f32]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    let bits = if fifth { 32 } else { 0 };
    for (sub, values) in values.chunks_exact_mut(32).enumerate() {
        let (by, min) = match sub {
            0..4 => (block[4 + sub] & 63, block[8 + sub] & 63),
            _ => {
                let (low, upper) = (block[8 + sub], [block[sub] >> 6, block[4 + sub] >> 6]);
                (upper[0] << 4 | low & 15, upper[1] << 4 | low >> 4)
            }
        };
        let (by, min) = (rounded(scale * f32::from(by)), rounded(least * f32::from(min)));
        for (i, value) in values.iter_mut().enumerate() {
            let low = block[16 + bits + sub / 2 * 32 + i] >> (sub % 2 * 4) & 15;
            let high = if fifth { block[16 + i] >> sub & 1 } else { 0 };
            // Exact in f32 unless one of both vanishes beside the other.
            *value = rounded(by.mul_add(f32::from(high << 4 | low), -min));
        }
    }
}

fn rounded(value: f32) -> f32 {
    f16::from_f32(value).to_f32()
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::super::{Simd, format};
    use super::*;
    use crate::WEIGHT_TYPES;

    #[test]
    fn a_row_keeps_eleven_bits_of_every_value_whatever_its_size() {
        for size in [1e-30, 1e-9, 1.0, 7e4, 1e36f32] {
            let row: Vec<f32> = (1..100).map(|i| (i as f32 - 40.3) * size / 100.0).collect();
            let mut halves = row.clone();
            let inverse = round_row(&mut halves);
            let largest = halves.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            assert!((8192.0..=16384.0).contains(&largest), "{size}: {largest}");
            for (value, half) in row.iter().zip(&halves) {
                let error = (half * inverse - value).abs() / value.abs();
                assert!(error <= 2f32.powi(-11), "{size}: {value} became {}", half * inverse);
            }
        }
    }

    #[test]
    fn what_is_not_a_number_is_seen_and_zeros_stay() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(round_row(&mut [1.0, bad, 2.0]).is_nan());
        }
        let mut zeros = [0.0, -0.0];
        assert!(round_row(&mut zeros).is_finite());
        assert_eq!(zeros, [0.0, 0.0]);
    }

    #[test]
    fn weights_stay_within_the_roundings_of_their_values() {
        for dtype in WEIGHT_TYPES {
            let blocks = 1024usize.div_ceil(dtype.block_values());
            let mut state = 7u64;
            let mut stored: Vec<u8> = std::iter::repeat_with(|| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .take(blocks * dtype.block_bytes())
            .collect();
            // Scales of ordinary size, wherever a format has them.
            let scales: &[usize] = match dtype {
                DType::F32 => &[3],
                DType::F16 | DType::BF16 => &[1],
                DType::Q6_K => &[209],
                DType::Q2_K => &[81, 83],
                DType::Q3_K => &[109],
                DType::TQ1_0 => &[53],
                DType::TQ2_0 => &[65],
                DType::MXFP4 | DType::MXFP8 => &[0],
                DType::FP8_128 | DType::FP8_A8 => &[3],
                DType::NVFP4 => &[0, 1, 2, 3],
                DType::IQ1_M => &[49, 51, 53, 55],
                _ => &[1, 3],
            };
            for block in stored.chunks_exact_mut(dtype.block_bytes()) {
                let ordinary = match dtype {
                    DType::MXFP4 | DType::MXFP8 => 120,
                    // With what stands behind it 2^-13 to 2^-11.
                    DType::FP8_128 | DType::FP8_A8 => 0x39,
                    _ => 0x1c,
                };
                scales.iter().for_each(|&at| {
                    if let Some(byte) = block.get_mut(at) {
                        *byte = ordinary;
                    }
                });
            }
            let mut values = vec![0.0; blocks * dtype.block_values()];
            (format(dtype, Simd::Scalar).unwrap().dequantize)(&stored, &mut values);
            let exact = values.clone();
            round_weights(dtype, &stored, &mut values);
            let most = exact.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            for (rounded, exact) in values.iter().zip(&exact) {
                let error = (rounded - exact).abs();
                assert!(error <= most * 2f32.powi(-10), "{dtype}: {exact} became {rounded} beside {most}");
            }
        }
    }
}
