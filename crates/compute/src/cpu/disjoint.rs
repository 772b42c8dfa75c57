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

/// Runs `body(row index, columns, their values)` over stretches of the rows of `values`, in parallel where there are
/// enough of them: for what looks at single values.
pub(super) fn for_each_stretch<T: Send>(
    pool: &Pool,
    values: &mut [T],
    columns: usize,
    body: impl Fn(usize, Range<usize>, &mut [T]) + Sync,
) {
    /// A stretch takes about as long as telling somebody of it.
    const STRETCH: usize = 2048;
    if columns <= STRETCH || values.len() < GRAIN_VALUES {
        return for_each_row(pool, values, columns, |row, values| body(row, 0..columns, values));
    }
    assert!(values.len().is_multiple_of(columns), "{} values in rows of {columns}", values.len());
    let (rows, stretches) = (values.len() / columns, columns.div_ceil(STRETCH));
    let values = Disjoint::new(values);
    pool.for_each(rows * stretches, |_, items| {
        for item in items {
            let (row, start) = (item / stretches, item % stretches * STRETCH);
            let these = start..columns.min(start + STRETCH);
            // SAFETY: the pool hands out each stretch once.
            let part = unsafe { values.part(row * columns + these.start..row * columns + these.end) };
            body(row, these, part);
        }
    });
}

/// Runs `body(row index, row)` over the rows, every row by itself: for rows that take microseconds, however short they are.
pub(super) fn for_each_slow_row<T: Send>(
    pool: &Pool,
    values: &mut [T],
    columns: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) {
    assert!(values.len().is_multiple_of(columns.max(1)), "{} values in rows of {columns}", values.len());
    let rows = values.len().checked_div(columns).unwrap_or(0);
    let values = Disjoint::new(values);
    pool.for_each(rows, |_, mine| {
        for row in mine {
            // SAFETY: the pool hands out each row once.
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
            for_each_slow_row(&pool, &mut values, columns, |index, row| {
                row.iter_mut().for_each(|value| *value += index + 1);
            });
            for_each_stretch(&pool, &mut values, columns, |index, these, part| {
                assert_eq!(these.len(), part.len());
                part.iter_mut().zip(these).for_each(|(value, column)| *value += (index + 1) * (column + 1));
            });
            let value = |row: usize, column: usize| (row + 1) * (column + 3);
            let wanted = (0..rows).flat_map(|row| (0..columns).map(move |column| value(row, column)));
            assert!(values.into_iter().eq(wanted), "{rows} x {columns}");
        }
    }
}
