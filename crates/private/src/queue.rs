//! The one queue of a server: products wait here for the thread that owns the device.
//!
//! First come, first served; a session has only a few products here at a time, so this is a round of all sessions. What
//! waits for the same matrix is computed as one product of more rows, which reads the weights once. Products that
//! nobody asked for yet are computed when nothing else waits, until somebody does ask.
//!
//! A device that need not stay on one thread is lent out: while nothing waits, whoever wants a product computes it at
//! once. To hand it over and back would take longer than a small product does.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, mpsc};

use fornax_compute::Ring;
use zeroize::Zeroizing;

use crate::patience::look;
use crate::server::Loaded;

/// Rows that are computed together; more wait for the next turn.
const ROWS_MAX: usize = 256;

/// A way into the queue.
#[derive(Clone)]
pub(crate) struct Queue {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// How many wait, to look at without the lock.
    count: AtomicUsize,
    /// The same of whether it is closed.
    closed: AtomicBool,
    lent: OnceLock<Box<Lent>>,
}

/// Computes a product of (matrix, rows, words), or says that the device is busy.
type Lent = dyn Fn(usize, usize, &[u32]) -> Option<Result<Vec<u32>, String>> + Send + Sync;

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    /// What nobody asked for yet.
    guessed: VecDeque<Job>,
    /// The name of the next job.
    next: u64,
    closed: bool,
    /// Products that were computed together with others.
    together: u64,
    products: u64,
}

struct Job {
    name: u64,
    matrix: usize,
    rows: usize,
    /// Masks, for party 1: gone with the product.
    words: Zeroizing<Vec<u32>>,
    done: mpsc::SyncSender<Result<Vec<u32>, String>>,
}

/// A product that was handed in.
pub(crate) enum Pending {
    /// It was computed at once.
    Known(Result<Vec<u32>, String>),
    /// It waits.
    Waiting(Waiting),
}

/// A place in the queue. Dropped, its product is no longer wanted.
pub(crate) struct Waiting {
    name: u64,
    guessed: bool,
    shared: Arc<Shared>,
    done: mpsc::Receiver<Result<Vec<u32>, String>>,
}

impl Pending {
    /// Its words, or why there are none.
    pub(crate) fn wait(self) -> Result<Vec<u32>, String> {
        match self {
            Pending::Known(result) => result,
            Pending::Waiting(waiting) => waiting.wait(),
        }
    }
}

impl Waiting {
    fn wait(mut self) -> Result<Vec<u32>, String> {
        if self.guessed {
            if let Ok(result) = self.done.try_recv() {
                return result;
            }
            self.ask();
        }
        if let Some(result) = look(|| self.done.try_recv().ok()) {
            return result;
        }
        self.done.recv().unwrap_or_else(|_| Err("the server is stopping".to_owned()))
    }

    /// Whoever guessed this was right: from now on it waits as others do.
    fn ask(&mut self) {
        self.guessed = false;
        let mut state = self.shared.lock();
        let job = state.take_guess(self.name);
        state.waiting.extend(job);
        self.shared.told(state);
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.guessed {
            let mut state = self.shared.lock();
            drop(state.take_guess(self.name));
            self.shared.count.store(state.count(), Ordering::Release);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is more to do.
    fn told(&self, state: MutexGuard<'_, State>) {
        self.count.store(state.count(), Ordering::Release);
        drop(state);
        self.changed.notify_one();
    }
}

impl State {
    fn count(&self) -> usize {
        self.waiting.len() + self.guessed.len()
    }

    fn take_guess(&mut self, name: u64) -> Option<Job> {
        let place = self.guessed.iter().position(|job| job.name == name)?;
        self.guessed.remove(place)
    }
}

impl Default for Queue {
    fn default() -> Queue {
        Queue {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                changed: Condvar::new(),
                count: AtomicUsize::new(0),
                closed: AtomicBool::new(false),
                lent: OnceLock::new(),
            }),
        }
    }
}

impl Queue {
    /// Hands in a product of `words`, which are so many rows that fit the matrix.
    pub(crate) fn submit(&self, matrix: usize, rows: usize, words: Vec<u32>) -> Pending {
        let words = Zeroizing::new(words);
        // What came before goes first.
        if self.shared.count.load(Ordering::Acquire) == 0
            && !self.shared.closed.load(Ordering::Acquire)
            && let Some(lent) = self.shared.lent.get()
            && let Some(result) = lent(matrix, rows, &words)
        {
            self.shared.lock().products += 1;
            return Pending::Known(result);
        }
        self.hand_in(matrix, rows, words, false)
    }

    /// The same for a product that nobody asked for yet.
    pub(crate) fn guess(&self, matrix: usize, rows: usize, words: Vec<u32>) -> Pending {
        self.hand_in(matrix, rows, Zeroizing::new(words), true)
    }

