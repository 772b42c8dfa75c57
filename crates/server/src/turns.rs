//! Turns to prepare requests, and how much of the machine each gets.
//!
//! Preparing takes as long as a caller makes it. There are turns for owners who prepare little and as many for those who
//! prepare much, so whoever asks something small waits for others of that kind alone. What takes long moves from the one
//! kind to the other while it goes on. Threads of those who prepare much also give way to the others and to the engine's.
//! Requests without an owner are one owner's, who has nobody to spare.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    front::keys::Tenant,
    shares::{Share, Shares},
};

/// How far back turns are counted: what was held so long ago counts a third of what is held now.
const MEMORY: f64 = 10.0;

/// Whoever holds less than this much of one turn on average prepares little, however many others prepare.
const LITTLE: f64 = 0.1;

/// Averages below are nobody's who prepares.
const NOTHING: f64 = 0.01;

/// A turn that goes on for so long is no short one. Far more than an ordinary request takes.
const SHORT: Duration = Duration::from_millis(100);

/// Owners remembered before those are forgotten who have prepared nothing lately.
const OWNERS_KEPT: usize = 256;

/// How much nicer threads are than the engine's: for short work, for what has become long, and for owners who prepare much.
/// With 5 a thread has a third of the weight of the engine's, with 10 a tenth.
const NICE_SHORT: i32 = 0;
const NICE_LONG: i32 = 5;
const NICE_MUCH: i32 = 10;

/// The turns, and who has had them.
pub(crate) struct Turns {
    /// Of each kind.
    count: usize,
    little: Arc<Shares>,
    much: Arc<Shares>,
    /// Held for as long as it takes to count.
    uses: Mutex<Uses>,
}

/// Somebody's turn; dropping it ends it.
pub(crate) struct Turn {
    turns: Arc<Turns>,
    tenant: Tenant,
    began: Instant,
    much: bool,
    /// Whether it has been moved, if it can be.
    is_long: AtomicBool,
    share: Mutex<Share>,
}

impl Turns {
    /// So many of each kind.
    pub(crate) fn new(count: usize) -> Arc<Turns> {
        let uses = Mutex::default();
        Arc::new(Turns { count, little: Shares::new(count), much: Shares::new(count), uses })
    }

    /// Waits for a turn. Whoever stops waiting is forgotten.
    pub(crate) async fn take(self: &Arc<Turns>, tenant: &Tenant) -> Turn {
        let mut much = self.prepares_much(tenant);
        let mut share = self.kind(much).take(tenant, 1).await;
        // While it waited, its owner's others may have become much.
        if !much && self.prepares_much(tenant) {
            much = true;
            drop(share);
            share = self.much.take(tenant, 1).await;
        }
        let began = Instant::now();
        if let Some(owner) = tenant {
            self.uses().begin(owner, began);
        }
        Turn {
            turns: Arc::clone(self),
            tenant: tenant.clone(),
            began,
            much,
            is_long: AtomicBool::new(much || tenant.is_none()),
            share: Mutex::new(share),
        }
    }

    fn kind(&self, much: bool) -> &Arc<Shares> {
        if much { &self.much } else { &self.little }
    }

    fn prepares_much(&self, tenant: &Tenant) -> bool {
        tenant.as_ref().is_some_and(|owner| self.uses().is_much(owner, self.count, Instant::now()))
    }

    fn uses(&self) -> std::sync::MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// How nice its thread begins.
    pub(crate) fn nice(&self) -> i32 {
        match (&self.tenant, self.much) {
            (None, _) => NICE_LONG,
            (Some(_), false) => NICE_SHORT,
            (Some(_), true) => NICE_MUCH,
        }
    }

    /// Looks at the clock between two pieces of work. Once it is no short turn any more, it makes room for those, if there is
    /// room for it among the others, and says how much nicer it becomes.
    pub(crate) fn look(&self) -> Option<i32> {
        self.look_at(Instant::now())
    }

    /// Ends it, for work that takes long and has turns of another kind, and says how much nicer its thread becomes.
    pub(crate) fn end(self) -> Option<i32> {
        (!self.is_long.swap(true, Ordering::Relaxed)).then_some(NICE_LONG)
    }

    fn look_at(&self, now: Instant) -> Option<i32> {
        if now.saturating_duration_since(self.began) < SHORT || self.is_long.swap(true, Ordering::Relaxed) {
            return None;
        }
        if let Some(share) = self.turns.much.try_take(&self.tenant, 1) {
            *self.share.lock().unwrap_or_else(PoisonError::into_inner) = share;
        }
        Some(NICE_LONG)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(owner) = &self.tenant {
            self.turns.uses().end(owner, Instant::now());
        }
    }
}

/// How many turns owners have held lately, on average.
#[derive(Default)]
struct Uses(HashMap<Arc<str>, Use>);

struct Use {
    /// Turns held now.
    held: usize,
    /// The average when it was looked at last.
    average: f64,
    at: Instant,
}

