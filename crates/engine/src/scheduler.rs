//! What runs next.
//!
//! One rule: `launched` catches up with the tokens of a sequence within a budget. A new prompt, a chunk of a long one,
//! one more token, a prefix hit, a resumed sequence are all the same thing: some positions are missing.
//!
//! Order is the place in line, fixed when a request arrives. Whoever is first can always take the pages of those
//! behind, so somebody always moves on, and nobody is overtaken for ever.

use std::collections::{BTreeSet, HashMap};

use fornax_compute::{Batch, KvGroup, PAGE_TOKENS, Row, Token};

use crate::{
    handle::Ticket,
    pages::{PageCounts, Pages},
    sequence::{Leave, Seat, Sequence, SequenceId},
};

/// Bounds of one step, from the runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens in one batch.
    pub tokens_max: usize,
    /// Logit rows in one batch.
    pub wanted_max: usize,
    /// Sequences that can be seated at once.
    pub slots: usize,
}

/// A sequence's part in a scheduled step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheduled {
    pub(crate) id: SequenceId,
    pub(crate) slot: u32,
    /// Position after the last of its tokens.
    pub(crate) end: usize,
    /// Whether a token is sampled at `end`.
    pub(crate) samples: bool,
}

/// Owns every sequence and every page.
pub(crate) struct Scheduler {
    pages: Pages,
    limits: StepLimits,
    sequences: HashMap<SequenceId, Sequence>,
    /// Without a seat, by place in line.
    waiting: BTreeSet<(i64, SequenceId)>,
    /// With a seat, by place in line.
    seated: BTreeSet<(i64, SequenceId)>,
    slots_free: Vec<u32>,
    /// Sequences that gave way to somebody before them.
    preemptions: u64,
}

impl Scheduler {
    pub(crate) fn new(groups: &[KvGroup], limits: StepLimits) -> Self {
        let slots = u32::try_from(limits.slots).expect("slots fit 32 bits");
        Scheduler {
            pages: Pages::new(groups),
            limits,
            sequences: HashMap::new(),
            waiting: BTreeSet::new(),
            seated: BTreeSet::new(),
            slots_free: (0..slots).rev().collect(),
            preemptions: 0,
        }
    }

    /// Takes a sequence in; it waits for a seat.
    pub(crate) fn add(&mut self, sequence: Sequence) {
        self.waiting.insert((sequence.line, sequence.id));
        let old = self.sequences.insert(sequence.id, sequence);
        assert!(old.is_none(), "sequence numbers are used once");
    }

    /// The next batch, at most `budget` tokens, and what each of its rows is; empty when nothing can move.
    pub(crate) fn schedule(&mut self, budget: usize) -> (Batch, Vec<Scheduled>) {
        let mut step = StepDraft {
            batch: Batch::default(),
            rows: Vec::new(),
            tokens_left: budget.clamp(1, self.limits.tokens_max),
            wanted_left: self.limits.wanted_max,
        };
        // Rows that need one token come first: a long prompt takes what they leave, and nobody's stream stalls.
        let (one, more): (Vec<_>, Vec<_>) = self
            .seated
            .iter()
            .map(|&(_, id)| self.sequence(id))
            .filter(|sequence| sequence.launched < sequence.target())
            .map(|sequence| (sequence.id, sequence.target() - sequence.launched))
            .partition(|&(_, missing)| missing == 1);
        for (id, _) in one.into_iter().chain(more) {
            self.advance(id, &mut step);
        }
        self.seat_waiting(&mut step);
        (step.batch, step.rows)
    }

    /// Adds a seated sequence's missing positions to the step, as many as fit.
    fn advance(&mut self, id: SequenceId, step: &mut StepDraft) {
        let Some(sequence) = self.sequences.get(&id) else { return };
        // It may have lost its seat to an earlier row of this very step.
        if sequence.seat.is_none() || sequence.leave.is_some() {
            return;
        }
        let len = step.room(sequence);
        if len == 0 {
            return;
        }
        let end = sequence.launched + len;
        while !self.grow(id, end) {
            if !self.make_room(id, step) {
                return;
            }
        }
        self.place(id, len, step);
    }

