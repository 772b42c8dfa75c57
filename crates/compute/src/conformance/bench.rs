//! The workbench of a case: filled inputs, poisoned outputs, simple batches.

use crate::{Backend, Batch, Error, Purpose, Row, Token};

use super::Failure;

/// Rows beyond the step's rows that every buffer has, and that no operation may touch.
const SPARE_ROWS: usize = 2;
/// What they hold: exact in every float type.
const SENTINEL: f32 = -1536.0;

/// Values read back: rows of `columns`.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) columns: usize,
    pub(super) values: Vec<f32>,
}

impl Table {
    pub(super) fn new(columns: usize) -> Table {
        Table { columns, values: Vec::new() }
    }

    pub(super) fn rows(&self) -> std::slice::ChunksExact<'_, f32> {
        self.values.chunks_exact(self.columns)
    }

    pub(super) fn append(&mut self, other: Table) {
        assert_eq!(self.columns, other.columns, "tables of one width");
        self.values.extend(other.values);
    }
}

/// A buffer with `rows` rows in use and spare ones behind them.
pub(super) struct Bench<B: Backend> {
    pub(super) buf: B::Buf,
    rows: usize,
    columns: usize,
}

impl<B: Backend> Bench<B> {
    /// Rows that hold `values`.
    pub(super) fn filled(
        backend: &B,
        purpose: Purpose,
        columns: usize,
        values: &[f32],
    ) -> Result<Bench<B>, Error> {
        let rows = values.len() / columns;
        assert_eq!(rows * columns, values.len(), "whole rows");
        let mut buf = backend.alloc(purpose, rows + SPARE_ROWS, columns)?;
        backend.write(&mut buf, 0, values)?;
        backend.write(&mut buf, rows, &vec![SENTINEL; SPARE_ROWS * columns])?;
        Ok(Bench { buf, rows, columns })
    }

    /// Rows of NaN, for an operation to write.
    pub(super) fn poisoned(
        backend: &B,
        purpose: Purpose,
        rows: usize,
        columns: usize,
    ) -> Result<Bench<B>, Error> {
        Bench::filled(backend, purpose, columns, &vec![f32::NAN; rows * columns])
    }

    /// The rows in use; fails if a spare row was touched.
    pub(super) fn table(&self, backend: &B) -> Result<Table, Failure> {
        let spare = backend.read(&self.buf, self.rows, SPARE_ROWS)?;
        if let Some(value) = spare.iter().find(|value| value.to_bits() != SENTINEL.to_bits()) {
            return Err(Failure(format!(
                "a row beyond the step's {} rows was written: {value:e}",
                self.rows
            )));
        }
        Ok(Table { columns: self.columns, values: backend.read(&self.buf, 0, self.rows)? })
    }
}

/// One sequence of `tokens` tokens without pages, of which the last `wanted` want logits.
pub(super) fn batch(tokens: usize, wanted: usize) -> Batch {
    let mut batch = Batch::default();
    let row = Row { slot: 0, start: 0, len: count(tokens), pages: Vec::new(), wanted: count(wanted) };
    batch.push(row, (0..count(tokens)).map(Token::Known));
    batch
}

/// A count as batches write it.
pub(super) fn count(count: usize) -> u32 {
    u32::try_from(count).expect("the suite counts small things")
}

/// Runs `body` in a step of this batch.
pub(super) fn step<B: Backend>(
    backend: &B,
    batch: &Batch,
    body: impl FnOnce(&B::Step) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let step = backend.begin(batch)?;
    // The slot is given back also when the body failed, so that one wrong operation does not fail every later case.
    let done = body(&step);
    backend.finish(step)?;
    done
}
