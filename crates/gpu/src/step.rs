//! A step's slot: what varies from batch to batch, in one piece of device memory that one copy fills.
//!
//! Kernels read counts, tokens, positions and page tables from it, so that a recorded graph computes whatever step its
//! slot holds. Each array has its place, whatever else is in the batches that a recording is for: a kernel needs one
//! load to reach it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use fornax_compute::{Batch, Error, PAGE_TOKENS, PageId, Purpose, Row, RowState, Rows, Sampled, Token};

use crate::CudaOptions;
use crate::abi::{Constant, Layout, layout};
use crate::arena::{Arena, Piece};
use crate::driver::{Device, Event, Pinned};
use crate::memory::int;

/// Words in front of the arrays: what is counted.
const HEADER_WORDS: usize = 16;
/// Arrays of a word for each token, in the order in which they lie, and how many there are in front of the page tables.
const IDS: usize = 0;
const POSITIONS: usize = 1;
const PLACES: usize = 2;
const WANTED: usize = 3;
const FIRSTS: usize = 4;
const LASTS: usize = 5;
const ADAPTERS: usize = 6;
const ARRAYS: usize = 7;
/// Words of a checkpoint: after how many of its row's tokens, and in which state (`SAVE_WORDS` of recurrence.cu).
const SAVE_WORDS: usize = 2;

/// `RowState` of recurrence.cu: what a row does with its state in one group of states. They lie behind the tables' places,
/// group after group, and checkpoints behind the tables.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct DeviceRowState {
    first: i32,
    tokens: i32,
    from: i32,
    to: i32,
    saves: i32,
    count: i32,
}

/// Words of one.
const STATE_WORDS: usize = size_of::<DeviceRowState>() / size_of::<i32>();

/// `Step` of prelude.cuh: where a slot's arrays lie. It follows from the slot and `stride`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct DeviceStep {
    counts: u64,
    ids: u64,
    positions: u64,
    places: u64,
    wanted: u64,
    firsts: u64,
    lasts: u64,
    adapters: u64,
    tables: u64,
    stride: i32,
    /// Counts that the host knows; negative where a recorded step may have others.
    pub(crate) known: [i32; 2],
    pad: i32,
}

/// Words from one array to the next for this many tokens: a short step has a short copy. All steps of one recording
/// have the same stride.
fn stride(tokens: usize, tokens_max: usize) -> usize {
    tokens.next_power_of_two().min(tokens_max)
}

/// Where an array begins, in words.
fn array(index: usize, stride: usize) -> usize {
    HEADER_WORDS + index * stride
}

impl DeviceStep {
    fn new(start: u64, stride: usize) -> DeviceStep {
        let array = |index: usize| start + (array(index, stride) * 4) as u64;
        DeviceStep {
            counts: start,
            ids: array(IDS),
            positions: array(POSITIONS),
            places: array(PLACES),
            wanted: array(WANTED),
            firsts: array(FIRSTS),
            lasts: array(LASTS),
            adapters: array(ADAPTERS),
            tables: array(ARRAYS),
            stride: int(stride),
            known: [-1; 2],
            pad: 0,
        }
    }
}
/// The longest grammar mask that stays on the device: a vocabulary of 262,144.
pub(crate) const MASK_BYTES: usize = 32 << 10;

/// The most tokens that `sample.cu` tells apart.
pub(crate) const VOCAB_MAX: u32 = 1 << 18;
/// Bytes that `sample.cu` keeps for the stretches of a row: 64 stretches, 32 bytes each.
pub(crate) const STRETCHES_BYTES: usize = 64 * 32;
/// Changes to single logits that a step has room for.
pub(crate) const CHANGES_MAX: usize = 1 << 15;

