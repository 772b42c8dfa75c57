//! Operations that work row by row: norms, sums, the gated activation, the choice of rows.

use std::fmt;

use crate::{
    Backend, Batch, GivenRows, Glu, Heads, Need, Norm, NormKind, Pointwise, Pooling, Purpose, QkNorm, Row,
    Rows, Temperature, Token,
};

use super::bench::{Bench, Table, batch, step};
use super::random::Random;
use super::{Case, Failure, Op, Suite};

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for columns in [1, 17, 64, 576, 2048] {
        for eps in [1e-5, 1e-6] {
            for size in [Size::Usual, Size::Tiny, Size::Zero] {
                suite.compare(NormRows { kind: NormKind::Rms, columns, eps, size, rows: Rows::Tokens });
            }
        }
        for kind in [NormKind::Rms, NormKind::Layer] {
            suite.compare(NormRows { kind, columns, eps: 1e-5, size: Size::Usual, rows: Rows::Wanted });
        }
        suite.compare(NormRows {
            kind: NormKind::Layer,
            columns,
            eps: 1e-5,
            size: Size::Tiny,
            rows: Rows::Tokens,
        });
        for rows in [Rows::Tokens, Rows::Wanted] {
            suite.compare(Add { columns, rows, vector: false });
            suite.compare(Add { columns, rows, vector: true });
        }
        // exp overflows f32 beyond 88.
        suite.compare(AddGated { columns, size: 1.0 });
        suite.compare(AddGated { columns, size: 100.0 });
        suite.compare(Factors { columns });
        suite.compare(Clamped { columns });
        suite.compare(Given { columns });
        for size in [1.0, 100.0] {
            for kind in [Glu::Silu, Glu::Gelu, Glu::GeluTanh, Glu::Clamped] {
                suite.compare(Gated { kind, columns, size });
            }
            for kind in [Glu::Silu, Glu::GeluTanh] {
                suite.compare(GatedBeside { kind, columns, size });
            }
            for function in [
                Pointwise::Scale(-0.7),
                Pointwise::SoftCap(30.0),
                Pointwise::Gelu,
                Pointwise::GeluTanh,
                Pointwise::Relu,
                Pointwise::ReluSquared,
                Pointwise::Xielu { positive: 0.7, negative: 0.9, beta: 0.5, eps: -1e-6 },
            ] {
                suite.compare(Each { function, columns, size });
            }
        }
        suite.compare(Gather { columns, pooling: None });
        for pooling in [Pooling::Mean, Pooling::First, Pooling::Last] {
            suite.compare(Gather { columns, pooling: Some(pooling) });
        }
    }
    for (columns, of) in [(64, 96), (30, 30), (512, 1536)] {
        for (length, offset) in [(32, 0), (32, 1), (8192, 1)] {
            suite.compare(Warmed { temperature: Temperature { beta: 0.1, length, offset }, columns, of });
        }
    }
    for (query, kv, dim) in [(1, 1, 16), (4, 2, 24), (9, 3, 64), (16, 8, 128)] {
        let heads = Heads { query, kv, dim };
        suite.compare(QkNormed { heads, whole: false, values: false });
        suite.compare(QkNormed { heads, whole: true, values: false });
        suite.compare(QkNormed { heads, whole: false, values: true });
    }
    suite.same_bits("norm 576: 33 rows, and one by one", |backend| {
        let norm = |values: &[f32]| {
            let mut random = Random::of("norm weight");
            let norm = Norm::rms(backend.upload_values(&random.values(576))?, 1e-5);
            let x = Bench::filled(backend, Purpose::Residual, 576, values)?;
            let mut out = Bench::poisoned(backend, Purpose::Activations, values.len() / 576, 576)?;
            step(backend, &batch(values.len() / 576, 0), |step| {
                Ok(backend.norm(step, Rows::Tokens, &norm, &x.buf, &mut out.buf)?)
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

/// Rows given in place of some tokens, three times as wide as the table's: the last third is added.
struct Given {
    columns: usize,
}

impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "given rows of 3 x {} columns", self.columns)
    }
}

impl Case for Given {
    fn op(&self) -> Op {
        Op::Add
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::GivenRows]
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut random = Random::of(self);
        let mut batch = nine_rows();
        for (row, at) in [(1, 0), (0, 4), (2, 5)] {
            batch.tokens[at] = Token::Given(row);
        }
        batch.given = GivenRows { columns: 3 * self.columns, values: random.values(9 * self.columns) };
        let values = random.values(9 * self.columns);
        let mut x = Bench::filled(backend, Purpose::Residual, self.columns, &values)?;
        step(backend, &batch, |step| Ok(backend.add_given(step, 2 * self.columns, &mut x.buf)?))?;
        x.table(backend)
    }
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

struct NormRows {
    kind: NormKind,
    columns: usize,
    eps: f32,
    size: Size,
    rows: Rows,
}

impl fmt::Display for NormRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NormRows { kind, columns, eps, size, rows } = self;
        write!(f, "{kind:?} {columns} columns, eps {eps:e}, {size:?} {rows:?}")
    }
}

