//! Gated activation of a feed-forward.

use super::disjoint::for_each_row;
use super::exp::exp;
use super::pool::Pool;
use super::quant::Simd;

/// `out` = `silu(gate) * up`, where a row of `gate_up` is all gates, then all ups. `columns` counts `out`'s.
pub(super) fn silu(pool: &Pool, simd: Simd, columns: usize, gate_up: &[f32], out: &mut [f32]) {
    for_each_row(pool, out, columns, |row, out| {
        let (gate, up) = gate_up[row * 2 * columns..][..2 * columns].split_at(columns);
        match simd {
            Simd::Scalar => silu_row(gate, up, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the backend was made for a processor with AVX2.
            Simd::Avx2 | Simd::Avx512 => unsafe { silu_row_avx2(gate, up, out) },
            #[cfg(target_arch = "aarch64")]
            Simd::Neon => silu_row(gate, up, out),
        }
    });
}

/// Element by element, so every instruction set gives the same bits.
#[inline(always)]
fn silu_row(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate / (1.0 + exp(-gate)) * up;
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn silu_row_avx2(gate: &[f32], up: &[f32], out: &mut [f32]) {
    silu_row(gate, up, out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{bits, numbers};

    #[test]
    fn matches_the_formula_in_f64_and_every_instruction_set_agrees() {
        for (rows, columns) in [(1, 1), (3, 15), (7, 1536)] {
            let gate_up: Vec<_> = numbers(3, rows * 2 * columns).iter().map(|x| x * 40.0).collect();
            let mut scalar = vec![f32::NAN; rows * columns];
            silu(&Pool::new(1).unwrap(), Simd::Scalar, columns, &gate_up, &mut scalar);
            for (gate_up, out) in gate_up.chunks(2 * columns).zip(scalar.chunks(columns)) {
                for (i, out) in out.iter().enumerate() {
                    let (gate, up) = (f64::from(gate_up[i]), f64::from(gate_up[columns + i]));
                    let wanted = gate / (1.0 + (-gate).exp()) * up;
                    assert!(
                        (f64::from(*out) - wanted).abs() <= 1e-6 * wanted.abs() + 1e-30,
                        "{out} {wanted}"
                    );
                }
            }
            for simd in Simd::present() {
                let mut out = vec![f32::NAN; rows * columns];
                silu(&Pool::new(3).unwrap(), simd, columns, &gate_up, &mut out);
                assert_eq!(bits(&out), bits(&scalar), "{rows} x {columns}");
            }
        }
    }

    #[test]
    fn extreme_gates_give_their_limits() {
        let gate_up = [-1e30, -100.0, 0.0, 100.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0];
        for simd in Simd::present() {
            let mut out = [f32::NAN; 5];
            silu(&Pool::new(1).unwrap(), simd, 5, &gate_up, &mut out);
            assert_eq!(out, [0.0, 0.0, 0.0, 100.0, 1e30]);
        }
    }
}
