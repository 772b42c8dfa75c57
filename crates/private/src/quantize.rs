//! Weights as whole numbers: a byte each, with a public scale for each row.
//!
//! Everything here is a function of the stored weights alone and the same on every machine, so that client and servers
//! agree on matrices, their numbers and their hash without asking each other. A matrix is numbered by the order in
//! which the model's loader uploads it; what the loader stacks is one matrix.

use std::cell::RefCell;

use fornax_compute::cpu::expand_rows;
use fornax_compute::{Error as ComputeError, KvSpec, Memory, Need, Part, Purpose, Usage};
use sha2::{Digest, Sha256};

use crate::Error;
use crate::error::supports;
use crate::frame::{FRAME_BYTES_MAX, Shapes, Weights};

/// How weights are quantised, for `info`.
pub const QUANT: &str = "w8-row";

/// Largest magnitude of a weight.
const WEIGHT_MAX: f32 = 127.0;

/// Products stay below this in magnitude: half of the ring, so that their sign is known.
const PRODUCT_MAX: u64 = (1 << 31) - 1;

/// Activations finer than this are no better than the weights; rounding below relies on it (see [`round`]).
const ACTIVATION_MAX: u64 = (1 << 22) - 1;

/// Activations coarser than seven bits are not worth computing with: a model that leaves fewer is refused.
const ACTIVATION_LEAST: u64 = 127;

/// A quantised matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Output rows.
    pub rows: usize,
    /// Values of a row.
    pub columns: usize,
    /// (rows, columns), -127 to 127.
    pub weights: Vec<i8>,
    /// What each row's whole numbers are multiplied by.
    pub scales: Vec<f32>,
    /// The largest activation whose products cannot leave half of the ring.
    pub bound: i32,
}

impl Matrix {
    /// Quantises stacked parts: each row's largest magnitude becomes 127. Refuses what the ring cannot hold.
    pub fn new(number: usize, parts: &[Part<'_>]) -> Result<Matrix, Error> {
        let (mut weights, mut scales) = (Vec::new(), Vec::new());
        let mut heaviest = (0, 0);
        let mut refused = None;
        for part in parts {
            expand_rows(part, |_, values| {
                let row = scales.len();
                let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                if let Some(&value) = values.iter().find(|value| !value.is_finite()) {
                    refused.get_or_insert(Error::Weight { matrix: number, row, value });
                }
                let inverse = if largest > 0.0 { WEIGHT_MAX / largest } else { 0.0 };
                let mut sum = 0;
                // Clamped: a subnormal row's inverse is too large for its product to be exact.
                weights.extend(values.iter().map(|value| {
                    #[expect(clippy::cast_possible_truncation, reason = "clamped to a byte")]
                    let weight = (value * inverse).clamp(-WEIGHT_MAX, WEIGHT_MAX).round_ties_even() as i8;
                    sum += u64::from(weight.unsigned_abs());
                    weight
                }));
                scales.push(if largest > 0.0 { largest / WEIGHT_MAX } else { 0.0 });
                if sum > heaviest.0 {
                    heaviest = (sum, row);
                }
                Ok(())
            })?;
            part.view.release();
        }
        if let Some(error) = refused {
            return Err(error);
        }
        let columns = weights.len() / scales.len().max(1);
        let (sum, row) = heaviest;
        let bound = (PRODUCT_MAX / sum.max(1)).min(ACTIVATION_MAX);
        if bound < ACTIVATION_LEAST {
            let least = ACTIVATION_LEAST;
            return Err(Error::Overflow { matrix: number, row, columns, sum, bound, least });
        }
        if 4 * scales.len().max(columns) + 64 > FRAME_BYTES_MAX {
            let (rows, limit) = (scales.len(), FRAME_BYTES_MAX);
            return Err(Error::MatrixSize { matrix: number, rows, columns, limit });
        }
        let bound = i32::try_from(bound).expect("below 2^22");
        Ok(Matrix { rows: scales.len(), columns, weights, scales, bound })
    }
}

/// One row of activations as whole numbers of at most `bound`, and what one of them is worth. `None` where a value is
/// not finite.
pub fn quantize_row(values: &[f32], bound: i32, out: &mut [i32]) -> Option<f32> {
    // Eight running maxima: one would be a chain as long as the row.
    let mut largest = [0.0_f32; 8];
    let mut finite = true;
    for chunk in values.chunks(8) {
        for (largest, value) in largest.iter_mut().zip(chunk) {
            finite &= value.is_finite();
            *largest = if value.abs() > *largest { value.abs() } else { *largest };
        }
    }
    let largest = largest.into_iter().fold(0.0, f32::max);
    if !finite {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "bounds are below 2^22")]
    let most = bound as f32;
    let inverse = if largest > 0.0 { most / largest } else { 0.0 };
    // An activation so small that its inverse is none is nothing.
    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
    for (value, out) in values.iter().zip(out) {
        *out = round((value * inverse).clamp(-most, most));
    }
    Some(if inverse > 0.0 { largest / most } else { 0.0 })
}

