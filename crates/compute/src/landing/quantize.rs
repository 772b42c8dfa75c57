//! Float rows as Q8_0, Q4_K, MXFP8 and FP8_A8.

use half::f16;

use crate::float8;

/// Blocks of 32: the scale is the largest magnitude / 127 as f16, a code is value * (127 / magnitude), rounded to
/// nearest, halves away from zero: bit by bit what llama.cpp and the `gguf` package write. Panics unless `out` has the
/// blocks' room.
pub fn quantize_q8_0(values: &[f32], out: &mut [u8]) {
    let (blocks, rest) = values.as_chunks::<32>();
    assert!(rest.is_empty() && out.len() == blocks.len() * 34, "rows of whole blocks");
    for (values, out) in blocks.iter().zip(out.as_chunks_mut::<34>().0) {
        let magnitude = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let scale = magnitude / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        for (out, value) in out[2..].iter_mut().zip(values) {
            *out = ((value * inverse).round() as i8).cast_unsigned();
        }
    }
}

/// Blocks of 32: the smallest power of two whose 448-fold no value exceeds, then 8-bit floats, rounded to nearest even:
/// at most 1/16 of a value is lost. Panics unless `out` has the blocks' room.
pub fn quantize_mxfp8(values: &[f32], out: &mut [u8]) {
    let (blocks, rest) = values.as_chunks::<32>();
    assert!(rest.is_empty() && out.len() == blocks.len() * 33, "rows of whole blocks");
    for (values, [exponent, codes @ ..]) in blocks.iter().zip(out.as_chunks_mut::<33>().0) {
        *exponent = float8::exponent(values);
        float8::encode(values, *exponent, codes);
    }
}

/// A row as blocks of FP8_A8 that share one scale, a 448th of its largest magnitude: 8-bit floats, rounded to nearest
/// even. NaN where a value is not finite. Panics unless `out` has the room of whole blocks.
pub fn quantize_fp8_row(values: &[f32], out: &mut [u8]) {
    let (runs, rest) = values.as_chunks::<128>();
    assert!(rest.is_empty() && out.len() == runs.len() * 132, "rows of whole blocks");
    let most = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let finite = values.iter().all(|value| value.is_finite());
    let scale = if finite { most / 448.0 } else { f32::NAN };
    for (values, [a, b, c, d, codes @ ..]) in runs.iter().zip(out.as_chunks_mut::<132>().0) {
        [*a, *b, *c, *d] = scale.to_le_bytes();
        for (code, value) in codes.iter_mut().zip(values) {
            *code = if scale > 0.0 { float8::code(value / scale) } else { 0 };
        }
    }
}

/// Superblocks of 256: each 32 values get the scale and the minimum of least squared error, large values counting more,
/// among some spacings of the codes; scales and minima then share an f16 each, in 63 steps, and codes are chosen anew.
/// Panics unless `out` has the blocks' room.
pub fn quantize_q4_k(values: &[f32], out: &mut [u8]) {
    let (blocks, rest) = values.as_chunks::<256>();
    assert!(rest.is_empty() && out.len() == blocks.len() * 144, "rows of whole blocks");
    for (values, out) in blocks.iter().zip(out.as_chunks_mut::<144>().0) {
        let subs = values.as_chunks::<32>().0;
        let fits: [Fit; 8] = std::array::from_fn(|sub| Fit::new(&subs[sub]));
        let most = |of: fn(&Fit) -> f32| fits.iter().map(of).fold(0.0f32, f32::max);
        let scale = f16::from_f32(most(|fit| fit.scale) / 63.0);
        let min_scale = f16::from_f32(most(|fit| fit.below) / 63.0);
        // Rounded to steps, each scale with its minimum: the neighbours may tell the values better than the nearest.
        let (step, min_step) = (scale.to_f32(), min_scale.to_f32());
        let (mut scales, mut mins) = ([0; 8], [0; 8]);
        for (sub, fit) in fits.iter().enumerate() {
            (scales[sub], mins[sub]) = fit.in_steps(&subs[sub], step, min_step);
        }
        out[..2].copy_from_slice(&scale.to_le_bytes());
        out[2..4].copy_from_slice(&min_scale.to_le_bytes());
        for i in 0..4 {
            out[4 + i] = scales[i] | scales[4 + i] >> 4 << 6;
            out[8 + i] = mins[i] | mins[4 + i] >> 4 << 6;
            out[12 + i] = scales[4 + i] & 15 | mins[4 + i] << 4;
        }
        out[16..].fill(0);
        for (sub, values) in subs.iter().enumerate() {
            let (scale, below) = (step * f32::from(scales[sub]), min_step * f32::from(mins[sub]));
            for (i, value) in values.iter().enumerate() {
                let code = match scale {
                    0.0 => 0,
                    scale => nearest((value + below) / scale, 15),
                };
                out[16 + sub / 2 * 32 + i] |= code << (sub % 2 * 4);
            }
        }
    }
}

