//! Operations that work row by row: norms, sums, the gated activation, the choice of rows.

use std::fmt;

use crate::{Backend, Batch, Glu, Norm, Purpose, Row, Rows, Token};

use super::bench::{Bench, Table, batch, step};
use super::random::Random;
use super::{Case, Failure, Op, Suite};

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for columns in [1, 17, 64, 576, 2048] {
        for eps in [1e-5, 1e-6] {
            for size in [Size::Usual, Size::Tiny, Size::Zero] {
                suite.compare(RmsNorm { columns, eps, size, rows: Rows::Tokens });
            }
        }
        suite.compare(RmsNorm { columns, eps: 1e-5, size: Size::Usual, rows: Rows::Wanted });
        for rows in [Rows::Tokens, Rows::Wanted] {
            suite.compare(Add { columns, rows, vector: false });
            suite.compare(Add { columns, rows, vector: true });
        }
        suite.compare(Gated { columns, size: 1.0 });
        // exp overflows f32 beyond 88.
        suite.compare(Gated { columns, size: 100.0 });
        suite.compare(AddGated { columns, size: 1.0 });
        suite.compare(AddGated { columns, size: 100.0 });
        suite.compare(Gather { columns });
    }
    suite.same_bits("rms_norm 576: 33 rows, and one by one", |backend| {
        let norm = |values: &[f32]| {
            let mut random = Random::of("norm weight");
            let norm = Norm { weight: backend.upload_values(&random.values(576))?, eps: 1e-5 };
            let x = Bench::filled(backend, Purpose::Residual, 576, values)?;
            let mut out = Bench::poisoned(backend, Purpose::Activations, values.len() / 576, 576)?;
            step(backend, &batch(values.len() / 576, 0), |step| {
                Ok(backend.rms_norm(step, Rows::Tokens, &norm, &x.buf, &mut out.buf)?)
            })?;
            out.table(backend)
        };
        let values = Random::of("norm rows").values(33 * 576);
        let mut alone = Table::new(576);
        for row in values.chunks_exact(576) {
            alone.append(norm(row)?);
        }
        Ok((norm(&values)?, alone))
    });
}

/// Nine tokens of which the last six want logits.
fn nine_rows() -> Batch {
    batch(9, 6)
}

fn count(rows: Rows) -> usize {
    match rows {
        Rows::Tokens => 9,
        Rows::Wanted => 6,
    }
}

/// How large inputs are; epsilon decides the result of tiny ones.
#[derive(Clone, Copy, Debug)]
enum Size {
    Usual,
    Tiny,
    Zero,
}

struct RmsNorm {
    columns: usize,
    eps: f32,
    size: Size,
    rows: Rows,
}

impl fmt::Display for RmsNorm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RmsNorm { columns, eps, size, rows } = self;
        write!(f, "{columns} columns, eps {eps:e}, {size:?} {rows:?}")
    }
}

impl Case for RmsNorm {
    fn op(&self) -> Op {
        Op::RmsNorm
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let (mut random, rows) = (Random::of(self), count(self.rows));
        let mut values = random.values(rows * self.columns);
        let scale = match self.size {
            Size::Usual => 3.0,
            Size::Tiny => 1e-4,
            Size::Zero => 0.0,
        };
        values.iter_mut().for_each(|value| *value *= scale);
        let norm = Norm { weight: backend.upload_values(&random.values(self.columns))?, eps: self.eps };
        let x = Bench::filled(backend, Purpose::Residual, self.columns, &values)?;
        let mut out = Bench::poisoned(backend, Purpose::Activations, rows, self.columns)?;
        step(backend, &nine_rows(), |step| {
            Ok(backend.rms_norm(step, self.rows, &norm, &x.buf, &mut out.buf)?)
        })?;
        out.table(backend)
    }
}

/// `add`, or `add_vector`.
struct Add {
    columns: usize,
    rows: Rows,
    vector: bool,
}

impl fmt::Display for Add {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} columns, {:?}, {}",
            self.columns,
            self.rows,
            if self.vector { "vector" } else { "rows" }
        )
    }
}

impl Case for Add {
    fn op(&self) -> Op {
        Op::Add
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let (mut random, rows) = (Random::of(self), count(self.rows));
        let mut x =
            Bench::filled(backend, Purpose::Residual, self.columns, &random.values(rows * self.columns))?;
        let vector = backend.upload_values(&random.values(self.columns))?;
        let y = Bench::filled(backend, Purpose::Residual, self.columns, &random.values(rows * self.columns))?;
        step(backend, &nine_rows(), |step| {
            let done = match self.vector {
                true => backend.add_vector(step, self.rows, &vector, &mut x.buf),
                false => backend.add(step, self.rows, &y.buf, &mut x.buf),
            };
            Ok(done?)
        })?;
        x.table(backend)
    }
}

struct Gated {
    columns: usize,
    size: f32,
}

impl fmt::Display for Gated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "silu {} columns, values of {}", self.columns, self.size)
    }
}

impl Case for Gated {
    fn op(&self) -> Op {
        Op::Glu
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut values = Random::of(self).values(9 * 2 * self.columns);
        values.iter_mut().for_each(|value| *value *= self.size);
        let gate_up = Bench::filled(backend, Purpose::Activations, 2 * self.columns, &values)?;
        let mut out = Bench::poisoned(backend, Purpose::Activations, 9, self.columns)?;
        step(backend, &nine_rows(), |step| Ok(backend.glu(step, Glu::Silu, &gate_up.buf, &mut out.buf)?))?;
        out.table(backend)
    }
}

struct AddGated {
    columns: usize,
    size: f32,
}

impl fmt::Display for AddGated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sigmoid of one gate, {} columns, gates of {}", self.columns, self.size)
    }
}

impl Case for AddGated {
    fn op(&self) -> Op {
        Op::Glu
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut random = Random::of(self);
        let gates: Vec<f32> = random.values(9).iter().map(|gate| self.size * gate).collect();
        let gate = Bench::filled(backend, Purpose::Logits, 1, &gates)?;
        let mut rows =
            |purpose| Bench::filled(backend, purpose, self.columns, &random.values(9 * self.columns));
        let (y, mut x) = (rows(Purpose::Activations)?, rows(Purpose::Residual)?);
        step(backend, &nine_rows(), |step| Ok(backend.add_gated(step, &gate.buf, &y.buf, &mut x.buf)?))?;
        x.table(backend)
    }
}

/// Several sequences want different numbers of their last positions; one wants none.
struct Gather {
    columns: usize,
}

impl fmt::Display for Gather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} columns of 4 sequences", self.columns)
    }
}

impl Case for Gather {
    fn op(&self) -> Op {
        Op::Gather
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut batch = Batch::default();
        for (slot, len, wanted) in [(3, 1, 1), (0, 5, 2), (6, 4, 0), (1, 7, 7)] {
            let row = Row { slot, start: 10 * slot, len, pages: Vec::new(), wanted };
            batch.push(row, (0..len).map(Token::Known));
        }
        let values = Random::of(self).values(batch.tokens.len() * self.columns);
        let x = Bench::filled(backend, Purpose::Residual, self.columns, &values)?;
        let mut out = Bench::poisoned(backend, Purpose::Residual, batch.wanted(), self.columns)?;
        step(backend, &batch, |step| Ok(backend.gather_wanted(step, &x.buf, &mut out.buf)?))?;
        out.table(backend)
    }
}
