//! A step's slot: what varies from batch to batch, checked once and kept flat.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::attention::UNIT_TOKENS;
use super::memory::{Counted, Ledger};
use crate::{
    Batch, Error, GivenRows, PAGE_TOKENS, PageId, Purpose, Rows, SampleFault, Sampled, Token, batch,
};

/// The preallocated slots of one backend, and how large a batch they hold.
pub(super) struct Steps {
    /// Slots that no step is using.
    free: RefCell<Vec<Slot>>,
    count: usize,
    tokens_max: usize,
    /// Sequence slots.
    slots: usize,
    _counted: Counted,
}

/// One of the preallocated slots. Dropping the step gives it back.
pub struct Step {
    /// `Some` until the drop.
    slot: Option<Slot>,
    steps: Rc<Steps>,
}

/// What a step holds, without what ties it to its backend's thread: operations share it among theirs.
///
/// The arrays keep their capacity from step to step. Page tables are the only ones whose size has no bound here; they
/// grow to the longest context once, at four bytes per page.
#[derive(Default)]
pub(super) struct Slot {
    tokens: Vec<Token>,
    positions: Vec<u32>,
    rows: Vec<StepRow>,
    /// By row; empty where none has one.
    adapters: Vec<Option<u32>>,
    /// Empty for text, so not counted: it grows to the most rows that a step was given.
    given: GivenRows,
    /// By token; empty where attention says it, as for text.
    lasts: Vec<u32>,
    /// By token the row that it is of; only where a row has an adapter.
    token_rows: Vec<u32>,
    /// The rows cut into what attention takes at once.
    units: Vec<Unit>,
    /// Token indices of the rows that want logits.
    wanted: Vec<u32>,
    /// All page tables: row after row, and within a row group after group.
    pages: Vec<PageId>,
    /// Where each table begins in `pages`: (rows, groups), and the end of the last.
    tables: Vec<u32>,
    groups: usize,
    /// The largest page number of each group.
    page_max: Vec<u32>,
    sampled: Vec<Sampled>,
    /// Scratch of the checks.
    seen: Vec<u32>,
}

/// One sequence's share of the step.
#[derive(Clone, Copy)]
pub(super) struct StepRow {
    /// Absolute position of the first token.
    pub(super) start: usize,
    /// Index of the first token in the step.
    pub(super) first: usize,
    pub(super) len: usize,
}

/// A few consecutive tokens of one row.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// Which row of the step.
    pub(super) row: usize,
    pub(super) tokens: StepRow,
}

/// Bytes of one slot: what `Slot` reserves for each token and each row.
pub(super) fn slot_bytes(tokens_max: usize, slots: usize) -> usize {
    let token_bytes = size_of::<Token>() + 3 * size_of::<u32>();
    let row_bytes = size_of::<StepRow>() + size_of::<Sampled>() + size_of::<u32>() + size_of::<Option<u32>>();
    let bytes = tokens_max.saturating_mul(token_bytes).saturating_add(slots.saturating_mul(row_bytes));
    bytes.saturating_add(units_max(tokens_max, slots).saturating_mul(size_of::<Unit>()))
}

/// A row's last unit may be short.
fn units_max(tokens_max: usize, slots: usize) -> usize {
    tokens_max.min((tokens_max / UNIT_TOKENS).saturating_add(slots))
}

impl Steps {
    pub(super) fn new(
        ledger: &Arc<Ledger>,
        count: usize,
        tokens_max: usize,
        slots: usize,
    ) -> Result<Rc<Steps>, Error> {
        let bytes = count.saturating_mul(slot_bytes(tokens_max, slots));
        let counted = ledger.count(Purpose::Workspace, bytes as u64)?;
        let free = (0..count).map(|_| Slot {
            tokens: Vec::with_capacity(tokens_max),
            positions: Vec::with_capacity(tokens_max),
            wanted: Vec::with_capacity(tokens_max),
            units: Vec::with_capacity(units_max(tokens_max, slots)),
            rows: Vec::with_capacity(slots),
            adapters: Vec::with_capacity(slots),
            token_rows: Vec::with_capacity(tokens_max),
            sampled: Vec::with_capacity(slots),
            seen: Vec::with_capacity(slots),
            ..Slot::default()
        });
        let free = RefCell::new(free.collect());
        Ok(Rc::new(Steps { free, count, tokens_max, slots, _counted: counted }))
    }

    /// Checks the batch and copies it into a free slot.
    pub(super) fn begin(self: &Rc<Self>, batch: &Batch) -> Result<Step, Error> {
        let slot = self.free.borrow_mut().pop().ok_or(Error::StepsInFlight { slots: self.count })?;
        let mut step = Step { slot: Some(slot), steps: Rc::clone(self) };
        batch.check(self.tokens_max, self.slots, &mut step.slot_mut().seen)?;
        step.slot_mut().fill(batch);
        Ok(step)
    }
}

