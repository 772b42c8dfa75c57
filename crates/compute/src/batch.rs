//! The plain data of one step.

use crate::{Error, Need, PAGE_TOKENS, PageId};

/// A token of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The id is known to the host.
    Known(u32),
    /// The id is whatever was last sampled into this sequence slot; it may still be on the device.
    Sampled(u32),
    /// No row of the table but this one of [`Batch::given`]: a piece of an image, say.
    Given(u32),
}

/// Rows that stand where the table's rows of tokens would, before anything is done to them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GivenRows {
    /// Values of a row: as many as a row of the table has, or a multiple of it; layers may add what stands behind
    /// ([`add_given`](crate::Backend::add_given)).
    pub columns: usize,
    /// (rows, columns)
    pub values: Vec<f32>,
}

impl GivenRows {
    /// How many there are.
    pub fn rows(&self) -> usize {
        self.values.len().checked_div(self.columns).unwrap_or(0)
    }
}

/// What a row does with its sequence's state in one group of states. Where to read and where to write are told apart,
/// so that going on from somebody's checkpoint takes no copy of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowState {
    /// The state before the row's first token: the sequence's own or a checkpoint; `None` before the first position.
    pub from: Option<PageId>,
    /// Where the state after the row's last token is left; may be `from`.
    pub to: PageId,
    /// Checkpoints: the state after this many positions of the sequence is left here as well. Within the row, ascending.
    pub saves: Vec<(u32, PageId)>,
}

/// One sequence's share of a step: `len` consecutive positions from `start`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The sequence's slot, below the backend's slot count.
    pub slot: u32,
    /// Absolute position of the row's first token.
    pub start: u32,
    /// Tokens of this row in this step.
    pub len: u32,
    /// Page tables, one per KV group; entry `p` holds positions `p * PAGE_TOKENS ..`. They cover `start + len`.
    pub pages: Vec<Vec<PageId>>,
    /// How many of the row's last positions want logits.
    pub wanted: u32,
}

/// Everything that varies from step to step. Rows follow each other in `tokens` and `positions`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The sequences in this step.
    pub rows: Vec<Row>,
    /// All rows' tokens, row after row.
    pub tokens: Vec<Token>,
    /// The position each token is rotated by; `start + i` for text.
    pub positions: Vec<u32>,
    /// By row: which adapter changes its products ([`low_rank`](crate::Backend::low_rank)), if one does. Empty where
    /// none does.
    pub adapters: Vec<Option<u32>>,
    /// What [`Token::Given`] stands for.
    pub given: GivenRows,
    /// The further sections of each token's position, where a model has more than one (time, height and width of an
    /// image's pieces): each as long as `positions`, which is the first.
    pub sections: Vec<Vec<u32>>,
    /// By token: the last position of its sequence that it sees, its own or a later one of the row. Empty where
    /// attention itself says it (`causal`).
    pub lasts: Vec<u32>,
    /// By row, and within it by group of states. Empty where the model keeps none.
    pub states: Vec<Vec<RowState>>,
}

impl Batch {
    /// Adds a row whose rotary positions are its absolute positions.
    #[inline]
    pub fn push(&mut self, row: Row, tokens: impl IntoIterator<Item = Token>) {
        let (start, len) = (row.start, row.len);
        self.rows.push(row);
        self.tokens.extend(tokens);
        self.positions.extend(start..start + len);
    }

    /// Logit rows of the whole step.
    pub fn wanted(&self) -> usize {
        self.rows.iter().map(|row| row.wanted as usize).sum()
    }

    /// What it asks for that not every backend has.
    pub fn needs(&self) -> impl Iterator<Item = Need> {
        let needs = [
            (Need::GivenRows, !self.given.values.is_empty()),
            (Need::Sections, !self.sections.is_empty()),
            (Need::LastSeen, !self.lasts.is_empty()),
            (Need::States, !self.states.is_empty()),
        ];
        needs.into_iter().filter(|(_, asked)| *asked).map(|(need, _)| need)
    }