/// A row as `sample.cu` takes it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct DeviceRow {
    pub(crate) wanted: i32,
    pub(crate) slot: i32,
    pub(crate) vocab: i32,
    pub(crate) mask_words: i32,
    pub(crate) mask: u64,
    pub(crate) random: u64,
    pub(crate) top_p: f64,
    pub(crate) log_min_p: f64,
    /// 0 is greedy.
    pub(crate) halvings: f32,
    pub(crate) top_k: i32,
    /// The range of its changes.
    pub(crate) changes: [i32; 2],
    /// Whether its log-probability is wanted.
    pub(crate) logprob: i32,
    pub(crate) pad: i32,
}

/// A change to one logit as `sample.cu` takes it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct DeviceChange {
    pub(crate) token: u32,
    pub(crate) kind: i32,
    /// Used by the device alone.
    pub(crate) before: [u32; 2],
    pub(crate) values: [f64; 2],
}

/// Bytes of `Bins` of sample.cu: a 64-bit total and a count for each, the total of all, and the cut.
pub(crate) const BINS_BYTES: usize = 1024 * 12 + 16;

/// What `sample.cu` leaves for the host.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Chosen {
    pub(crate) token: i32,
    pub(crate) fault: i32,
    pub(crate) logprob: f32,
    pad: i32,
}

pub(crate) const LAYOUTS: &[Layout] = &[
    layout!(DeviceStep, "Step" in "prelude.cuh", {
        counts, ids, positions, places, wanted, firsts, lasts, adapters, tables, stride, known: known_tokens known_wanted, pad,
    }),
    layout!(DeviceRowState, "RowState" in "recurrence.cu", { first, tokens, from, to, saves, count }),
    layout!(DeviceRow, "Row" in "sample.cu", {
        wanted, slot, vocab, mask_words, mask, random, top_p, log_min_p, halvings, top_k, changes: changes changes_end, logprob, pad,
    }),
    layout!(DeviceChange, "Change" in "sample.cu", { token, kind, before: before pad, values: a b }),
    layout!(Chosen, "Chosen" in "sample.cu", { token, fault, logprob, pad }),
];
pub(crate) const CONSTANTS: &[Constant] = &[
    Constant::new("recurrence.cu", "SAVE_WORDS", SAVE_WORDS),
    Constant::new("sample.cu", "1 << ID_BITS", VOCAB_MAX as usize),
    Constant::new("sample.cu", "STRETCHES * sizeof(Stretch)", STRETCHES_BYTES),
    Constant::new("sample.cu", "sizeof(Bins)", BINS_BYTES),
];

/// Bytes of each device piece of one slot: the batch; rows to choose, with their masks and changes; stretches.
pub(crate) fn slot_bytes(options: &CudaOptions) -> [u64; 3] {
    let words = (options.tokens_max as u64).saturating_mul(ARRAYS as u64).saturating_add(HEADER_WORDS as u64);
    let words = words.saturating_add(options.pages_max as u64);
    let rows = |bytes: usize| (options.slots as u64).saturating_mul(bytes as u64);
    [
        words.saturating_mul(4),
        rows(size_of::<DeviceRow>() + MASK_BYTES)
            .saturating_add((CHANGES_MAX * size_of::<DeviceChange>()) as u64),
        rows(STRETCHES_BYTES),
    ]
}

/// The preallocated slots of one backend.
pub(crate) struct Steps {
    free: RefCell<Vec<Slot>>,
    count: usize,
    tokens_max: usize,
    slots: usize,
    pages_max: usize,
    device: Rc<Device>,
}

/// One of the preallocated slots. Dropping the step gives it back.
pub struct Step {
    /// `Some` until the drop.
    slot: Option<Slot>,
    steps: Rc<Steps>,
}

