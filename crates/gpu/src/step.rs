//! A step's slot: what varies from batch to batch, in one piece of device memory that one copy fills.
//!
//! Kernels read counts, tokens, positions and page tables from it, so that a recorded graph computes whatever step its
//! slot holds. The arrays lie one behind the other; the header says where.

use std::cell::RefCell;
use std::rc::Rc;

use fornax_compute::{Batch, Error, PAGE_TOKENS, Purpose, Rows, Sampled, Token};

use crate::CudaOptions;
use crate::arena::{Arena, Piece};
use crate::driver::{Device, Event, Pinned};

/// Words in front of the arrays: `Step` in prelude.cuh.
const HEADER_WORDS: usize = 16;
/// Stretches of the vocabulary that `sample.cu` scans at once.
pub(crate) const SCANS: usize = 32;
/// The longest grammar mask that stays on the device: a vocabulary of 262,144.
pub(crate) const MASK_BYTES: usize = 32 << 10;

/// A greedy row as `sample.cu` takes it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct GreedyRow {
    pub(crate) wanted: i32,
    pub(crate) slot: i32,
    pub(crate) vocab: i32,
    pub(crate) mask_words: i32,
    pub(crate) mask: u64,
}

/// What `sample.cu` leaves for the host.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Chosen {
    pub(crate) token: i32,
    pub(crate) fault: i32,
    pub(crate) logprob: f32,
    pad: i32,
}

/// Bytes of each device piece of one slot: the batch; greedy rows with their masks; scans; what was chosen.
pub(crate) fn slot_bytes(options: &CudaOptions) -> [u64; 4] {
    let words = (options.tokens_max as u64).saturating_mul(5).saturating_add(HEADER_WORDS as u64);
    let words = words.saturating_add(options.pages_max as u64);
    let rows = |bytes: usize| (options.slots as u64).saturating_mul(bytes as u64);
    [
        words.saturating_mul(4),
        rows(size_of::<GreedyRow>() + MASK_BYTES),
        rows(SCANS * 20),
        rows(size_of::<Chosen>()),
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

/// A slot's memory, and what the host knows of the batch in it.
pub(crate) struct Slot {
    /// Which slot it is: recorded graphs belong to one.
    pub(crate) index: usize,
    batch: Piece,
    pub(crate) greedy: Piece,
    pub(crate) scans: Piece,
    pub(crate) chosen: Piece,
    staged: Pinned,
    pub(crate) staged_greedy: Pinned,
    pub(crate) staged_chosen: Pinned,
    /// Behind the last thing that was launched for this step.
    pub(crate) done: Event,
    pub(crate) tokens: usize,
    pub(crate) wanted: usize,
    /// Whether every row is one token.
    pub(crate) decode: bool,
    /// The largest known token, and the slots whose sampled token is wanted.
    pub(crate) token_max: Option<u32>,
    pub(crate) sampled_slots: Vec<u32>,
    /// The largest absolute position.
    pub(crate) place_max: usize,
    groups: usize,
    page_max: Vec<u32>,
    pub(crate) results: Vec<Outcome>,
    seen: Vec<u32>,
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
            free.push(Slot {
                index,
                batch: piece(sizes[0])?,
                greedy: piece(sizes[1])?,
                scans: piece(sizes[2])?,
                chosen: piece(sizes[3])?,
                staged: pinned(sizes[0])?,
                staged_greedy: pinned(sizes[1])?,
                staged_chosen: pinned(sizes[3])?,
                done: Event::new(device)?,
                tokens: 0,
                wanted: 0,
                decode: false,
                token_max: None,
                sampled_slots: Vec::new(),
                place_max: 0,
                groups: 0,
                page_max: Vec::new(),
                results: Vec::new(),
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
        // A step that was dropped without being finished may still be reading what was staged for it.
        slot.done.wait("begin")?;
        let words = slot.fill(batch, self.pages_max)?;
        self.device.write_pinned("begin", slot.batch.pointer(), &slot.staged, 0, words * 4)?;
        slot.done.record()?;
        Ok(step)
    }
}

impl Slot {
    /// Lays the batch out; how many words it takes.
    fn fill(&mut self, batch: &Batch, pages_max: usize) -> Result<usize, Error> {
        let groups = batch.rows.first().map_or(0, |row| row.pages.len());
        let needed =
            |row: &fornax_compute::Row| (row.start as usize + row.len as usize).div_ceil(PAGE_TOKENS);
        let pages: usize =
            batch.rows.iter().map(|row| needed(row) * groups).sum::<usize>() + batch.rows.len() * groups;
        if pages > pages_max {
            return Err(Error::BatchLimit { what: "pages", got: pages, limit: pages_max });
        }
        let (tokens, wanted) = (batch.tokens.len(), batch.wanted());
        self.tokens = tokens;
        self.wanted = wanted;
        self.groups = groups;
        self.decode = batch.rows.iter().all(|row| row.len == 1);
        self.token_max = None;
        self.sampled_slots.clear();
        self.place_max = 0;
        self.page_max.clear();
        self.page_max.resize(groups, 0);
        self.results.clear();

        let starts: [usize; 7] = {
            let mut at = HEADER_WORDS;
            [tokens, tokens, tokens, tokens, wanted, batch.rows.len() * groups, 0].map(|words| {
                let start = at;
                at += words;
                start
            })
        };
        let [ids, positions, rows, places, wanted_at, tables, pages_at] = starts;
        let words: &mut [i32] = bytemuck::cast_slice_mut(self.staged.bytes_mut());
        let header = [tokens, wanted, batch.rows.len(), groups];
        for (word, value) in words.iter_mut().zip(header.into_iter().chain(starts)) {
            *word = crate::memory::int(value);
        }
        for (word, token) in words[ids..].iter_mut().zip(&batch.tokens) {
            *word = match *token {
                Token::Known(id) => {
                    self.token_max = self.token_max.max(Some(id));
                    // Ids beyond any table are refused by the operation that looks them up.
                    i32::try_from(id).unwrap_or(i32::MAX)
                }
                Token::Sampled(slot) => {
                    self.sampled_slots.push(slot);
                    -1 - slot.cast_signed()
                }
            };
        }
        for (word, position) in words[positions..].iter_mut().zip(&batch.positions) {
            *word = position.cast_signed();
        }
        let (mut first, mut wanted_next, mut page_next) = (0, wanted_at, pages_at);
        for (index, row) in batch.rows.iter().enumerate() {
            let len = row.len as usize;
            for token in 0..len {
                words[rows + first + token] = crate::memory::int(index);
                words[places + first + token] = (row.start + token as u32).cast_signed();
            }
            first += len;
            self.place_max = self.place_max.max(row.start as usize + len - 1);
            for token in first - row.wanted as usize..first {
                words[wanted_next] = crate::memory::int(token);
                wanted_next += 1;
            }
            for (group, table) in row.pages.iter().enumerate() {
                words[tables + index * groups + group] = crate::memory::int(page_next - pages_at);
                for page in &table[..needed(row)] {
                    words[page_next] = page.0.cast_signed();
                    page_next += 1;
                    self.page_max[group] = self.page_max[group].max(page.0);
                }
            }
        }
        Ok(page_next)
    }

    /// Where the batch lies on the device.
    pub(crate) fn pointer(&self) -> u64 {
        self.batch.pointer()
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