    /// Refuses a batch that contradicts itself or exceeds `tokens_max` tokens or `slots` sequence slots: what every
    /// backend checks before it believes a batch. `seen` is scratch that keeps its capacity.
    pub fn check(&self, tokens_max: usize, slots: usize, seen: &mut Vec<u32>) -> Result<(), Error> {
        self.check_counts(tokens_max, slots)?;
        let groups = self.rows.first().map_or(0, |row| row.pages.len());
        for row in &self.rows {
            same("page tables of a row", row.pages.len(), groups)?;
            let wanted = (row.start as usize + row.len as usize).div_ceil(PAGE_TOKENS);
            if let Some(short) = row.pages.iter().find(|table| table.len() < wanted) {
                return Err(Error::BatchShape { what: "pages of a row", got: short.len(), wanted });
            }
        }
        seen.clear();
        seen.extend(self.rows.iter().map(|row| row.slot));
        check_seen_once("rows of one slot", seen)?;
        for group in 0..groups {
            for row in &self.rows {
                let end = row.start as usize + row.len as usize;
                let written = row.start as usize / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS);
                let owned = row.pages[group][written].iter().filter(|&&page| page != PageId::TRASH);
                seen.extend(owned.map(|page| page.0));
            }
            check_seen_once("rows writing to one page", seen)?;
        }
        self.check_states(seen)
    }

    /// States are written by one row each, once, and checkpoints lie within their row.
    fn check_states(&self, seen: &mut Vec<u32>) -> Result<(), Error> {
        if self.states.is_empty() {
            return Ok(());
        }
        same("rows with states", self.states.len(), self.rows.len())?;
        let groups = self.states.first().map_or(0, Vec::len);
        for (row, states) in self.rows.iter().zip(&self.states) {
            same("states of a row", states.len(), groups)?;
            for state in states {
                same(
                    "states before the first position",
                    usize::from(state.from.is_none()),
                    usize::from(row.start == 0),
                )?;
                let ends = state.saves.iter().map(|&(end, _)| end);
                for (before, end) in std::iter::once(row.start).chain(ends.clone()).zip(ends) {
                    limit("end of a checkpoint", end as usize, (row.start + row.len) as usize)?;
                    below("start of a checkpoint", before as usize, end as usize)?;
                }
            }
        }
        for group in 0..groups {
            let of_group = || self.states.iter().map(|states| &states[group]);
            for state in of_group() {
                seen.extend(std::iter::once(state.to.0).chain(state.saves.iter().map(|(_, page)| page.0)));
            }
            // What one row reads, another must not be writing meanwhile; its own it may go on from.
            let others = of_group().filter_map(|state| state.from.filter(|from| *from != state.to));
            if others.map(|from| from.0).any(|from| seen.contains(&from)) {
                let what = "rows writing to a state that another reads";
                return Err(Error::BatchShape { what, got: 1, wanted: 0 });
            }
            check_seen_once("rows writing to one state", seen)?;
        }
        Ok(())
    }

    fn check_counts(&self, tokens_max: usize, slots: usize) -> Result<(), Error> {
        limit("tokens", self.tokens.len(), tokens_max)?;
        limit("rows", self.rows.len(), slots)?;
        let tokens = self.rows.iter().map(|row| row.len as usize).sum();
        same("tokens", self.tokens.len(), tokens)?;
        same("positions", self.positions.len(), tokens)?;
        for section in &self.sections {
            same("positions of a section", section.len(), tokens)?;
        }
        if !self.lasts.is_empty() {
            same("last positions seen", self.lasts.len(), tokens)?;
            let mut lasts = self.lasts.iter();
            for row in &self.rows {
                for (own, &last) in (row.start..row.start + row.len).zip(&mut lasts) {
                    below("last position seen", last as usize, (row.start + row.len) as usize)?;
                    limit("own position", own as usize, last as usize)?;
                }
            }
        }
        same("given values", self.given.values.len(), self.given.rows() * self.given.columns)?;
        if !self.adapters.is_empty() {
            same("adapters", self.adapters.len(), self.rows.len())?;
        }
        for row in &self.rows {
            if row.len == 0 {
                return Err(Error::BatchShape { what: "tokens of a row", got: 0, wanted: 1 });
            }
            below("slot", row.slot as usize, slots)?;
            limit("wanted positions of a row", row.wanted as usize, row.len as usize)?;
            limit("start of a row", row.start as usize, (u32::MAX - row.len) as usize)?;
        }
        for token in &self.tokens {
            match *token {
                Token::Known(_) => {}
                Token::Sampled(slot) => below("slot", slot as usize, slots)?,
                Token::Given(row) => below("given row", row as usize, self.given.rows())?,
            }
        }
        Ok(())
    }
}

/// Empties `seen`, or tells that a number was in it twice.
fn check_seen_once(what: &'static str, seen: &mut Vec<u32>) -> Result<(), Error> {
    seen.sort_unstable();
    let twice = seen.windows(2).any(|pair| pair[0] == pair[1]);
    seen.clear();
    if twice { Err(Error::BatchShape { what, got: 2, wanted: 1 }) } else { Ok(()) }
}

fn limit(what: &'static str, got: usize, limit: usize) -> Result<(), Error> {
    if got > limit { Err(Error::BatchLimit { what, got, limit }) } else { Ok(()) }
}

/// Refuses an index at or past the end.
pub(crate) fn below(what: &'static str, got: usize, count: usize) -> Result<(), Error> {
    if got >= count { Err(Error::BatchLimit { what, got, limit: count.saturating_sub(1) }) } else { Ok(()) }
}

fn same(what: &'static str, got: usize, wanted: usize) -> Result<(), Error> {
    if got != wanted { Err(Error::BatchShape { what, got, wanted }) } else { Ok(()) }
}