/// A slot's memory, and what the host knows of its batch.
pub(crate) struct Slot {
    /// Which slot it is: recorded graphs belong to one.
    pub(crate) index: usize,
    _batch: Piece,
    batch: u64,
    arrays: DeviceStep,
    pub(crate) rows: Piece,
    pub(crate) stretches: Piece,
    staged: Pinned,
    pub(crate) staged_rows: Pinned,
    /// Where the device writes its choices: a copy after the step would keep the next step waiting.
    pub(crate) chosen: Pinned,
    /// Recorded after everything that was launched for this step.
    pub(crate) done: Event,
    /// Whether it comes after all of the step: after a recorded step, or a choice of tokens. Otherwise other operations
    /// may have followed.
    pub(crate) behind: Cell<bool>,
    pub(crate) tokens: usize,
    pub(crate) wanted: usize,
    /// Whether every row is one token.
    pub(crate) decode: bool,
    /// Where single tokens of sequences follow each other, if not every row is one.
    pub(crate) singles: Vec<Run>,
    /// The largest known token, and the slots whose sampled token is used.
    pub(crate) token_max: Option<u32>,
    pub(crate) sampled_slots: Vec<u32>,
    /// The largest absolute position.
    pub(crate) place_max: usize,
    /// The largest rotary position.
    position_max: u32,
    /// Groups of pages; those of states come behind them.
    pub(crate) groups: usize,
    page_max: Vec<u32>,
    /// The largest state that is named in each group of states.
    state_max: Vec<u32>,
    /// Rows that there is room for in a group of states.
    state_rows: usize,
    /// Sequences in the step, and tokens of the longest.
    pub(crate) row_count: usize,
    pub(crate) len_max: usize,
    /// The largest number of an adapter, if a sequence uses one.
    pub(crate) adapter_max: Option<u32>,
    pub(crate) results: Vec<Outcome>,
    /// How many changes to logits it holds, and words of masks.
    pub(crate) changes: usize,
    pub(crate) mask_words: usize,
    seen: Vec<u32>,
}

/// Tokens that follow each other in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: usize,
    pub(crate) tokens: usize,
    /// Places of the longest of their sequences.
    pub(crate) places: usize,
}

/// A sampled row: known to the host, or on its way from the device.
pub(crate) enum Outcome {
    Known(Sampled),
    /// Its index among what the device chose, whether a log-probability was asked for, and what mirostat's state was.
    Device {
        index: usize,
        logprob: bool,
        mu: f32,
    },
}

impl Steps {
    pub(crate) fn new(
        device: &Rc<Device>,
        arena: &Rc<Arena>,
        options: &CudaOptions,
    ) -> Result<Rc<Steps>, Error> {
        let count = options.depth.saturating_add(1);
        let sizes = slot_bytes(options);
        let mut free = Vec::new();
        for index in 0..count {
            let piece = |bytes| arena.cut(Purpose::Workspace, bytes);
            let pinned = |bytes: u64| Pinned::new(device, usize::try_from(bytes).unwrap_or(usize::MAX));
            let batch = piece(sizes[0])?;
            free.push(Slot {
                index,
                batch: batch.pointer(),
                arrays: DeviceStep::new(batch.pointer(), options.tokens_max),
                _batch: batch,
                rows: piece(sizes[1])?,
                stretches: piece(sizes[2])?,
                staged: pinned(sizes[0])?,
                staged_rows: pinned(sizes[1])?,
                chosen: pinned((options.slots as u64).saturating_mul(size_of::<Chosen>() as u64))?,
                done: Event::new(device)?,
                behind: Cell::new(false),
                tokens: 0,
                wanted: 0,
                decode: false,
                singles: Vec::new(),
                token_max: None,
                sampled_slots: Vec::new(),
                place_max: 0,
                position_max: 0,
                groups: 0,
                page_max: Vec::new(),
                state_max: Vec::new(),
                state_rows: 0,
                row_count: 0,
                len_max: 0,
                adapter_max: None,
                results: Vec::new(),
                changes: 0,
                mask_words: 0,
                seen: Vec::new(),
            });
        }
        Ok(Rc::new(Steps {
            free: RefCell::new(free),
            count,
            tokens_max: options.tokens_max,
            slots: options.slots,
            pages_max: options.pages_max,
            device: Rc::clone(device),
        }))
    }

