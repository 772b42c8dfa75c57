//! A few threads for many jobs, the longest of those that wait first.
//!
//! Jobs are independent. Somebody who needs the result of a job that has not started runs the job himself. Jobs that
//! have not started when the pool ends are dropped.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

type Work<T> = Box<dyn FnOnce() -> T + Send>;

/// Dropping it waits for running jobs: no thread outlives it.
pub(crate) struct Pool<T> {
    shared: Arc<Shared<T>>,
    /// Threads are started as jobs come, up to this many.
    threads: Vec<JoinHandle<()>>,
    threads_max: usize,
    given: usize,
}

/// A job that was submitted, and whose result has not been taken.
pub(crate) struct Job(usize);

struct Shared<T> {
    state: Mutex<State<T>>,
    /// Signals a new job, or the end.
    come: Condvar,
    /// Signals a finished job.
    done: Condvar,
}

struct State<T> {
    waiting: Vec<Waiting<T>>,
    /// Results that have not been taken; a job that panicked has none.
    done: HashMap<usize, Option<T>>,
    ends: bool,
}

struct Waiting<T> {
    job: usize,
    cost: usize,
    work: Work<T>,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().expect("no job runs while it is held")
    }

    /// The loop of a thread.
    fn work(&self) {
        while let Some(Waiting { job, work, .. }) = self.next() {
            let result = done(work);
            self.lock().done.insert(job, result);
            self.done.notify_all();
        }
    }

    /// The longest job that waits, the first of equals; `None` at the end.
    fn next(&self) -> Option<Waiting<T>> {
        let mut state = self.lock();
        loop {
            if state.ends {
                return None;
            }
            let longest = (0..state.waiting.len()).max_by_key(|&at| {
                let Waiting { job, cost, .. } = state.waiting[at];
                (cost, std::cmp::Reverse(job))
            });
            match longest {
                Some(at) => return Some(state.waiting.swap_remove(at)),
                None => state = self.come.wait(state).expect("no job runs while it is held"),
            }
        }
    }
}

impl<T: Send + 'static> Pool<T> {
    pub(crate) fn new(threads_max: usize) -> Pool<T> {
        let state = State { waiting: Vec::new(), done: HashMap::new(), ends: false };
        let shared = Shared { state: Mutex::new(state), come: Condvar::new(), done: Condvar::new() };
        Pool { shared: Arc::new(shared), threads: Vec::new(), threads_max, given: 0 }
    }

    /// Submits a job that takes about this long, in any unit.
    pub(crate) fn give(&mut self, cost: usize, work: impl FnOnce() -> T + Send + 'static) -> Job {
        let job = self.given;
        self.given += 1;
        self.shared.lock().waiting.push(Waiting { job, cost, work: Box::new(work) });
        self.shared.come.notify_one();
        if self.threads.len() < self.threads_max {
            let shared = Arc::clone(&self.shared);
            self.threads.push(std::thread::spawn(move || shared.work()));
        }
        Job(job)
    }

    /// The result of a job, which is run here if it has not started; `None` where it panicked.
    pub(crate) fn take(&self, job: Job) -> Option<T> {
        let mut state = self.shared.lock();
        if let Some(at) = state.waiting.iter().position(|waiting| waiting.job == job.0) {
            let Waiting { work, .. } = state.waiting.swap_remove(at);
            drop(state);
            return done(work);
        }
        loop {
            match state.done.remove(&job.0) {
                Some(result) => return result,
                None => state = self.shared.done.wait(state).expect("no job runs while it is held"),
            }
        }
    }

    /// The number of finished jobs whose results were not taken, once it is more than this.
    pub(crate) fn done_beyond(&self, known: usize) -> usize {
        let state = self.shared.lock();
        let state = self.shared.done.wait_while(state, |state| state.done.len() <= known);
        state.expect("no job runs while it is held").done.len()
    }

    /// The number of finished jobs whose results were not taken.
    pub(crate) fn done(&self) -> usize {
        self.shared.lock().done.len()
    }
}

impl<T> Drop for Pool<T> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ends = true;
        state.waiting.clear();
        drop(state);
        self.shared.come.notify_all();
        for thread in self.threads.drain(..) {
            // Its result was not needed; a job that panics does not end the thread.
            thread.join().ok();
        }
    }
}

fn done<T>(work: Work<T>) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn the_longest_that_waits_is_next_and_the_first_of_equals() {
        let mut pool = Pool::new(1);
        // Until all have come the thread has this one.
        let (come, all) = channel::<()>();
        let first = pool.give(0, move || all.recv().is_err());
        let (tell, told) = channel();
        let jobs: Vec<Job> = [(1, "b"), (5, "a"), (1, "c"), (0, "d")]
            .map(|(cost, name)| {
                let tell = tell.clone();
                pool.give(cost, move || tell.send(name).is_ok())
            })
            .into();
        drop(come);
        assert_eq!(pool.done_beyond(4), 5);
        assert_eq!(told.try_iter().collect::<Vec<_>>(), ["a", "b", "c", "d"]);
        assert!(jobs.into_iter().chain([first]).all(|job| pool.take(job) == Some(true)));
        assert_eq!(pool.done(), 0);
    }

    #[test]
    fn what_nobody_has_begun_is_done_by_who_needs_it() {
        let mut pool = Pool::new(1);
        let (come, end) = channel::<()>();
        let (begins, begun) = channel();
        let busy = pool.give(0, move || {
            begins.send(()).unwrap();
            end.recv().is_err().to_string()
        });
        begun.recv().unwrap();
        let thread = || format!("{:?}", std::thread::current().id());
        let job = pool.give(1, thread);
        assert_eq!(pool.take(job), Some(thread()));
        drop(come);
        assert_eq!(pool.take(busy), Some("true".to_owned()));
    }

    #[test]
    fn a_job_that_panics_ends_no_thread_and_no_other_job() {
        let mut pool = Pool::new(1);
        let broken = pool.give(9, || panic!("a job that breaks"));
        let (tell, told) = channel();
        let jobs = [1, 2].map(|number: i32| {
            let tell = tell.clone();
            pool.give(0, move || tell.send(number).map_or(0, |()| number))
        });
        // Both were done by the thread, which the first did not end.
        assert_eq!(told.iter().take(2).sum::<i32>(), 3);
        assert_eq!(pool.take(broken), None);
        assert_eq!(jobs.map(|job| pool.take(job)), [Some(1), Some(2)]);
    }

    #[test]
    fn at_its_end_what_is_under_way_is_ended_and_the_rest_is_not_begun() {
        let mut pool = Pool::new(1);
        let (begins, begun) = channel();
        let (come, end) = channel::<()>();
        let (tell, ended) = channel();
        let tells = tell.clone();
        pool.give(0, move || {
            begins.send(()).unwrap();
            end.recv().unwrap_err();
            tells.send("under way").unwrap();
        });
        begun.recv().unwrap();
        pool.give(0, move || tell.send("not begun").unwrap());
        let shared = Arc::clone(&pool.shared);
        let ending = std::thread::spawn(move || drop(pool));
        while !shared.lock().ends {
            std::thread::yield_now();
        }
        drop(come);
        ending.join().unwrap();
        assert_eq!(ended.iter().collect::<Vec<_>>(), ["under way"]);
    }
}
