//! Threads for parallel regions of a few to tens of microseconds.
//!
//! The caller works too. Between regions a worker spins briefly, because the next region of a running step is
//! microseconds away, then lets others go first, and then parks: an idle backend burns no core. Work is handed over as
//! one borrowed closure; nothing is allocated per region.
//!
//! Every thread has a share of the items, the same one whenever the counts are the same, so that it reads the weights
//! that it packed. Who is through with its own takes from the shares of others. A region is over when the caller finds
//! nothing left and those inside have come out. It never waits for a worker that has not begun: on a machine that is
//! busy with other things such a worker may be without a core for milliseconds, a hundred regions long, and the others
//! do its share.
//!
//! With many threads a region costs what its cache lines cost that several threads write: each transfer takes some 100
//! ns on a processor with many cores, and transfers of one line wait for each other. So all are told by one line that
//! the caller alone writes; a thread counts what it took of its share, and says that it is out, in a line of its own,
//! which others write only when they take from it.
//!
//! Own code because neither alternative fits: rayon is a work-stealing queue of tasks, made for longer ones;
//! `fork_union` is made for such regions, but it is a C++ library whose workers spin until they are put to sleep by
//! hand, and a panic in a region is not allowed.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
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

/// What a region runs on every thread that comes, by thread index.
type Task<'a> = dyn Fn(usize) + Sync + 'a;

pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// A region is running. The `Cell` also makes the pool `!Sync`, so a region's closure cannot capture its own pool.
    busy: Cell<bool>,
    /// How many threads regions are shared by.
    used: Cell<usize>,
    /// Names the region in the counters of shares; never 0.
    tag: Cell<u32>,
    /// Where its threads run, if that is not everywhere. The caller's is bound when it starts its first region.
    node: Option<Processors>,
    /// What regions took, where somebody wants to know.
    times: Cell<Option<Times>>,
}

/// What regions took the caller.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    /// How many there were that more than one thread might enter.
    pub(super) regions: u64,
    /// From a region's beginning until the caller found nothing left to do.
    pub(super) working: Duration,
    /// From then on until the others were out.
    pub(super) waiting: Duration,
}

thread_local! {
    /// Whether a pool has bound this thread.
    static BOUND: Cell<bool> = const { Cell::new(false) };
}

/// Two cache lines, which processors fetch together.
#[repr(align(128))]
struct Alone<T>(T);

/// The line that only the caller writes.
struct Signal {
    /// Odd while a region is open, even when none is. Every change is an increment.
    state: AtomicU64,
    /// Threads below this index may enter.
    width: AtomicUsize,
    /// The running region's closure, its lifetime erased. Written only while no region is open and nobody inside.
    task: UnsafeCell<Option<&'static Task<'static>>>,
}

/// The line of one thread.
struct Seat {
    /// A state that it entered, or that one plus one when it is out again.
    at: AtomicU64,
    /// What of its share is taken: above a region's tag, below how many items. Another tag means none.
    taken: AtomicU64,
}

