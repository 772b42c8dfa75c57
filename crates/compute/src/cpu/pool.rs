//! Threads for parallel regions of tens of microseconds.
//!
//! The caller works too. Between regions a worker spins briefly, because the next region of a running step is
//! microseconds away, then lets others go first, and then parks: an idle backend burns no core. Work is handed over as
//! one borrowed closure; nothing is allocated per region.
//!
//! Threads claim their items, and a region is over when the caller finds none left and those inside have come out. It
//! never waits for a worker that has not begun: on a machine that is busy with other things such a worker may be
//! without a core for milliseconds, a hundred regions long, and the others do its share.
//!
//! Own code because neither alternative fits: rayon is a work-stealing queue of tasks, made for longer ones;
//! `fork_union` is made for such regions, but it is a C++ library whose workers spin until they are put to sleep by
//! hand, and a panic in a region is not allowed.

use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};
use std::{hint, io};

use super::cores::{self, Processors};

/// How often a waiting thread looks before it lets others go first: some 20 to 50 us, for a pause takes 20 to 45 ns.
const SPINS: usize = 1000;
/// How long it goes on looking before it parks. To wake it takes longer than a region, above all on a virtual machine,
/// and between two steps of a model, or two products for a client of private inference, lie tens of microseconds.
const PATIENCE: Duration = Duration::from_micros(300);

/// In the state: workers may enter the region. Above it the region's number, below it how many are inside.
const OPEN: u64 = 1 << 31;
const INSIDE: u64 = OPEN - 1;

/// What a region runs on every thread that comes, by thread index.
type Task<'a> = dyn Fn(usize) + Sync + 'a;

pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// A region is running. The `Cell` also makes the pool `!Sync`, so a region's closure cannot capture its own pool.
    busy: Cell<bool>,
    /// Where its threads run, if that is not everywhere. The caller's is bound when it starts its first region.
    node: Option<Processors>,
}

thread_local! {
    /// Whether a pool has bound this thread.
    static BOUND: Cell<bool> = const { Cell::new(false) };
}

