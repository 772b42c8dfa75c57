//! What runs next.
//!
//! One rule: `launched` catches up with the tokens of a sequence within a budget. A new prompt, a chunk of a long one,
//! one more token, a prefix hit, a resumed sequence are all the same thing: some positions are missing.
//!
//! Order is the place in line, fixed when a request arrives. Whoever is first can always take the pages of those
//! behind, so somebody always moves on, and nobody is overtaken for ever. Where several owners want something, seats
//! and the tokens of a step are shared out among them first (`shares.rs`).

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    ops::Range,
    sync::Arc,
};

use fornax_compute::{Batch, KvGroup, PAGE_TOKENS, PageId, Row, Token};
use slotmap::{Key, SlotMap};

use crate::{
    budget::{Beside, Budget, taken},
    drafting::{DraftModel, Wanted, fitting},
    event::Miss,
    handle::Ticket,
    pages::{PageCounts, Pages},
    picture::{Picture, Progress, REQUESTS_MAX},
    prefix::Units,
    request::Piece,
    sequence::{Leave, Restoring, Seat, Sequence, SequenceId},
    shares::{Owner, Parts},
    speculation::{DRAFT_MAX, Offer, Speculator, may_draft},
    tier::{Missing, PageName, Unkept},
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

/// How a model computes sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sequences {
    /// In one step or not at all.
    pub(crate) whole: bool,
    /// What is added to the positions of a second text.
    pub(crate) pairs: u32,
    /// Sections of a position.
    pub(crate) sections: usize,
    /// Tokens that a sequence may be ahead of those collected when it is computed further: 1 where the device feeds
    /// them back, else 0.
    pub(crate) ahead: usize,
}

/// A sequence's part in a scheduled step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheduled {
    pub(crate) id: SequenceId,
    /// It is seated for the first time.
    pub(crate) starts: bool,
    pub(crate) slot: u32,
    /// Position after the last of its tokens, drafts included.
    pub(crate) end: usize,
    /// The first of its last positions that have logits.
    pub(crate) wanted_from: usize,
    /// The positions from `wanted_from` to here tell how likely the token after them was.
    pub(crate) scores_end: usize,
    /// How many of its last positions choose a token: none, one, or one more than it has drafts.
    pub(crate) samples: usize,
}

impl Scheduled {
    /// Positions that have logits.
    pub(crate) fn wanted(&self) -> usize {
        self.end - self.wanted_from
    }

    /// Positions that tell how likely the token after them was.
    pub(crate) fn scores(&self) -> Range<usize> {
        self.wanted_from..self.scores_end.max(self.wanted_from)
    }

    /// Tokens guessed and computed ahead.
    pub(crate) fn drafts(&self) -> usize {
        self.samples.saturating_sub(1)
    }
}

/// Owns every sequence and every page.
pub(crate) struct Scheduler {
    pages: Pages,
    limits: StepLimits,
    sequences: SlotMap<SequenceId, Sequence>,
    /// Without a seat, by place in line.
    waiting: BTreeSet<(i64, SequenceId)>,
    /// With a seat, by place in line.
    seated: BTreeSet<(i64, SequenceId)>,
    slots_free: Vec<u32>,
    /// Sequences that gave way to somebody before them.
    preemptions: u64,
    /// Prompt positions computed.
    prompt_tokens: u64,
    speculator: Speculator,
    /// Whether a model drafts.
    drafts_by_model: bool,
    /// Seconds for one of its steps and for each of its tokens.
    model_pace: Option<(f64, f64)>,
    /// Whether cached prefixes are used again.
    prefix_reuse: bool,
    computed: Sequences,
    /// The last batch, whose memory the next one uses again.
    batch: Batch,
    /// Whose turn it is among guests' streams: the one that was in a step last, by its place in the line. Places of
    /// several owners may be the same.
    guests_turn: Option<(i64, SequenceId)>,
}

/// How the owners of a step stand to each other.
#[derive(Default)]
pub(crate) struct Standing {
    /// Whether requests have come from more than one.
    pub(crate) several: bool,
    /// Those who have had much lately, beside others who have not: they have what the others leave, and a little in any case.
    pub(crate) guests: HashSet<Owner>,
}

impl Scheduler {
    pub(crate) fn new(
        groups: &[KvGroup],
        limits: StepLimits,
        speculator: Speculator,
        prefix_reuse: bool,
        computed: Sequences,
    ) -> Self {
        let slots = u32::try_from(limits.slots).expect("slots fit 32 bits");
        Scheduler {
            pages: Pages::new(groups),
            limits,
            sequences: SlotMap::with_key(),
            waiting: BTreeSet::new(),
            seated: BTreeSet::new(),
            slots_free: (0..slots).rev().collect(),
            preemptions: 0,
            prompt_tokens: 0,
            speculator,
            drafts_by_model: false,
            model_pace: None,
            prefix_reuse,
            computed,
            batch: Batch::default(),
            guests_turn: None,
        }
    }