    /// Checks the batch and sends it to a free slot.
    pub(crate) fn begin(self: &Rc<Self>, batch: &Batch) -> Result<Step, Error> {
        let slot = self.free.borrow_mut().pop().ok_or(Error::StepsInFlight { slots: self.count })?;
        let mut step = Step { slot: Some(slot), steps: Rc::clone(self) };
        let slot = step.slot_mut();
        batch.check(self.tokens_max, self.slots, &mut slot.seen)?;
        // A step that was dropped before it was finished may still be reading what was staged for it.
        slot.done.wait("begin")?;
        let words = slot.fill(batch, self)?;
        self.device.write_pinned("begin", slot.batch, slot.staged.room().part(0, words * 4))?;
        slot.done.record()?;
        slot.behind.set(false);
        Ok(step)
    }
}

impl Slot {
    /// Lays out the batch; how many words it takes.
    fn fill(&mut self, batch: &Batch, steps: &Steps) -> Result<usize, Error> {
        self.note(batch);
        let stride = stride(self.tokens, steps.tokens_max);
        self.state_rows = stride.min(steps.slots);
        self.arrays = DeviceStep::new(self.batch, stride);
        self.check_room(batch, steps)?;
        let tables = array(ARRAYS, stride);
        let states = tables + self.groups * stride;
        let mut words = Words {
            stride,
            tables,
            states,
            wanted_next: array(WANTED, stride),
            next: states + self.state_max.len() * self.state_rows * STATE_WORDS,
            words: bytemuck::cast_slice_mut(self.staged.bytes_mut()),
        };
        words.write_tokens(batch);
        let mut first = 0;
        for (index, row) in batch.rows.iter().enumerate() {
            words.write_row(first, row, batch.adapters.get(index).copied().flatten());
            words.write_pages(first, row);
            for (group, state) in batch.states.get(index).into_iter().flatten().enumerate() {
                words.write_state(first, row, state, group * self.state_rows + index);
            }
            first += row.len as usize;
        }
        Ok(words.next)
    }

    /// Notes what the host has to know of the batch.
    fn note(&mut self, batch: &Batch) {
        self.tokens = batch.tokens.len();
        self.wanted = batch.wanted();
        self.groups = batch.rows.first().map_or(0, |row| row.pages.len());
        self.row_count = batch.rows.len();
        self.len_max = batch.rows.iter().map(|row| row.len as usize).max().unwrap_or(0);
        self.decode = batch.rows.iter().all(|row| row.len == 1);
        self.singles.clear();
        if !self.decode {
            note_singles(batch, &mut self.singles);
        }
        self.token_max = None;
        self.sampled_slots.clear();
        for token in &batch.tokens {
            match *token {
                Token::Known(id) => self.token_max = self.token_max.max(Some(id)),
                Token::Sampled(slot) => self.sampled_slots.push(slot),
                Token::Given(_) => unreachable!("refused before"),
            }
        }
        self.place_max = batch.rows.iter().map(|row| (row.start + row.len - 1) as usize).max().unwrap_or(0);
        self.position_max = batch.positions.iter().copied().max().unwrap_or(0);
        self.adapter_max = batch.adapters.iter().copied().flatten().max();
        self.page_max.clear();
        self.page_max.resize(self.groups, 0);
        for row in &batch.rows {
            for (max, table) in self.page_max.iter_mut().zip(&row.pages) {
                *max = table[..pages_read(row)].iter().fold(*max, |max, page| max.max(page.0));
            }
        }
        self.state_max.clear();
        self.state_max.resize(batch.states.first().map_or(0, Vec::len), 0);
        for states in &batch.states {
            for (max, state) in self.state_max.iter_mut().zip(states) {
                let named = state.saves.iter().map(|(_, page)| *page).chain(state.from).chain([state.to]);
                *max = named.fold(*max, |max, page| max.max(page.0));
            }
        }
        self.results.clear();
        self.changes = 0;
        self.mask_words = 0;
    }

    /// Refuses a batch whose page tables and states do not fit behind the arrays.
    fn check_room(&self, batch: &Batch, steps: &Steps) -> Result<(), Error> {
        let pages = batch.rows.iter().map(|row| pages_read(row) * self.groups).sum::<usize>();
        let saves = batch.states.iter().flatten().map(|state| state.saves.len()).sum::<usize>();
        let states = self.state_max.len() * steps.tokens_max.min(steps.slots) * STATE_WORDS;
        let got = pages + self.groups * steps.tokens_max + states + saves * SAVE_WORDS;
        if got > steps.pages_max {
            return Err(Error::BatchLimit { what: "pages", got, limit: steps.pages_max });
        }
        Ok(())
    }

