//! What a client's products cost: rounds, bytes each way, and where the time went. Read from any thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Counters that a client writes and anybody reads.
#[derive(Debug, Default)]
pub struct Stats {
    rounds: AtomicU64,
    sessions: AtomicU64,
    sent: [AtomicU64; 2],
    received: [AtomicU64; 2],
    waited_ns: [AtomicU64; 2],
    masks_ns: AtomicU64,
    checks_ns: AtomicU64,
}

/// What [`Stats`] said at one moment, by party where it is two numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Products, each one round trip to party 0.
    pub rounds: u64,
    /// Sessions opened.
    pub sessions: u64,
    /// Bytes to each party.
    pub sent: [u64; 2],
    /// Bytes from each party.
    pub received: [u64; 2],
    /// Seconds spent waiting for each party.
    pub waited: [f64; 2],
    /// Seconds spent drawing masks and blinding.
    pub masks: f64,
    /// Seconds spent checking answers.
    pub checks: f64,
}

impl Stats {
    /// The numbers now.
    pub fn snapshot(&self) -> Snapshot {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let both = |counters: &[AtomicU64; 2]| [get(&counters[0]), get(&counters[1])];
        let seconds = |counter: &AtomicU64| Duration::from_nanos(get(counter)).as_secs_f64();
        Snapshot {
            rounds: get(&self.rounds),
            sessions: get(&self.sessions),
            sent: both(&self.sent),
            received: both(&self.received),
            waited: [seconds(&self.waited_ns[0]), seconds(&self.waited_ns[1])],
            masks: seconds(&self.masks_ns),
            checks: seconds(&self.checks_ns),
        }
    }

    pub(crate) fn round(&self) {
        self.rounds.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn session(&self) {
        self.sessions.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn sent(&self, party: usize, bytes: u64) {
        self.sent[party].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn received(&self, party: usize, bytes: u64) {
        self.received[party].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn waited<T>(&self, party: usize, wait: impl FnOnce() -> T) -> T {
        timed(&self.waited_ns[party], wait)
    }

    pub(crate) fn masked<T>(&self, work: impl FnOnce() -> T) -> T {
        timed(&self.masks_ns, work)
    }

    pub(crate) fn checked<T>(&self, work: impl FnOnce() -> T) -> T {
        timed(&self.checks_ns, work)
    }
}

impl Snapshot {
    /// What came since an earlier moment.
    pub fn since(&self, earlier: &Snapshot) -> Snapshot {
        let both = |now: [u64; 2], then: [u64; 2]| [now[0] - then[0], now[1] - then[1]];
        Snapshot {
            rounds: self.rounds - earlier.rounds,
            sessions: self.sessions - earlier.sessions,
            sent: both(self.sent, earlier.sent),
            received: both(self.received, earlier.received),
            waited: [self.waited[0] - earlier.waited[0], self.waited[1] - earlier.waited[1]],
            masks: self.masks - earlier.masks,
            checks: self.checks - earlier.checks,
        }
    }
}

fn timed<T>(counter: &AtomicU64, work: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = work();
    counter.fetch_add(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    result
}
