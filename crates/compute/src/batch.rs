//! The plain data of one step.

use crate::{Error, PAGE_TOKENS, PageId};

/// A token of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The id is known to the host.
    Known(u32),
    /// The id is whatever was last sampled into this sequence slot; it may still be on the device.
    Sampled(u32),
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
        Ok(())
    }

    fn check_counts(&self, tokens_max: usize, slots: usize) -> Result<(), Error> {
        limit("tokens", self.tokens.len(), tokens_max)?;
        limit("rows", self.rows.len(), slots)?;
        let tokens = self.rows.iter().map(|row| row.len as usize).sum();
        same("tokens", self.tokens.len(), tokens)?;
        same("positions", self.positions.len(), tokens)?;
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
            if let Token::Sampled(slot) = token {
                below("slot", *slot as usize, slots)?;
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