/// All loads and stores of these are sequentially consistent: a thread says that it will park and then looks once
/// more, the other side changes the state and then looks who parks; neither may be seen out of order.
struct Shared {
    /// Number of the region, whether workers may enter it, and how many are inside. An open region with another number
    /// is the signal to start.
    state: AtomicU64,
    /// The running region's closure, its lifetime erased. Written only while no region is open and nobody inside.
    task: Mutex<Option<&'static Task<'static>>>,
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
            state: AtomicU64::new(0),
            task: Mutex::new(None),
            stop: AtomicBool::new(false),
            parked: (0..threads).map(|_| AtomicBool::new(false)).collect(),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
        });
        let node = cores::node_for(threads);
        let mut pool =
            Pool { shared, workers: Vec::with_capacity(threads - 1), busy: Cell::new(false), node };
        for index in 1..threads {
            let (shared, node) = (Arc::clone(&pool.shared), pool.node.clone());
            let builder = thread::Builder::new().name(format!("cpu-{index}"));
            pool.workers.push(builder.spawn(move || {
                if let Some(node) = node {
                    cores::bind(&node);
                }
                shared.work(index);
            })?);
        }
        Ok(pool)
    }

    /// Threads of a region, the caller's included.
    pub(super) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `body(thread, range)` over ranges that make up `0..items`; a thread may get several, or none.
    pub(super) fn for_each(&self, items: usize, body: impl Fn(usize, Range<usize>) + Sync) {
        let threads = self.threads();
        if threads == 1 || items <= 1 {
            if items > 0 {
                body(0, 0..items);
            }
            return;
        }
        let next = AtomicUsize::new(0);
        self.run(&|thread| {
            while let Some(range) = claim(&next, items, threads) {
                body(thread, range);
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

    /// Runs `task` on the caller's thread and on every other one that comes before the caller is through; waits for
    /// those. A panic on any thread is raised here, after all are done.
    fn run(&self, task: &Task<'_>) {
        assert!(!self.busy.replace(true), "a region cannot start inside another one");
        if let Some(node) = &self.node
            && !BOUND.replace(true)
        {
            cores::bind(node);
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Workers use the task between entering an open region and leaving it, and
        // this function does not return or unwind before the region is closed and nobody is inside.
        let erased = unsafe { std::mem::transmute::<&Task<'_>, &'static Task<'static>>(task) };
        *lock(&shared.task) = Some(erased);
        *lock(&shared.caller) = Some(thread::current());
        let region = (shared.state.load(SeqCst) >> 32).wrapping_add(1);
        shared.state.store(region << 32 | OPEN, SeqCst);
        self.wake();
        let own = catch_unwind(AssertUnwindSafe(|| task(0)));
        shared.state.fetch_and(!OPEN, SeqCst);
        shared.wait(0, || shared.state.load(SeqCst) & INSIDE == 0);
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
            let new = |state: u64| state & OPEN != 0 && state >> 32 != seen;
            self.wait(index, || self.stop.load(SeqCst) || new(self.state.load(SeqCst)));
            if self.stop.load(SeqCst) {
                return;
            }
            let state = self.state.load(SeqCst);
            // Closed meanwhile, or somebody else came in or went out: look again.
            if !new(state) || self.state.compare_exchange(state, state + 1, SeqCst, SeqCst).is_err() {
                continue;
            }
            seen = state >> 32;
            let task = lock(&self.task).expect("a region has a task");
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(index))) {
                lock(&self.panic).get_or_insert(panic);
            }
            // The last one out of a closed region.
            if self.state.fetch_sub(1, SeqCst) & (OPEN | INSIDE) == 1 && self.parked[0].load(SeqCst) {
                // The caller may have seen zero and be gone; then this wakes it once for nothing.
                if let Some(caller) = &*lock(&self.caller) {
                    caller.unpark();
                }
            }
        }
    }

    /// Spins, then looks between what others do, then parks, until `ready`. Whoever makes it ready unparks thread
    /// `index` if it says that it parks.
    fn wait(&self, index: usize, ready: impl Fn() -> bool) {
        for _ in 0..SPINS {
            if ready() {
                return;
            }
            hint::spin_loop();
        }
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            if ready() {
                return;
            }
            thread::yield_now();
        }
        self.parked[index].store(true, SeqCst);
        while !ready() {
            thread::park();
        }
        self.parked[index].store(false, SeqCst);
    }
}

/// The next range of those that are left: half of an even share, so that all threads end at about the same time,
/// whenever they began.
fn claim(next: &AtomicUsize, items: usize, threads: usize) -> Option<Range<usize>> {
    let mut start = next.load(SeqCst);
    while start < items {
        let end = start + ((items - start) / (2 * threads)).max(1);
        match next.compare_exchange_weak(start, end, SeqCst, SeqCst) {
            Ok(_) => return Some(start..end),
            Err(now) => start = now,
        }
    }
    None
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
            assert_eq!(pool.shared.state.load(SeqCst), round << 32);
        }
    }

    #[test]
    fn a_panic_on_any_thread_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::new(3).unwrap();
        // Nobody is through before all three are inside, so each of them is guilty once.
        let meet = |inside: &AtomicUsize| {
            count(inside, 1);
            while inside.load(SeqCst) < 3 {
                thread::yield_now();
            }
        };
        for guilty in 0..3 {
            let inside = AtomicUsize::new(0);
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|thread| {
                    meet(&inside);
                    assert!(thread != guilty, "thread {thread} fails");
                });
            }));
            let message = caught.unwrap_err();
            assert_eq!(message.downcast_ref::<String>(), Some(&format!("thread {guilty} fails")));
            let done = AtomicUsize::new(0);
            pool.for_each(3, |_, range| count(&done, range.len()));
            assert_eq!(done.into_inner(), 3);
        }
    }

    #[test]
    fn a_worker_that_does_not_come_is_not_waited_for() {
        let pool = Pool::new(2).unwrap();
        // Its workers have ended, and the pool does not know.
        let left = Pool {
            shared: Arc::clone(&pool.shared),
            workers: Vec::new(),
            busy: Cell::new(false),
            node: None,
        };
        drop(pool);
        let ran = AtomicUsize::new(0);
        left.run(&|_| count(&ran, 1));
        assert_eq!(ran.into_inner(), 1);
    }

    #[test]
    fn a_region_inside_a_region_is_refused() {
        thread_local!(static POOL: Rc<Pool> = Rc::new(Pool::new(2).unwrap()));
        let pool = POOL.with(Rc::clone);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|thread| {
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
