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
    /// Further sections of the positions; none in most models, so not counted.
    sections: Vec<Vec<u32>>,
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
    /// States: (rows, groups of states).
    states: Vec<Kept>,
    state_groups: usize,
    /// The largest state's number of each group of them.
    state_max: Vec<u32>,
    /// Checkpoints of all states: after this many tokens of the row, in this page.
    saves: Vec<(u32, u32)>,
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

/// What a row does with its state in one group, and where its checkpoints are among all of them.
#[derive(Clone)]
struct Kept {
    from: Option<u32>,
    to: u32,
    saves: Range<usize>,
}

/// What a row does with its state in one group.
#[derive(Clone, Copy)]
pub(super) struct RowState<'a> {
    /// What it goes on from.
    pub(super) from: Option<u32>,
    /// Its own.
    pub(super) to: u32,
    /// Checkpoints: after this many tokens of the row, in this page. Ascending.
    pub(super) saves: &'a [(u32, u32)],
}

/// A few consecutive tokens of one row.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// Which row of the step.
    pub(super) row: usize,
    pub(super) tokens: StepRow,
}

/// Bytes of one slot: what `Slot` reserves for each token and each row. States have no bound here, either: they grow to
/// the most that a step names, some bytes for each row and checkpoint.
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
        self.sections.resize(batch.sections.len(), Vec::new());
        for (section, positions) in self.sections.iter_mut().zip(&batch.sections) {
            section.extend_from_slice(positions);
        }
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
        self.state_groups = batch.states.first().map_or(0, Vec::len);
        self.state_max.resize(self.state_groups, 0);
        for (row, states) in batch.rows.iter().zip(&batch.states) {
            for (state, state_max) in states.iter().zip(&mut self.state_max) {
                let start = self.saves.len();
                self.saves.extend(state.saves.iter().map(|(end, page)| (end - row.start, page.0)));
                let from = state.from.map(|page| page.0);
                let named = self.saves[start..].iter().map(|(_, page)| *page).chain(from).chain([state.to.0]);
                *state_max = named.fold(*state_max, u32::max);
                self.states.push(Kept { from, to: state.to.0, saves: start..self.saves.len() });
            }
        }
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.sections.iter_mut().for_each(Vec::clear);
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
        self.states.clear();
        self.state_max.clear();
        self.saves.clear();
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

    /// The further sections of each token's position; none where there is one.
    pub(super) fn sections(&self) -> &[Vec<u32>] {
        &self.sections
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

    /// What a row does with its state in a group of states.
    pub(super) fn state(&self, row: usize, group: usize) -> RowState<'_> {
        let Kept { from, to, saves } = &self.states[row * self.state_groups + group];
        RowState { from: *from, to: *to, saves: &self.saves[saves.clone()] }
    }

    /// Which of the groups of states a group of the cache is, whose pool has `pages` states: every one that the step
    /// names is among them.
    pub(super) fn state_group(&self, group: usize, pages: usize) -> Result<usize, Error> {
        let behind = group.checked_sub(self.groups).unwrap_or(usize::MAX);
        match self.state_max.get(behind) {
            None => {
                let wanted = behind.saturating_add(1);
                Err(Error::BatchShape { what: "states of a row", got: self.state_groups, wanted })
            }
            Some(&state_max) => batch::below("state", state_max as usize, pages).map(|()| behind),
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

    /// The same with a state each: the first goes on from a checkpoint and leaves another.
    fn batch_with_states() -> Batch {
        let state = |from: Option<u32>, to, saves: &[(u32, u32)]| {
            let saves = saves.iter().map(|(end, page)| (*end, PageId(*page))).collect();
            vec![crate::RowState { from: from.map(PageId), to: PageId(to), saves }]
        };
        Batch { states: vec![state(Some(5), 2, &[(32, 7)]), state(None, 3, &[])], ..batch() }
    }

    #[test]
    fn states_are_kept_by_row_with_their_checkpoints_counted_from_the_rows_first_token() {
        let step = steps().begin(&batch_with_states()).unwrap();
        let slot = step.slot();
        let RowState { from, to, saves } = slot.state(0, 0);
        assert_eq!((from, to, saves), (Some(5), 2, &[(2, 7)][..]));
        assert_eq!(slot.state(1, 0).from, None);
        // Behind two groups of pages.
        assert_eq!(slot.state_group(2, 8).unwrap(), 0);
        let beyond = slot.state_group(2, 7);
        assert!(matches!(beyond, Err(Error::BatchLimit { what: "state", got: 7, limit: 6 })));
        assert!(slot.state_group(1, 8).is_err() && slot.state_group(3, 8).is_err());
    }

    #[test]
    fn states_that_rows_would_spoil_for_each_other_are_refused() {
        let check = |change: &dyn Fn(&mut Batch), message: &str| {
            let mut batch = batch_with_states();
            change(&mut batch);
            let error = steps().begin(&batch).err().expect(message);
            assert_eq!(error.to_string(), format!("batch: {message}"));
        };
        check(&|b| b.states.truncate(1), "rows with states: 1, wanted 2");
        check(&|b| b.states[1][0].to = PageId(2), "rows writing to one state: 2, wanted 1");
        check(&|b| b.states[1][0].to = PageId(7), "rows writing to one state: 2, wanted 1");
        let what = "rows writing to a state that another reads: 1, wanted 0";
        check(&|b| b.states[1][0].to = PageId(5), what);
        check(&|b| b.states[0][0].saves[0].1 = PageId(5), what);
        check(&|b| b.states[0][0].saves[0].0 = 41, "end of a checkpoint 41 beyond the limit 40");
        check(&|b| b.states[0][0].from = None, "states before the first position: 1, wanted 0");
        // Several may read one checkpoint.
        let mut batch = batch_with_states();
        batch.push(row(1, 40, 3, &[8, 9]), [Token::Known(0); 3]);
        batch.states.push(vec![crate::RowState { from: Some(PageId(5)), to: PageId(1), saves: vec![] }]);
        assert!(steps().begin(&batch).is_ok());
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
