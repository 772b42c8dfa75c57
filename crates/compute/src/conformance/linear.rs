//! Weights: embedding rows, products, uploaded vectors, over every stored type.

use std::fmt;

use fornax_format::DType;

use crate::cpu::Activations;
use crate::{Backend, Glu, Linear, Need, Part, Purpose, Rows, Token, WeightPlace};

use super::bench::{Bench, Table, batch, step};
use super::random::{Random, Stored};
use super::{Case, FLOATS8_BOUND_HALF, Failure, Op, Suite};

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    let types = suite.weight_types();
    for &dtype in &types {
        // 17 leaves vector code a tail; the widths of real models follow.
        for columns in [17usize, 32, 256, 576, 768, 896] {
            if !columns.is_multiple_of(dtype.block_values()) {
                continue;
            }
            suite.compare(Embed { dtype, columns, positions: false, host: false });
            suite.compare(Embed { dtype, columns, positions: true, host: false });
            suite.compare(Embed { dtype, columns, positions: false, host: true });
            let tokens: &[usize] = if columns <= 256 { &[1, 2, 3, 7, 33, 128] } else { &[1, 3, 7] };
            for &tokens in tokens {
                suite.compare(Matmul::plain(dtype, 33, columns, tokens));
            }
            let case = format!("matmul {dtype} 21x{columns}: 128 rows, and in groups");
            suite.same_bits(case, |backend| regrouped(backend, dtype, (21, columns), 128));
        }
        // Enough output rows for every thread of a large machine, and one row alone.
        for rows in [515, 1] {
            suite.compare(Matmul::plain(dtype, rows, 256, 1));
        }
        if dtype.block_values() > 1 {
            suite.compare(Extreme { dtype });
        }
    }
    // Sums are shared out differently in larger weights, and prompts have other kernels than batches.
    let shared_out =
        [DType::BF16, DType::Q8_0, DType::MXFP8, DType::FP8_128, DType::FP8_A8, DType::Q4_K, DType::Q6_K];
    for dtype in shared_out.into_iter().filter(|dtype| types.contains(dtype)) {
        for (rows, tokens) in [(1100, 300), (2200, 300), (8500, 150), (17_000, 150)] {
            let case = format!("matmul {dtype} {rows}x512: {tokens} rows, and in groups");
            suite.same_bits(case, |backend| regrouped(backend, dtype, (rows, 512), tokens));
        }
    }
    // Long rows of several hundred tokens, weights of so many rows that blocks have more of them, and gates.
    let long = [DType::BF16, DType::Q4_K, DType::FP8_A8];
    for dtype in long.into_iter().filter(|dtype| types.contains(dtype)) {
        for (rows, columns, tokens) in
            [(1100, 8192, 150), (1100, 8192, 200), (1500, 4096, 230), (4600, 1024, 210), (25_300, 256, 70)]
        {
            let case = format!("matmul {dtype} {rows}x{columns}: {tokens} rows, and in groups");
            suite.same_bits(case, |backend| regrouped(backend, dtype, (rows, columns), tokens));
        }
        for (rows, columns, tokens) in
            [(17_024, 512, 300), (17_024, 512, 190), (25_600, 2048, 70), (34_048, 512, 230)]
        {
            let case = format!("matmul {dtype} {rows}x{columns}, gated: {tokens} rows, and in groups");
            suite.same_bits(case, |backend| gated_in_groups(backend, dtype, (rows, columns), tokens));
        }
    }
    let stacked = vec![
        Rowset::plain(DType::Q4_K, 7),
        Rowset { dtype: DType::Q6_K, rows: 12, permuted: true },
        Rowset { dtype: DType::Q8_0, rows: 5, permuted: true },
        Rowset::plain(DType::F16, 3),
        Rowset { dtype: DType::F32, rows: 1, permuted: false },
    ];
    for tokens in [1, 5] {
        suite.compare(Matmul { parts: stacked.clone(), columns: 512, tokens, wanted: None });
    }
    for (tokens, wanted) in [(6, 1), (6, 4), (40, 33)] {
        let parts = vec![Rowset::plain(DType::Q4_1, 67)];
        suite.compare(Matmul { parts, columns: 64, tokens, wanted: Some(wanted) });
    }
    for (bias, added) in [(false, false), (true, false), (false, true), (true, true)] {
        for tokens in [4, 130] {
            suite.compare(Biased { bias, added, tokens });
        }
    }
    suite.compare(Vector);
    for (purpose, columns) in [(Purpose::Residual, 33), (Purpose::Logits, 129)] {
        suite.compare(Copy { purpose, columns });
    }
}