    /// Owners who want something, once for each of their sequences.
    pub(crate) fn owners(&self) -> impl Iterator<Item = &Owner> {
        let everybody = self.seated.iter().chain(&self.waiting);
        everybody.map(|(_, id)| &self.sequence(*id).request.owner)
    }

    /// Takes a sequence in; it waits for a seat.
    pub(crate) fn add(&mut self, sequence: impl FnOnce(SequenceId) -> Sequence) -> SequenceId {
        let id = self.sequences.insert_with_key(sequence);
        self.waiting.insert((self.sequences[id].line, id));
        id
    }

    /// Puts the next batch together: what each of its rows is, in `rows`; none when nothing can move. It has at most as
    /// many tokens as the budget says for the streams that want one, and for the owners of prompts beside streams of others:
    /// how many of the streams are theirs; and as many for guests as it says for them.
    pub(crate) fn schedule(
        &mut self,
        budget: &Budget,
        standing: Standing,
        mut rows: Vec<Scheduled>,
    ) -> Vec<Scheduled> {
        rows.clear();
        let mut batch = std::mem::take(&mut self.batch);
        batch.tokens.clear();
        batch.positions.clear();
        batch.adapters.clear();
        batch.given.values.clear();
        batch.sections.resize(self.computed.sections - 1, Vec::new());
        batch.sections.iter_mut().for_each(Vec::clear);
        batch.states.clear();
        batch.lasts.clear();
        // Rows that need one token come first: a long prompt takes what they leave, and nobody's stream stalls.
        let streams = self.seated.len();
        let (mut one, mut more) = (Vec::with_capacity(streams), Vec::new());
        for &(_, id) in &self.seated {
            let sequence = self.sequence(id);
            let waits = sequence.sampled_ahead > self.computed.ahead
                || sequence.sampled_ahead > 0
                    && (self.speculator.worth_waiting(&sequence.draft, streams)
                        || self.drafts_by_model && may_draft(sequence) && self.waits_for_model(sequence));
            if waits {
                continue;
            }
            match sequence.target() - sequence.launched.min(sequence.target()) {
                0 => {}
                1 => one.push(id),
                _ => more.push(id),
            }
        }
        // Drafts are for steps that have nothing better to do: no prompt waits to be computed.
        let drafting = more.is_empty() && self.is_settled();
        // What is computed in one step or not at all cannot be cut for guests.
        let Standing { several, guests } = if self.computed.whole { Standing::default() } else { standing };
        let is_guest = |id: &SequenceId| guests.contains(&self.sequence(*id).request.owner);
        let (guests_one, one): (Vec<_>, Vec<_>) = one.into_iter().partition(is_guest);
        let (guests_more, more): (Vec<_>, Vec<_>) = more.into_iter().partition(is_guest);
        let streams_of = self.streams_of(&one);
        let beside =
            Beside { streams: one.len(), strangers: self.strangers(&streams_of, &more, &guests), several };
        let mut step = StepDraft {
            batch,
            rows,
            tokens_left: if self.computed.whole {
                self.limits.tokens_max
            } else {
                budget.tokens(&beside).clamp(1, self.limits.tokens_max)
            },
            wanted_left: self.limits.wanted_max,
            tokens_max: self.limits.tokens_max,
            computed: self.computed,
        };
        let mut after = one.len();
        for id in one {
            after -= 1;
            let drafts = if drafting { self.drafts_for(id, streams, after, &step) } else { 0 };
            self.advance(id, drafts, &mut step);
        }
        let mut parts = self.parts(guests);
        self.advance_prompts(more, &streams_of, &parts, &mut step);
        self.seat_waiting(false, &mut parts, &mut step);
        if !parts.guests.is_empty() {
            let room = self.limits.tokens_max - step.batch.tokens.len();
            step.tokens_left = budget.guests(beside.streams).min(room);
            self.advance_guests(guests_one, &mut step);
            // Their prompts move on even where their streams take all of it.
            step.tokens_left = step.tokens_left.max(1).min(self.limits.tokens_max - step.batch.tokens.len());
            self.advance_prompts(guests_more, &HashMap::new(), &parts, &mut step);
            self.seat_waiting(true, &mut parts, &mut step);
        }
        self.place_lasts(&mut step);
        self.batch = step.batch;
        step.rows
    }

    /// Says how far tokens see, if what some of them stand for is read in both directions.
    fn place_lasts(&self, step: &mut StepDraft) {
        let pieces = |row: &Scheduled| &self.sequence(row.id).request.pieces;
        if !step.rows.iter().any(|row| pieces(row).iter().any(|piece| piece.whole)) {
            return;
        }
        let StepDraft { batch, rows, .. } = step;
        for (scheduled, row) in rows.iter().zip(&batch.rows) {
            let request = &self.sequence(scheduled.id).request;
            let positions = row.start..row.start + row.len;
            batch.lasts.extend(positions.map(|position| {
                let whole = request.whole_at(position as usize);
                whole.map_or(position, |own| small(own.end - 1))
            }));
        }
    }