impl Use {
    /// The average of now: it nears what is held.
    fn average(&self, now: Instant) -> f64 {
        let faded = (-(now.saturating_duration_since(self.at).as_secs_f64() / MEMORY)).exp();
        let held = self.held as f64;
        held + (self.average - held) * faded
    }

    fn set(&mut self, held: usize, now: Instant) {
        (self.average, self.at) = (self.average(now), now);
        self.held = held;
    }
}

impl Uses {
    fn begin(&mut self, owner: &Arc<str>, now: Instant) {
        if self.0.len() > OWNERS_KEPT {
            self.0.retain(|_, used| used.held > 0 || used.average(now) > NOTHING);
        }
        let used = self.0.entry(Arc::clone(owner)).or_insert(Use { held: 0, average: 0.0, at: now });
        used.set(used.held + 1, now);
    }

    fn end(&mut self, owner: &Arc<str>, now: Instant) {
        if let Some(used) = self.0.get_mut(owner) {
            used.set(used.held.saturating_sub(1), now);
        }
    }

    /// Whether an owner has held more than an equal part of so many turns.
    fn is_much(&self, owner: &Arc<str>, count: usize, now: Instant) -> bool {
        let Some(own) = self.0.get(owner).map(|used| used.average(now)) else { return false };
        let others = self.0.iter().filter(|(other, used)| *other != owner && used.average(now) > NOTHING);
        own > LITTLE.min(count as f64 / (1 + others.count()) as f64)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        pin::{Pin, pin},
        task::{Context, Poll, Waker},
    };

    use super::*;

    fn now<T>(future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn whoever_holds_more_than_an_equal_part_prepares_much_until_it_is_forgotten() {
        let (mut uses, start) = (Uses::default(), Instant::now());
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let (busy, idle): (Arc<str>, Arc<str>) = ("busy".into(), "idle".into());
        uses.begin(&busy, at(0.0));
        assert!(!uses.is_much(&busy, 2, at(1.0)), "a second of ten");
        assert!(uses.is_much(&busy, 2, at(5.0)), "five of ten");
        assert!(!uses.is_much(&idle, 2, at(5.0)));
        // Short ones, one after the other, are little.
        for turn in 0..50 {
            let begins = 5.0 + f64::from(turn) / 10.0;
            uses.begin(&idle, at(begins));
            uses.end(&idle, at(begins + 0.01));
        }
        assert!(!uses.is_much(&idle, 2, at(10.0)));
        uses.end(&busy, at(10.0));
        assert!(uses.is_much(&busy, 2, at(12.0)) && !uses.is_much(&busy, 2, at(30.0)));
        // Where many prepare, an equal part is less.
        for other in 0..30 {
            let other: Arc<str> = format!("other {other}").into();
            uses.begin(&other, at(30.0));
            uses.end(&other, at(31.0));
        }
        uses.begin(&idle, at(31.0));
        assert!(uses.is_much(&idle, 2, at(31.9)) && !uses.is_much(&idle, 16, at(31.9)));
    }

    #[test]
    fn what_has_become_long_makes_room_and_asks_for_less() {
        let turns = Turns::new(2);
        let take = |name: &str| {
            let tenant: Tenant = Some(name.into());
            now(pin!(turns.take(&tenant)))
        };
        let long = [take("a").unwrap(), take("b").unwrap()];
        assert_eq!(long[0].nice(), NICE_SHORT);
        assert!(take("c").is_none(), "both turns are taken");
        let later = |turn: &Turn, share: u32| turn.look_at(turn.began + SHORT / share);
        assert_eq!(later(&long[0], 2), None, "it is short");
        assert_eq!(long.each_ref().map(|turn| later(turn, 1)), [Some(NICE_LONG); 2]);
        assert_eq!(later(&long[0], 1), None, "once");
        let short = [take("c").unwrap(), take("d").unwrap()];
        // There is room for two that are long; a third stays where it is.
        assert_eq!(later(&short[0], 1), Some(NICE_LONG));
        assert!(take("e").is_none());
        drop(long);
        drop(short);
        drop(take("e").unwrap());
        assert!(turns.uses().0.values().all(|used| used.held == 0));
        // An only owner is as nice as it always was, and has all turns of one kind.
        let all: Vec<Turn> = (0..3).map_while(|_| now(pin!(turns.take(&None)))).collect();
        assert_eq!((all.len(), all[0].nice()), (2, NICE_LONG));
    }

    #[test]
    fn whoever_prepares_much_waits_for_others_who_do() {
        let turns = Turns::new(2);
        let (busy, idle): (Tenant, Tenant) = (Some("busy".into()), Some("idle".into()));
        let used = Use { held: 0, average: 1.0, at: Instant::now() };
        turns.uses().0.insert(busy.clone().unwrap(), used);
        let first = now(pin!(turns.take(&busy))).unwrap();
        assert_eq!(first.nice(), NICE_MUCH);
        assert!(now(pin!(turns.take(&busy))).is_none(), "half of these turns is its");
        let other: Tenant = Some("other".into());
        let both = (now(pin!(turns.take(&idle))), now(pin!(turns.take(&other))));
        assert!(both.0.is_some() && both.1.is_some(), "nobody else waits for it");
    }
}