    /// Where its arrays lie, as kernels take it.
    pub(crate) fn device_step(&self) -> DeviceStep {
        self.arrays
    }

    /// How many rows an operation runs over.
    pub(crate) fn count(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.tokens,
            Rows::Wanted => self.wanted,
        }
    }

    /// Checks that every page named for `group` is in a pool of `pages` pages.
    pub(crate) fn check_pages(&self, group: usize, pages: usize) -> Result<(), Error> {
        if self.tokens == 0 {
            return Ok(());
        }
        match self.page_max.get(group) {
            None => {
                Err(Error::BatchShape { what: "page tables of a row", got: self.groups, wanted: group + 1 })
            }
            Some(&page) if page as usize >= pages => {
                Err(Error::BatchLimit { what: "page", got: page as usize, limit: pages.saturating_sub(1) })
            }
            Some(_) => Ok(()),
        }
    }

    /// Where the rows of a group of states begin, counted from the tables.
    pub(crate) fn states_at(&self, group: usize) -> usize {
        self.groups * self.arrays.stride.cast_unsigned() as usize + group * self.state_rows * STATE_WORDS
    }

    /// Checks that `group` is one of states behind `groups` of pages, and that every state named for it is in a pool of
    /// `pages` states.
    pub(crate) fn check_states(&self, group: usize, groups: usize, pages: usize) -> Result<(), Error> {
        if self.groups != groups {
            return Err(Error::BatchShape { what: "page tables of a row", got: self.groups, wanted: groups });
        }
        let behind = group.checked_sub(groups).unwrap_or(usize::MAX);
        match self.state_max.get(behind) {
            None => {
                let (got, wanted) = (self.state_max.len(), behind.saturating_add(1));
                Err(Error::BatchShape { what: "states of a row", got, wanted })
            }
            Some(&state) if state as usize >= pages => {
                Err(Error::BatchLimit { what: "state", got: state as usize, limit: pages.saturating_sub(1) })
            }
            Some(_) => Ok(()),
        }
    }

    /// Checks that every token's position is in a table of `rows` rows.
    pub(crate) fn check_positions(&self, rows: usize) -> Result<(), Error> {
        let position = self.position_max as usize;
        if self.tokens > 0 && position >= rows {
            return Err(Error::BatchLimit { what: "position", got: position, limit: rows.saturating_sub(1) });
        }
        Ok(())
    }

    /// Checks that every adapter is one of `count`.
    pub(crate) fn check_adapters(&self, count: usize) -> Result<(), Error> {
        match self.adapter_max {
            Some(adapter) if adapter as usize >= count => Err(Error::BatchLimit {
                what: "adapter",
                got: adapter as usize,
                limit: count.saturating_sub(1),
            }),
            _ => Ok(()),
        }
    }

    /// Checks that every known token is in a table of `rows` rows.
    pub(crate) fn check_tokens(&self, rows: usize) -> Result<(), Error> {
        match self.token_max {
            Some(token) if token as usize >= rows => {
                Err(Error::BatchLimit { what: "token", got: token as usize, limit: rows.saturating_sub(1) })
            }
            _ => Ok(()),
        }
    }
}

/// Pages of a group that a row's tokens lie in or look at.
fn pages_read(row: &Row) -> usize {
    (row.start as usize + row.len as usize).div_ceil(PAGE_TOKENS)
}

/// Finds the runs of rows of one token.
fn note_singles(batch: &Batch, singles: &mut Vec<Run>) {
    let mut first = 0;
    for row in &batch.rows {
        if row.len == 1 {
            let places = row.start as usize + 1;
            match singles.last_mut() {
                Some(run) if run.first + run.tokens == first => {
                    run.tokens += 1;
                    run.places = run.places.max(places);
                }
                _ => singles.push(Run { first, tokens: 1, places }),
            }
        }
        first += row.len as usize;
    }
}