    /// As many streams of guests as there is room for, by turns.
    fn advance_guests(&mut self, mut streams: Vec<SequenceId>, step: &mut StepDraft) {
        // They are in the order of the line.
        let next = streams.iter().position(|id| Some((self.sequence(*id).line, *id)) > self.guests_turn);
        streams.rotate_left(next.unwrap_or(0));
        for id in streams.into_iter().take(step.tokens_left) {
            self.guests_turn = Some((self.sequence(id).line, id));
            self.advance(id, 0, step);
        }
    }

    /// Says where the adapters of the batch's rows lie, which requests name by number.
    pub(crate) fn place_adapters(&mut self, place: impl Fn(u32) -> u32) {
        for adapter in self.batch.adapters.iter_mut().flatten() {
            *adapter = place(*adapter);
        }
    }

    /// Tokens of the batch that was put together last, by owner.
    pub(crate) fn tokens_of(&self, rows: &[Scheduled]) -> Vec<(Owner, usize)> {
        let mut tokens: Vec<(Owner, usize)> = Vec::new();
        for (scheduled, row) in rows.iter().zip(&self.batch.rows) {
            let owner = &self.sequence(scheduled.id).request.owner;
            match tokens.iter_mut().find(|(other, _)| other == owner) {
                Some((_, sum)) => *sum += row.len as usize,
                None => tokens.push((owner.clone(), row.len as usize)),
            }
        }
        tokens
    }

    /// The batch that was put together last.
    pub(crate) fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Gives the page tables that the launched batch carried back to their sequences. The step's rows are in its order.
    pub(crate) fn take_back(&mut self, rows: &[Scheduled]) {
        assert_eq!(rows.len(), self.batch.rows.len(), "a batch is taken back once");
        for (scheduled, row) in rows.iter().zip(self.batch.rows.drain(..)) {
            let sequence = self.sequences.get_mut(scheduled.id).expect("seated");
            sequence.seat.as_mut().expect("seated").tables.take_back(row.pages);
        }
    }

    /// Whether nobody waits who could be seated.
    fn is_settled(&self) -> bool {
        self.waiting.is_empty() || self.slots_free.is_empty()
    }

    /// How many guessed tokens a sequence may compute beside its newest, leaving one for each of the rows `after` it.
    fn drafts_for(&self, id: SequenceId, streams: usize, after: usize, step: &StepDraft) -> usize {
        let Some(sequence) = self.sequences.get(id) else { return 0 };
        if sequence.sampled_ahead > 0 {
            return 0;
        }
        let places = sequence.positions_max() - sequence.launched;
        let room = step.tokens_left.min(step.wanted_left).min(places).saturating_sub(after + 1);
        let count = self.speculator.count(&sequence.draft, streams).min(room);
        match &sequence.grammar {
            Some(form) if count > 0 => {
                let end_tokens = &sequence.request.sampling.end_tokens;
                fitting(form, &sequence.draft.guess()[..count], end_tokens, self.speculator.forces())
            }
            _ => count,
        }
    }

    /// From now on a model drafts, or none does any more.
    pub(crate) fn draft_by_model(&mut self, drafts: bool) {
        self.drafts_by_model = drafts;
    }

    /// Sequences that the model should guess about now, with what it would have to read in one turn at most.
    pub(crate) fn wanted_of(&self, model: &DraftModel) -> (Vec<Wanted>, usize) {
        let (mut wanted, mut chunk) = (Vec::new(), 0);
        if !self.is_settled() || self.seated.iter().any(|&(_, id)| self.sequence(id).is_reading()) {
            return (wanted, chunk);
        }
        for &(_, id) in &self.seated {
            let sequence = self.sequence(id);
            let Some(seat) = &sequence.seat else { continue };
            let newest = sequence.tokens.len() - 1;
            // Of what is guessed, at least one token has to be verified before the last one that may come.
            let left = sequence.positions_max() - newest.min(sequence.positions_max());
            let ready = sequence.sampled_ahead == 0 && sequence.leave.is_none() && may_draft(sequence);
            if !ready || sequence.launched != newest || left < 2 || sequence.request.embeds {
                continue;
            }
            let text = sequence.text();
            if text.len() + DRAFT_MAX > model.context() {
                continue;
            }
            let offer = self.offer(sequence, model.pace(), model.missing(id, text));
            let Some(asking) = self.speculator.asks_model(&sequence.draft, &offer) else { continue };
            chunk = chunk.max(asking.chunk);
            wanted.push(Wanted {
                id,
                slot: seat.slot,
                text: text.to_vec(),
                count: asking.count.min(left - 1),
                request: Arc::clone(&sequence.request),
                seed: sequence.seed,
                position: sequence.tokens.len(),
                generated: sequence.generated(),
                form: sequence.grammar.clone(),
                forces: self.speculator.forces(),
            });
        }
        (wanted, chunk)
    }

