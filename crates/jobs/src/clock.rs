//! Time that never runs backwards and never jumps.
//!
//! The time of day is looked at once, when the store is opened; from then on only time that has passed counts. So
//! setting the machine's clock moves no deadline, and what was stored by a process whose clock was ahead is still not
//! in the future.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Instant,
};

/// Microseconds since 1970, strictly increasing within a process.
#[derive(Clone)]
pub(crate) struct Clock {
    shared: Arc<Shared>,
}

struct Shared {
    base_us: i64,
    began: Instant,
    last_us: AtomicI64,
}

impl Clock {
    /// Starts at the later of the time of day and what was stored last.
    pub(crate) fn starting(wall_us: i64, stored_us: i64) -> Clock {
        let base_us = wall_us.max(stored_us);
        Clock { shared: Arc::new(Shared { base_us, began: Instant::now(), last_us: AtomicI64::new(0) }) }
    }

    /// The next moment: no two are equal, so that what came first sorts first.
    pub(crate) fn now_us(&self) -> i64 {
        let passed = i64::try_from(self.shared.began.elapsed().as_micros()).unwrap_or(i64::MAX);
        let now = self.shared.base_us.saturating_add(passed);
        let last = self
            .shared
            .last_us
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |last| Some(now.max(last.saturating_add(1))));
        let (Ok(last) | Err(last)) = last;
        now.max(last.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_only_grow_whatever_was_stored() {
        let check = |wall, stored, least| {
            let clock = Clock::starting(wall, stored);
            let moments: Vec<i64> = (0..1000).map(|_| clock.now_us()).collect();
            assert!(moments[0] >= least && moments.is_sorted_by(|a, b| a < b), "{wall} {stored}");
        };
        check(1_000, 5_000_000, 5_000_000);
        check(5_000_000, 1_000, 5_000_000);
        check(-1, 0, 0);
    }
}