/// A slot's words while a batch is laid out in them. Rows are named by their first token.
struct Words<'a> {
    words: &'a mut [i32],
    stride: usize,
    /// Where each token's page tables are named, group after group.
    tables: usize,
    /// Where rows' states are described.
    states: usize,
    /// Where the next wanted token is named.
    wanted_next: usize,
    /// Where the next page table or list of checkpoints begins.
    next: usize,
}

impl Words<'_> {
    /// The words of the tokens from `first` on in one of the arrays.
    fn array(&mut self, index: usize, first: usize) -> &mut [i32] {
        &mut self.words[array(index, self.stride) + first..]
    }

    fn write_tokens(&mut self, batch: &Batch) {
        self.words[0] = int(batch.tokens.len());
        self.words[1] = int(batch.wanted());
        for (word, token) in self.array(IDS, 0).iter_mut().zip(&batch.tokens) {
            *word = match *token {
                // Ids beyond any table are refused by the operation that looks them up.
                Token::Known(id) => i32::try_from(id).unwrap_or(i32::MAX),
                Token::Sampled(slot) => -1 - slot.cast_signed(),
                Token::Given(_) => unreachable!("refused before"),
            };
        }
        for (word, position) in self.array(POSITIONS, 0).iter_mut().zip(&batch.positions) {
            *word = position.cast_signed();
        }
    }

    fn write_row(&mut self, first: usize, row: &Row, adapter: Option<u32>) {
        let len = row.len as usize;
        for (word, place) in self.array(PLACES, first)[..len].iter_mut().zip(row.start..) {
            *word = place.cast_signed();
        }
        self.array(FIRSTS, first)[..len].fill(int(first));
        self.array(LASTS, first)[..len].fill(int(first + len - 1));
        self.array(ADAPTERS, first)[..len].fill(adapter.map_or(-1, |adapter| int(adapter as usize)));
        for token in first + len - row.wanted as usize..first + len {
            self.words[self.wanted_next] = int(token);
            self.wanted_next += 1;
        }
    }

    /// Writes a row's page tables, and for each of its tokens where they are.
    fn write_pages(&mut self, first: usize, row: &Row) {
        for (group, table) in row.pages.iter().enumerate() {
            let named = self.tables + group * self.stride + first;
            self.words[named..][..row.len as usize].fill(int(self.next - self.tables));
            let pages = &table[..pages_read(row)];
            for (word, page) in self.words[self.next..].iter_mut().zip(pages) {
                *word = page.0.cast_signed();
            }
            self.next += pages.len();
        }
    }

    /// Writes what a row does with its state in one group, as the description `index`, and its checkpoints.
    fn write_state(&mut self, first: usize, row: &Row, state: &RowState, index: usize) {
        let page = |page: PageId| page.0.cast_signed();
        let described = DeviceRowState {
            first: int(first),
            tokens: int(row.len as usize),
            from: state.from.map_or(-1, page),
            to: page(state.to),
            saves: int(self.next - self.tables),
            count: int(state.saves.len()),
        };
        let words = &mut self.words[self.states + index * STATE_WORDS..][..STATE_WORDS];
        words.copy_from_slice(bytemuck::cast_slice(std::slice::from_ref(&described)));
        for &(end, to) in &state.saves {
            let save = [(end - row.start).cast_signed(), page(to)];
            self.words[self.next..][..SAVE_WORDS].copy_from_slice(&save);
            self.next += SAVE_WORDS;
        }
    }
}

impl Step {
    pub(crate) fn slot(&self) -> &Slot {
        self.slot.as_ref().expect("held until the drop")
    }

    pub(crate) fn slot_mut(&mut self) -> &mut Slot {
        self.slot.as_mut().expect("held until the drop")
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        self.steps.free.borrow_mut().extend(self.slot.take());
    }
}

#[cfg(test)]
mod tests {
    use fornax_compute::Backend;

