//! One slice written by many threads, each its own part.

use std::marker::PhantomData;
use std::ops::Range;

use super::pool::Pool;

/// Below this many values per thread a region costs more than it saves.
const GRAIN_VALUES: usize = 4096;

/// A mutable slice whose parts are handed to different threads.
pub(super) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` in parts; the callers of `part` promise that no two threads hold the same one.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Disjoint { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// One part; panics if it reaches past the end.
    ///
    /// # Safety
    /// No two parts that overlap may be alive at the same time.
    #[expect(clippy::mut_from_ref, reason = "that is what the type is for; the caller keeps parts apart")]
    pub(super) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: inside the slice that this borrows for its lifetime; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

impl<T> Disjoint<'_, T> {
    /// One part, to read; panics if it reaches past the end.
    ///
    /// # Safety
    /// No part that overlaps may be alive to be written at the same time.
    pub(super) unsafe fn read(&self, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: inside the slice that this borrows for its lifetime; not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }
}

/// Runs `body(row index, row)` over the rows of `values`, in parallel where there are enough of them.
pub(super) fn for_each_row<T: Send>(
    pool: &Pool,
    values: &mut [T],
    columns: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) {
    if columns == 0 {
        return;
    }
    assert!(values.len().is_multiple_of(columns), "{} values in rows of {columns}", values.len());
    let (rows, grain) = (values.len() / columns, GRAIN_VALUES.div_ceil(columns));
    let values = Disjoint::new(values);
    pool.for_each(rows.div_ceil(grain), |_, grains| {
        for row in grains.start * grain..rows.min(grains.end * grain) {
            // SAFETY: the pool hands out each grain once, and a row is in one grain.
            body(row, unsafe { values.part(row * columns..(row + 1) * columns) });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_visited_once_with_its_index() {
        let pool = Pool::new(3).unwrap();
        for (rows, columns) in [(0, 5), (1, 7), (2, 10_000), (1000, 17), (5, 4096)] {
            let mut values = vec![0_usize; rows * columns];
            for_each_row(&pool, &mut values, columns, |index, row| {
                row.iter_mut().for_each(|value| *value += index + 1);
            });
            let wanted = (0..rows).flat_map(|row| std::iter::repeat_n(row + 1, columns));
            assert!(values.into_iter().eq(wanted), "{rows} x {columns}");
        }
    }
}