impl Case for NormRows {
    fn op(&self) -> Op {
        Op::Norm
    }

    fn needs(&self) -> Vec<Need> {
        if self.kind == NormKind::Rms { Vec::new() } else { vec![Need::LayerNorm] }
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
        let weight = backend.upload_values(&random.values(self.columns))?;
        let bias = match self.kind {
            NormKind::Rms => None,
            NormKind::Layer => Some(backend.upload_values(&random.values(self.columns))?),
        };
        let norm = Norm { kind: self.kind, weight, bias, eps: self.eps };
        let x = Bench::filled(backend, Purpose::Residual, self.columns, &values)?;
        let mut out = Bench::poisoned(backend, Purpose::Activations, rows, self.columns)?;
        step(backend, &nine_rows(), |step| {
            Ok(backend.norm(step, self.rows, &norm, &x.buf, &mut out.buf)?)
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

/// Queries and keys of fused rows, head by head or all together, and perhaps values.
struct QkNormed {
    heads: Heads,
    whole: bool,
    values: bool,
}

impl fmt::Display for QkNormed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let QkNormed { heads: Heads { query, kv, dim }, whole, values } = self;
        write!(
            f,
            "queries and keys of {query}/{kv} heads of {dim}{}",
            if *whole { ", together" } else { "" }
        )?;
        f.write_str(if *values { ", and values" } else { "" })
    }
}

impl Case for QkNormed {
    fn op(&self) -> Op {
        Op::Norm
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::QkNorm]
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let (mut random, heads) = (Random::of(self), self.heads);
        let mut norm = |count: usize| -> Result<_, Failure> {
            let columns = if self.whole { count * heads.dim } else { heads.dim };
            Ok(Norm::rms(backend.upload_values(&random.values(columns))?, 1e-5))
        };
        let (query, key) = (norm(heads.query)?, norm(heads.kv)?);
        let value = if self.values { Some(norm(heads.kv)?) } else { None };
        let norm = QkNorm { query, key, value };
        let columns = heads.qkv_columns();
        let mut qkv = Bench::filled(backend, Purpose::Activations, columns, &random.values(9 * columns))?;
        step(backend, &nine_rows(), |step| Ok(backend.qk_norm(step, heads, &norm, &mut qkv.buf)?))?;
        qkv.table(backend)
    }
}

struct Gated {
    kind: Glu,
    columns: usize,
    size: f32,
}

impl fmt::Display for Gated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {} columns, values of {}", self.kind, self.columns, self.size)
    }
}

impl Case for Gated {
    fn op(&self) -> Op {
        Op::Glu
    }

    fn needs(&self) -> Vec<Need> {
        match self.kind {
            Glu::Silu => Vec::new(),
            Glu::Gelu | Glu::GeluTanh => vec![Need::Gelu],
            Glu::Clamped => vec![Need::Experts],
        }
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut values = Random::of(self).values(9 * 2 * self.columns);
        values.iter_mut().for_each(|value| *value *= self.size);
        let gate_up = Bench::filled(backend, Purpose::Activations, 2 * self.columns, &values)?;
        let mut out = Bench::poisoned(backend, Purpose::Activations, 9, self.columns)?;
        step(backend, &nine_rows(), |step| Ok(backend.glu(step, self.kind, &gate_up.buf, &mut out.buf)?))?;
        out.table(backend)
    }
}

/// The other half stands in wider rows, between others.
struct GatedBeside {
    kind: Glu,
    columns: usize,
    size: f32,
}

impl fmt::Display for GatedBeside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {} columns beside wider rows, values of {}", self.kind, self.columns, self.size)
    }
}

impl Case for GatedBeside {
    fn op(&self) -> Op {
        Op::Glu
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Gelu, Need::LayerEmbeddings]
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut random = Random::of(self);
        let mut rows = |columns: usize| {
            let values: Vec<f32> = random.values(9 * columns).iter().map(|value| value * self.size).collect();
            Bench::filled(backend, Purpose::Activations, columns, &values)
        };
        let (up, mut gate) = (rows(2 * self.columns + 3)?, rows(self.columns)?);
        step(backend, &nine_rows(), |step| {
            Ok(backend.glu_beside(step, self.kind, &up.buf, self.columns + 1, &mut gate.buf)?)
        })?;
        gate.table(backend)
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