    fn hand_in(&self, matrix: usize, rows: usize, words: Zeroizing<Vec<u32>>, guessed: bool) -> Pending {
        let (done, awaited) = mpsc::sync_channel(1);
        let mut state = self.shared.lock();
        let name = state.next;
        state.next += 1;
        // After closing nobody takes it: the sender is dropped, which tells whoever waits.
        if !state.closed {
            let job = Job { name, matrix, rows, words, done };
            let queue = if guessed { &mut state.guessed } else { &mut state.waiting };
            queue.push_back(job);
        }
        self.shared.told(state);
        Pending::Waiting(Waiting { name, guessed, shared: Arc::clone(&self.shared), done: awaited })
    }

    pub(crate) fn close(&self) {
        let mut state = self.shared.lock();
        state.closed = true;
        self.shared.closed.store(true, Ordering::Release);
        state.waiting.clear();
        state.guessed.clear();
        drop(state);
        self.shared.changed.notify_all();
    }

    pub(crate) fn counts(&self) -> (u64, u64) {
        let state = self.shared.lock();
        (state.together, state.products)
    }

    /// Multiplies until the queue is closed, on this thread alone.
    pub(crate) fn work<R: Ring>(&self, loaded: &Loaded<R>) {
        self.serve(|jobs| multiply(loaded, jobs));
    }

