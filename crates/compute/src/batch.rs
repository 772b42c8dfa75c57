//! The plain data of one step.

use crate::PageId;

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
}

impl Batch {
    /// Adds a row whose rotary positions are its absolute positions.
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
}
