//! The plaintext reference: the same whole numbers multiplied here, nothing blinded, nobody asked.
//!
//! It is what private inference is bit-equal to, and how the quantised model's perplexity is measured.

use std::thread;

use fornax_compute::Rows;

use crate::Error;
use crate::backend::Products;
use crate::quantize::Matrix;

/// All matrices in memory.
pub struct Reference {
    matrices: Vec<Matrix>,
    threads: usize,
}

impl Reference {
    /// Products by this many threads.
    pub fn new(threads: usize) -> Reference {
        Reference { matrices: Vec::new(), threads: threads.max(1) }
    }
}

impl Products for Reference {
    fn add(&mut self, matrix: Matrix) -> Result<(), Error> {
        self.matrices.push(matrix);
        Ok(())
    }

    fn begin(&mut self, _tokens: usize, _wanted: usize) -> Result<(), Error> {
        Ok(())
    }

    fn multiply(&mut self, matrix: usize, _kind: Rows, x: &[i32], out: &mut [i32]) -> Result<(), Error> {
        /// Fewer products than this are done before a thread has started.
        const WORTH_A_THREAD: usize = 1 << 20;
        let matrix = &self.matrices[matrix];
        let threads = self.threads.min((out.len() * matrix.columns / WORTH_A_THREAD).max(1));
        let rows = matrix.rows.div_ceil(threads);
        let parts: Vec<Vec<i32>> = thread::scope(|scope| {
            let part = |weights| scope.spawn(move || products(weights, matrix.columns, x));
            let parts: Vec<_> = matrix.weights.chunks(rows * matrix.columns).map(part).collect();
            let join = |part: thread::ScopedJoinHandle<'_, Vec<i32>>| {
                part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            parts.into_iter().map(join).collect()
        });
        for (index, part) in parts.iter().enumerate() {
            let width = part.len() / (x.len() / matrix.columns).max(1);
            for (out, part) in out.chunks_exact_mut(matrix.rows).zip(part.chunks_exact(width)) {
                out[index * rows..][..width].copy_from_slice(part);
            }
        }
        Ok(())
    }
}

/// (rows of x, rows of weights). No sum of magnitudes reaches 2^31, so none of these wraps; see the matrix's bound.
fn products(weights: &[i8], columns: usize, x: &[i32]) -> Vec<i32> {
    let dot = |weights: &[i8], x: &[i32]| {
        let terms = weights.iter().zip(x).map(|(&weight, &x)| i32::from(weight).wrapping_mul(x));
        terms.fold(0_i32, i32::wrapping_add)
    };
    let rows = |x: &[i32]| weights.chunks_exact(columns).map(|row| dot(row, x)).collect::<Vec<_>>();
    x.chunks_exact(columns).flat_map(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_those_of_64_bits_with_any_number_of_threads() {
        let (rows, columns, tokens) = (301, 700, 5);
        let weights: Vec<i8> =
            (0..rows * columns).map(|i| i8::try_from((i * 7 + i / 11) % 128).unwrap() - 63).collect();
        let bound = i32::MAX / (64 * i32::try_from(columns).unwrap());
        let whole = |i: usize| i32::try_from(i * 6151 % 1_000_003).unwrap() % (2 * bound + 1) - bound;
        let x: Vec<i32> = (0..tokens * columns).map(whole).collect();
        let mut wide = Vec::new();
        for x in x.chunks_exact(columns) {
            for row in weights.chunks_exact(columns) {
                let sum: i64 = row.iter().zip(x).map(|(&w, &x)| i64::from(w) * i64::from(x)).sum();
                wide.push(i32::try_from(sum).unwrap());
            }
        }
        for threads in [1, 2, 7] {
            let mut reference = Reference::new(threads);
            let scales = vec![1.0; rows];
            reference.add(Matrix { rows, columns, weights: weights.clone(), scales, bound }).unwrap();
            let mut out = vec![-1; rows * tokens];
            reference.multiply(0, Rows::Tokens, &x, &mut out).unwrap();
            assert_eq!(out, wide, "{threads} threads");
        }
    }
}