/// Output rows of one type.
#[derive(Clone)]
struct Rowset {
    dtype: DType,
    rows: usize,
    permuted: bool,
}

impl Rowset {
    fn plain(dtype: DType, rows: usize) -> Rowset {
        Rowset { dtype, rows, permuted: false }
    }
}

/// Uploads random parts.
fn weight<B: Backend>(
    backend: &B,
    random: &mut Random,
    sets: &[Rowset],
    columns: usize,
) -> Result<B::Weight, Failure> {
    let stored: Vec<Stored> =
        sets.iter().map(|set| Stored::matrix(random, set.dtype, set.rows, columns)).collect();
    let mut parts = Vec::new();
    for (set, stored) in sets.iter().zip(&stored) {
        let mut part = stored.part()?;
        part.rows = set.permuted.then(|| random.order(set.rows));
        parts.push(part);
    }
    Ok(backend.upload(&parts)?)
}

/// Rows looked up by token, or added by position.
struct Embed {
    dtype: DType,
    columns: usize,
    positions: bool,
    /// Whether the table is to lie in the host's memory.
    host: bool,
}

impl fmt::Display for Embed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = if self.positions { ", by position" } else { "" };
        write!(f, "{} 37x{}{by}{}", self.dtype, self.columns, if self.host { ", in the host" } else { "" })
    }
}

impl Case for Embed {
    fn op(&self) -> Op {
        Op::Embed
    }

    fn needs(&self) -> Vec<Need> {
        match (self.positions, self.host) {
            (true, _) => vec![Need::Positions],
            (false, true) => vec![Need::HostTables],
            (false, false) => Vec::new(),
        }
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let in_host = || -> Result<_, Failure> {
            let stored = Stored::matrix(&mut Random::of(self), self.dtype, 37, self.columns);
            Ok(backend.upload_table(&[Part { place: WeightPlace::Host, ..stored.part()? }], false)?)
        };
        let table = if self.host {
            in_host()?
        } else {
            weight(backend, &mut Random::of(self), &[Rowset::plain(self.dtype, 37)], self.columns)?
        };
        let ids = [36, 0, 5, 5, 31, 1];
        let mut batch = batch(ids.len(), 0);
        if self.positions {
            batch.positions = ids.to_vec();
            let values = Random::of("rows").values(ids.len() * self.columns);
            let mut x = Bench::filled(backend, Purpose::Residual, self.columns, &values)?;
            step(backend, &batch, |step| Ok(backend.add_positions(step, &table, &mut x.buf)?))?;
            return x.table(backend);
        }
        batch.tokens = ids.map(Token::Known).to_vec();
        let mut out = Bench::poisoned(backend, Purpose::Residual, ids.len(), self.columns)?;
        step(backend, &batch, |step| Ok(backend.embed(step, &table, &mut out.buf)?))?;
        out.table(backend)
    }
}

struct Matmul {
    parts: Vec<Rowset>,
    columns: usize,
    tokens: usize,
    /// Runs over this many wanted rows instead of all tokens.
    wanted: Option<usize>,
}

impl Matmul {
    fn plain(dtype: DType, rows: usize, columns: usize, tokens: usize) -> Matmul {
        Matmul { parts: vec![Rowset::plain(dtype, rows)], columns, tokens, wanted: None }
    }
}

impl fmt::Display for Matmul {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in &self.parts {
            let order = if part.permuted { " permuted" } else { "" };
            write!(f, "{} {}x{}{order}, ", part.dtype, part.rows, self.columns)?;
        }
        match self.wanted {
            None => write!(f, "{} rows", self.tokens),
            Some(wanted) => write!(f, "{wanted} wanted of {} rows", self.tokens),
        }
    }
}

impl Case for Matmul {
    fn op(&self) -> Op {
        Op::Matmul
    }

