//! Exact products in the ring of integers mod 2^32: what private inference asks of a device.

use crate::{Error, Usage};

/// A device that multiplies public bytes with blinded words. Every result is exact mod 2^32, so any two devices give
/// the same words, and shares of an input sum to its product.
pub trait Ring {
    /// Weights on the device, in its own layout.
    type Matrix;

    /// A short name for messages: `cpu`, `cuda:0`.
    fn name(&self) -> &'static str;

    /// Places `weights`, which are (rows, columns), on the device.
    fn matrix(&self, rows: usize, columns: usize, weights: &[i8]) -> Result<Self::Matrix, Error>;

    /// `out[t][r]` = sum over c of `weights[r][c] * x[t][c]` mod 2^32. `x` is (tokens, columns), `out` is (tokens,
    /// rows).
    fn multiply(&self, matrix: &Self::Matrix, x: &[u32], tokens: usize, out: &mut [u32])
    -> Result<(), Error>;

    /// Bytes in use, from the allocator itself.
    fn usage(&self) -> Usage;
}

/// Refuses weights that are not `rows` x `columns`.
pub fn check_weights(rows: usize, columns: usize, weights: &[i8]) -> Result<(), Error> {
    check("ring matrix", "weights", (rows, columns), weights.len())
}

/// Refuses words that are not of `tokens` rows for a matrix of this shape.
pub fn check_words(
    (rows, columns): (usize, usize),
    tokens: usize,
    x: &[u32],
    out: &[u32],
) -> Result<(), Error> {
    check("ring product", "x", (tokens, columns), x.len())?;
    check("ring product", "out", (tokens, rows), out.len())
}

fn check(
    operation: &'static str,
    operand: &'static str,
    wanted: (usize, usize),
    len: usize,
) -> Result<(), Error> {
    if wanted.0.checked_mul(wanted.1) == Some(len) {
        return Ok(());
    }
    Err(Error::OperandLength { operation, operand, got: len, wanted })
}
