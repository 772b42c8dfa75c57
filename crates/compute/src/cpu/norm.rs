//! Root-mean-square normalisation.

use super::disjoint::for_each_row;
use super::pool::Pool;
use super::quant::Simd;

/// Partial sums of the squares: enough to fill two vector registers.
const LANES: usize = 16;

/// `out` = `x / sqrt(mean(x^2) + eps) * weight`, row by row. A row has as many columns as there are weights.
pub(super) fn rms_norm(pool: &Pool, simd: Simd, weight: &[f32], eps: f32, x: &[f32], out: &mut [f32]) {
    let columns = weight.len();
    for_each_row(pool, out, columns, |row, out| {
        let x = &x[row * columns..][..columns];
        match simd {
            Simd::Scalar => norm_row(weight, eps, x, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the backend was made for a processor with AVX2.
            Simd::Avx2 | Simd::Avx512 => unsafe { norm_row_avx2(weight, eps, x, out) },
            #[cfg(target_arch = "aarch64")]
            Simd::Neon => norm_row(weight, eps, x, out),
        }
    });
}

/// The squares are summed in sixteen f32 lanes (value i into lane i mod 16), which are then added in order: the same
/// for every instruction set, so all give the same bits.
#[inline(always)]
fn norm_row(weight: &[f32], eps: f32, x: &[f32], out: &mut [f32]) {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value * value;
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += value * value;
    }
    let mean = lanes.iter().sum::<f32>() / x.len() as f32;
    let inverse = 1.0 / (mean + eps).sqrt();
    for ((out, value), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = value * inverse * weight;
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn norm_row_avx2(weight: &[f32], eps: f32, x: &[f32], out: &mut [f32]) {
    norm_row(weight, eps, x, out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{bits, numbers};

    #[test]
    fn matches_the_formula_in_f64_and_every_instruction_set_agrees() {
        for (rows, columns) in [(1, 1), (3, 15), (2, 16), (5, 576), (40, 897)] {
            let x = numbers(1, rows * columns);
            let weight = numbers(2, columns);
            let mut scalar = vec![f32::NAN; x.len()];
            rms_norm(&Pool::new(1).unwrap(), Simd::Scalar, &weight, 1e-5, &x, &mut scalar);
            for (x, out) in x.chunks(columns).zip(scalar.chunks(columns)) {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / columns as f64;
                for ((x, weight), out) in x.iter().zip(&weight).zip(out) {
                    let wanted = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*weight);
                    assert!(
                        (f64::from(*out) - wanted).abs() <= 2e-6 * wanted.abs().max(1e-3),
                        "{out} {wanted}"
                    );
                }
            }
            for simd in Simd::present() {
                let mut out = vec![f32::NAN; x.len()];
                rms_norm(&Pool::new(3).unwrap(), simd, &weight, 1e-5, &x, &mut out);
                assert_eq!(bits(&out), bits(&scalar), "{rows} x {columns}");
            }
        }
    }
}
