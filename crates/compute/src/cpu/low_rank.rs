//! What adapters add to products: for each token two small products, in f32.
//!
//! A token's sums have one order, whatever else is in the step: so rows of different adapters, and of none, share a
//! batch without changing each other's bits.

use crate::RANK_MAX;

/// Sums that run beside each other, so that a compiler can use wide registers.
const LANES: usize = 16;

/// `out` += `scale * up (down x)`. `down` is (rank, in), `up` is (out, rank).
pub(super) fn add(down: &[f32], up: &[f32], scale: f32, x: &[f32], out: &mut [f32]) {
    let rank = down.len() / x.len();
    let mut inner = [0.0; RANK_MAX];
    let inner = &mut inner[..rank];
    for (value, row) in inner.iter_mut().zip(down.chunks_exact(x.len())) {
        *value = dot(row, x);
    }
    for (out, row) in out.iter_mut().zip(up.chunks_exact(rank)) {
        *out += scale * dot(row, inner);
    }
}

/// The sum of products: of every sixteenth one, then of these sums in order, then of what is left.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    let rest = a_rest.iter().zip(b_rest).map(|(a, b)| a * b);
    lanes.into_iter().chain(rest).sum()
}

#[cfg(test)]
mod tests {
    use super::super::testing::numbers;
    use super::*;

    #[test]
    fn both_products_are_those_of_the_definition_in_f64() {
        for (columns, rank, outputs) in [(1, 1, 1), (7, 3, 5), (16, 16, 2), (64, 4, 96), (100, 512, 33)] {
            let values = numbers(columns as u64, columns * rank + rank * outputs + columns + outputs);
            let (down, rest) = values.split_at(columns * rank);
            let (up, rest) = rest.split_at(rank * outputs);
            let (x, before) = rest.split_at(columns);
            let mut out = before.to_vec();
            add(down, up, 0.75, x, &mut out);
            for (at, (got, before)) in out.iter().zip(before).enumerate() {
                let inner = |r: usize| -> f64 {
                    (0..columns).map(|c| f64::from(down[r * columns + c]) * f64::from(x[c])).sum()
                };
                let outer: f64 = (0..rank).map(|r| f64::from(up[at * rank + r]) * inner(r)).sum();
                let wanted = f64::from(*before) + 0.75 * outer;
                assert!((f64::from(*got) - wanted).abs() <= 1e-4 * wanted.abs().max(1.0), "{columns} {rank}");
            }
        }
    }
}