/// The nearest whole number of a value below 2^22 in magnitude, ties to even: adding 1.5 * 2^23 leaves it in the low
/// bits. The processors that every build runs on have no faster instruction.
#[inline]
fn round(value: f32) -> i32 {
    const SHIFT: f32 = 12_582_912.0;
    #[expect(clippy::cast_possible_truncation, reason = "a whole number below 2^22")]
    let whole = ((value + SHIFT) - SHIFT) as i32;
    whole
}

/// The hash of all matrices in order: shapes, weights and scales.
pub struct Fingerprint {
    hash: Sha256,
    shapes: Shapes,
}

impl Default for Fingerprint {
    fn default() -> Fingerprint {
        let mut hash = Sha256::new();
        hash.update(b"fornax blind2 ");
        hash.update(QUANT);
        Fingerprint { hash, shapes: Shapes::default() }
    }
}

impl Fingerprint {
    /// Counts the next matrix in and returns its number.
    pub fn add(&mut self, matrix: &Matrix) -> usize {
        let size = |size: usize| u32::try_from(size).expect("a row fits a frame");
        let (rows, columns) = (size(matrix.rows), size(matrix.columns));
        self.hash.update(rows.to_le_bytes());
        self.hash.update(columns.to_le_bytes());
        self.hash.update(bytemuck::cast_slice::<i8, u8>(&matrix.weights));
        for scale in &matrix.scales {
            self.hash.update(scale.to_le_bytes());
        }
        self.shapes.0.push((rows, columns));
        self.shapes.0.len() - 1
    }

    /// How many matrices there are.
    pub fn count(&self) -> usize {
        self.shapes.0.len()
    }

    /// Shapes and hash of all that was added.
    pub fn finish(&self) -> (Shapes, Weights) {
        let digest = self.hash.clone().finalize();
        let sha256 = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        (self.shapes.clone(), Weights { sha256, quant: QUANT.to_owned() })
    }
}

/// A memory that quantises the matrices a model multiplies by, hands them on in order, and keeps nothing else: how a
/// server loads a model through the model's own loader.
pub struct Collector<F> {
    next: RefCell<(usize, F)>,
}

impl<F: FnMut(usize, Matrix) -> Result<(), ComputeError>> Collector<F> {
    /// `visit(number, matrix)` is called for each matrix.
    pub fn new(visit: F) -> Collector<F> {
        Collector { next: RefCell::new((0, visit)) }
    }
}

impl<F: FnMut(usize, Matrix) -> Result<(), ComputeError>> Memory for Collector<F> {
    type Weight = ();
    type Buf = ();
    type Kv = ();

