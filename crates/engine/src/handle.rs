//! The way into the engine: bounded, checked at the door, and drained when nobody holds it any more.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    sync::mpsc,
    time::Duration,
};

use fornax_model::Adapter;

use crate::{
    Clock,
    adapters::{AdapterChange, AdapterRefusal},
    event::Event,
    picture::Picture,
    reply::{Reply, ReplySender, reply},
    request::{Capacity, Refusal, Request},
    stats::Stats,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
        lock,
    },
};

/// How much may wait. An owner that has something waiting may have more only as long as that is no more than what is
/// free: the first that floods the queue takes half of it, the next half of what is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Choices that wait for their first seat.
    pub requests_max: usize,
    /// Their prompt tokens.
    pub tokens_max: usize,
}

/// What callers and the engine's thread share.
pub(crate) struct Door {
    state: Mutex<DoorState>,
    arrived: Condvar,
    capacity: Capacity,
    limits: QueueLimits,
    clock: Clock,
    stuck_after: Duration,
    /// When the step now running began, in microseconds of the clock; 0 between steps.
    step_began_us: AtomicU64,
    stats: Mutex<Stats>,
    /// Somebody has looked since the last picture: another is wanted.
    looked_at: AtomicBool,
    /// Held for as long as it takes to copy a pointer.
    picture: Mutex<Arc<Picture>>,
}

#[derive(Default)]
struct DoorState {
    arrivals: VecDeque<Arrival>,
    /// What is to become of adapters, in order.
    changes: VecDeque<AdapterChange>,
    /// The numbers of adapters that came later and that requests may name.
    adapters: BTreeSet<u32>,
    /// Choices that have no seat yet, here or in the scheduler.
    requests: usize,
    tokens: usize,
    /// The same by owner, of those that have any.
    owners: HashMap<Arc<str>, Waiting>,
    handles: usize,
    /// The engine is gone, or what it drives is.
    closed: Option<Refusal>,
}

/// What waits of one owner.
#[derive(Clone, Copy, Default)]
struct Waiting {
    requests: usize,
    tokens: usize,
}

impl DoorState {
    /// Refuses what would leave less room than its owner has taken.
    fn check_share(&self, request: &Request, limits: QueueLimits, tokens: usize) -> Result<(), Refusal> {
        let Some(own) = request.owner.as_ref().and_then(|owner| self.owners.get(owner)) else {
            return Ok(());
        };
        let free = limits.requests_max - self.requests;
        let tokens_free = limits.tokens_max - self.tokens;
        if own.requests + request.choices as usize > free || own.tokens.saturating_add(tokens) > tokens_free {
            return Err(Refusal::ShareFull { requests: own.requests, tokens: own.tokens });
        }
        Ok(())
    }
}

/// What the engine finds at the door.
pub(crate) struct Arrived {
    pub(crate) requests: VecDeque<Arrival>,
    pub(crate) changes: VecDeque<AdapterChange>,
}

/// A request on its way to the scheduler.
pub(crate) struct Arrival {
    pub(crate) request: Arc<Request>,
    pub(crate) choices: Vec<(ReplySender, Ticket)>,
}

/// A waiting choice's place in the bounded queue. Dropping it makes room.
pub(crate) struct Ticket {
    door: Arc<Door>,
    tokens: usize,
    owner: Option<Arc<str>>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = lock(&self.door.state);
        state.requests -= 1;
        state.tokens -= self.tokens;
        let Some(owner) = &self.owner else { return };
        let Some(own) = state.owners.get_mut(owner) else { return };
        own.requests -= 1;
        own.tokens -= self.tokens;
        if own.requests == 0 {
            state.owners.remove(owner);
        }
    }
}

impl Door {
    pub(crate) fn new(
        capacity: Capacity,
        limits: QueueLimits,
        clock: Clock,
        stuck_after: Duration,
    ) -> Arc<Door> {
        Arc::new(Door {
            state: Mutex::new(DoorState::default()),
            arrived: Condvar::new(),
            capacity,
            limits,
            clock,
            stuck_after,
            step_began_us: AtomicU64::new(0),
            stats: Mutex::new(Stats::default()),
            looked_at: AtomicBool::new(false),
            picture: Mutex::new(Arc::new(Picture::default())),
        })
    }

    /// What has arrived since the last call. Whoever names an adapter that is to be unloaded came before that change.
    pub(crate) fn take(&self) -> Arrived {
        let mut state = lock(&self.state);
        Arrived { requests: std::mem::take(&mut state.arrivals), changes: std::mem::take(&mut state.changes) }
    }

    /// Requests may name the adapter of this number from now on.
    pub(crate) fn adapter_loaded(&self, number: u32) {
        lock(&self.state).adapters.insert(number);
    }