/// The state, seats' `at` and `parked` are sequentially consistent where a thread says one thing and then looks at
/// another: a worker enters and then looks whether the region is still open, while the caller closes it and then looks
/// who is inside; a thread says that it will park and then looks once more, while the other side changes the state and
/// then looks who parks. Neither may be seen out of order.
struct Shared {
    signal: Alone<Signal>,
    /// By thread; index 0 is the caller.
    seats: Vec<Alone<Seat>>,
    stop: AtomicBool,
    /// Which waiting threads must be unparked; index 0 is the caller.
    parked: Vec<AtomicBool>,
    /// The caller of the running region.
    caller: Mutex<Option<Thread>>,
    /// The first panic of a worker in this region.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: all but the task are atomics and locks. The task is written by the caller while no region is open and nobody
// inside, and read by workers that are inside.
unsafe impl Sync for Shared {}

impl Pool {
    /// A pool of `threads` threads, the caller's included.
    pub(super) fn new(threads: usize) -> io::Result<Pool> {
        assert!(threads > 0, "a pool has at least its caller");
        let signal =
            Signal { state: AtomicU64::new(0), width: AtomicUsize::new(0), task: UnsafeCell::new(None) };
        let seat = |_| Alone(Seat { at: AtomicU64::new(0), taken: AtomicU64::new(0) });
        let shared = Arc::new(Shared {
            signal: Alone(signal),
            seats: (0..threads).map(seat).collect(),
            stop: AtomicBool::new(false),
            parked: (0..threads).map(|_| AtomicBool::new(false)).collect(),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
        });
        let mut pool = Pool {
            shared,
            workers: Vec::with_capacity(threads - 1),
            busy: Cell::new(false),
            used: Cell::new(threads),
            tag: Cell::new(0),
            node: cores::node_for(threads),
            times: Cell::new(None),
        };
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

    /// Threads that there are, the caller's included.
    pub(super) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// How many of them share regions.
    pub(super) fn used(&self) -> usize {
        self.used.get()
    }

    /// Shares regions by the first `threads` threads only, from the next one on; the others sleep.
    pub(super) fn set_used(&self, threads: usize) {
        self.used.set(threads.clamp(1, self.threads()));
    }

    /// Begins to take times, from zero.
    pub(super) fn start_times(&self) {
        self.times.set(Some(Times::default()));
    }

    /// What regions took so far; `None` where nobody asked.
    pub(super) fn times(&self) -> Option<Times> {
        self.times.get()
    }

    /// Runs `body(thread, range)` over ranges that make up `0..items`; a thread may get several, or none.
    pub(super) fn for_each(&self, items: usize, body: impl Fn(usize, Range<usize>) + Sync) {
        let width = self.used().min(items);
        if width <= 1 {
            if items > 0 {
                body(0, 0..items);
            }
            return;
        }
        // Contiguous shares, the first ones larger by one item.
        let first = |owner: usize| items / width * owner + owner.min(items % width);
        let taking = Taking { shared: &self.shared, tag: self.next_tag(), width };
        // An eighth of what is left: who is slow keeps little that others could do when they are through. Taking costs
        // nothing where nobody else takes.
        let some = |left: usize| left.div_ceil(8);
        self.run(width, &|thread| {
            taking.all(
                thread,
                |owner| first(owner + 1) - first(owner),
                some,
                |owner, range| {
                    body(thread, first(owner) + range.start..first(owner) + range.end);
                },
            );
        });
    }

    /// Runs `body(thread, item)` for every item, the first ones first and one at a time: for items of unequal cost.
    pub(super) fn for_each_claimed(&self, items: usize, body: impl Fn(usize, usize) + Sync) {
        let width = self.used().min(items);
        if width <= 1 {
            return (0..items).for_each(|item| body(0, item));
        }
        // Shares alternate, item by item: the first ones of all shares are the first ones of all.
        let taking = Taking { shared: &self.shared, tag: self.next_tag(), width };
        self.run(width, &|thread| {
            taking.all(
                thread,
                |owner| (items - owner).div_ceil(width),
                |_| 1,
                |owner, range| {
                    range.for_each(|at| body(thread, at * width + owner));
                },
            );
        });
    }

    /// A tag that no counter has. After the last one all counters forget theirs and it begins anew.
    fn next_tag(&self) -> u32 {
        let next = self.tag.get().checked_add(1).unwrap_or_else(|| {
            // No region is open and nobody inside.
            self.shared.seats.iter().for_each(|seat| seat.0.taken.store(0, SeqCst));
            1
        });
        self.tag.set(next);
        next
    }

    /// Runs `task` on the caller's thread and on every other one below `width` that comes before the caller is through;
    /// waits for those. A panic on any thread is raised here, after all are done.
    fn run(&self, width: usize, task: &Task<'_>) {
        assert!(!self.busy.replace(true), "a region cannot start inside another one");
        if let Some(node) = &self.node
            && !BOUND.replace(true)
        {
            cores::bind(node);
        }
        let times = self.times.get();
        let began = times.map(|_| Instant::now());
        let shared = &*self.shared;
        let signal = &shared.signal.0;
        // SAFETY: only the lifetime changes. Workers use the task between entering an open region and leaving it, and
        // this function does not return or unwind before the region is closed and nobody is inside.
        let erased = unsafe { std::mem::transmute::<&Task<'_>, &'static Task<'static>>(task) };
        // SAFETY: no region is open and nobody is inside, so nobody reads it.
        unsafe { *signal.task.get() = Some(erased) };
        signal.width.store(width, Release);
        let open = signal.state.load(Relaxed) + 1;
        signal.state.store(open, SeqCst);
        self.wake(width);
        let own = catch_unwind(AssertUnwindSafe(|| task(0)));
        let through = began.map(|_| Instant::now());
        signal.state.store(open + 1, SeqCst);
        let inside = |seat: &Alone<Seat>| seat.0.at.load(SeqCst) == open;
        let others = &shared.seats[1..width];
        let is_over = || !others.iter().any(inside);
        if !is_over() {
            // Only who parks must be known.
            shared.wait(0, || *lock(&shared.caller) = Some(thread::current()), is_over);
        }
        // SAFETY: as above.
        unsafe { *signal.task.get() = None };
        self.busy.set(false);
        if let (Some(times), Some(began), Some(through)) = (times, began, through) {
            self.times.set(Some(Times {
                regions: times.regions + 1,
                working: times.working + (through - began),
                waiting: times.waiting + through.elapsed(),
            }));
        }
        let theirs = lock(&shared.panic).take();
        if let Some(panic) = own.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    fn wake(&self, width: usize) {
        for (index, worker) in self.workers.iter().enumerate().take(width - 1) {
            if self.shared.parked[index + 1].load(SeqCst) {
                worker.thread().unpark();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.wake(self.threads());
        for worker in self.workers.drain(..) {
            // A worker catches its tasks' panics, so it can only have ended well.
            worker.join().expect("workers do not panic");
        }
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let (signal, seat) = (&self.signal.0, &self.seats[index].0);
        let mut seen = 0;
        loop {
            let new = || {
                let state = signal.state.load(SeqCst);
                let mine = state % 2 == 1 && state != seen && index < signal.width.load(Acquire);
                mine.then_some(state)
            };
            self.wait(index, || (), || self.stop.load(SeqCst) || new().is_some());
            if self.stop.load(SeqCst) {
                return;
            }
            // Closed meanwhile: look again.
            let Some(state) = new() else { continue };
            seat.at.store(state, SeqCst);
            if signal.state.load(SeqCst) == state {
                seen = state;
                // SAFETY: it is inside an open region: the caller waits for it before it writes the task again.
                let task = unsafe { *signal.task.get() }.expect("a region has a task");
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(index))) {
                    lock(&self.panic).get_or_insert(panic);
                }
            }
            seat.at.store(state + 1, SeqCst);
            if self.parked[0].load(SeqCst) {
                // The caller may have seen it and be gone; then this wakes it once for nothing.
                if let Some(caller) = &*lock(&self.caller) {
                    caller.unpark();
                }
            }
        }
    }

    /// Spins, then looks between what others do, then parks, until `ready`. Whoever makes it ready unparks thread
    /// `index` if it says that it parks; `before` that it does something else.
    fn wait(&self, index: usize, before: impl Fn(), ready: impl Fn() -> bool) {
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
        before();
        self.parked[index].store(true, SeqCst);
        while !ready() {
            thread::park();
        }
        self.parked[index].store(false, SeqCst);
    }
}

/// Who takes what of a region.
struct Taking<'a> {
    shared: &'a Shared,
    tag: u32,
    /// Threads that have a share.
    width: usize,
}

impl Taking<'_> {
    /// All that this thread gets: of its own share, then of the others'. `len` is how many items a thread's share has,
    /// `some` how many are taken at once of those left; `body` gets the share's owner and a range of it.
    fn all(
        &self,
        thread: usize,
        len: impl Fn(usize) -> usize,
        some: impl Fn(usize) -> usize,
        mut body: impl FnMut(usize, Range<usize>),
    ) {
        for owner in (thread..self.width).chain(0..thread) {
            let taken = &self.shared.seats[owner].0.taken;
            while let Some(range) = self.take(taken, len(owner), &some) {
                body(owner, range);
            }
        }
    }

    fn take(&self, taken: &AtomicU64, len: usize, some: impl Fn(usize) -> usize) -> Option<Range<usize>> {
        const COUNT: u64 = u32::MAX as u64;
        assert!(len as u64 <= COUNT, "{len} items of one thread");
        let mut seen = taken.load(Relaxed);
        loop {
            let start = if seen >> 32 == u64::from(self.tag) { (seen & COUNT) as usize } else { 0 };
            if start >= len {
                return None;
            }
            let end = start + some(len - start);
            let next = u64::from(self.tag) << 32 | end as u64;
            match taken.compare_exchange_weak(seen, next, Relaxed, Relaxed) {
                Ok(_) => return Some(start..end),
                Err(now) => seen = now,
            }
        }
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
    fn a_thread_takes_its_own_share_first_and_then_what_the_others_left() {
        let pool = Pool::new(4).unwrap();
        let taking = Taking { shared: &pool.shared, tag: pool.next_tag(), width: 4 };
        let take = |thread: usize, owners: &[usize]| {
            let mut taken = Vec::new();
            taking.all(thread, |_| 5, |left| left.div_ceil(2), |owner, range| taken.push((owner, range)));
            let wanted = owners.iter().flat_map(|&owner| [(owner, 0..3), (owner, 3..4), (owner, 4..5)]);
            assert!(taken.into_iter().eq(wanted), "{thread}");
        };
        // Somebody has the whole share of the first already.
        while taking.take(&pool.shared.seats[0].0.taken, 5, |_| 2).is_some() {}
        take(2, &[2, 3, 1]);
        take(0, &[]);
    }

    #[test]
    fn fewer_threads_are_used_where_fewer_are_asked_for() {
        let pool = Pool::new(4).unwrap();
        for (asked, used) in [(2, 2), (1, 1), (0, 1), (9, 4), (3, 3)] {
            pool.set_used(asked);
            assert_eq!(pool.used(), used);
            for _ in 0..50 {
                let runs = AtomicUsize::new(0);
                pool.for_each(64, |thread, range| {
                    assert!(thread < used);
                    count(&runs, range.len());
                });
                pool.for_each_claimed(64, |thread, _| {
                    assert!(thread < used);
                    count(&runs, 1);
                });
                assert_eq!(runs.into_inner(), 128);
            }
        }
    }

    #[test]
    fn tags_begin_anew_and_no_counter_keeps_an_old_one() {
        let pool = Pool::new(3).unwrap();
        let run = |items| {
            let sum = AtomicUsize::new(0);
            pool.for_each(items, |_, range| count(&sum, range.len()));
            assert_eq!(sum.into_inner(), items);
        };
        // All three have taken their shares under tag 1, two under the later ones.
        run(300);
        (0..3).for_each(|_| run(2));
        pool.tag.set(u32::MAX - 2);
        (0..6).for_each(|_| run(2));
        assert!(pool.tag.get() < 10);
        pool.tag.set(u32::MAX);
        run(300);
        assert_eq!(pool.tag.get(), 1);
    }

    #[test]
    fn times_are_taken_where_they_are_asked_for() {
        let pool = Pool::new(2).unwrap();
        pool.for_each(8, |_, _| ());
        assert!(pool.times().is_none());
        pool.start_times();
        (0..5).for_each(|_| pool.for_each(8, |_, _| ()));
        // One item is no region.
        pool.for_each(1, |_, _| ());
        let times = pool.times().unwrap();
        assert_eq!(times.regions, 5);
        assert!(times.working > Duration::ZERO);
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
            assert_eq!(pool.shared.signal.0.state.load(SeqCst), 2 * round);
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
                pool.run(3, &|thread| {
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
            used: Cell::new(2),
            tag: Cell::new(0),
            node: None,
            times: Cell::new(None),
        };
        drop(pool);
        let ran = AtomicUsize::new(0);
        left.run(2, &|_| count(&ran, 1));
        assert_eq!(ran.into_inner(), 1);
        // The shares of those that do not come are done by the caller.
        let done = AtomicUsize::new(0);
        left.for_each(9, |_, range| count(&done, range.len()));
        left.for_each_claimed(9, |_, _| count(&done, 1));
        assert_eq!(done.into_inner(), 18);
    }

    #[test]
    fn a_region_inside_a_region_is_refused() {
        thread_local!(static POOL: Rc<Pool> = Rc::new(Pool::new(2).unwrap()));
        let pool = POOL.with(Rc::clone);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(2, &|thread| {
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