impl Slot {
    fn fill(&mut self, batch: &Batch) {
        self.clear();
        self.tokens.extend_from_slice(&batch.tokens);
        self.positions.extend_from_slice(&batch.positions);
        self.given.columns = batch.given.columns;
        self.given.values.extend_from_slice(&batch.given.values);
        self.lasts.extend_from_slice(&batch.lasts);
        if batch.adapters.iter().any(Option::is_some) {
            self.adapters.extend_from_slice(&batch.adapters);
            let rows = batch.rows.iter().enumerate();
            self.token_rows.extend(rows.flat_map(|(at, row)| (0..row.len).map(move |_| index(at))));
        }
        self.groups = batch.rows.first().map_or(0, |row| row.pages.len());
        self.page_max.resize(self.groups, 0);
        self.tables.push(0);
        let mut first = 0;
        for row in &batch.rows {
            let (start, len) = (row.start as usize, row.len as usize);
            for (table, page_max) in row.pages.iter().zip(&mut self.page_max) {
                let needed = (start + len).div_ceil(PAGE_TOKENS);
                self.pages.extend_from_slice(&table[..needed]);
                self.tables.push(index(self.pages.len()));
                *page_max = table[..needed].iter().fold(*page_max, |max, page| max.max(page.0));
            }
            self.units.extend((0..len).step_by(UNIT_TOKENS).map(|at| Unit {
                row: self.rows.len(),
                tokens: StepRow { start: start + at, first: first + at, len: UNIT_TOKENS.min(len - at) },
            }));
            self.rows.push(StepRow { start, first, len });
            first += len;
            self.wanted.extend(index(first) - row.wanted..index(first));
        }
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.given.values.clear();
        self.lasts.clear();
        self.rows.clear();
        self.adapters.clear();
        self.token_rows.clear();
        self.units.clear();
        self.wanted.clear();
        self.pages.clear();
        self.tables.clear();
        self.page_max.clear();
        self.sampled.clear();
    }
}

impl Step {
    /// What the batch said, to share among threads.
    pub(super) fn slot(&self) -> &Slot {
        self.slot.as_ref().expect("held until the drop")
    }

    /// How many rows an operation runs over.
    pub fn count(&self, rows: Rows) -> usize {
        self.slot().count(rows)
    }

    pub(super) fn slot_mut(&mut self) -> &mut Slot {
        self.slot.as_mut().expect("held until the drop")
    }
}

impl Slot {
    /// Every token of the step.
    pub(super) fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// The position each token is rotated by.
    pub(super) fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// What given tokens stand for.
    pub(super) fn given(&self) -> &GivenRows {
        &self.given
    }

    /// The last position that each token sees; empty where attention says it.
    pub(super) fn lasts(&self) -> &[u32] {
        &self.lasts
    }

    /// The sequences of the step.
    pub(super) fn rows(&self) -> &[StepRow] {
        &self.rows
    }

    /// The adapters of the sequences; empty where none has one.
    pub(super) fn adapters(&self) -> &[Option<u32>] {
        &self.adapters
    }

    /// The adapter of a token's sequence.
    pub(super) fn adapter(&self, token: usize) -> Option<usize> {
        let row = *self.token_rows.get(token)?;
        self.adapters[row as usize].map(|adapter| adapter as usize)
    }

    /// The rows cut into what attention takes at once.
    pub(super) fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Token indices that want logits.
    pub(super) fn wanted(&self) -> &[u32] {
        &self.wanted
    }

    /// How many rows an operation runs over.
    pub(super) fn count(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.tokens().len(),
            Rows::Wanted => self.wanted().len(),
        }
    }

    /// The page table of a row in a group.
    pub(super) fn table(&self, row: usize, group: usize) -> &[PageId] {
        table(&self.tables, &self.pages, self.groups, row, group)
    }

    /// Checks that every page named for `group` is in a pool of `pages` pages.
    pub(super) fn check_pages(&self, group: usize, pages: usize) -> Result<(), Error> {
        if self.rows().is_empty() {
            return Ok(());
        }
        match self.page_max.get(group) {
            None => {
                Err(Error::BatchShape { what: "page tables of a row", got: self.groups, wanted: group + 1 })
            }
            Some(&page_max) => batch::below("page", page_max as usize, pages),
        }
    }

    /// Room for the results of `rows` more sampled rows.
    pub(super) fn sampled_more(&mut self, rows: usize) -> &mut [Sampled] {
        let start = self.sampled.len();
        self.sampled.resize(start + rows, Sampled::fault(SampleFault::Logits));
        &mut self.sampled[start..]
    }

    pub(super) fn sampled(&self) -> &[Sampled] {
        &self.sampled
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        self.steps.free.borrow_mut().extend(self.slot.take());
    }
}

fn table<'a>(tables: &[u32], pages: &'a [PageId], groups: usize, row: usize, group: usize) -> &'a [PageId] {
    assert!(group < groups, "group {group} of {groups}");
    let at = row * groups + group;
    &pages[Range { start: tables[at] as usize, end: tables[at + 1] as usize }]
}