    fn bound(&self, activations: Activations) -> f64 {
        let eights = self.parts.iter().any(|part| part.dtype == DType::FP8_A8);
        if eights && activations == Activations::Half {
            FLOATS8_BOUND_HALF
        } else {
            Op::Matmul.bound(activations)
        }
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut random = Random::of(self);
        let weight = weight(backend, &mut random, &self.parts, self.columns)?;
        let (rows, purpose, count) = match self.wanted {
            None => (Rows::Tokens, Purpose::Activations, self.tokens),
            Some(wanted) => (Rows::Wanted, Purpose::Logits, wanted),
        };
        let x =
            Bench::filled(backend, Purpose::Activations, self.columns, &random.values(count * self.columns))?;
        let columns = self.parts.iter().map(|part| part.rows).sum();
        let mut out = Bench::poisoned(backend, purpose, count, columns)?;
        step(backend, &batch(self.tokens, self.wanted.unwrap_or(0)), |step| {
            Ok(backend.matmul(step, rows, &weight, &x.buf, &mut out.buf)?)
        })?;
        out.table(backend)
    }
}

/// Quants and activations at the ends of their ranges.
struct Extreme {
    dtype: DType,
}

impl fmt::Display for Extreme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} 33x512 of extreme quants, 2 rows of one magnitude", self.dtype)
    }
}

impl Case for Extreme {
    fn op(&self) -> Op {
        Op::Matmul
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        const COLUMNS: usize = 512;
        let mut random = Random::of(self);
        let weight = Stored::matrix(&mut random, self.dtype, 33, COLUMNS).extreme(&mut random);
        let weight = backend.upload(&[weight.part()?])?;
        // All positive, then by turns.
        let values: Vec<f32> =
            (0..2 * COLUMNS).map(|at| if at > COLUMNS && at % 2 == 1 { -3.0 } else { 3.0 }).collect();
        product(backend, &weight, 33, COLUMNS, &values)
    }
}

/// The product of these rows of `columns` values, in a step of their own.
fn product<B: Backend>(
    backend: &B,
    weight: &B::Weight,
    weight_rows: usize,
    columns: usize,
    values: &[f32],
) -> Result<Table, Failure> {
    let tokens = values.len() / columns;
    let x = Bench::filled(backend, Purpose::Activations, columns, values)?;
    let mut out = Bench::poisoned(backend, Purpose::Activations, tokens, weight_rows)?;
    step(backend, &batch(tokens, 0), |step| {
        Ok(backend.matmul(step, Rows::Tokens, weight, &x.buf, &mut out.buf)?)
    })?;
    out.table(backend)
}

/// A product of many rows, and the same rows alone and in smaller groups.
fn regrouped<B: Backend>(
    backend: &B,
    dtype: DType,
    (out, columns): (usize, usize),
    tokens: usize,
) -> Result<(Table, Table), Failure> {
    let mut random = Random::of(format_args!("regrouped {dtype} {out} {columns}"));
    let weight = weight(backend, &mut random, &[Rowset::plain(dtype, out)], columns)?;
    let values = random.values(tokens * columns);
    in_groups((out, columns), &values, |values| product(backend, &weight, out, columns, values))
}

/// The same where half of the product are gates.
fn gated_in_groups<B: Backend>(
    backend: &B,
    dtype: DType,
    (out, columns): (usize, usize),
    tokens: usize,
) -> Result<(Table, Table), Failure> {
    let mut random = Random::of(format_args!("gated {dtype} {out} {columns}"));
    let weight = weight(backend, &mut random, &[Rowset::plain(dtype, out)], columns)?;
    let values = random.values(tokens * columns);
    in_groups((out / 2, columns), &values, |values| {
        let tokens = values.len() / columns;
        let x = Bench::filled(backend, Purpose::Activations, columns, values)?;
        let mut gate_up = Bench::poisoned(backend, Purpose::Activations, tokens, out)?;
        let mut gated = Bench::poisoned(backend, Purpose::Activations, tokens, out / 2)?;
        step(backend, &batch(tokens, 0), |step| {
            // Recorded, as models are: a backend may do both at once.
            Ok(backend.record(step, &mut || {
                backend.matmul(step, Rows::Tokens, &weight, &x.buf, &mut gate_up.buf)?;
                backend.glu(step, Glu::Silu, &gate_up.buf, &mut gated.buf)
            })?)
        })?;
        gated.table(backend)
    })
}

