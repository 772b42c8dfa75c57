//! Threads for parallel regions of tens of microseconds.
//!
//! The caller works too. Between regions a worker spins briefly, because the next region of a running step is
//! microseconds away, and then parks: an idle backend burns no core. Work is handed over as one borrowed closure;
//! nothing is allocated per region.
//!
//! Own code because neither alternative fits: rayon is a work-stealing queue of tasks, while a region here is one static
//! split that every thread knows beforehand; `fork_union` is made for such regions, but it is a C++ library whose
//! workers spin until they are put to sleep by hand, and a panic in a region is not allowed.

use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::{hint, io};

/// How often a waiting thread looks before it parks: some 20 to 50 us, for a pause takes 20 to 45 ns.
const SPINS: usize = 1000;

/// What a region runs on every thread, by thread index.
type Task<'a> = dyn Fn(usize) + Sync + 'a;

pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// A region is running. The `Cell` also makes the pool `!Sync`, so a region's closure cannot capture its own pool.
    busy: Cell<bool>,
}

/// All loads and stores of these are sequentially consistent: a thread says that it will park and then looks once
/// more, the other side changes the state and then looks who parks; neither may be seen out of order.
struct Shared {
    /// Counts regions; a change is the signal to start. Only the caller's thread writes it.
    region: AtomicUsize,
    /// The running region's closure, its lifetime erased. Written only while no region runs.
    task: Mutex<Option<&'static Task<'static>>>,
    /// Workers still inside the region.
    running: AtomicUsize,
    stop: AtomicBool,
    /// Which waiting threads must be unparked; index 0 is the caller.
    parked: Vec<AtomicBool>,
    /// The caller of the running region.
    caller: Mutex<Option<Thread>>,
    /// The first panic of a worker in this region.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Pool {
    /// A pool of `threads` threads, the caller's included.
    pub(super) fn new(threads: usize) -> io::Result<Pool> {
        assert!(threads > 0, "a pool has at least its caller");
        let shared = Arc::new(Shared {
            region: AtomicUsize::new(0),
            task: Mutex::new(None),
            running: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            parked: (0..threads).map(|_| AtomicBool::new(false)).collect(),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
        });
        let mut pool = Pool { shared, workers: Vec::with_capacity(threads - 1), busy: Cell::new(false) };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = thread::Builder::new().name(format!("cpu-{index}"));
            pool.workers.push(builder.spawn(move || shared.work(index))?);
        }
        Ok(pool)
    }

    /// Threads of a region, the caller's included.
    pub(super) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Splits `0..items` evenly, in order, and runs `body(thread, range)` on every thread that has any.
    pub(super) fn for_each(&self, items: usize, body: impl Fn(usize, Range<usize>) + Sync) {
        let threads = self.threads().min(items);
        if threads <= 1 {
            if items > 0 {
                body(0, 0..items);
            }
            return;
        }
        self.run(&|thread| {
            if thread < threads {
                body(thread, items * thread / threads..items * (thread + 1) / threads);
            }
        });
    }

    /// Runs `body(thread, item)` for every item, each claimed by whichever thread is free: for items of unequal cost.
    pub(super) fn for_each_claimed(&self, items: usize, body: impl Fn(usize, usize) + Sync) {
        if self.threads() == 1 || items <= 1 {
            return (0..items).for_each(|item| body(0, item));
        }
        let next = AtomicUsize::new(0);
        self.run(&|thread| {
            loop {
                let item = next.fetch_add(1, SeqCst);
                if item >= items {
                    return;
                }
                body(thread, item);
            }
        });
    }

    /// Runs `task` once on every thread and waits for all. A panic on any thread is raised here, after all are done.
    fn run(&self, task: &Task<'_>) {
        assert!(!self.busy.replace(true), "a region cannot start inside another one");
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers use the task between the change of `region` and their decrement
        // of `running`, and this function does not return or unwind before `running` is zero.
        let erased = unsafe { std::mem::transmute::<&Task<'_>, &'static Task<'static>>(task) };
        *lock(&shared.task) = Some(erased);
        *lock(&shared.caller) = Some(thread::current());
        shared.running.store(self.workers.len(), SeqCst);
        shared.region.fetch_add(1, SeqCst);
        self.wake();
        let own = catch_unwind(AssertUnwindSafe(|| task(0)));
        shared.wait(0, || shared.running.load(SeqCst) == 0);
        *lock(&shared.task) = None;
        self.busy.set(false);
        let theirs = lock(&shared.panic).take();
        if let Some(panic) = own.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    fn wake(&self) {
        for (index, worker) in self.workers.iter().enumerate() {
            if self.shared.parked[index + 1].load(SeqCst) {
                worker.thread().unpark();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.region.fetch_add(1, SeqCst);
        self.wake();
        for worker in self.workers.drain(..) {
            // A worker catches its tasks' panics, so it can only have ended well.
            worker.join().expect("workers do not panic");
        }
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut seen = 0;
        loop {
            self.wait(index, || self.region.load(SeqCst) != seen);
            seen = self.region.load(SeqCst);
            if self.stop.load(SeqCst) {
                return;
            }
            let task = lock(&self.task).expect("a region has a task");
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(index))) {
                lock(&self.panic).get_or_insert(panic);
            }
            if self.running.fetch_sub(1, SeqCst) == 1 && self.parked[0].load(SeqCst) {
                // The caller may have seen zero and be gone; then this wakes it once for nothing.
                if let Some(caller) = &*lock(&self.caller) {
                    caller.unpark();
                }
            }
        }
    }

    /// Spins, then parks, until `ready`. Whoever makes it ready unparks thread `index` if it says that it parks.
    fn wait(&self, index: usize, ready: impl Fn() -> bool) {
        for _ in 0..SPINS {
            if ready() {
                return;
            }
            hint::spin_loop();
        }
        self.parked[index].store(true, SeqCst);
        while !ready() {
            thread::park();
        }
        self.parked[index].store(false, SeqCst);
    }
}

/// No code panics while it holds one of these locks, so a poisoned one still holds whole data.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    fn count(counter: &AtomicUsize, more: usize) {
        counter.fetch_add(more, SeqCst);
    }

    #[test]
    fn every_item_is_run_once_whatever_the_counts() {
        for threads in 1..=4 {
            let pool = Pool::new(threads).unwrap();
            for items in [0, 1, 2, 3, 5, 64, 1000] {
                let runs: Vec<_> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(items, |_, range| range.for_each(|item| count(&runs[item], 1)));
                pool.for_each_claimed(items, |thread, item| {
                    assert!(thread < threads);
                    count(&runs[item], 1);
                });
                assert!(runs.iter().all(|runs| runs.load(SeqCst) == 2), "{threads} threads, {items} items");
            }
        }
    }

    #[test]
    fn many_short_regions_in_a_row_lose_no_wake_up() {
        let pool = Pool::new(3).unwrap();
        let sum = AtomicUsize::new(0);
        for _ in 0..3_000 {
            pool.for_each(3, |_, range| count(&sum, range.len()));
        }
        assert_eq!(sum.into_inner(), 9_000);
    }

    #[test]
    fn idle_workers_park_and_work_again() {
        let pool = Pool::new(3).unwrap();
        for round in 1..=3 {
            let sum = AtomicUsize::new(0);
            pool.for_each(300, |_, range| count(&sum, range.len()));
            assert_eq!(sum.into_inner(), 300);
            // Ends only when both workers have given up their core; a pool that spins for ever hangs here.
            while !pool.shared.parked[1..].iter().all(|parked| parked.load(SeqCst)) {
                thread::yield_now();
            }
            assert_eq!(pool.shared.region.load(SeqCst), round);
        }
    }

    #[test]
    fn a_panic_on_any_thread_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3).unwrap();
        for guilty in 0..3 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each(3, |thread, _| assert!(thread != guilty, "thread {thread} fails"));
            }));
            let message = caught.unwrap_err();
            assert_eq!(message.downcast_ref::<String>(), Some(&format!("thread {guilty} fails")));
            let done = AtomicUsize::new(0);
            pool.for_each(3, |_, _| count(&done, 1));
            assert_eq!(done.into_inner(), 3);
        }
    }

    #[test]
    fn a_region_inside_a_region_is_refused() {
        thread_local!(static POOL: Rc<Pool> = Rc::new(Pool::new(2).unwrap()));
        let pool = POOL.with(Rc::clone);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.for_each(2, |thread, _| {
                if thread == 0 {
                    POOL.with(|pool| pool.for_each(2, |_, _| ()));
                }
            });
        }));
        assert!(caught.is_err());
        pool.for_each(2, |_, _| ());
    }

    #[test]
    fn dropping_the_pool_joins_its_threads() {
        let pool = Pool::new(4).unwrap();
        pool.for_each(4, |_, _| ());
        let shared = Arc::downgrade(&pool.shared);
        drop(pool);
        // Each worker held a count until it returned.
        assert!(shared.upgrade().is_none());
    }
}