fn index(value: usize) -> u32 {
    u32::try_from(value).expect("a batch has fewer than 2^32 tokens and pages")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Row;

    fn steps() -> Rc<Steps> {
        Steps::new(&Ledger::new(u64::MAX), 2, 100, 3).unwrap()
    }

    fn row(slot: u32, start: u32, len: u32, pages: &[u32]) -> Row {
        let pages = pages.iter().copied().map(PageId).collect::<Vec<_>>();
        Row { slot, start, len, pages: vec![pages.clone(), pages], wanted: 1 }
    }

    /// Two sound rows: positions 30..40 and 0..3.
    fn batch() -> Batch {
        let mut batch = Batch::default();
        batch.push(row(2, 30, 10, &[4, 5]), [Token::Known(1); 10]);
        batch.push(row(0, 0, 3, &[6]), [Token::Sampled(0); 3]);
        batch
    }

    #[test]
    fn a_sound_batch_is_kept_flat() {
        let step = steps().begin(&batch()).unwrap();
        let slot = step.slot();
        assert_eq!(slot.count(Rows::Tokens), 13);
        assert_eq!(slot.wanted(), [9, 12]);
        assert_eq!(slot.table(0, 1), [PageId(4), PageId(5)]);
        assert_eq!(slot.table(1, 0), [PageId(6)]);
        assert_eq!(slot.positions()[9..11], [39, 0]);
        assert!(slot.check_pages(1, 7).is_ok());
        assert!(matches!(slot.check_pages(1, 6), Err(Error::BatchLimit { what: "page", got: 6, limit: 5 })));
        assert!(matches!(slot.check_pages(2, 7), Err(Error::BatchShape { got: 2, wanted: 3, .. })));
    }

    #[test]
    fn what_contradicts_itself_or_the_limits_is_refused_with_its_values() {
        let check = |change: &dyn Fn(&mut Batch), message: &str| {
            let (steps, mut batch) = (steps(), batch());
            change(&mut batch);
            let error = steps.begin(&batch).err().expect(message);
            assert_eq!(error.to_string(), format!("batch: {message}"));
            // A refused batch leaves its slot free.
            assert_eq!(steps.free.borrow().len(), 2);
        };
        check(&|b| b.tokens.truncate(12), "tokens: 12, wanted 13");
        check(&|b| b.positions.truncate(12), "positions: 12, wanted 13");
        check(&|b| b.rows[0].slot = 3, "slot 3 beyond the limit 2");
        check(&|b| b.rows[0].slot = 0, "rows of one slot: 2, wanted 1");
        check(&|b| b.tokens[0] = Token::Sampled(9), "slot 9 beyond the limit 2");
        check(&|b| b.rows[1].wanted = 4, "wanted positions of a row 4 beyond the limit 3");
        check(&|b| b.rows[0].start = u32::MAX - 9, "start of a row 4294967286 beyond the limit 4294967285");
        check(&|b| b.rows[0].pages[1].truncate(1), "pages of a row: 1, wanted 2");
        check(&|b| b.rows[1].pages.truncate(1), "page tables of a row: 1, wanted 2");
        check(&|b| b.rows[1].pages[1][0] = PageId(5), "rows writing to one page: 2, wanted 1");
        check(&|b| b.push(row(1, 0, 0, &[]), []), "tokens of a row: 0, wanted 1");
        check(
            &|b| b.push(row(1, 0, 90, &[1, 2, 3]), [Token::Known(0); 90]),
            "tokens 103 beyond the limit 100",
        );
        let more = |b: &mut Batch| (3..5).for_each(|slot| b.push(row(slot, 0, 1, &[9]), [Token::Known(0)]));
        check(&more, "rows 4 beyond the limit 3");
    }

    #[test]
    fn padding_and_shared_prefixes_may_name_one_page_twice() {
        let mut batch = batch();
        batch.rows[1].pages = vec![vec![PageId::TRASH], vec![PageId::TRASH]];
        batch.push(row(1, 32, 1, &[4, 7]), [Token::Known(0)]);
        batch.rows[0].start = 32;
        assert!(steps().begin(&batch).is_ok(), "page 4 is only read");
    }

    #[test]
    fn slots_run_out_and_come_back() {
        let steps = steps();
        let first = steps.begin(&batch()).unwrap();
        let _second = steps.begin(&batch()).unwrap();
        assert!(matches!(steps.begin(&batch()), Err(Error::StepsInFlight { slots: 2 })));
        drop(first);
        assert!(steps.begin(&batch()).is_ok());
    }

    #[test]
    fn a_steady_state_does_not_allocate() {
        let steps = steps();
        let capacities = || {
            let free = steps.free.borrow();
            free.iter()
                .map(|slot| [slot.tokens.capacity(), slot.pages.capacity(), slot.units.capacity()])
                .collect::<Vec<_>>()
        };
        drop((steps.begin(&batch()).unwrap(), steps.begin(&batch()).unwrap()));
        let before = capacities();
        for _ in 0..10 {
            drop(steps.begin(&batch()).unwrap());
        }
        assert_eq!(before.len(), 2);
        assert_eq!(capacities(), before);
    }
}
