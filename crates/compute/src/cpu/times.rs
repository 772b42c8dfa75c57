//! Where a step's time goes: by operation, how long it took, and how much of that the caller waited for other threads.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::pool::{Pool, Times as Regions};

/// What one kind of operation took since timing began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationTime {
    /// How often it ran.
    pub calls: u64,
    /// All of it.
    pub all: Duration,
    /// Regions that several threads shared.
    pub regions: u64,
    /// Of `all`, what the caller computed in regions.
    pub shared: Duration,
    /// Of `all`, what the caller waited at the ends of regions.
    pub waited: Duration,
}

/// The times of a backend; nothing until somebody asks for them.
#[derive(Default)]
pub(super) struct Times {
    operations: RefCell<Option<BTreeMap<&'static str, OperationTime>>>,
}

/// An operation that runs; dropping it ends it.
pub(super) struct Running<'a> {
    timing: Option<Timing<'a>>,
}

struct Timing<'a> {
    times: &'a Times,
    pool: &'a Pool,
    name: &'static str,
    began: Instant,
    before: Regions,
}

impl Times {
    /// Forgets what was taken and begins.
    pub(super) fn start(&self, pool: &Pool) {
        pool.start_times();
        *self.operations.borrow_mut() = Some(BTreeMap::new());
    }

    /// What was taken so far, by operation.
    pub(super) fn taken(&self) -> Vec<(&'static str, OperationTime)> {
        self.operations.borrow().iter().flatten().map(|(name, time)| (*name, *time)).collect()
    }

    /// An operation begins.
    pub(super) fn run<'a>(&'a self, pool: &'a Pool, name: &'static str) -> Running<'a> {
        let timing =
            pool.times().map(|before| Timing { times: self, pool, name, began: Instant::now(), before });
        Running { timing }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let Some(Timing { times, pool, name, began, before }) = &self.timing else { return };
        let (all, after) = (began.elapsed(), pool.times().unwrap_or_default());
        if let Some(operations) = &mut *times.operations.borrow_mut() {
            let time = operations.entry(name).or_default();
            time.calls += 1;
            time.all += all;
            time.regions += after.regions - before.regions;
            time.shared += after.working - before.working;
            time.waited += after.waiting - before.waiting;
        }
    }
}