    /// Sleeps until something arrives; `false` when nothing ever will.
    pub(crate) fn wait(&self) -> bool {
        let mut state = lock(&self.state);
        loop {
            if !(state.arrivals.is_empty() && state.changes.is_empty()) {
                return true;
            }
            if state.handles == 0 {
                return false;
            }
            state = self.arrived.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Refuses everybody from now on, for the first reason given. What had arrived and was not taken is returned;
    /// dropping it tells its callers that the engine is gone.
    pub(crate) fn close(&self, reason: Refusal) -> VecDeque<Arrival> {
        let mut state = lock(&self.state);
        state.closed.get_or_insert(reason);
        // Whoever waits for an adapter hears that nobody will tell.
        state.changes.clear();
        std::mem::take(&mut state.arrivals)
    }

    /// Marks the beginning of a step for whoever watches.
    pub(crate) fn step_begins(&self) {
        let now = (self.clock)().as_micros().max(1);
        self.step_began_us.store(u64::try_from(now).unwrap_or(u64::MAX), Ordering::Release);
    }

    /// Marks its end and publishes what changed.
    pub(crate) fn step_ends(&self, stats: Stats) {
        self.step_began_us.store(0, Ordering::Release);
        *lock(&self.stats) = stats;
    }

    /// Whether a picture is wanted that shows what has just been done.
    pub(crate) fn is_looked_at(&self) -> bool {
        self.looked_at.swap(false, Ordering::Relaxed)
    }

    /// Hangs a new picture.
    pub(crate) fn show(&self, picture: Picture) {
        let picture = Arc::new(picture);
        *lock(&self.picture) = picture;
    }
}

/// The `Send + Clone` way in. Dropping the last one drains the engine and stops it.
pub struct Handle {
    door: Arc<Door>,
}

impl Handle {
    pub(crate) fn new(door: Arc<Door>) -> Handle {
        lock(&door.state).handles += 1;
        Handle { door }
    }

    /// Hands a request over, or says at once why not. One reply per choice; dropping a reply cancels its choice.
    pub fn submit(&self, request: Request) -> Result<Vec<Reply>, Refusal> {
        request.check(&self.door.capacity)?;
        let (choices, tokens) = (request.choices as usize, request.prompt.len());
        let limits = self.door.limits;
        if choices > limits.requests_max || tokens.saturating_mul(choices) > limits.tokens_max {
            // Waiting for room would be in vain.
            return Err(Refusal::Parameter {
                name: "n",
                value: format!("{choices}, with a prompt of {tokens} tokens"),
                wanted: "no more answers, and no more prompt tokens for them, than the queue holds when it is empty",
            });
        }
        let mut state = lock(&self.door.state);
        if let Some(reason) = &state.closed {
            return Err(reason.clone());
        }
        if let Some(adapter) = request.adapter.filter(|&adapter| adapter >= self.door.capacity.adapters)
            && !state.adapters.contains(&adapter)
        {
            return Err(Refusal::Parameter {
                name: "adapter",
                value: adapter.to_string(),
                wanted: "an adapter that is loaded",
            });
        }
        let added = tokens.saturating_mul(choices);
        let tokens_after = state.tokens.saturating_add(added);
        if state.requests + choices > limits.requests_max || tokens_after > limits.tokens_max {
            return Err(Refusal::QueueFull {
                requests: state.requests,
                requests_max: limits.requests_max,
                tokens: state.tokens,
                tokens_max: limits.tokens_max,
            });
        }
        state.check_share(&request, limits, added)?;
        state.requests += choices;
        state.tokens = tokens_after;
        let owner = request.owner.clone();
        if let Some(owner) = &owner {
            let own = state.owners.entry(Arc::clone(owner)).or_default();
            own.requests += choices;
            own.tokens += added;
        }
        let (senders, replies): (Vec<_>, Vec<_>) = (0..choices).map(|_| reply()).unzip();
        let choices = senders
            .into_iter()
            .map(|sender| (sender, Ticket { door: Arc::clone(&self.door), tokens, owner: owner.clone() }))
            .collect();
        state.arrivals.push_back(Arrival { request: Arc::new(request), choices });
        drop(state);
        self.door.arrived.notify_one();
        Ok(replies)
    }

    /// Loads an adapter between two steps and returns the number by which requests name it ([`Request::adapter`]). Waits
    /// for the step that runs. What is under way goes on as it is.
    pub fn load_adapter(&self, adapter: Adapter) -> Result<u32, AdapterRefusal> {
        let (told, answer) = mpsc::sync_channel(1);
        let mut state = lock(&self.door.state);
        if let Some(reason) = &state.closed {
            return Err(reason.clone().into());
        }
        state.changes.push_back(AdapterChange::Load { adapter: Box::new(adapter), told });
        drop(state);
        self.door.arrived.notify_one();
        answer.recv().unwrap_or(Err(Refusal::Closed.into()))
    }

    /// Lets no request name this adapter any more; `false` where none is called so. Those that were let in keep it, and
    /// its place is free when the last of them has ended.
    pub fn unload_adapter(&self, number: u32) -> bool {
        let mut state = lock(&self.door.state);
        let was_there = state.adapters.remove(&number);
        if was_there {
            state.changes.push_back(AdapterChange::Unload { number });
            drop(state);
            self.door.arrived.notify_one();
        }
        was_there
    }

    /// Whether the engine is gone: it refuses everybody.
    pub fn is_closed(&self) -> bool {
        lock(&self.door.state).closed.is_some()
    }

    /// What the engine can hold.
    pub fn capacity(&self) -> Capacity {
        self.door.capacity
    }

    /// How the engine stands. Never waits for a step.
    pub fn stats(&self) -> Stats {
        let mut stats = lock(&self.door.stats).clone();
        let began = self.door.step_began_us.load(Ordering::Acquire);
        stats.step_running_for =
            (began > 0).then(|| (self.door.clock)().saturating_sub(Duration::from_micros(began)));
        stats.stuck = stats.step_running_for.is_some_and(|running| running > self.door.stuck_after);
        let state = lock(&self.door.state);
        stats.requests_waiting = state.requests;
        stats.tokens_waiting = state.tokens;
        stats
    }

    /// Every page and every request, after the first step since somebody last asked, or as the engine came to rest.
    /// Never waits for a step.
    pub fn picture(&self) -> Arc<Picture> {
        self.door.looked_at.store(true, Ordering::Relaxed);
        Arc::clone(&lock(&self.door.picture))
    }

    /// Generates to the end and returns the events: for callers that want no stream.
    pub fn complete(&self, request: Request) -> Result<Vec<Vec<Event>>, Refusal> {
        let replies = self.submit(request)?;
        Ok(replies.into_iter().map(|mut reply| std::iter::from_fn(|| reply.recv()).collect()).collect())
    }
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        Handle::new(Arc::clone(&self.door))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        lock(&self.door.state).handles -= 1;
        self.door.arrived.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use fornax_compute::Sampling;

    use super::*;

    #[test]
    fn what_the_queue_could_never_hold_is_not_told_to_come_again() {
        let limits = QueueLimits { requests_max: 4, tokens_max: 20 };
        let door = Door::new(Capacity::SMALL, limits, std::sync::Arc::new(|| Duration::ZERO), Duration::MAX);
        let handle = Handle::new(door);
        let request = |prompt: usize, choices| Request {
            choices,
            ..Request::new(vec![1; prompt], 10, Sampling::greedy())
        };
        for (prompt, choices) in [(1, 5), (21, 1), (7, 3)] {
            let refused = handle.submit(request(prompt, choices)).err();
            assert!(matches!(refused, Some(Refusal::Parameter { name: "n", .. })), "{refused:?}");
        }
        let waiting = handle.submit(request(5, 4)).unwrap();
        assert!(matches!(handle.submit(request(1, 1)).err(), Some(Refusal::QueueFull { .. })));
        drop(waiting);
    }

    #[test]
    fn owners_who_flood_the_queue_leave_room_for_the_next_one() {
        let limits = QueueLimits { requests_max: 12, tokens_max: 1000 };
        let door = Door::new(Capacity::SMALL, limits, std::sync::Arc::new(|| Duration::ZERO), Duration::MAX);
        let handle = Handle::new(Arc::clone(&door));
        let submit = |owner: Option<&str>, prompt: usize| {
            let owner = owner.map(Arc::from);
            handle.submit(Request { owner, ..Request::new(vec![1; prompt], 10, Sampling::greedy()) })
        };
        let flood = |owner| (0..20).map_while(|_| submit(Some(owner), 1).ok()).count();
        assert_eq!(flood("a"), 6);
        assert!(matches!(submit(Some("a"), 1), Err(Refusal::ShareFull { requests: 6, tokens: 6 })));
        assert_eq!((flood("b"), flood("c"), flood("d")), (3, 2, 1), "each half of what is left");
        // Those that come in make room, and whoever says no owner has no part that could be full.
        drop(door.take());
        assert_eq!((0..20).map_while(|_| submit(None, 1).ok()).count(), 12);
        drop(door.take());
        // Few long ones flood it as well.
        let long = (0..20).map_while(|_| submit(Some("a"), 90).ok()).count();
        assert_eq!((long, flood("b")), (6, 3));
    }
}
