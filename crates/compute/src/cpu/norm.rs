//! Normalisation of rows, and of the heads inside them.

use super::disjoint::for_each_row;
use super::pool::Pool;
use super::quant::Simd;
use crate::{Heads, NormKind};

/// Partial sums: enough to fill two vector registers.
const LANES: usize = 16;

/// A norm of rows with as many columns as there are weights.
#[derive(Clone, Copy)]
pub(super) struct RowNorm<'a> {
    pub(super) kind: NormKind,
    pub(super) weight: &'a [f32],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) eps: f32,
}

/// `out` = the norm of `x`, row by row.
pub(super) fn norm(pool: &Pool, simd: Simd, norm: RowNorm<'_>, x: &[f32], out: &mut [f32]) {
    let columns = norm.weight.len();
    for_each_row(pool, out, columns, |row, out| {
        out.copy_from_slice(&x[row * columns..][..columns]);
        norm.row(simd, out);
    });
}

/// Normalises, in every row of `qkv`, the query heads and the key heads that follow them, and perhaps the value heads behind
/// those: as many values at once as there are weights.
pub(super) fn qk_norm(
    pool: &Pool,
    simd: Simd,
    heads: Heads,
    ([query, key], value): ([RowNorm<'_>; 2], Option<RowNorm<'_>>),
    qkv: &mut [f32],
) {
    let each = |norm: RowNorm<'_>, heads: &mut [f32]| {
        heads.chunks_exact_mut(norm.weight.len()).for_each(|values| norm.row(simd, values));
    };
    for_each_row(pool, qkv, heads.qkv_columns(), |_, row| {
        let (queries, rest) = row.split_at_mut(heads.query * heads.dim);
        let (keys, values) = rest.split_at_mut(heads.kv * heads.dim);
        each(query, queries);
        each(key, keys);
        if let Some(value) = value {
            each(value, values);
        }
    });
}

impl RowNorm<'_> {
    /// Of one row, or of what is normalised together in it.
    pub(super) fn row(self, simd: Simd, values: &mut [f32]) {
        match simd {
            Simd::Scalar => norm_row(self, values),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the backend was made for a processor with AVX2.
            Simd::Avx2 | Simd::Avx512 | Simd::Amx => unsafe { norm_row_avx2(self, values) },
            #[cfg(target_arch = "aarch64")]
            Simd::Neon | Simd::Dotprod | Simd::I8mm => norm_row(self, values),
        }
    }
}

/// Sums are taken in sixteen f32 lanes (value i into lane i mod 16), which are then added in order: the same for every
/// instruction set, so all give the same bits.
#[inline(always)]
fn norm_row(norm: RowNorm<'_>, values: &mut [f32]) {
    let count = values.len() as f32;
    let mean = match norm.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => sum(values, |value| value) / count,
    };
    let square = sum(values, |value| (value - mean) * (value - mean)) / count;
    let inverse = 1.0 / (square + norm.eps).sqrt();
    for (value, weight) in values.iter_mut().zip(norm.weight) {
        *value = (*value - mean) * inverse * weight;
    }
    if let Some(bias) = norm.bias {
        for (value, bias) in values.iter_mut().zip(bias) {
            *value += bias;
        }
    }
}

/// The sum of a term of each value, in lanes as above.
#[inline(always)]
pub(super) fn sum(values: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += term(*value);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += term(*value);
    }
    lanes.iter().sum::<f32>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn norm_row_avx2(norm: RowNorm<'_>, values: &mut [f32]) {
    norm_row(norm, values);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{bits, numbers};

    /// The formula in f64.
    fn wanted(norm: RowNorm<'_>, x: &[f32]) -> Vec<f64> {
        let count = x.len() as f64;
        let x: Vec<f64> = x.iter().copied().map(f64::from).collect();
        let mean = match norm.kind {
            NormKind::Rms => 0.0,
            NormKind::Layer => x.iter().sum::<f64>() / count,
        };
        let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        let bias = |i: usize| norm.bias.map_or(0.0, |bias| f64::from(bias[i]));
        let value = |(i, x): (usize, &f64)| {
            (x - mean) / (square + f64::from(norm.eps)).sqrt() * f64::from(norm.weight[i]) + bias(i)
        };
        x.iter().enumerate().map(value).collect()
    }

    fn close(got: &[f32], wanted: &[f64]) {
        for (got, wanted) in got.iter().zip(wanted) {
            assert!((f64::from(*got) - wanted).abs() <= 4e-6 * wanted.abs().max(1e-1), "{got} {wanted}");
        }
    }

    #[test]
    fn matches_the_formula_in_f64_and_every_instruction_set_agrees() {
        for (rows, columns) in [(1, 2), (3, 15), (2, 16), (5, 576), (40, 897)] {
            let (weight, bias) = (numbers(2, columns), numbers(3, columns));
            let x: Vec<f32> = numbers(1, rows * columns).iter().map(|x| x + 0.3).collect();
            for kind in [NormKind::Rms, NormKind::Layer] {
                for bias in [None, Some(&bias[..])] {
                    let spec = RowNorm { kind, weight: &weight, bias, eps: 1e-5 };
                    let mut scalar = vec![f32::NAN; x.len()];
                    norm(&Pool::new(1).unwrap(), Simd::Scalar, spec, &x, &mut scalar);
                    for (x, out) in x.chunks(columns).zip(scalar.chunks(columns)) {
                        close(out, &wanted(spec, x));
                    }
                    for simd in Simd::present() {
                        let mut out = vec![f32::NAN; x.len()];
                        norm(&Pool::new(3).unwrap(), simd, spec, &x, &mut out);
                        assert_eq!(bits(&out), bits(&scalar), "{rows} x {columns}");
                    }
                }
            }
        }
    }

    #[test]
    fn queries_and_keys_are_normalised_by_head_or_together_and_values_stay_unless_asked() {
        let heads = Heads { query: 4, kv: 2, dim: 24 };
        for (query_columns, key_columns) in [(24, 24), (96, 48)] {
            let (query, key) = (numbers(5, query_columns), numbers(6, key_columns));
            let spec = |weight| RowNorm { kind: NormKind::Rms, weight, bias: None, eps: 1e-5 };
            let before = numbers(4, 7 * heads.qkv_columns());
            for simd in Simd::present() {
                let mut after = before.clone();
                let norms = [spec(&query[..]), spec(&key[..])];
                let value = spec(&key[..key_columns.min(24)]);
                let mut with_values = before.clone();
                qk_norm(&Pool::new(3).unwrap(), simd, heads, (norms, Some(value)), &mut with_values);
                qk_norm(&Pool::new(3).unwrap(), simd, heads, (norms, None), &mut after);
                for ((before, after), with_values) in
                    before.chunks(192).zip(after.chunks(192)).zip(with_values.chunks(192))
                {
                    assert_eq!(after[..144], with_values[..144]);
                    let parts = before[144..].chunks(24).zip(with_values[144..].chunks(24));
                    parts.for_each(|(before, after)| close(after, &wanted(value, before)));
                }
                let rows = before.chunks(heads.qkv_columns()).zip(after.chunks(heads.qkv_columns()));
                for (before, after) in rows {
                    for (at, norm) in [(0..96, norms[0]), (96..144, norms[1])] {
                        let columns = norm.weight.len();
                        let parts = before[at.clone()].chunks(columns).zip(after[at].chunks(columns));
                        parts.for_each(|(before, after)| close(after, &wanted(norm, before)));
                    }
                    assert_eq!(before[144..], after[144..]);
                }
            }
        }
    }
}