    /// The same, while others may use the device when it is idle.
    pub(crate) fn work_and_lend<R: Ring<Matrix: Send> + Send + 'static>(&self, loaded: Loaded<R>) {
        let loaded = Arc::new(Mutex::new(loaded));
        let device = Arc::clone(&loaded);
        // After a panic its numbers are still exact: nothing of one product is kept for the next.
        let lend = move |matrix, rows, words: &[u32]| {
            let device = match device.try_lock() {
                Ok(device) => device,
                Err(TryLockError::Poisoned(device)) => device.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            };
            Some(product(&device, matrix, rows, words))
        };
        // A queue has one device.
        drop(self.shared.lent.set(Box::new(lend)));
        self.serve(|jobs| multiply(&loaded.lock().unwrap_or_else(PoisonError::into_inner), jobs));
    }

    fn serve(&self, multiply: impl Fn(&[Job]) -> Vec<Result<Vec<u32>, String>>) {
        while let Some(jobs) = self.next() {
            let results = multiply(&jobs);
            for (job, result) in jobs.into_iter().zip(results) {
                // A session that is gone wants nothing.
                drop(job.done.send(result));
            }
        }
    }

    /// The oldest product that was asked for, and those that wait for the same matrix; otherwise the oldest guess.
    fn next(&self) -> Option<Vec<Job>> {
        let nothing_yet = || self.shared.count.load(Ordering::Acquire) == 0;
        look(|| (!nothing_yet()).then_some(()));
        let mut state = self.shared.lock();
        let first = loop {
            if state.closed {
                return None;
            }
            let oldest = state.waiting.pop_front();
            match oldest.or_else(|| state.guessed.pop_front()) {
                Some(job) => break job,
                None => state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        let (matrix, mut rows) = (first.matrix, first.rows);
        let mut jobs = vec![first];
        let mut index = 0;
        while let Some(job) = state.waiting.get(index) {
            let more = rows + job.rows;
            if job.matrix == matrix && more <= ROWS_MAX {
                rows = more;
                jobs.extend(state.waiting.remove(index));
            } else {
                index += 1;
            }
        }
        self.shared.count.store(state.count(), Ordering::Release);
        state.products += jobs.len() as u64;
        if jobs.len() > 1 {
            state.together += jobs.len() as u64;
        }
        Some(jobs)
    }
}

fn product<R: Ring>(
    loaded: &Loaded<R>,
    matrix: usize,
    rows: usize,
    words: &[u32],
) -> Result<Vec<u32>, String> {
    let mut out = vec![0; rows * loaded.shapes.rows(matrix)];
    let multiplied = loaded.ring.multiply(&loaded.matrices[matrix], words, rows, &mut out);
    // Whose fault it is stays here: a message could say something about a payload.
    multiplied.map(|()| out).map_err(|_| "the product could not be computed".to_owned())
}

/// One product for all of them, cut apart again.
fn multiply<R: Ring>(loaded: &Loaded<R>, jobs: &[Job]) -> Vec<Result<Vec<u32>, String>> {
    let matrix = jobs[0].matrix;
    if let [job] = jobs {
        return vec![product(loaded, matrix, job.rows, &job.words)];
    }
    let rows: usize = jobs.iter().map(|job| job.rows).sum();
    let words: Zeroizing<Vec<u32>> =
        Zeroizing::new(jobs.iter().flat_map(|job| job.words.iter().copied()).collect());
    let out = match product(loaded, matrix, rows, &words) {
        Ok(out) => out,
        Err(reason) => return jobs.iter().map(|_| Err(reason.clone())).collect(),
    };
    let mut rest = out.as_slice();
    let cut = |job: &Job| {
        let (own, after) = rest.split_at(job.rows * loaded.shapes.rows(matrix));
        rest = after;
        Ok(own.to_vec())
    };
    jobs.iter().map(cut).collect()
}

#[cfg(test)]
mod tests {
    use fornax_compute::cpu::{CpuRing, CpuRingOptions};

    use super::*;
    use crate::frame::{Shapes, Weights};

    fn loaded() -> Loaded<CpuRing> {
        let ring = CpuRing::new(&CpuRingOptions { threads: 1, ..CpuRingOptions::default() }).unwrap();
        let matrices = vec![ring.matrix(1, 2, &[1, 10]).unwrap(), ring.matrix(2, 1, &[3, -1]).unwrap()];
        let weights = Weights { sha256: String::new(), quant: String::new() };
        Loaded { ring, matrices, shapes: Shapes(vec![(1, 2), (2, 1)]), weights }
    }

    #[test]
    fn products_of_one_matrix_that_wait_together_are_computed_together_and_told_apart() {
        let loaded = loaded();
        let queue = Queue::default();
        let first = queue.submit(0, 1, vec![1, 2]);
        let other = queue.submit(1, 1, vec![5]);
        let second = queue.submit(0, 1, vec![3, 4]);
        let taken: Vec<Vec<u64>> = (0..2)
            .map(|_| {
                let jobs = queue.next().unwrap();
                let names = jobs.iter().map(|job| job.name).collect();
                let results = multiply(&loaded, &jobs);
                jobs.into_iter().zip(results).for_each(|(job, result)| job.done.send(result).unwrap());
                names
            })
            .collect();
        assert_eq!(taken, [vec![0, 2], vec![1]], "the oldest first, with what waits for its matrix");
        assert_eq!(first.wait(), Ok(vec![21]));
        assert_eq!(second.wait(), Ok(vec![43]));
        assert_eq!(other.wait(), Ok(vec![15, u32::MAX - 4]));
        assert_eq!(queue.counts(), (2, 3));
    }

    #[test]
    fn a_closed_queue_tells_whoever_waits() {
        let queue = Queue::default();
        let before = [queue.submit(0, 1, vec![1, 2]), queue.guess(0, 1, vec![1, 2])];
        queue.close();
        let after = [queue.submit(0, 1, vec![1, 2]), queue.guess(0, 1, vec![1, 2])];
        for pending in before.into_iter().chain(after) {
            assert_eq!(pending.wait(), Err("the server is stopping".to_owned()));
        }
        assert!(queue.next().is_none());
    }

    /// Names in the order in which they are taken until nothing waits.
    fn taken(queue: &Queue) -> Vec<u64> {
        let mut names = Vec::new();
        while queue.shared.count.load(Ordering::Acquire) > 0 {
            names.extend(queue.next().unwrap().iter().map(|job| job.name));
        }
        names
    }

    #[test]
    fn guesses_wait_until_nothing_else_does() {
        let queue = Queue::default();
        let guesses = [queue.guess(0, 1, vec![1]), queue.guess(1, 1, vec![2])];
        let asked = queue.submit(2, 1, vec![3]);
        assert_eq!(taken(&queue), [2, 0, 1]);
        drop((guesses, asked));
    }

    #[test]
    fn a_guess_that_is_asked_for_waits_as_others_do_and_one_that_is_dropped_is_not_computed() {
        let queue = Queue::default();
        let mut guesses: Vec<Pending> = (0..3).map(|matrix| queue.guess(matrix, 1, vec![1])).collect();
        let asked = queue.submit(3, 1, vec![3]);
        let Pending::Waiting(guess) = &mut guesses[1] else { panic!("a guess waits") };
        guess.ask();
        drop(guesses.remove(0));
        assert_eq!(taken(&queue), [3, 1, 2]);
        drop((guesses, asked));
    }

    #[test]
    fn a_device_that_is_lent_computes_at_once_while_nothing_waits() {
        let queue = Queue::default();
        let worker = queue.clone();
        let worker = std::thread::spawn(move || worker.work_and_lend(loaded()));
        // The first products may come before the device is there.
        while queue.shared.lent.get().is_none() {
            std::thread::yield_now();
        }
        let known = |pending: &Pending| matches!(pending, Pending::Known(_));
        let first = queue.submit(0, 1, vec![1, 2]);
        assert!(known(&first));
        assert_eq!(first.wait(), Ok(vec![21]));
        // Guesses are the worker's, and what they say is what the products are.
        let guesses: Vec<Pending> = (0..200).map(|word| queue.guess(1, 1, vec![word])).collect();
        let asked: Vec<Pending> = (0..50).map(|word| queue.submit(1, 1, vec![word])).collect();
        assert!(guesses.iter().all(|guess| !known(guess)));
        for (word, pending) in (0_u32..).zip(guesses).chain((0..).zip(asked)) {
            assert_eq!(pending.wait(), Ok(vec![3 * word, 0_u32.wrapping_sub(word)]));
        }
        assert_eq!(queue.counts().1, 251);
        queue.close();
        assert_eq!(queue.submit(0, 1, vec![1, 2]).wait(), Err("the server is stopping".to_owned()));
        worker.join().unwrap();
    }
}
