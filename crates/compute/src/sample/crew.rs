//! Who looks at the stretches of a vocabulary: one thread, or several at the same time.

/// Computes values that do not depend on each other.
pub(crate) trait Crew {
    /// Sets every value by its place, in any order.
    fn set<T: Send>(&self, values: &mut [T], value: impl Fn(usize) -> T + Sync);
}

/// One thread.
pub(crate) struct Alone;

impl Crew for Alone {
    fn set<T: Send>(&self, values: &mut [T], value: impl Fn(usize) -> T + Sync) {
        values.iter_mut().enumerate().for_each(|(place, to)| *to = value(place));
    }
}
