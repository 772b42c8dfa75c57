//! How requests of different owners share what there is: places in line, seats, and the tokens of a step.
//!
//! Everything here is decided among owners first and by place in line second, so how much one of them asks for delays
//! another's request by what is under way, never by what waits. Requests without an owner are one owner's.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
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

/// What an owner has and waits for.
struct Part {
    owner: Owner,
    seats: usize,
    /// In line.
    waiting: VecDeque<(i64, SequenceId)>,
}

/// Who is seated next: of the owners that have the fewest seats, the one whose next request is first in line.
#[derive(Default)]
pub(crate) struct Parts {
    parts: Vec<Part>,
}

impl Parts {
    fn of(&mut self, owner: &Owner) -> &mut Part {
        let index = self.parts.iter().position(|part| part.owner == *owner).unwrap_or_else(|| {
            self.parts.push(Part { owner: owner.clone(), seats: 0, waiting: VecDeque::new() });
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

    /// The next one, taken out.
    pub(crate) fn next(&mut self) -> Option<SequenceId> {
        let waiting = self.parts.iter_mut().filter(|part| !part.waiting.is_empty());
        let next = waiting.min_by_key(|part| (part.seats, part.waiting.front().copied()))?;
        next.waiting.pop_front().map(|(_, id)| id)
    }

    /// Whether another owner has so many more seats than this one that one of them would be better with this one. Two
    /// more: otherwise they would take it from each other by turns.
    pub(crate) fn has_less_than(&self, owner: &Owner, other: &Owner) -> bool {
        let seats =
            |owner: &Owner| self.parts.iter().find(|part| part.owner == *owner).map_or(0, |part| part.seats);
        seats(other) >= seats(owner) + 2
    }

    /// Whether somebody waits who would find or be given a seat, and is none of these.
    pub(crate) fn expects_other_than(&self, owners: &[Owner], slots_free: bool) -> bool {
        self.parts.iter().any(|part| {
            !part.waiting.is_empty()
                && !owners.contains(&part.owner)
                && (slots_free || self.parts.iter().any(|other| other.seats >= part.seats + 2))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