    fn needs(&self) -> Vec<Need> {
        vec![Need::Experts]
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

/// A function of single values.
struct Each {
    function: Pointwise,
    columns: usize,
    size: f32,
}

impl fmt::Display for Each {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {} columns, values of {}", self.function, self.columns, self.size)
    }
}

impl Case for Each {
    fn op(&self) -> Op {
        Op::Pointwise
    }

    fn needs(&self) -> Vec<Need> {
        match self.function {
            Pointwise::Xielu { .. } => vec![Need::Pointwise, Need::Xielu],
            _ => vec![Need::Pointwise],
        }
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut values = Random::of(self).values(9 * self.columns);
        values.iter_mut().for_each(|value| *value *= self.size);
        let mut x = Bench::filled(backend, Purpose::Activations, self.columns, &values)?;
        step(backend, &nine_rows(), |step| {
            Ok(backend.pointwise(step, Rows::Tokens, self.function, &mut x.buf)?)
        })?;
        x.table(backend)
    }
}

/// A factor for each column.
struct Factors {
    columns: usize,
}

impl fmt::Display for Factors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "factors of {} columns", self.columns)
    }
}

impl Case for Factors {
    fn op(&self) -> Op {
        Op::Pointwise
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::ColumnFactors]
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut random = Random::of(self);
        let values = random.values(9 * self.columns);
        let mut x = Bench::filled(backend, Purpose::Activations, self.columns, &values)?;
        let factors = backend.upload_values(&random.values(self.columns))?;
        step(backend, &nine_rows(), |step| Ok(backend.scale_columns(step, &factors, &mut x.buf)?))?;
        x.table(backend)
    }
}

/// Bounds that differ by column, some without an end.
struct Clamped {
    columns: usize,
}

impl fmt::Display for Clamped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bounds of {} columns", self.columns)
    }
}

impl Case for Clamped {
    fn op(&self) -> Op {
        Op::Pointwise
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Clamp]
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut random = Random::of(self);
        let values = random.values(9 * self.columns);
        let mut x = Bench::filled(backend, Purpose::Activations, self.columns, &values)?;
        let least = random.values(self.columns).into_iter().map(|value| -value.abs());
        let most = random.values(self.columns).into_iter().map(f32::abs);
        let endless = most.enumerate().map(|(at, most)| if at % 5 == 3 { f32::INFINITY } else { most });
        let bounds = backend.upload_values(&least.chain(endless).collect::<Vec<_>>())?;
        step(backend, &nine_rows(), |step| Ok(backend.clamp(step, &bounds, &mut x.buf)?))?;
        x.table(backend)
    }
}

/// Several sequences want different numbers of their last positions, or as often their pooled rows; one wants none.
struct Gather {
    columns: usize,
    pooling: Option<Pooling>,
}

impl fmt::Display for Gather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} columns of 4 sequences", self.columns)?;
        self.pooling.map_or(Ok(()), |pooling| write!(f, ", {pooling:?}"))
    }
}

impl Case for Gather {
    fn op(&self) -> Op {
        if self.pooling.is_some() { Op::Pool } else { Op::Gather }
    }

    fn needs(&self) -> Vec<Need> {
        self.pooling.map(|_| Need::Pooling).into_iter().collect()
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
        step(backend, &batch, |step| {
            let done = match self.pooling {
                None => backend.gather_wanted(step, &x.buf, &mut out.buf),
                Some(pooling) => backend.pool(step, pooling, &x.buf, &mut out.buf),
            };
            Ok(done?)
        })?;
        out.table(backend)
    }
}

/// Queries that grow with their positions: the first columns of wider rows.
struct Warmed {
    temperature: Temperature,
    columns: usize,
    of: usize,
}

impl fmt::Display for Warmed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Temperature { beta, length, offset } = self.temperature;
        write!(f, "by position: {} of {} columns, {beta} of {length} from {offset}", self.columns, self.of)
    }
}

impl Case for Warmed {
    fn op(&self) -> Op {
        Op::Pointwise
    }

    fn needs(&self) -> Vec<Need> {
        vec![Need::Temperature]
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let positions = [0, 30, 31, 32, 63, 64, 8191, 8192, 100_000];
        let values = Random::of(self).values(positions.len() * self.of);
        let mut x = Bench::filled(backend, Purpose::Activations, self.of, &values)?;
        let mut batch = batch(positions.len(), 0);
        batch.positions = positions.to_vec();
        step(backend, &batch, |step| {
            Ok(backend.scale_by_position(step, self.temperature, self.columns, &mut x.buf)?)
        })?;
        x.table(backend)
    }
}