    /// Seats waiting sequences in line order until slots, pages or the budget run out.
    fn seat_waiting(&mut self, step: &mut StepDraft) {
        let waiting: Vec<SequenceId> = self.waiting.iter().map(|&(_, id)| id).collect();
        for id in waiting {
            let sequence = self.sequence(id);
            if self.waits_for_leader(sequence) {
                continue;
            }
            if self.slots_free.is_empty() && !self.unseat_less_urgent(id, step) {
                return;
            }
            let Some(slot) = self.slots_free.pop() else { return };
            let sequence = self.sequences.get_mut(&id).expect("listed");
            let (mut tables, hit) = self.pages.find(&sequence.request.salt, &sequence.tokens);
            (sequence.launched, sequence.computed) = (hit, hit);
            let len = step.room(sequence);
            let grown = len > 0
                && loop {
                    if self.pages.grow(&mut tables, hit + len) {
                        break true;
                    }
                    if !self.unseat_less_urgent(id, step) {
                        break false;
                    }
                };
            let sequence = self.sequences.get_mut(&id).expect("listed");
            if !grown {
                // Nobody behind it in line may take what it is waiting for.
                (sequence.launched, sequence.computed) = (0, 0);
                self.pages.release(tables);
                self.slots_free.push(slot);
                return;
            }
            sequence.cached_tokens.get_or_insert(hit.min(sequence.request.prompt.len()));
            sequence.seat = Some(Seat { slot, tables });
            let line = sequence.line;
            self.waiting.remove(&(line, id));
            self.seated.insert((line, id));
            self.place(id, len, step);
        }
    }

    /// Whether another choice of the same request is still computing the prompt they share.
    fn waits_for_leader(&self, sequence: &Sequence) -> bool {
        let Some(leader) = sequence.leader.and_then(|leader| self.sequences.get(&leader)) else {
            return false;
        };
        leader.computed < (sequence.prompt_len() - 1) / PAGE_TOKENS * PAGE_TOKENS
    }

    fn grow(&mut self, id: SequenceId, positions: usize) -> bool {
        let sequence = self.sequences.get_mut(&id).expect("seated");
        let seat = sequence.seat.as_mut().expect("seated");
        self.pages.grow(&mut seat.tables, positions)
    }

    /// Takes pages from the last in line behind `id`. `false`: nothing more can be freed for this step.
    fn make_room(&mut self, id: SequenceId, step: &StepDraft) -> bool {
        let line = self.sequence(id).line;
        self.unseat_one(step, |sequence| (sequence.line, sequence.id) > (line, id))
    }

    /// Takes the seat of the last in line whose priority is lower than that of `id`.
    fn unseat_less_urgent(&mut self, id: SequenceId, step: &StepDraft) -> bool {
        let sequence = self.sequence(id);
        let (line, priority) = (sequence.line, sequence.request.priority);
        self.unseat_one(step, |other| other.request.priority > priority && other.line > line)
    }

    /// Unseats the last in line for which `behind` holds and that no step names. Sequences in flight can only be
    /// marked: their pages return when their step is collected, so one mark a step is enough.
    fn unseat_one(&mut self, step: &StepDraft, behind: impl Fn(&Sequence) -> bool) -> bool {
        let mut mark = None;
        let mut victim = None;
        for &(_, id) in self.seated.iter().rev() {
            let sequence = self.sequence(id);
            if !behind(sequence) {
                break;
            }
            if sequence.leave.is_some() {
                // Room is on its way already.
                return false;
            }
            if step.names(id) {
                continue;
            }
            if sequence.steps_in_flight == 0 {
                victim = Some(id);
                break;
            }
            mark.get_or_insert(id);
        }
        if let Some(id) = victim {
            self.preempt(id);
            return true;
        }
        if let Some(id) = mark {
            self.sequences.get_mut(&id).expect("seated").leave = Some(Leave::Preempted);
        }
        false
    }

    /// Takes the seat; the sequence waits at its old place in line and computes again what nobody kept.
    fn preempt(&mut self, id: SequenceId) {
        self.preemptions += 1;
        let sequence = self.sequences.get_mut(&id).expect("seated");
        assert_eq!(sequence.steps_in_flight, 0, "pages in flight stay");
        (sequence.launched, sequence.computed, sequence.leave) = (0, 0, None);
        let line = sequence.line;
        self.unseat(id);
        self.waiting.insert((line, id));
    }

    /// Returns slot and pages of a seated sequence.
    fn unseat(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("known");
        let Some(Seat { slot, tables }) = sequence.seat.take() else { return };
        self.seated.remove(&(sequence.line, id));
        self.slots_free.push(slot);
        self.pages.release(tables);
    }

    /// Writes the next `len` positions of a seated sequence into the step.
    fn place(&mut self, id: SequenceId, len: usize, step: &mut StepDraft) {
        let sequence = self.sequences.get_mut(&id).expect("seated");
        let seat = sequence.seat.as_ref().expect("seated");
        let (start, end) = (sequence.launched, sequence.launched + len);
        let samples = sequence.samples_at(end);
        let row = Row {
            slot: seat.slot,
            start: small(start),
            len: small(len),
            pages: seat.tables.groups().to_vec(),
            wanted: u32::from(samples),
        };
        let known = &sequence.tokens[start.min(sequence.tokens.len())..end.min(sequence.tokens.len())];
        let tokens = known.iter().map(|&token| Token::Known(token));
        let ahead = len - known.len();
        assert!(ahead <= 1, "only the newest token may still be on the device");
        step.batch.push(row, tokens.chain((0..ahead).map(|_| Token::Sampled(seat.slot))));
        step.rows.push(Scheduled { id, slot: seat.slot, end, samples });
        step.tokens_left -= len;
        step.wanted_left -= usize::from(samples);
        sequence.launched = end;
        sequence.steps_in_flight += 1;
        sequence.sampled_ahead += usize::from(samples);
    }