/// The nearest whole number from 0 to `most`.
#[expect(clippy::cast_sign_loss, reason = "what is below zero is zero")]
fn nearest(value: f32, most: u8) -> u8 {
    (value.round() as u8).min(most)
}

/// How 32 values are best told: value = scale * code - below.
struct Fit {
    scale: f32,
    below: f32,
}

impl Fit {
    fn new(values: &[f32; 32]) -> Fit {
        let least = values.iter().fold(0.0f32, |least, value| least.min(*value));
        let most = values.iter().fold(f32::NEG_INFINITY, |most, value| most.max(*value));
        if most <= least {
            return Fit { scale: 0.0, below: -least };
        }
        let weights = weights(values);
        let error = |scale: f32, below: f32| weighted_error(values, &weights, scale, below);
        let mut best = Fit { scale: (most - least) / 15.0, below: -least };
        let mut best_error = error(best.scale, best.below);
        // As if there were 14 to 16 steps from the smallest to the largest value, in tenths.
        for tenths in 140..=162 {
            let inverse = tenths as f32 / 10.0 / (most - least);
            // From the best minimum so far: beside an outlier, the smallest value is a poor one.
            let codes = values.map(|value| (inverse * (value + best.below)).round().clamp(0.0, 15.0));
            let Some((scale, below)) = least_squares(values, &weights, &codes) else { continue };
            let found = error(scale, below);
            if found < best_error {
                (best, best_error) = (Fit { scale, below }, found);
            }
        }
        best
    }

    /// Scale and minimum in steps, 0 to 63.
    fn in_steps(&self, values: &[f32; 32], step: f32, min_step: f32) -> (u8, u8) {
        let around = |value: f32, step: f32| {
            let near = if step == 0.0 { 0 } else { nearest(value / step, 63) };
            near.saturating_sub(1)..=if step == 0.0 { 0 } else { (near + 1).min(63) }
        };
        let weights = weights(values);
        let mut best = (0, 0);
        let mut best_error = f32::INFINITY;
        for scale in around(self.scale, step) {
            for min in around(self.below, min_step) {
                let error =
                    weighted_error(values, &weights, step * f32::from(scale), min_step * f32::from(min));
                if error < best_error {
                    (best, best_error) = ((scale, min), error);
                }
            }
        }
        best
    }
}

/// Errors of large values show more.
fn weights(values: &[f32; 32]) -> [f32; 32] {
    let mean_square = values.iter().map(|value| value * value).sum::<f32>() / 32.0;
    values.map(|value| mean_square.sqrt() + value.abs())
}

fn weighted_error(values: &[f32; 32], weights: &[f32; 32], scale: f32, below: f32) -> f32 {
    let terms = values.iter().zip(weights).map(|(value, weight)| {
        let code = if scale == 0.0 { 0.0 } else { ((value + below) / scale).round().clamp(0.0, 15.0) };
        weight * (scale * code - below - value).powi(2)
    });
    terms.sum()
}

/// The (scale, below) of least squared error for these codes; a minimum above zero cannot be stored.
fn least_squares(values: &[f32; 32], weights: &[f32; 32], codes: &[f32; 32]) -> Option<(f32, f32)> {
    let [mut w, mut wc, mut wcc, mut wv, mut wvc] = [0.0f32; 5];
    for ((value, weight), code) in values.iter().zip(weights).zip(codes) {
        w += weight;
        wc += weight * code;
        wcc += weight * code * code;
        wv += weight * value;
        wvc += weight * value * code;
    }
    let determinant = w * wcc - wc * wc;
    if determinant <= 0.0 {
        return None;
    }
    let (mut scale, mut min) = ((w * wvc - wv * wc) / determinant, (wcc * wv - wc * wvc) / determinant);
    if min > 0.0 {
        (scale, min) = (wvc / wcc, 0.0);
    }
    (scale > 0.0).then_some((scale, -min))
}