    fn offer(&self, sequence: &Sequence, model: Option<(f64, f64)>, missing: usize) -> Offer {
        let left = sequence.request.max_tokens.saturating_sub(sequence.generated());
        let generated = sequence.generated();
        Offer { model, streams: self.seated.len(), missing, generated, left }
    }

    /// Whether a sequence would rather know its token than go on without a guess of the model, which reads along.
    fn waits_for_model(&self, sequence: &Sequence) -> bool {
        let offer = self.offer(sequence, self.model_pace, 1);
        self.speculator.asks_model(&sequence.draft, &offer).is_some()
    }

    /// The model's guess about a sequence.
    pub(crate) fn guessed(&mut self, id: SequenceId, tokens: Vec<u32>) {
        if let Some(sequence) = self.get_mut(id) {
            sequence.draft.guessed(tokens);
        }
    }

    /// Whether a sequence has a seat.
    pub(crate) fn is_seated(&self, id: SequenceId) -> bool {
        self.sequences.get(id).is_some_and(|sequence| sequence.seat.is_some())
    }

    /// Adds a seated sequence's missing positions to the step, as many as fit, and drafts if there is room for all.
    fn advance(&mut self, id: SequenceId, drafts: usize, step: &mut StepDraft) {
        let mut drafts = drafts;
        loop {
            let Some(sequence) = self.sequences.get_mut(id) else { return };
            let len = step.room(sequence);
            let end = sequence.launched + len;
            // It may have lost its seat to an earlier row of this very step.
            let Some(seat) = &mut sequence.seat else { return };
            if len == 0 || sequence.leave.is_some() {
                return;
            }
            if self.pages.grow(&mut seat.tables, end + drafts) {
                return place(sequence, len, drafts, step);
            }
            // Nobody gives way to a guess.
            let had_drafts = std::mem::take(&mut drafts) > 0;
            if !had_drafts && !self.make_room(id, step) {
                return;
            }
        }
    }

    /// How many streams want their next token, by owner.
    fn streams_of(&self, streams: &[SequenceId]) -> HashMap<Owner, usize> {
        let mut counts = HashMap::new();
        for id in streams {
            *counts.entry(self.sequence(*id).request.owner.clone()).or_default() += 1;
        }
        counts
    }

    /// Owners who have prompts, seated or in line, where a stream of another owner wants its next token: how many of the
    /// streams are each one's. Else none.
    fn strangers(
        &self,
        streams_of: &HashMap<Owner, usize>,
        prompts: &[SequenceId],
        guests: &HashSet<Owner>,
    ) -> Vec<usize> {
        let owner = |id: &SequenceId| &self.sequence(*id).request.owner;
        let prompts = prompts.iter().map(owner).chain(self.waiting.iter().map(|(_, id)| owner(id)));
        let owners: HashSet<&Owner> = prompts.filter(|owner| !guests.contains(*owner)).collect();
        let beside_another =
            owners.iter().any(|prompt| streams_of.keys().any(|streaming| streaming != *prompt));
        match beside_another {
            true => owners.iter().map(|owner| streams_of.get(*owner).copied().unwrap_or(0)).collect(),
            false => Vec::new(),
        }
    }

    /// Who has seats and who waits for one.
    fn parts(&self, guests: HashSet<Owner>) -> Parts {
        let mut parts = Parts::new(guests);
        for &(_, id) in &self.seated {
            let sequence = self.sequence(id);
            if sequence.leave.is_none() {
                parts.sits(&sequence.request.owner);
            }
        }
        for &(line, id) in &self.waiting {
            parts.waits(&self.sequence(id).request.owner, line, id);
        }
        parts
    }