    /// A step that named this sequence was collected: its positions are computed.
    pub(crate) fn collected(&mut self, row: &Scheduled) {
        let sequence = self.sequences.get_mut(&row.id).expect("kept while in flight");
        sequence.steps_in_flight -= 1;
        sequence.sampled_ahead -= usize::from(row.samples);
        if sequence.leave == Some(Leave::Ended) {
            return self.settle(row.id);
        }
        sequence.computed = row.end;
        let seat = sequence.seat.as_mut().expect("kept while in flight");
        self.pages.commit(&mut seat.tables, &sequence.tokens[..row.end]);
    }

    /// A step that named this sequence was lost.
    pub(crate) fn dropped(&mut self, row: &Scheduled) {
        let sequence = self.sequences.get_mut(&row.id).expect("kept while in flight");
        sequence.steps_in_flight -= 1;
        sequence.sampled_ahead -= usize::from(row.samples);
        self.settle(row.id);
    }

    /// The ticket of a sequence that has its first seat.
    pub(crate) fn take_ticket(&mut self, id: SequenceId) -> Option<Ticket> {
        self.sequences.get_mut(&id).expect("seated").ticket.take()
    }

    /// The sequence has had its last event: everything it holds returns, now or when its last step is collected.
    pub(crate) fn end(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.leave = Some(Leave::Ended);
        self.settle(id);
    }

    /// Carries out a pending leave once no step names the sequence.
    pub(crate) fn settle(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get(&id) else { return };
        if sequence.steps_in_flight > 0 {
            return;
        }
        match sequence.leave {
            None => {}
            Some(Leave::Preempted) => self.preempt(id),
            Some(Leave::Ended) => {
                let line = sequence.line;
                self.unseat(id);
                self.waiting.remove(&(line, id));
                self.sequences.remove(&id);
            }
        }
    }

    /// A sequence that has not had its last event.
    pub(crate) fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(&id).filter(|sequence| sequence.leave != Some(Leave::Ended))
    }

    /// The same, to append to.
    pub(crate) fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.sequences.get_mut(&id).filter(|sequence| sequence.leave != Some(Leave::Ended))
    }

    /// All sequences that have not had their last event.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Sequence> {
        self.sequences.values().filter(|sequence| sequence.leave != Some(Leave::Ended))
    }

    /// Sequences in the books, those included that wait for their last step.
    pub(crate) fn len(&self) -> usize {
        self.sequences.len()
    }

    /// (seated, waiting)
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.seated.len(), self.waiting.len())
    }

    /// Sequences that wait for a seat they have had before.
    pub(crate) fn preempted(&self) -> usize {
        self.waiting.iter().filter(|(_, id)| self.sequence(*id).cached_tokens.is_some()).count()
    }

    pub(crate) fn preemptions(&self) -> u64 {
        self.preemptions
    }

    pub(crate) fn page_counts(&self) -> Vec<PageCounts> {
        self.pages.counts()
    }

    /// Checks the books; for tests and for an idle engine.
    pub(crate) fn assert_consistent(&self) {
        self.pages.assert_consistent();
        assert_eq!(self.sequences.len(), self.seated.len() + self.waiting.len(), "everybody sits or waits");
        assert_eq!(self.limits.slots, self.slots_free.len() + self.seated.len(), "a slot was lost");
    }

    fn sequence(&self, id: SequenceId) -> &Sequence {
        self.sequences.get(&id).expect("listed sequences exist")
    }
}

/// A step being put together.
struct StepDraft {
    batch: Batch,
    rows: Vec<Scheduled>,
    tokens_left: usize,
    wanted_left: usize,
}

impl StepDraft {
    /// How many of the sequence's missing positions still fit.
    fn room(&self, sequence: &Sequence) -> usize {
        let missing = sequence.target() - sequence.launched;
        let len = missing.min(self.tokens_left);
        let samples = len > 0 && sequence.samples_at(sequence.launched + len);
        // Without a logits row left, all but the last position can still be computed.
        if samples && self.wanted_left == 0 { len - 1 } else { len }
    }

    fn names(&self, id: SequenceId) -> bool {
        self.rows.iter().any(|row| row.id == id)
    }
}

fn small(value: usize) -> u32 {
    u32::try_from(value).expect("positions are bounded by the context")
}
