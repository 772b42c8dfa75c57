//! The primitives of the hand-over between callers and the engine's thread. Under `--cfg shuttle` they are the model
//! checker's, so that what it explores is the code that ships.

#[cfg(not(shuttle))]
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};

/// Locks, also after a panic elsewhere: every critical section here leaves its data whole at each point it could
/// panic, and a request must still get its error.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