    /// Computes what is missing of prompts: an equal part of the step for each owner that has some, less what its streams
    /// take. What one does not use is there for the next, and something is left for an owner who is about to be seated.
    /// They are guests' prompts or those of the others.
    fn advance_prompts(
        &mut self,
        more: Vec<SequenceId>,
        streams_of: &HashMap<Owner, usize>,
        parts: &Parts,
        step: &mut StepDraft,
    ) {
        let mut prompts: Vec<(usize, Owner, Vec<SequenceId>)> = Vec::new();
        for id in more {
            let sequence = self.sequence(id);
            let (owner, missing) = (&sequence.request.owner, sequence.target() - sequence.launched);
            match prompts.iter_mut().find(|(_, other, _)| other == owner) {
                Some((sum, _, ids)) => {
                    *sum += missing;
                    ids.push(id);
                }
                None => prompts.push((missing, owner.clone(), vec![id])),
            }
        }
        // What one step has to compute whole first, before others have filled it; then those who want little: what they
        // leave is shared by the others.
        let reads_whole = |id: &SequenceId| {
            let sequence = self.sequence(*id);
            sequence.request.whole_at(sequence.launched).is_some()
        };
        prompts.sort_by_key(|(missing, _, ids)| (!ids.first().is_some_and(reads_whole), *missing));
        let owners: Vec<Owner> = prompts.iter().map(|(_, owner, _)| owner.clone()).collect();
        let guests = owners.first().is_some_and(|owner| parts.is_guest(owner));
        let expected = parts.expects_other_than(&owners, guests, !self.slots_free.is_empty());
        // Sequences that are computed in one step cannot be cut.
        let shared = !step.computed.whole && prompts.len() + usize::from(expected) > 1;
        let mut left = step.tokens_left;
        let mut sharers = prompts.len() + usize::from(expected);
        let taken = |owner: &Owner| taken(streams_of.get(owner).copied().unwrap_or(0));
        let mut all_taken = owners.iter().map(taken).sum::<usize>();
        for (_, owner, ids) in prompts {
            let own = taken(&owner);
            let part = match shared {
                true => (left + all_taken).div_ceil(sharers).saturating_sub(own).max(1).min(left),
                false => left,
            };
            all_taken -= own;
            let before = step.batch.tokens.len();
            step.tokens_left = part;
            for id in ids {
                self.advance(id, 0, step);
            }
            // What cannot be cut may have taken more than its part.
            left = left.saturating_sub(step.batch.tokens.len() - before);
            sharers -= 1;
        }
        step.tokens_left = left;
    }

