//! Whether a product is right, at the cost of two dot products (Freivalds).
//!
//! The client draws a secret vector `s` for each matrix `W` and keeps `s` and `s^T W`. If the answer `Y` to `X` is
//! right, then `s . Y = (s^T W) . X`. All three are taken as whole numbers modulo the prime 2^61 - 1 and not modulo
//! 2^32: in a field a wrong answer passes for one `s` in 2^61, in the ring an error of 2^31 would pass for every second
//! `s`. The true products are below 2^31 in magnitude, so reading an answer as a signed number loses nothing.
//!
//! `s` serves for as long as the client runs: an answer that passes tells a server nothing about it, and after the
//! first that fails nothing more is sent.

use zeroize::Zeroize;

use crate::Error;
use crate::mask::random;
use crate::quantize::Matrix;

const P: u64 = (1 << 61) - 1;

/// Bits of a limb when `s^T W` is made: a limb times a weight, summed over 2^24 rows, fits 64 bits.
const LIMB_BITS: u32 = 31;

/// What is kept of one matrix.
pub(crate) struct Check {
    /// One for each output row.
    secret: Vec<i64>,
    /// `s^T W` mod p, one for each column.
    product: Vec<i64>,
}

/// `(s^T W) . X` of one row.
pub(crate) struct Expected(i64);

impl Check {
    /// Draws the secret and multiplies it with the matrix.
    pub(crate) fn new(matrix: &Matrix) -> Result<Check, Error> {
        let secret = secret(matrix.rows)?;
        let mut limbs = vec![(0_i64, 0_i64); matrix.columns];
        for (weights, &s) in matrix.weights.chunks_exact(matrix.columns.max(1)).zip(&secret) {
            let (low, high) = (s & ((1 << LIMB_BITS) - 1), s >> LIMB_BITS);
            for (sum, &weight) in limbs.iter_mut().zip(weights) {
                sum.0 += low * i64::from(weight);
                sum.1 += high * i64::from(weight);
            }
        }
        let whole = |&(low, high): &(i64, i64)| modulo(i128::from(low) + (i128::from(high) << LIMB_BITS));
        let product = limbs.iter().map(whole).collect();
        Ok(Check { secret, product })
    }

    /// What one row of `x` makes of an answer that is right: it can be known before the answer comes.
    pub(crate) fn expect(&self, x: &[i32]) -> Expected {
        Expected(dot(&self.product, x))
    }

    /// Whether `y`, one row of answers read as signed numbers, is as expected.
    pub(crate) fn holds(&self, expected: &Expected, y: &[i32]) -> bool {
        expected.0 == dot(&self.secret, y)
    }
}

impl Drop for Check {
    fn drop(&mut self) {
        self.secret.zeroize();
    }
}

/// Numbers below p, uniform but for one part in 2^61.
fn secret(count: usize) -> Result<Vec<i64>, Error> {
    let mut words = vec![0_u64; count];
    random(bytemuck::cast_slice_mut(&mut words))?;
    Ok(words.into_iter().map(|word| modulo(i128::from(word & P))).collect())
}

/// The sum of products mod p. Terms are below 2^92, so 2^35 of them fit before anything is reduced.
fn dot(field: &[i64], whole: &[i32]) -> i64 {
    // Two running sums, since one is a chain of carries.
    let (mut even, mut odd) = (0_i128, 0_i128);
    let (mut fields, mut wholes) = (field.chunks_exact(2), whole.chunks_exact(2));
    for (field, whole) in fields.by_ref().zip(wholes.by_ref()) {
        even += i128::from(field[0]) * i128::from(whole[0]);
        odd += i128::from(field[1]) * i128::from(whole[1]);
    }
    for (field, whole) in fields.remainder().iter().zip(wholes.remainder()) {
        even += i128::from(*field) * i128::from(*whole);
    }
    modulo(even + odd)
}

fn modulo(value: i128) -> i64 {
    i64::try_from(value.rem_euclid(i128::from(P))).expect("p is below 2^61")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(rows: usize, columns: usize) -> Matrix {
        let weights =
            (0..rows * columns).map(|i| i8::try_from((i * 89 + i / 7) % 255).unwrap_or(-128).max(-127));
        Matrix { rows, columns, weights: weights.collect(), scales: vec![1.0; rows], bound: 1000 }
    }

    fn product(matrix: &Matrix, x: &[i32]) -> Vec<i32> {
        let row = |row: &[i8]| row.iter().zip(x).map(|(&w, &x)| i32::from(w) * x).sum();
        matrix.weights.chunks_exact(matrix.columns).map(row).collect()
    }

    #[test]
    fn a_right_product_passes_and_every_single_wrong_bit_fails() {
        for (rows, columns) in [(1, 1), (5, 3), (64, 33)] {
            let matrix = matrix(rows, columns);
            let check = Check::new(&matrix).unwrap();
            let x: Vec<i32> = (0..columns).map(|i| i32::try_from(i * 7919 % 2001).unwrap() - 1000).collect();
            let right = product(&matrix, &x);
            assert!(check.holds(&check.expect(&x), &right));
            for word in 0..rows {
                for bit in 0..32 {
                    let mut wrong = right.clone();
                    wrong[word] ^= 1 << bit;
                    assert!(
                        !check.holds(&check.expect(&x), &wrong),
                        "bit {bit} of word {word} of {rows} x {columns}"
                    );
                }
            }
        }
    }

    #[test]
    fn errors_that_cancel_in_the_ring_do_not_cancel_in_the_field() {
        let matrix = matrix(8, 4);
        let check = Check::new(&matrix).unwrap();
        let x = [3, -4, 5, 1000];
        let mut wrong = product(&matrix, &x);
        // Added twice, half of the ring is nothing modulo 2^32, whatever an even secret.
        wrong[0] = wrong[0].wrapping_add(i32::MIN);
        wrong[1] = wrong[1].wrapping_add(i32::MIN);
        assert!(!check.holds(&check.expect(&x), &wrong));
    }

    #[test]
    fn swapped_rows_and_another_inputs_product_fail() {
        let matrix = matrix(6, 5);
        let check = Check::new(&matrix).unwrap();
        let (x, other) = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6]);
        let mut swapped = product(&matrix, &x);
        swapped.swap(0, 3);
        assert!(!check.holds(&check.expect(&x), &swapped));
        assert!(!check.holds(&check.expect(&x), &product(&matrix, &other)));
    }

    #[test]
    fn the_arithmetic_is_that_of_the_prime() {
        // 2^61 is 1 modulo 2^61 - 1, by definition; and powers of it.
        assert_eq!(modulo(1 << 61), 1);
        assert_eq!(modulo(1 << 122), 1);
        assert_eq!(modulo(-1), i64::try_from(P).unwrap() - 1);
        assert_eq!(dot(&[1 << 60, 1 << 60, 7], &[2, -2, 3]), 21);
    }
}