    use super::*;
    use crate::Cuda;
    use crate::driver::fake;

    #[test]
    fn what_rows_do_with_their_states_lies_behind_the_places_of_their_tables() {
        fake::willing();
        let options = CudaOptions { tokens_max: 80, slots: 4, pages_max: 1 << 10, ..CudaOptions::default() };
        let cuda = Cuda::new(options).unwrap();
        let mut batch = Batch::default();
        for (slot, start, len) in [(0, 32, 40), (1, 0, 1)] {
            let pages = vec![vec![PageId(1), PageId(2), PageId(3 + slot)]];
            batch.push(Row { slot, start, len, pages, wanted: 0 }, (0..len).map(Token::Known));
        }
        let state = |from: Option<u32>, to, saves: &[(u32, u32)]| {
            let saves = saves.iter().map(|&(end, page)| (end, PageId(page))).collect();
            RowState { from: from.map(PageId), to: PageId(to), saves }
        };
        batch.states = vec![
            vec![state(Some(5), 5, &[(64, 7), (72, 4)]), state(Some(1), 2, &[])],
            vec![state(None, 3, &[(1, 6)]), state(None, 9, &[])],
        ];
        let step = cuda.begin(&batch).unwrap();
        let slot = step.slot();
        let words: &[i32] = bytemuck::cast_slice(slot.staged.bytes());
        // 41 tokens: arrays of 64 words.
        let tables = &words[HEADER_WORDS + ARRAYS * 64..];
        assert_eq!([slot.states_at(0), slot.states_at(1)], [64, 64 + 4 * STATE_WORDS]);
        let row = |group, row: usize| {
            let words = &tables[slot.states_at(group) + row * STATE_WORDS..][..STATE_WORDS];
            let at = words[4].cast_unsigned() as usize;
            let saves = tables[at..at + words[5].cast_unsigned() as usize * SAVE_WORDS].to_vec();
            (words[..4].to_vec(), saves)
        };
        assert_eq!(row(0, 0), (vec![0, 40, 5, 5], vec![32, 7, 40, 4]));
        assert_eq!(row(0, 1), (vec![40, 1, -1, 3], vec![1, 6]));
        assert_eq!(row(1, 0), (vec![0, 40, 1, 2], vec![]));
        assert_eq!(row(1, 1), (vec![40, 1, -1, 9], vec![]));
        assert_eq!((slot.row_count, slot.len_max), (2, 40));
        let said = |checked: Result<(), Error>| checked.map_err(|error| error.to_string());
        assert_eq!(said(slot.check_states(1, 1, 8)), Ok(()));
        assert_eq!(said(slot.check_states(1, 1, 7)), Err("batch: state 7 beyond the limit 6".to_owned()));
        assert_eq!(said(slot.check_states(2, 1, 9)), Err("batch: state 9 beyond the limit 8".to_owned()));
        assert_eq!(said(slot.check_states(3, 1, 9)), Err("batch: states of a row: 2, wanted 3".to_owned()));
        assert_eq!(
            said(slot.check_states(2, 2, 9)),
            Err("batch: page tables of a row: 1, wanted 2".to_owned())
        );
    }

    #[test]
    fn arrays_of_few_tokens_lie_close_together_and_where_their_recording_wants_them() {
        assert_eq!([1, 2, 3, 400, 600].map(|tokens| stride(tokens, 600)), [1, 2, 4, 512, 600]);
        // A recording is for all steps whose tokens become the same power of two.
        for tokens in 1..=256usize {
            let recorded = stride(tokens.next_power_of_two(), 200);
            assert!(stride(tokens, 200) == recorded && recorded >= tokens.min(200), "{tokens}");
        }
        let (one, four) = (DeviceStep::new(4096, 1), DeviceStep::new(4096, 4));
        assert_eq!((one.ids, one.tables), (4096 + 64, 4096 + 64 + 7 * 4));
        assert_eq!((four.ids, four.tables, four.stride), (4096 + 64, 4096 + 64 + 7 * 16, 4));
    }
}