    /// Seats waiting sequences until slots, pages or the budget run out: those of the owners with the fewest seats
    /// first, then in line order; guests or the others.
    fn seat_waiting(&mut self, guests: bool, parts: &mut Parts, step: &mut StepDraft) {
        while let Some(id) = parts.next(guests) {
            let sequence = self.sequence(id);
            if self.waits_for_leader(sequence) || sequence.restoring == Restoring::Waits {
                continue;
            }
            if self.slots_free.is_empty() && !self.unseat_for(id, parts, step) {
                return;
            }
            let Some(slot) = self.slots_free.pop() else { return };
            let sequence = self.sequences.get_mut(id).expect("listed");
            let cacheable = if self.prefix_reuse { sequence.cacheable() } else { sequence.units(0) };
            let (mut tables, hit, miss) =
                self.pages.find(sequence.request.adapter, &sequence.request.salt, cacheable);
            (sequence.launched, sequence.computed) = (hit, hit);
            let len = step.room(sequence);
            let grown = len > 0
                && loop {
                    if self.pages.grow(&mut tables, hit + len) {
                        break true;
                    }
                    if !self.unseat_for(id, parts, step) {
                        break false;
                    }
                };
            let sequence = self.sequences.get_mut(id).expect("listed");
            if !grown {
                // Nobody behind it in line may take what it is waiting for.
                (sequence.launched, sequence.computed) = (0, 0);
                self.pages.release(tables);
                self.slots_free.push(slot);
                return;
            }
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(hit.min(sequence.request.prompt.len()));
                if let Restoring::Done { before: Some(before) } = sequence.restoring {
                    sequence.restored_tokens = hit.min(sequence.request.prompt.len()).saturating_sub(before);
                }
                // Of a prompt without a full page nothing is ever kept.
                let whole = sequence.scored.is_some() && sequence.prompt_len() > PAGE_TOKENS;
                sequence.miss = if whole { Some(Miss::Whole) } else { miss };
            }
            sequence.seat = Some(Seat { slot, tables });
            let line = sequence.line;
            parts.sits(&sequence.request.owner);
            place(sequence, len, 0, step);
            self.waiting.remove(&(line, id));
            self.seated.insert((line, id));
        }
    }

    /// Sequences that would be seated next and of which nobody knows whether pages could be brought back.
    pub(crate) fn unrestored(&mut self) -> Vec<SequenceId> {
        let next = self.waiting.iter().map(|&(_, id)| id).take(self.slots_free.len());
        let next: Vec<SequenceId> = next.collect();
        let unknown = |id: &SequenceId| {
            let sequence = self.sequence(*id);
            sequence.restoring == Restoring::Unknown && !self.waits_for_leader(sequence)
        };
        next.into_iter().filter(unknown).collect()
    }

    /// Whether anybody waits for pages that are being brought back.
    pub(crate) fn restores(&self) -> bool {
        self.waiting.iter().any(|&(_, id)| self.sequence(id).restoring == Restoring::Waits)
    }

    /// What a sequence could go on from if pages that are kept elsewhere were here. There is nothing of what an adapter
    /// made.
    pub(crate) fn missing(&mut self, id: SequenceId, holds: &dyn Fn(&PageName) -> bool) -> Option<Missing> {
        let sequence = self.sequences.get(id)?;
        if sequence.request.adapter.is_some() || !self.prefix_reuse {
            return None;
        }
        self.pages.missing(&sequence.request.salt, sequence.cacheable(), holds)
    }

    /// Gives pages back to the prefix that a sequence waits for; see [`Pages::restore`].
    pub(crate) fn restore(
        &mut self,
        id: SequenceId,
        pages: &[(usize, PageName)],
        fill: &mut dyn FnMut(usize, Vec<Unkept>, PageId) -> bool,
    ) {
        let Some(sequence) = self.sequences.get(id).filter(|sequence| !sequence.has_ended()) else { return };
        self.pages.restore(&sequence.request.salt, sequence.cacheable(), pages, fill);
    }

    /// Copies of pages are kept elsewhere from now on.
    pub(crate) fn keep_copies(&mut self) {
        self.pages.keep_copies();
    }

    /// Pages that were evicted without a copy, which the next step may write over.
    pub(crate) fn take_evicted(&mut self) -> Vec<Unkept> {
        self.pages.take_evicted()
    }

    /// Whether there may be pages without a copy.
    pub(crate) fn has_unkept(&self) -> bool {
        self.pages.has_unkept()
    }

    /// At most so many pages without a copy.
    pub(crate) fn take_unkept(&mut self, most: usize) -> Vec<Unkept> {
        self.pages.take_unkept(most)
    }

    /// Whether another choice of the same request is still computing the prompt they share.
    fn waits_for_leader(&self, sequence: &Sequence) -> bool {
        let Some(leader) = sequence.leader.and_then(|leader| self.sequences.get(leader)) else {
            return false;
        };
        leader.computed < (sequence.prompt_len() - 1) / PAGE_TOKENS * PAGE_TOKENS
    }

    /// Takes pages from the last in line behind `id`. `false`: nothing more can be freed for this step.
    fn make_room(&mut self, id: SequenceId, step: &StepDraft) -> bool {
        let line = self.sequence(id).line;
        self.unseat_one(step, |sequence| (sequence.line, sequence.id) > (line, id)).is_some()
    }

    /// Takes the seat of the last in line whose priority is lower than that of `id`, or whose owner has more than its
    /// part while that of `id` has less.
    fn unseat_for(&mut self, id: SequenceId, parts: &mut Parts, step: &StepDraft) -> bool {
        let sequence = self.sequence(id);
        let (line, priority, owner) = (sequence.line, sequence.request.priority, &sequence.request.owner);
        let owner = owner.clone();
        let left = self
            .unseat_one(step, |other| other.request.priority > priority && other.line > line)
            .or_else(|| self.unseat_one(step, |other| parts.has_less_than(&owner, &other.request.owner)));
        left.map(|owner| parts.leaves(&owner)).is_some()
    }

    /// Unseats the last in line for which `behind` holds and that no step names; whose it was. Sequences in flight can
    /// only be marked: their pages return when their step is collected, so one mark a step is enough.
    fn unseat_one(&mut self, step: &StepDraft, behind: impl Fn(&Sequence) -> bool) -> Option<Owner> {
        let mut mark = None;
        let mut victim = None;
        for &(_, id) in self.seated.iter().rev() {
            let sequence = self.sequence(id);
            if !behind(sequence) {
                continue;
            }
            if sequence.leave.is_some() {
                // Room is on its way already.
                return None;
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
            return Some(self.sequence(id).request.owner.clone());
        }
        if let Some(id) = mark {
            self.sequences.get_mut(id).expect("seated").leave = Some(Leave::Preempted);
        }
        None
    }

    /// Takes the seat; the sequence waits at its old place in line and computes again what nobody kept.
    fn preempt(&mut self, id: SequenceId) {
        self.preemptions += 1;
        let sequence = self.sequences.get_mut(id).expect("seated");
        assert_eq!(sequence.steps_in_flight, 0, "pages in flight stay");
        (sequence.launched, sequence.computed, sequence.leave) = (0, 0, None);
        sequence.restoring = Restoring::Unknown;
        let line = sequence.line;
        self.unseat(id);
        self.waiting.insert((line, id));
    }

    /// Returns slot and pages of a seated sequence.
    fn unseat(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(id).expect("known");
        let Some(Seat { slot, tables }) = sequence.seat.take() else { return };
        self.seated.remove(&(sequence.line, id));
        self.slots_free.push(slot);
        self.pages.release(tables);
    }

    /// A step that named this sequence was collected: its positions are computed, those of drafts excepted. `true` when
    /// the sequence gives up its seat once the step's tokens are taken.
    pub(crate) fn collected(&mut self, row: &Scheduled) -> bool {
        let sequence = self.sequences.get_mut(row.id).expect("kept while in flight");
        sequence.steps_in_flight -= 1;
        sequence.sampled_ahead -= usize::from(row.samples > 0);
        if sequence.leave == Some(Leave::Ended) {
            return true;
        }
        let leaves = sequence.leave.is_some();
        let prompt_len = sequence.prompt_len();
        self.prompt_tokens += (row.end.min(prompt_len) - sequence.computed.min(prompt_len)) as u64;
        sequence.scored = sequence.scored.map(|scored| scored.max(row.scores().end));
        computed(sequence, row.end - row.drafts(), &mut self.pages);
        leaves
    }

    /// The drafts of a collected row are verified: those that became tokens are computed, the others never were.
    pub(crate) fn verified(&mut self, row: &Scheduled) {
        let Some(sequence) = self.sequences.get_mut(row.id).filter(|sequence| !sequence.has_ended()) else {
            return;
        };
        // Behind a wrong guess a form may have forced tokens that nobody computed.
        let right = row.end - row.drafts() + sequence.draft.right;
        sequence.draft.launch(0);
        sequence.launched = right;
        computed(sequence, right, &mut self.pages);
    }

    /// Lets a sequence guess what comes next.
    pub(crate) fn propose(&mut self, id: SequenceId) {
        if self.speculator.proposes(self.seated.len())
            && let Some(sequence) = self.sequences.get_mut(id)
        {
            self.speculator.propose(sequence);
        }
    }

    /// A step of this many tokens took this long.
    pub(crate) fn observe(&mut self, tokens: usize, seconds: f64) {
        self.speculator.observe(tokens, seconds);
    }

    /// What steps of the model that drafts take.
    pub(crate) fn observe_model(&mut self, pace: Option<(f64, f64)>) {
        self.model_pace = pace;
    }

    /// A step that named this sequence was lost.
    pub(crate) fn dropped(&mut self, row: &Scheduled) {
        let sequence = self.sequences.get_mut(row.id).expect("kept while in flight");
        sequence.steps_in_flight -= 1;
        sequence.sampled_ahead -= usize::from(row.samples > 0);
        sequence.draft.launch(0);
        self.settle(row.id);
    }

    /// The ticket of a sequence that has its first seat.
    pub(crate) fn take_ticket(&mut self, id: SequenceId) -> Option<Ticket> {
        self.sequences.get_mut(id).expect("seated").ticket.take()
    }

    /// The sequence has had its last event: everything it holds returns, now or when its last step is collected.
    pub(crate) fn end(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get_mut(id) else { return };
        if self.drafts_by_model && sequence.generated() > 0 {
            self.speculator.ended(&sequence.draft);
        }
        sequence.leave = Some(Leave::Ended);
        self.settle(id);
    }

    /// Carries out a pending leave once no step names the sequence.
    pub(crate) fn settle(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get(id) else { return };
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
                self.sequences.remove(id);
            }
        }
    }

    /// A sequence that has not had its last event.
    pub(crate) fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(id).filter(|sequence| !sequence.has_ended())
    }

    /// The same, to append to.
    pub(crate) fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.sequences.get_mut(id).filter(|sequence| !sequence.has_ended())
    }

    /// All sequences that have not had their last event.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Sequence> {
        self.sequences.values().filter(|sequence| !sequence.has_ended())
    }

    /// Those that have not ended, and those that wait for their last step.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Sequence> {
        self.sequences.values()
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

    pub(crate) fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens
    }

    pub(crate) fn page_counts(&self) -> Vec<PageCounts> {
        self.pages.counts()
    }

    /// Every page and every request, for people.
    pub(crate) fn picture(&self) -> Picture {
        let progress = |id: SequenceId| {
            let sequence = self.sequence(id);
            Progress {
                id: id.data().as_ffi(),
                owner: sequence.request.owner.clone(),
                running: sequence.seat.is_some(),
                prompt_tokens: sequence.prompt_len(),
                cached_tokens: sequence.cached_tokens.unwrap_or(0),
                computed_tokens: sequence.computed,
                tokens: sequence.generated(),
                tokens_max: sequence.request.max_tokens,
            }
        };
        let everybody = self.seated.iter().chain(&self.waiting).map(|&(_, id)| id);
        Picture { pages: self.pages.uses(), requests: everybody.take(REQUESTS_MAX).map(progress).collect() }
    }

    /// Checks the books; for tests and for an idle engine.
    pub(crate) fn assert_consistent(&self) {
        self.pages.assert_consistent();
        assert_eq!(self.sequences.len(), self.seated.len() + self.waiting.len(), "everybody sits or waits");
        assert_eq!(self.limits.slots, self.slots_free.len() + self.seated.len(), "a slot was lost");
    }

    fn sequence(&self, id: SequenceId) -> &Sequence {
        self.sequences.get(id).expect("listed sequences exist")
    }
}