#[cfg(test)]
mod tests {
    use fornax_format::DType;

    use super::*;

    /// What make_packed.py wrote: rows of 1024 f32, their Q8_0 by the `gguf` package, their Q4_K by llama.cpp.
    const ROWS: &[u8] = include_bytes!("../../tests/packed/quantize.bin");
    const VALUES: usize = 16 * 1024;

    fn fixture() -> (Vec<f32>, &'static [u8], &'static [u8]) {
        let (values, rest) = ROWS.split_at(VALUES * 4);
        let (eight, four) = rest.split_at(VALUES / 32 * 34);
        (values.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(), eight, four)
    }

    #[test]
    fn q8_0_is_what_the_gguf_package_writes() {
        let (values, eight, _) = fixture();
        let mut out = vec![0; eight.len()];
        quantize_q8_0(&values, &mut out);
        for (block, (got, want)) in out.chunks(34).zip(eight.chunks(34)).enumerate() {
            assert_eq!(got, want, "block {block}");
        }
    }

    #[test]
    fn mxfp8_is_what_ml_dtypes_rounds_to() {
        let (values, ..) = fixture();
        let want = include_bytes!("../../tests/quant/mxfp8_rows.bin");
        let mut out = vec![0; want.len()];
        quantize_mxfp8(&values, &mut out);
        for (block, (got, want)) in out.chunks(33).zip(want.chunks(33)).enumerate() {
            assert_eq!(got, want, "block {block}");
        }
    }

    #[test]
    fn q4_k_errs_no_more_than_llama_cpp() {
        let (values, _, four) = fixture();
        assert_eq!(four.len(), VALUES / 256 * 144);
        let mut out = vec![0; four.len()];
        quantize_q4_k(&values, &mut out);
        // By the measure that both minimise: large values count more, as llama.cpp weighs them.
        let error = |quantized: &[u8]| -> Vec<f64> {
            let mut got = vec![0.0; VALUES];
            crate::cpu::dequantize(DType::Q4_K, quantized, &mut got).unwrap();
            let block = |(got, values): (&[f32; 32], &[f32; 32])| -> f64 {
                let terms = got.iter().zip(values).zip(weights(values));
                terms.map(|((got, value), weight)| f64::from(weight) * f64::from(got - value).powi(2)).sum()
            };
            let blocks: Vec<f64> =
                got.as_chunks::<32>().0.iter().zip(values.as_chunks::<32>().0).map(block).collect();
            blocks.chunks(32).map(|row| row.iter().sum()).collect()
        };
        for (row, (ours, theirs)) in error(&out).iter().zip(error(four)).enumerate() {
            assert!(*ours <= theirs, "row {row}: {ours:.4e}, llama.cpp {theirs:.4e}");
        }
    }

    #[test]
    fn what_cannot_be_scaled_stays_finite() {
        for value in [0.0, -0.0, 1e-30, -1e-9, 3.0, -3.0] {
            let (mut eight, mut four, mut float) = ([0; 34 * 8], [0; 144], [0; 33 * 8]);
            quantize_q8_0(&[value; 256], &mut eight);
            quantize_q4_k(&[value; 256], &mut four);
            quantize_mxfp8(&[value; 256], &mut float);
            let all =
                [(DType::Q8_0, &eight[..], 1e-2), (DType::Q4_K, &four, 1e-2), (DType::MXFP8, &float, 7e-2)];
            for (dtype, bytes, bound) in all {
                let mut out = [f32::NAN; 256];
                crate::cpu::dequantize(dtype, bytes, &mut out).unwrap();
                assert!(
                    out.iter().all(|got| (got - value).abs() <= bound * value.abs() + 1e-6),
                    "{dtype} {value}"
                );
            }
        }
    }
}
