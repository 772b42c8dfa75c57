//! What adapters add to products.

use std::fmt;

use super::bench::{Bench, Table, count, step};
use super::random::Random;
use super::{Case, Failure, Op, Suite};
use crate::{Backend, Batch, LowRank, Need, Purpose, Row, Token};

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for (columns, outputs, rank) in [(64, 96, 4), (100, 33, 1), (576, 64, 16)] {
        suite.compare(Changed { columns, outputs, rank });
    }
    if suite.backend.supports(Need::LowRank).is_err() {
        return;
    }
    suite.same_bits("low_rank: rows of different adapters and of none, together and alone", |backend| {
        let case = Changed { columns: 100, outputs: 48, rank: 5 };
        let together = case.rows(backend, &ADAPTERS)?;
        let mut alone = Table::new(case.outputs);
        for at in 0..ADAPTERS.len() {
            alone.append(case.rows(backend, &ADAPTERS[at..=at])?);
        }
        Ok((together, alone))
    });
}

/// The adapters of a batch's sequences.
const ADAPTERS: [Option<u32>; 5] = [Some(1), None, Some(0), Some(1), None];
/// Tokens of each of them.
const TOKENS: usize = 3;

/// Two adapters, the second of which changes two parts of the columns and the first one of them.
struct Changed {
    columns: usize,
    outputs: usize,
    rank: usize,
}

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Changed { columns, outputs, rank } = self;
        write!(f, "{columns} to {outputs} columns, rank {rank}")
    }
}

impl Case for Changed {
    fn op(&self) -> Op {
        Op::LowRank
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::LowRank]
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        self.rows(backend, &ADAPTERS)
    }
}

impl Changed {
    /// The rows of sequences with these adapters, each with values of its own whoever stands beside it.
    fn rows<B: Backend>(&self, backend: &B, adapters: &[Option<u32>]) -> Result<Table, Failure> {
        let Changed { columns, outputs, rank } = *self;
        let mut random = Random::of(self);
        let mut change = |column: usize, columns_changed: usize| -> Result<_, Failure> {
            Ok(LowRank {
                down: backend.upload_values(&random.values(rank * columns))?,
                up: backend.upload_values(&random.values(columns_changed * rank))?,
                rank,
                scale: 0.5,
                column,
                columns: columns_changed,
            })
        };
        let half = outputs / 2;
        let changes = [vec![change(half, outputs - half)?], vec![change(0, half)?, change(half, 1)?]];
        let mut batch = Batch { adapters: adapters.to_vec(), ..Batch::default() };
        let (mut x, mut before) = (Vec::new(), Vec::new());
        for (slot, adapter) in adapters.iter().enumerate() {
            let row = Row { slot: count(slot), start: 0, len: count(TOKENS), pages: Vec::new(), wanted: 0 };
            batch.push(row, (0..count(TOKENS)).map(Token::Known));
            let mut own = Random::of(format!("{self} {adapter:?}"));
            x.extend(own.values(TOKENS * columns));
            before.extend(own.values(TOKENS * outputs));
        }
        let x = Bench::filled(backend, Purpose::Activations, columns, &x)?;
        let mut out = Bench::filled(backend, Purpose::Activations, outputs, &before)?;
        step(backend, &batch, |step| Ok(backend.low_rank(step, &changes, &x.buf, &mut out.buf)?))?;
        out.table(backend)
    }
}