/// A step being put together.
struct StepDraft {
    batch: Batch,
    rows: Vec<Scheduled>,
    tokens_left: usize,
    wanted_left: usize,
    /// Tokens that it can have at all, whatever the budget.
    tokens_max: usize,
    computed: Sequences,
}

impl StepDraft {
    /// How many of the sequence's missing positions still fit.
    fn room(&self, sequence: &Sequence) -> usize {
        let start = sequence.launched;
        let missing = sequence.target() - start;
        if self.computed.whole && (missing > self.tokens_left || self.wanted_left == 0) {
            return 0;
        }
        let len = missing.min(self.tokens_left);
        let unscored = sequence.unscored(start);
        if unscored.start < unscored.end.min(start + len) {
            // Every position from the first that has to be told wants logits.
            return len.min(unscored.start - start + self.wanted_left);
        }
        // Without a logits row left, all but the last position can still be computed.
        let last = self.wanted_left == 0 && sequence.samples_at(start + len);
        let len = if len > 0 && last { len - 1 } else { len };
        // What cannot be cut may take more than the budget, but no more than a step holds.
        let uncut =
            sequence.request.uncut(start, len, missing.min(self.tokens_max - self.batch.tokens.len()));
        let samples = uncut > len && sequence.samples_at(start + uncut);
        if samples && self.wanted_left == 0 { 0 } else { uncut }
    }

