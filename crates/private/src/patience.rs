//! Looking for a while before sleeping. To wake a thread takes tens of microseconds, as long as a product, and there
//! are a hundred rounds in a token, each of which wakes four.

use std::hint;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

/// How long is looked.
const PATIENCE: Duration = Duration::from_micros(300);
/// Cores on which both parties and a client can look for each other and compute as well. On fewer, whoever looks lets
/// others go first.
const MANY_CORES: usize = 8;

/// What `found` finds within a while, asked again and again; `None` means that it is time to sleep.
pub(crate) fn look<T>(mut found: impl FnMut() -> Option<T>) -> Option<T> {
    static CORES: OnceLock<usize> = OnceLock::new();
    let cores = *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from));
    let began = Instant::now();
    loop {
        let result = found();
        if result.is_some() || began.elapsed() >= PATIENCE {
            return result;
        }
        if cores < MANY_CORES { thread::yield_now() } else { hint::spin_loop() }
    }
}
