//! The one queue of a server: products wait here for the thread that owns the device.
//!
//! First come, first served; a session has only a few products here at a time, so this is a round of all sessions. What
//! waits for the same matrix is computed as one product of more rows, which reads the weights once.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use fornax_compute::Ring;

use crate::channel::patience;
use crate::frame::{Draw, Shapes};

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
    /// How long threads look before they sleep.
    patience: Duration,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    closed: bool,
    /// Products that were computed together with others.
    together: u64,
    products: u64,
}

struct Job {
    draw: Draw,
    words: Vec<u32>,
    done: mpsc::SyncSender<Result<Vec<u32>, String>>,
}

/// A product that is awaited.
pub(crate) struct Pending {
    pub(crate) draw: Draw,
    done: mpsc::Receiver<Result<Vec<u32>, String>>,
    patience: Duration,
}

impl Pending {
    /// Its words, or why there are none.
    pub(crate) fn wait(self) -> Result<Vec<u32>, String> {
        let began = Instant::now();
        while began.elapsed() < self.patience {
            if let Ok(result) = self.done.try_recv() {
                return result;
            }
            std::hint::spin_loop();
        }
        self.done.recv().unwrap_or_else(|_| Err("the server is stopping".to_owned()))
    }
}

impl Default for Queue {
    fn default() -> Queue {
        Queue {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                changed: Condvar::new(),
                count: AtomicUsize::new(0),
                patience: patience(),
            }),
        }
    }
}

impl Queue {
    /// Hands in a product of words that fit its matrix.
    pub(crate) fn submit(&self, draw: Draw, words: Vec<u32>) -> Pending {
        let (done, awaited) = mpsc::sync_channel(1);
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        // After closing nobody takes it: the sender is dropped, which tells whoever waits.
        if !state.closed {
            state.waiting.push_back(Job { draw, words, done });
            self.shared.count.store(state.waiting.len(), Ordering::Release);
        }
        drop(state);
        self.shared.changed.notify_one();
        Pending { draw, done: awaited, patience: self.shared.patience }
    }

    pub(crate) fn close(&self) {
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.closed = true;
        state.waiting.clear();
        drop(state);
        self.shared.changed.notify_all();
    }

    pub(crate) fn counts(&self) -> (u64, u64) {
        let state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.together, state.products)
    }

    /// Multiplies until the queue is closed.
    pub(crate) fn work<R: Ring>(&self, ring: &R, matrices: &[R::Matrix], shapes: &Shapes) {
        while let Some(jobs) = self.next() {
            let results = multiply(ring, matrices, shapes, &jobs);
            for (job, result) in jobs.into_iter().zip(results) {
                // A session that is gone wants nothing.
                drop(job.done.send(result));
            }
        }
    }

    /// The oldest product, and those that wait for the same matrix.
    fn next(&self) -> Option<Vec<Job>> {
        let began = Instant::now();
        while self.shared.count.load(Ordering::Acquire) == 0 && began.elapsed() < self.shared.patience {
            std::hint::spin_loop();
        }
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        let first = loop {
            if state.closed {
                return None;
            }
            match state.waiting.pop_front() {
                Some(job) => break job,
                None => state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        let (matrix, mut rows) = (first.draw.matrix, first.draw.rows as usize);
        let mut jobs = vec![first];
        let mut index = 0;
        while let Some(job) = state.waiting.get(index) {
            let more = rows + job.draw.rows as usize;
            if job.draw.matrix == matrix && more <= ROWS_MAX {
                rows = more;
                jobs.extend(state.waiting.remove(index));
            } else {
                index += 1;
            }
        }
        self.shared.count.store(state.waiting.len(), Ordering::Release);
        state.products += jobs.len() as u64;
        if jobs.len() > 1 {
            state.together += jobs.len() as u64;
        }
        Some(jobs)
    }
}

/// One product for all of them, cut apart again.
fn multiply<R: Ring>(
    ring: &R,
    matrices: &[R::Matrix],
    shapes: &Shapes,
    jobs: &[Job],
) -> Vec<Result<Vec<u32>, String>> {
    let matrix = jobs[0].draw.matrix as usize;
    let rows: usize = jobs.iter().map(|job| job.draw.rows as usize).sum();
    let mut out = vec![0; rows * shapes.rows(matrix)];
    let result = if let [job] = jobs {
        ring.multiply(&matrices[matrix], &job.words, rows, &mut out)
    } else {
        let words: Vec<u32> = jobs.iter().flat_map(|job| job.words.iter().copied()).collect();
        ring.multiply(&matrices[matrix], &words, rows, &mut out)
    };
    // Whose fault it is stays here: a message could say something about a payload.
    if result.is_err() {
        return jobs.iter().map(|_| Err("the product could not be computed".to_owned())).collect();
    }
    if jobs.len() == 1 {
        return vec![Ok(out)];
    }
    let mut rest = out.as_slice();
    let cut = |job: &Job| {
        let (own, after) = rest.split_at(job.draw.answer_words(shapes));
        rest = after;
        Ok(own.to_vec())
    };
    jobs.iter().map(cut).collect()
}

#[cfg(test)]
mod tests {
    use fornax_compute::cpu::{CpuRing, CpuRingOptions};

    use super::*;

    fn job(queue: &Queue, matrix: u32, counter: u64, words: &[u32]) -> Pending {
        queue.submit(Draw { counter, matrix, rows: 1 }, words.to_vec())
    }

    #[test]
    fn products_of_one_matrix_that_wait_together_are_computed_together_and_told_apart() {
        let ring = CpuRing::new(&CpuRingOptions { threads: 1, ..CpuRingOptions::default() }).unwrap();
        let matrices = [ring.matrix(1, 2, &[1, 10]).unwrap(), ring.matrix(2, 1, &[3, -1]).unwrap()];
        let shapes = Shapes(vec![(1, 2), (2, 1)]);
        let queue = Queue::default();
        let first = job(&queue, 0, 1, &[1, 2]);
        let other = job(&queue, 1, 2, &[5]);
        let second = job(&queue, 0, 3, &[3, 4]);
        let taken: Vec<Vec<u64>> = (0..2)
            .map(|_| {
                let jobs = queue.next().unwrap();
                let counters = jobs.iter().map(|job| job.draw.counter).collect();
                let results = multiply(&ring, &matrices, &shapes, &jobs);
                jobs.into_iter().zip(results).for_each(|(job, result)| job.done.send(result).unwrap());
                counters
            })
            .collect();
        assert_eq!(taken, [vec![1, 3], vec![2]], "the oldest first, with what waits for its matrix");
        assert_eq!(first.wait(), Ok(vec![21]));
        assert_eq!(second.wait(), Ok(vec![43]));
        assert_eq!(other.wait(), Ok(vec![15, u32::MAX - 4]));
        assert_eq!(queue.counts(), (2, 3));
    }

    #[test]
    fn a_closed_queue_tells_whoever_waits() {
        let queue = Queue::default();
        let before = job(&queue, 0, 1, &[1, 2]);
        queue.close();
        let after = job(&queue, 0, 2, &[1, 2]);
        for pending in [before, after] {
            assert_eq!(pending.wait(), Err("the server is stopping".to_owned()));
        }
        assert!(queue.next().is_none());
    }
}