    fn names(&self, id: SequenceId) -> bool {
        self.rows.iter().any(|row| row.id == id)
    }
}

/// The keys and values of this many positions are there.
fn computed(sequence: &mut Sequence, positions: usize, pages: &mut Pages) {
    sequence.computed = positions;
    let seat = sequence.seat.as_mut().expect("kept while in flight");
    let units = Units { tokens: &sequence.tokens[..positions], pieces: &sequence.request.pieces };
    pages.commit(&mut seat.tables, units);
}

/// Writes the next `len` positions of a seated sequence, and `drafts` guessed ones, into the step.
fn place(sequence: &mut Sequence, len: usize, drafts: usize, step: &mut StepDraft) {
    let id = sequence.id;
    let slot = sequence.seat.as_ref().expect("seated").slot;
    let (start, known_end) = (sequence.launched, sequence.launched + len);
    let end = known_end + drafts;
    let samples = if sequence.samples_at(known_end) { 1 + drafts } else { 0 };
    let unscored = sequence.unscored(start);
    let scores_end = unscored.end.min(end);
    let wanted_from = if unscored.start < scores_end { unscored.start } else { end - samples };
    let scheduled =
        Scheduled { id, starts: sequence.ticket.is_some(), slot, end, wanted_from, scores_end, samples };

    let known = &sequence.tokens[start.min(sequence.tokens.len())..known_end.min(sequence.tokens.len())];
    let ahead = len - known.len();
    assert!(ahead <= 1, "only the newest token may still be on the device");
    assert!(ahead == 0 || drafts == 0, "drafts follow a known token");
    sequence.draft.launch(drafts);
    let tables = &mut sequence.seat.as_mut().expect("seated").tables;
    let states = tables.states(start, end);
    let row = Row {
        slot,
        start: small(start),
        len: small(end - start),
        // Not copied: they come back in `take_back`.
        pages: tables.lend(),
        wanted: small(scheduled.wanted()),
    };
    if !states.is_empty() {
        step.batch.states.push(states);
    }
    let first = step.batch.tokens.len();
    step.batch.push(row, known.iter().copied().map(Token::Known));
    place_given(&sequence.request.pieces, start..start + known.len(), first, &mut step.batch);
    let request = &sequence.request;
    if !request.pieces.is_empty() {
        step.batch.positions.truncate(first);
        step.batch.positions.extend(request.rotations(0, start..end));
    }
    for (section, rotations) in step.batch.sections.iter_mut().enumerate() {
        rotations.extend(request.rotations(section + 1, start..end));
    }
    if let Some(second) = sequence.request.second {
        let first = step.batch.positions.len() - (end - start);
        let positions = step.batch.positions[first..].iter_mut().zip(start..);
        let second = positions.filter(|(_, place)| *place >= second);
        second.for_each(|(position, _)| *position += step.computed.pairs);
    }
    step.batch.adapters.push(sequence.request.adapter);
    step.batch.tokens.extend(sequence.draft.launched().iter().copied().map(Token::Known));
    step.batch.tokens.extend((ahead > 0).then_some(Token::Sampled(slot)));
    step.tokens_left = step.tokens_left.saturating_sub(end - start);
    step.wanted_left -= scheduled.wanted();
    step.rows.push(scheduled);
    sequence.launched = end;
    sequence.steps_in_flight += 1;
    sequence.sampled_ahead += usize::from(samples > 0);
}

/// Puts the rows of given content in the place of the tokens from `first` on, which are read at `positions`.
fn place_given(pieces: &[Piece], positions: Range<usize>, first: usize, batch: &mut Batch) {
    for piece in pieces {
        let own = piece.positions();
        for position in own.start.max(positions.start)..own.end.min(positions.end) {
            batch.given.columns = piece.columns;
            batch.tokens[first + position - positions.start] = Token::Given(small(batch.given.rows()));
            batch.given.values.extend_from_slice(piece.row(position));
        }
    }
}

fn small(value: usize) -> u32 {
    u32::try_from(value).expect("positions are bounded by the context")
}