/// What becomes of all rows together, and of the same rows alone and in smaller groups.
fn in_groups(
    (out, columns): (usize, usize),
    values: &[f32],
    mut of: impl FnMut(&[f32]) -> Result<Table, Failure>,
) -> Result<(Table, Table), Failure> {
    let together = of(values)?;
    let (mut apart, mut rest) = (Table::new(out), values);
    for group in [1, 1, 2, 1, 3, 7, 1, 33, 5, 64].into_iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (these, others) = rest.split_at(rest.len().min(group * columns));
        apart.append(of(these)?);
        rest = others;
    }
    Ok((together, apart))
}

/// The provided products: with a bias, and added to what is there.
struct Biased {
    bias: bool,
    added: bool,
    tokens: usize,
}

impl fmt::Display for Biased {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bias = if self.bias { "bias" } else { "no bias" };
        write!(f, "Q5_0 19x96, {} rows, {bias}{}", self.tokens, if self.added { ", added" } else { "" })
    }
}

impl Case for Biased {
    fn op(&self) -> Op {
        Op::Linear
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut random = Random::of(self);
        let weight = weight(backend, &mut random, &[Rowset::plain(DType::Q5_0, 19)], 96)?;
        let bias = backend.upload_values(&random.values(19))?;
        let x = Bench::filled(backend, Purpose::Activations, 96, &random.values(self.tokens * 96))?;
        let mut out = Bench::poisoned(backend, Purpose::Activations, self.tokens, 19)?;
        let mut residual = Bench::filled(backend, Purpose::Residual, 19, &random.values(self.tokens * 19))?;
        step(backend, &batch(self.tokens, 0), |step| {
            let bias = self.bias.then_some(&bias);
            if self.added {
                let linear = Linear { weight: &weight, bias };
                let (room, residual) = (&mut out.buf, &mut residual.buf);
                return Ok(backend.linear_add(step, Rows::Tokens, linear, &x.buf, room, residual)?);
            }
            Ok(backend.linear(step, Rows::Tokens, &weight, bias, &x.buf, &mut out.buf)?)
        })?;
        if self.added { residual.table(backend) } else { out.table(backend) }
    }
}

/// Vectors of several stored types become one row of f32.
struct Vector;

impl fmt::Display for Vector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("F32, F16 permuted, BF16, Q8_0")
    }
}

impl Case for Vector {
    fn op(&self) -> Op {
        Op::Vector
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut random = Random::of(self);
        let stored = [(DType::F32, 5), (DType::F16, 9), (DType::BF16, 3), (DType::Q8_0, 64)]
            .map(|(dtype, values)| Stored::vector(&mut random, dtype, values));
        let mut parts = stored.iter().map(Stored::part).collect::<Result<Vec<_>, _>>()?;
        parts[1].rows = Some(random.order(9));
        let vector = backend.upload_vector(&parts)?;
        Ok(Table { columns: 81, values: backend.read(&vector, 0, 1)? })
    }
}

/// What is written is read, also from the middle.
struct Copy {
    purpose: Purpose,
    columns: usize,
}

impl fmt::Display for Copy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.purpose, self.columns)
    }
}

impl Case for Copy {
    fn op(&self) -> Op {
        Op::Copy
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let values = Random::of(self).values(5 * self.columns);
        let mut bench = Bench::poisoned(backend, self.purpose, 5, self.columns)?;
        let (first, rest) = values.split_at(2 * self.columns);
        backend.write(&mut bench.buf, 2, rest)?;
        backend.write(&mut bench.buf, 0, first)?;
        let mut table = bench.table(backend)?;
        table.append(Table { columns: self.columns, values: backend.read(&bench.buf, 3, 1)? });
        let uploaded = backend.upload_values(first)?;
        let read = backend.read(&uploaded, 0, 1)?;
        table.append(Table { columns: self.columns, values: read });
        Ok(table)
    }
}
