//! What matrices are multiplied by while a model runs: sums of squares by column, of which importance matrices are made.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// A record of inputs, which a backend keeps that was made with one.
#[derive(Debug, Default)]
pub struct Watch {
    /// By the name of the stored tensor. It is locked once a product: the backend computes on one thread, and who asks does so
    /// between its steps.
    seen: Mutex<BTreeMap<Box<str>, Seen>>,
}

/// What was multiplied by one tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// Sums of squares, (experts, columns); of a matrix that is of no experts one row.
    pub sums: Vec<f64>,
    /// Input rows that they are of, for each expert.
    pub counts: Vec<u64>,
}

impl Watch {
    /// All that was seen so far, by the tensors' names.
    pub fn seen(&self) -> BTreeMap<Box<str>, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts rows of `columns` values, by which the matrix of an expert was multiplied.
    pub(super) fn see(
        &self,
        names: &[Box<str>],
        (expert, experts): (usize, usize),
        columns: usize,
        rows: &[f32],
    ) {
        let mut squares = vec![0.0; columns];
        for row in rows.chunks_exact(columns) {
            for (sum, value) in squares.iter_mut().zip(row) {
                *sum += f64::from(*value) * f64::from(*value);
            }
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        for name in names {
            let one = seen.entry(name.clone()).or_default();
            one.sums.resize(experts * columns, 0.0);
            one.counts.resize(experts, 0);
            one.counts[expert] += (rows.len() / columns) as u64;
            let own = &mut one.sums[expert * columns..][..columns];
            own.iter_mut().zip(&squares).for_each(|(sum, square)| *sum += square);
        }
    }
}
