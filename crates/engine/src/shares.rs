//! How requests of different owners share what there is: places in line, seats, and the tokens of a step.
//!
//! Everything here is decided among owners first and by place in line second, so how much one of them asks for delays
//! another's request by what is under way, never by what waits. Requests without an owner are one owner's.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use crate::sequence::SequenceId;

/// Whose something is.
pub(crate) type Owner = Option<Arc<str>>;

/// Owners remembered before those are forgotten of whom nothing is known any more.
const OWNERS_KEPT: usize = 256;

/// Gives out places in line.
///
/// An owner's requests have places of their own, one after the other, beginning behind the place that was seated last.
/// So the first request of an owner stands beside the first ones of others, however many of those wait. With one owner
/// that is the order of arrival.
#[derive(Default)]
pub(crate) struct Line {
    /// The furthest place that has been seated.
    seated: i64,
    /// By owner, the last place that was given out.
    last: HashMap<Owner, i64>,
}

impl Line {
    /// A place for the next request of an owner.
    pub(crate) fn place(&mut self, owner: &Owner) -> i64 {
        if self.last.len() > OWNERS_KEPT {
            let seated = self.seated;
            self.last.retain(|_, last| *last > seated);
        }
        let last = self.last.get(owner).copied().unwrap_or(0);
        let place = last.max(self.seated) + 1;
        self.last.insert(owner.clone(), place);
        place
    }

    /// Whether there are several owners.
    pub(crate) fn is_shared(&self) -> bool {
        self.last.len() > 1
    }

    /// A place has its seat.
    pub(crate) fn seat(&mut self, place: i64) {
        self.seated = self.seated.max(place);
    }
}

/// How far back the time of steps is counted, in seconds: what was so long ago counts a third of what is now.
const MEMORY: f64 = 10.0;

/// Whoever has had more than this part of the time on average has had much: others who ask for something go first.
const MUCH: f64 = 0.25;

/// And whoever has had this part and asks for so many times what another asks for, before a flood has become much.
const SOME: f64 = 0.05;
const TIMES: usize = 4;

/// How much of the time of steps each owner has had lately.
#[derive(Default)]
pub(crate) struct Uses(HashMap<Owner, Use>);

/// A part of the time, as it was then.
#[derive(Clone, Copy)]
struct Use {
    part: f64,
    at: Duration,
}

impl Use {
    fn part(self, now: Duration) -> f64 {
        self.part * (-now.saturating_sub(self.at).as_secs_f64() / MEMORY).exp()
    }
}

impl Uses {
    /// An owner has had so many seconds of a step that ended now.
    pub(crate) fn add(&mut self, owner: &Owner, seconds: f64, now: Duration) {
        if self.0.len() > OWNERS_KEPT {
            // A thousandth of the time is nothing.
            self.0.retain(|_, used| used.part(now) > 1e-3);
        }
        let used = self.0.entry(owner.clone()).or_insert(Use { part: 0.0, at: now });
        *used = Use { part: used.part(now) + seconds / MEMORY, at: now };
    }

    /// Those of these owners who have had much, if there are others among them: they are the others' guests. An owner is
    /// named once for each thing that it asks for.
    pub(crate) fn guests<'a>(
        &self,
        owners: impl Iterator<Item = &'a Owner>,
        now: Duration,
    ) -> HashSet<Owner> {
        let mut asked: HashMap<&Owner, usize> = HashMap::new();
        owners.for_each(|owner| *asked.entry(owner).or_default() += 1);
        let least = asked.values().copied().min().unwrap_or(0);
        let has_much = |owner: &Owner, count: usize| {
            let part = self.0.get(owner).map_or(0.0, |used| used.part(now));
            part > MUCH || part > SOME && count >= TIMES * least
        };
        let much = asked.iter().filter(|(owner, count)| has_much(owner, **count));
        let much: HashSet<Owner> = much.map(|(owner, _)| (*owner).clone()).collect();
        if much.len() == asked.len() { HashSet::new() } else { much }
    }
}

/// What an owner has and waits for.
struct Part {
    owner: Owner,
    /// It has had much, and others want something.
    is_guest: bool,
    seats: usize,
    /// In line.
    waiting: VecDeque<(i64, SequenceId)>,
}

impl Part {
    /// Whether the other one has so many more seats that one of them would be better here. Two more: otherwise they would
    /// take it from each other by turns. Any of a guest's, unless this one is a guest, too.
    fn would_take_of(&self, other: &Part) -> bool {
        match (self.is_guest, other.is_guest) {
            (false, true) => other.seats > 0,
            (true, false) => false,
            _ => other.seats >= self.seats + 2,
        }
    }
}

/// Who is seated next: of the owners that have the fewest seats, the one whose next request is first in line. Guests come
/// last.
pub(crate) struct Parts {
    parts: Vec<Part>,
    pub(crate) guests: HashSet<Owner>,
}

impl Parts {
    pub(crate) fn new(guests: HashSet<Owner>) -> Parts {
        Parts { parts: Vec::new(), guests }
    }