    fn upload(&self, parts: &[Part<'_>]) -> Result<(), ComputeError> {
        let (number, visit) = &mut *self.next.borrow_mut();
        let matrix = Matrix::new(*number, parts)?;
        visit(*number, matrix)?;
        *number += 1;
        Ok(())
    }

    fn upload_table(&self, parts: &[Part<'_>], tied: bool) -> Result<(), ComputeError> {
        // What is only looked up stays with the client.
        if tied { self.upload(parts) } else { Ok(()) }
    }

    fn upload_vector(&self, _parts: &[Part<'_>]) -> Result<(), ComputeError> {
        Ok(())
    }

    fn upload_values(&self, _values: &[f32]) -> Result<(), ComputeError> {
        Ok(())
    }

    fn alloc(&self, _purpose: Purpose, _rows: usize, _columns: usize) -> Result<(), ComputeError> {
        Ok(())
    }

    fn alloc_kv(&self, _spec: &KvSpec) -> Result<(), ComputeError> {
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }

    fn supports(&self, need: Need) -> Result<(), ComputeError> {
        supports(need)
    }
}

#[cfg(test)]
mod tests {
    use fornax_format::{DType, View};

    use super::*;

    fn matrix(rows: usize, values: &[f32]) -> Result<Matrix, Error> {
        let bytes = bytemuck::cast_slice(values);
        let view = View::new("w", DType::F32, vec![rows, values.len() / rows], bytes).unwrap();
        Matrix::new(4, &[Part::from(view)])
    }

    #[test]
    fn a_rows_largest_weight_becomes_127_and_the_rest_its_share() {
        let matrix = matrix(3, &[1.0, -2.0, 0.5, 0.0, 0.0, 0.0, -127.0, 3.5, 126.49]).unwrap();
        assert_eq!(matrix.weights, [64, -127, 32, 0, 0, 0, -127, 4, 126]);
        assert_eq!(matrix.scales, [2.0 / 127.0, 0.0, 1.0]);
    }

    #[test]
    fn a_row_that_would_overflow_the_ring_is_refused_with_numbers() {
        let columns = 140_000;
        let mut values = vec![1.0_f32; 2 * columns];
        values[0] = 1000.0;
        let error = matrix(2, &values).unwrap_err().to_string();
        assert_eq!(
            error,
            "matrix 4, row 1: its 140000 weights sum to 17780000 in magnitude, which leaves activations 120 steps of \
             the ring of 2^32; at least 127 are needed"
        );
    }

    #[test]
    fn products_with_the_largest_activations_stay_inside_half_of_the_ring() {
        for columns in [1, 63, 1000, 100_000] {
            let matrix = matrix(1, &vec![-3.0; columns]).unwrap();
            let sum: i64 =
                matrix.weights.iter().map(|&weight| i64::from(weight) * i64::from(matrix.bound)).sum();
            assert!(sum.abs() < 1 << 31, "{columns} columns: {sum}");
        }
    }

    #[test]
    fn a_weight_that_is_no_number_is_refused() {
        let error = matrix(2, &[1.0, 2.0, f32::NAN, 1.0]).unwrap_err().to_string();
        assert_eq!(error, "matrix 4, row 1 holds NaN");
    }

    #[test]
    fn activations_are_rounded_to_the_bound_and_come_back_within_a_step_or_so() {
        let values: Vec<f32> = (0..100).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.013).collect();
        for bound in [127, 30_000, (1 << 22) - 1] {
            let mut whole = vec![0; values.len()];
            let scale = quantize_row(&values, bound, &mut whole).unwrap();
            assert_eq!(whole.iter().map(|whole| whole.abs()).max(), Some(bound));
            for (value, whole) in values.iter().zip(&whole) {
                let back = f64::from(*whole) * f64::from(scale);
                assert!((back - f64::from(*value)).abs() <= f64::from(scale) * 1.5, "{value} became {back}");
            }
        }
        let mut whole = [9; 3];
        assert_eq!(quantize_row(&[0.0; 3], 100, &mut whole), Some(0.0));
        assert_eq!(whole, [0; 3]);
        assert_eq!(quantize_row(&[1.0, f32::INFINITY, 0.0], 100, &mut whole), None);
        assert_eq!(quantize_row(&[1.0, f32::NAN, 0.0], 100, &mut whole), None);
        assert_eq!(quantize_row(&[f32::MIN_POSITIVE / 8.0; 3], 100, &mut whole), Some(0.0));
    }

    #[test]
    fn experts_are_refused_because_their_choice_would_be_seen() {
        let collector = Collector::new(|_, _| Ok(()));
        assert_eq!(
            collector.supports(Need::Experts).unwrap_err().to_string(),
            "a mixture of experts (which of them a token takes would tell the servers about the token) is not \
             available on private"
        );
    }

    #[test]
    fn the_hash_sees_every_weight_scale_and_shape() {
        let hash = |rows, values: &[f32]| {
            let mut fingerprint = Fingerprint::default();
            fingerprint.add(&matrix(rows, values).unwrap());
            fingerprint.finish().1.sha256
        };
        let first = hash(2, &[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(first, hash(2, &[1.0, 2.0, 3.0, 4.0]));
        assert_eq!(first.len(), 64);
        assert_ne!(first, hash(2, &[1.0, 2.0, 3.1, 4.0]), "a weight");
        assert_ne!(first, hash(2, &[1.0, 2.0, 6.0, 8.0]), "a scale");
        assert_ne!(hash(1, &[2.0; 4]), hash(2, &[2.0; 4]), "a shape");
    }
}
