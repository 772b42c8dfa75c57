//! Activations of a feed-forward, gated and not, and other functions of single values.

use super::disjoint::{for_each_row, for_each_stretch};
use super::exp::{exp, tanh};
use super::pool::Pool;
use super::quant::Simd;
use crate::{Glu, Pointwise};

/// `out` = `activation(gate) * up`, where a row of `gate_up` is all gates, then all ups. `columns` counts `out`'s.
pub(super) fn glu(pool: &Pool, simd: Simd, kind: Glu, columns: usize, gate_up: &[f32], out: &mut [f32]) {
    for_each_stretch(pool, out, columns, |row, these, out| {
        let (gate, up) = gate_up[row * 2 * columns..][..2 * columns].split_at(columns);
        let (gate, up) = (&gate[these.clone()], &up[these]);
        match simd {
            Simd::Scalar => glu_row(kind, gate, up, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the backend was made for a processor with AVX2.
            Simd::Avx2 => unsafe { glu_row_avx2(kind, gate, up, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the backend was made for a processor with AVX-512.
            Simd::Avx512 | Simd::Amx => unsafe { glu_row_avx512(kind, gate, up, out) },
            #[cfg(target_arch = "aarch64")]
            Simd::Neon | Simd::Dotprod | Simd::I8mm => glu_row(kind, gate, up, out),
        }
    });
}

/// `gate` = `activation(gate) * up`, where a row of `gate` has `columns`, and as many begin what `up` has of a row.
pub(super) fn beside<'a>(
    pool: &Pool,
    simd: Simd,
    kind: Glu,
    (columns, up): (usize, impl Fn(usize) -> &'a [f32] + Sync),
    gate: &mut [f32],
) {
    for_each_row(pool, gate, columns, |row, gate| {
        let up = &up(row)[..columns];
        match simd {
            Simd::Scalar => beside_row(kind, up, gate),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the backend was made for a processor with AVX2.
            Simd::Avx2 | Simd::Avx512 | Simd::Amx => unsafe { beside_row_avx2(kind, up, gate) },
            #[cfg(target_arch = "aarch64")]
            Simd::Neon | Simd::Dotprod | Simd::I8mm => beside_row(kind, up, gate),
        }
    });
}

/// `x` = a function of each of its values; a row has `columns`.
pub(super) fn pointwise(pool: &Pool, simd: Simd, function: Pointwise, columns: usize, x: &mut [f32]) {
    for_each_row(pool, x, columns, |_, x| match simd {
        Simd::Scalar => pointwise_row(function, x),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the backend was made for a processor with AVX2.
        Simd::Avx2 | Simd::Avx512 | Simd::Amx => unsafe { pointwise_row_avx2(function, x) },
        #[cfg(target_arch = "aarch64")]
        Simd::Neon | Simd::Dotprod | Simd::I8mm => pointwise_row(function, x),
    });
}

/// Value by value, so every instruction set gives the same bits.
#[inline(always)]
fn glu_row(kind: Glu, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match kind {
        Glu::Silu => gated(gate, up, out, silu),
        Glu::Gelu => gated(gate, up, out, gelu),
        Glu::GeluTanh => gated(gate, up, out, gelu_tanh),
        Glu::Clamped => clamped(gate, up, out),
    }
}

#[inline(always)]
fn gated(gate: &[f32], up: &[f32], out: &mut [f32], activation: impl Fn(f32) -> f32) {
    for ((out, &gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = activation(gate) * up;
    }
}

#[inline(always)]
fn clamped(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = clamped_one(gate, up);
    }
}

#[inline(always)]
fn clamped_one(gate: f32, up: f32) -> f32 {
    const LIMIT: f32 = 7.0;
    // Not `min`, which would make a number of NaN.
    let gate = if gate > LIMIT { LIMIT } else { gate };
    gate / (1.0 + exp(-1.702 * gate)) * (up.clamp(-LIMIT, LIMIT) + 1.0)
}

/// The same in place.
#[inline(always)]
fn beside_row(kind: Glu, up: &[f32], gate: &mut [f32]) {
    match kind {
        Glu::Silu => beside_each(up, gate, |gate, up| silu(gate) * up),
        Glu::Gelu => beside_each(up, gate, |gate, up| gelu(gate) * up),
        Glu::GeluTanh => beside_each(up, gate, |gate, up| gelu_tanh(gate) * up),
        Glu::Clamped => beside_each(up, gate, clamped_one),
    }
}

#[inline(always)]
fn beside_each(up: &[f32], gate: &mut [f32], gated: impl Fn(f32, f32) -> f32) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = gated(*gate, *up);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn beside_row_avx2(kind: Glu, up: &[f32], gate: &mut [f32]) {
    beside_row(kind, up, gate);
}

#[inline(always)]
fn pointwise_row(function: Pointwise, x: &mut [f32]) {
    match function {
        Pointwise::Scale(factor) => each(x, |x| x * factor),
        Pointwise::SoftCap(cap) => each(x, |x| soft_cap(cap, x)),
        Pointwise::Gelu => each(x, gelu),
        Pointwise::GeluTanh => each(x, gelu_tanh),
        Pointwise::Relu => each(x, relu),
        Pointwise::ReluSquared => each(x, |x| relu(x) * relu(x)),
        Pointwise::Xielu { positive, negative, beta, eps } => each(x, |x| {
            if x > 0.0 {
                positive * x * x + beta * x
            } else {
                // Not f32::min, which drops a NaN: a fault has to reach the logits.
                let least = if x > eps { eps } else { x };
                (least.exp_m1() - x) * negative + beta * x
            }
        }),
    }
}

#[inline(always)]
fn each(x: &mut [f32], function: impl Fn(f32) -> f32) {
    for x in x {
        *x = function(*x);
    }
}

/// `cap * tanh(x / cap)`.
#[inline(always)]
pub(super) fn soft_cap(cap: f32, x: f32) -> f32 {
    cap * tanh(x / cap)
}

/// `x` times its sigmoid.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `x / 2 * (1 + tanh(u))` is `x / (1 + e^(-2u))`.
#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const TWICE_ROOT: f32 = 1.595_769; // 2 sqrt(2 / pi)
    x / (1.0 + exp(-TWICE_ROOT * (x + 0.044715 * x * x * x)))
}

/// `x / 2 * erfc(-x / sqrt 2)`, with the complementary error function of the magnitude as e to a polynomial (Numerical
/// Recipes' erfcc: within 1.2e-7 of the true value, relatively).
#[inline(always)]
fn gelu(x: f32) -> f32 {
    const COEFFICIENTS: [f32; 9] = [
        0.170_872_77,
        -0.822_152_24,
        1.488_515_9,
        -1.135_204,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
    ];
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * z);
    let polynomial = COEFFICIENTS.iter().fold(0.0, |sum, coefficient| sum * t + coefficient);
    let tail = t * exp(-z * z - 1.265_512_2 + t * polynomial);
    // NaN takes the second branch and stays.
    let share = if x < 0.0 { tail } else { 2.0 - tail };
    0.5 * x * share
}

/// Zero for what is less. NaN takes the second branch and stays.
#[inline(always)]
fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn glu_row_avx2(kind: Glu, gate: &[f32], up: &[f32], out: &mut [f32]) {
    glu_row(kind, gate, up, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
fn glu_row_avx512(kind: Glu, gate: &[f32], up: &[f32], out: &mut [f32]) {
    glu_row(kind, gate, up, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn pointwise_row_avx2(function: Pointwise, x: &mut [f32]) {
    pointwise_row(function, x);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{bits, numbers};

    /// x, silu, gelu, gelu with tanh, and 30 tanh(x / 30), by torch in float64.
    const TORCH: [[f64; 5]; 9] = [
        [-9.0, -0.0011105511838760856, -0.0, -0.0, -8.739378373547726],
        [-4.5, -0.04944124183766931, -1.5289529061324192e-05, -5.136737411925996e-06, -4.46655100869954],
        [-1.25, -0.27837517353163604, -0.13206221708356905, -0.13228579703028542, -1.2492771223645784],
        [
            -0.009999999776482582,
            -0.00497500009769011,
            -0.004960106326878326,
            -0.00496010633016907,
            -0.009999999406112254,
        ],
        [
            0.003000000026077032,
            0.001502250011390133,
            0.0015035904882388345,
            0.001503590488212178,
            0.003000000016077032,
        ],
        [0.75, 0.5093840243815447, 0.5800294857173489, 0.5799605551656203, 0.7498437890526207],
        [2.0, 1.7615941559557646, 1.9544997361036416, 1.954597694087775, 1.997042295067877],
        [6.5, 6.490242315331209, 6.49999999973896, 6.499999999999372, 6.400161366492686],
        [40.0, 40.0, 40.0, 40.0, 26.101849852280157],
    ];

    #[test]
    fn functions_are_those_of_torch() {
        let close = |got: f32, wanted: f64, what: &str| {
            let error = (f64::from(got) - wanted).abs();
            assert!(error <= 1e-6 * wanted.abs() + 3e-8, "{what}: {got} {wanted}");
        };
        for [x, silu_of, gelu_of, gelu_tanh_of, capped] in TORCH {
            let x = x as f32;
            close(silu(x), silu_of, "silu");
            close(gelu(x), gelu_of, "gelu");
            close(gelu_tanh(x), gelu_tanh_of, "gelu_tanh");
            let error = (f64::from(soft_cap(30.0, x)) - capped).abs();
            assert!(error <= 1e-6 * capped.abs() + 4e-6, "soft cap: {x} {capped}");
        }
    }

    #[test]
    fn every_instruction_set_agrees_in_every_bit() {
        for (rows, columns) in [(1, 1), (3, 15), (7, 1536)] {
            let gate_up: Vec<_> = numbers(3, rows * 2 * columns).iter().map(|x| x * 40.0).collect();
            for kind in [Glu::Silu, Glu::Gelu, Glu::GeluTanh, Glu::Clamped] {
                let mut scalar = vec![f32::NAN; rows * columns];
                glu(&Pool::new(1).unwrap(), Simd::Scalar, kind, columns, &gate_up, &mut scalar);
                for simd in Simd::present() {
                    let mut out = vec![f32::NAN; rows * columns];
                    glu(&Pool::new(3).unwrap(), simd, kind, columns, &gate_up, &mut out);
                    assert_eq!(bits(&out), bits(&scalar), "{kind:?} {rows} x {columns}");
                }
            }
            for function in [
                Pointwise::Scale(0.3),
                Pointwise::SoftCap(7.0),
                Pointwise::Gelu,
                Pointwise::GeluTanh,
                Pointwise::Relu,
                Pointwise::ReluSquared,
            ] {
                let mut scalar = gate_up.clone();
                pointwise(&Pool::new(1).unwrap(), Simd::Scalar, function, columns, &mut scalar);
                for simd in Simd::present() {
                    let mut out = gate_up.clone();
                    pointwise(&Pool::new(3).unwrap(), simd, function, columns, &mut out);
                    assert_eq!(bits(&out), bits(&scalar), "{function:?} {rows} x {columns}");
                }
            }
        }
    }

    #[test]
    fn gates_are_the_first_half() {
        let mut out = [f32::NAN; 2];
        glu(&Pool::new(1).unwrap(), Simd::Scalar, Glu::Silu, 2, &[100.0, 0.0, 3.0, 5.0], &mut out);
        assert_eq!(out, [300.0, 0.0]);
    }

    #[test]
    fn extreme_gates_give_their_limits() {
        let gate_up = [-1e30, -100.0, 0.0, 100.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0];
        for simd in Simd::present() {
            for kind in [Glu::Silu, Glu::Gelu] {
                let mut out = [f32::NAN; 5];
                glu(&Pool::new(1).unwrap(), simd, kind, 5, &gate_up, &mut out);
                assert_eq!(out, [0.0, 0.0, 0.0, 100.0, 1e30], "{kind:?}");
            }
            let mut x = [f32::NEG_INFINITY, -1e30, 1e30, f32::INFINITY];
            pointwise(&Pool::new(1).unwrap(), simd, Pointwise::SoftCap(30.0), 4, &mut x);
            assert_eq!(x, [-30.0, -30.0, 30.0, 30.0]);
        }
    }

    #[test]
    fn gates_and_ups_have_their_limits() {
        // gate, up, and what torch makes of them in float64.
        const TORCH: [[f64; 3]; 7] = [
            [-3.0, 2.0, -0.05421392912335791],
            [0.5, -1.5, -0.17519421830319007],
            [6.75, 6.75, 52.31196394559435],
            [8.0, 1.0, 13.999906256606636],
            [30.0, -9.0, -41.99971876981991],
            [-20.0, 9.0, -2.6347281931194997e-13],
            [2.0, -1.0, 0.0],
        ];
        for [gate, up, wanted] in TORCH {
            let mut out = [f32::NAN];
            clamped(&[gate as f32], &[up as f32], &mut out);
            let error = (f64::from(out[0]) - wanted).abs();
            assert!(error <= 1e-6 * wanted.abs(), "{gate} {up}: {out:?} {wanted}");
        }
        for (gate, up) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            let mut out = [0.0];
            clamped(&[gate], &[up], &mut out);
            assert!(out[0].is_nan());
        }
    }

    #[test]
    fn what_is_below_zero_is_cut_off() {
        for (function, wanted) in
            [(Pointwise::Relu, [0.0, 0.0, 0.0, 2.5]), (Pointwise::ReluSquared, [0.0, 0.0, 0.0, 6.25])]
        {
            let mut x = [-1e30, -0.5, 0.0, 2.5];
            pointwise_row(function, &mut x);
            assert_eq!(x, wanted, "{function:?}");
        }
    }

    #[test]
    fn a_nan_stays() {
        for function in [
            Pointwise::SoftCap(7.0),
            Pointwise::Gelu,
            Pointwise::GeluTanh,
            Pointwise::Relu,
            Pointwise::ReluSquared,
        ] {
            let mut x = [f32::NAN];
            pointwise_row(function, &mut x);
            assert!(x[0].is_nan(), "{function:?}");
        }
    }
}