    pub(crate) fn is_guest(&self, owner: &Owner) -> bool {
        self.guests.contains(owner)
    }

    fn of(&mut self, owner: &Owner) -> &mut Part {
        let index = self.parts.iter().position(|part| part.owner == *owner).unwrap_or_else(|| {
            let is_guest = self.is_guest(owner);
            self.parts.push(Part { owner: owner.clone(), is_guest, seats: 0, waiting: VecDeque::new() });
            self.parts.len() - 1
        });
        &mut self.parts[index]
    }

    /// One more waits; called in the order of the line.
    pub(crate) fn waits(&mut self, owner: &Owner, line: i64, id: SequenceId) {
        self.of(owner).waiting.push_back((line, id));
    }

    pub(crate) fn sits(&mut self, owner: &Owner) {
        self.of(owner).seats += 1;
    }

    pub(crate) fn leaves(&mut self, owner: &Owner) {
        self.of(owner).seats -= 1;
    }

    /// The next one, taken out, of guests or of the others.
    pub(crate) fn next(&mut self, guests: bool) -> Option<SequenceId> {
        let waiting =
            self.parts.iter_mut().filter(|part| part.is_guest == guests && !part.waiting.is_empty());
        let next = waiting.min_by_key(|part| (part.seats, part.waiting.front().copied()))?;
        next.waiting.pop_front().map(|(_, id)| id)
    }

    /// Whether a seat of another owner would be better with this one.
    pub(crate) fn has_less_than(&self, owner: &Owner, other: &Owner) -> bool {
        let part = |owner: &Owner| self.parts.iter().find(|part| part.owner == *owner);
        part(owner).zip(part(other)).is_some_and(|(part, other)| part.would_take_of(other))
    }

    /// Whether somebody waits who would find or be given a seat, and is none of these; a guest or one of the others.
    pub(crate) fn expects_other_than(&self, owners: &[Owner], guests: bool, slots_free: bool) -> bool {
        self.parts.iter().any(|part| {
            !part.waiting.is_empty()
                && part.is_guest == guests
                && !owners.contains(&part.owner)
                && (slots_free || self.parts.iter().any(|other| part.would_take_of(other)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_had_much_is_a_guest_of_those_who_have_not_until_it_is_forgotten() {
        let names: [Owner; 3] = [Some("busy".into()), Some("idle".into()), None];
        let [busy, idle, nobody] = &names;
        let (mut uses, at) = (Uses::default(), Duration::from_secs_f64);
        let guests = |uses: &Uses, owners: &[&Owner], now: f64| {
            let mut guests: Vec<Owner> = uses.guests(owners.iter().copied(), at(now)).into_iter().collect();
            guests.sort();
            guests
        };
        // Four seconds of the first four; somebody else had one of them, too.
        for step in 0..40 {
            let now = f64::from(step) / 10.0;
            uses.add(busy, 0.1, at(now));
            if step % 4 == 0 {
                uses.add(idle, 0.1, at(now));
            }
        }
        assert_eq!(guests(&uses, &[busy, idle, nobody], 4.0), names[..1]);
        assert!(guests(&uses, &[busy], 4.0).is_empty(), "nobody else is there");
        assert!(guests(&uses, &[busy, idle], 8.0).is_empty(), "that was long ago");
        // Less is much of whoever asks for many times as much.
        assert_eq!(guests(&uses, &[busy, idle, busy, busy, busy], 9.0), names[..1]);
        assert!(guests(&uses, &[busy, idle, busy, busy], 9.0).is_empty(), "three times");
        assert!(guests(&uses, &[idle, busy, idle, idle, idle], 30.0).is_empty(), "nobody has had anything");
        // Where all have had much, none has had more than it should.
        (0..40).for_each(|step| uses.add(idle, 0.1, at(4.0 + f64::from(step) / 10.0)));
        (0..40).for_each(|step| uses.add(busy, 0.1, at(4.0 + f64::from(step) / 10.0)));
        assert!(guests(&uses, &[busy, idle], 8.0).is_empty());
        assert_eq!(guests(&uses, &[nobody, idle, busy], 8.0), [busy.clone(), idle.clone()]);
    }

    #[test]
    fn an_owner_stands_in_line_behind_its_own_requests_and_not_behind_anothers() {
        let (a, b): (Owner, Owner) = (Some("a".into()), Some("b".into()));
        let mut line = Line::default();
        assert_eq!((0..100).map(|_| line.place(&a)).collect::<Vec<_>>(), (1..=100).collect::<Vec<_>>());
        assert_eq!((line.place(&b), line.place(&b)), (1, 2));
        line.seat(7);
        assert_eq!((line.place(&b), line.place(&None), line.place(&a)), (8, 8, 101));
        // Whoever was away has no claim to what it did not ask for.
        line.seat(101);
        assert_eq!((line.place(&b), line.place(&None)), (102, 102));
    }
}
