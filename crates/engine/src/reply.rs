//! The way out of the engine: events of one choice, in order, ended by exactly one last event.

use std::{
    collections::VecDeque,
    future::poll_fn,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use crate::{
    event::Event,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
        lock,
    },
};

/// Makes the two ends of a reply.
pub(crate) fn reply() -> (ReplySender, Reply) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State { events: VecDeque::new(), ended: false, waiting: false, waker: None }),
        arrived: Condvar::new(),
        abandoned: AtomicBool::new(false),
    });
    (ReplySender { shared: Arc::clone(&shared) }, Reply { shared })
}

struct Shared {
    state: Mutex<State>,
    arrived: Condvar,
    /// The receiver is gone; read by the engine every step, so outside the lock.
    abandoned: AtomicBool,
}

struct State {
    /// Bounded by what the request may produce: a slow reader never blocks the engine.
    events: VecDeque<Event>,
    /// The last event was sent.
    ended: bool,
    /// The receiver sleeps. Waking it is a system call, so it is made only then.
    waiting: bool,
    waker: Option<Waker>,
}

/// The engine's end.
pub(crate) struct ReplySender {
    shared: Arc<Shared>,
}

impl ReplySender {
    /// Hands over an event. After the last one nothing may follow.
    #[inline] // so that the event is made where it is kept: it is what a row of a step costs most
    pub(crate) fn send(&self, event: Event) {
        let mut state = lock(&self.shared.state);
        assert!(!state.ended, "exactly one last event");
        state.ended = event.is_last();
        state.events.push_back(event);
        let waker = state.waker.take();
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        if waiting {
            self.shared.arrived.notify_one();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether nobody will read what is sent: the request is cancelled.
    pub(crate) fn abandoned(&self) -> bool {
        self.shared.abandoned.load(Ordering::Acquire)
    }
}

impl Drop for ReplySender {
    fn drop(&mut self) {
        // An engine that dies without a word must not leave its callers waiting.
        if !lock(&self.shared.state).ended {
            self.send(Event::gone());
        }
    }
}

/// Nothing came in time; more will.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut;

/// The caller's end. Dropping it cancels the request.
pub struct Reply {
    shared: Arc<Shared>,
}

impl Reply {
    /// Waits for the next event; `None` after the last one.
    pub fn recv(&mut self) -> Option<Event> {
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(event) = state.events.pop_front() {
                return Some(event);
            }
            if state.ended {
                return None;
            }
            state.waiting = true;
            state = self.shared.arrived.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// [`Reply::recv`] for at most `patience`: for callers that must look up now and then.
    pub fn recv_timeout(&mut self, patience: Duration) -> Result<Option<Event>, TimedOut> {
        let until = Instant::now().checked_add(patience);
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(event) = state.events.pop_front() {
                return Ok(Some(event));
            }
            if state.ended {
                return Ok(None);
            }
            // No end to the patience where the clock has none.
            let left = until.map_or(patience, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(TimedOut);
            }
            state.waiting = true;
            let waited = self.shared.arrived.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// The next event if it is there already.
    pub fn try_recv(&mut self) -> Option<Event> {
        lock(&self.shared.state).events.pop_front()
    }

    /// [`Reply::recv`] for asynchronous callers. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// The step of [`Reply::next`].
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let mut state = lock(&self.shared.state);
        match state.events.pop_front() {
            Some(event) => Poll::Ready(Some(event)),
            None if state.ended => Poll::Ready(None),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.shared.abandoned.store(true, Ordering::Release);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// Both ways to sleep have to say that they do, or nobody wakes them before their time.
    #[test]
    fn a_sleeping_receiver_is_woken() {
        type Receive = fn(&mut Reply) -> Option<Event>;
        let ways: [Receive; 2] = [Reply::recv, |reply| reply.recv_timeout(Duration::MAX).expect("patient")];
        for receive in ways {
            let (sender, mut receiver) = reply();
            let sleeper = std::thread::spawn(move || receive(&mut receiver));
            let began = Instant::now();
            while !lock(&sender.shared.state).waiting {
                assert!(began.elapsed() < Duration::from_secs(60), "it never said that it sleeps");
                std::thread::yield_now();
            }
            sender.send(Event::gone());
            assert_eq!(sleeper.join().expect("no panic"), Some(Event::gone()));
        }
    }
}
