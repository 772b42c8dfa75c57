//! Latent attention: a matrix for each head, rows in pages, attention over them.

use std::fmt;

use fornax_format::DType;

use crate::{
    Backend, Batch, Error, HeadProducts, KvDType, KvGroup, KvKind, KvLayer, KvSpec, LatentAttention,
    LatentHeads, Need, PAGE_TOKENS, PageId, Part, Purpose, Row, Token,
};

use super::bench::{Bench, Table, batch, count, step};
use super::random::{Random, Stored};
use super::{Case, Failure, Op, Suite, TOKENS_MAX};

/// Around the borders of a page, and beyond three of them.
const LENGTHS: [usize; 6] = [1, 31, 32, 33, 64, 100];

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    if suite.backend.supports(Need::Latent).is_err() {
        return;
    }
    let usual =
        ByHead { heads: 5, rows: 24, columns: 64, each: 96, column: 32, tokens: 7, dtype: DType::F32 };
    for tokens in [1, 2, 7, 33, 130] {
        suite.compare(ByHead { tokens, ..usual });
        suite.compare(ByHead { tokens, heads: 1, rows: 10, columns: 20, each: 20, column: 0, ..usual });
        suite.compare(ByHead { tokens, heads: 17, rows: 16, columns: 12, each: 20, column: 8, ..usual });
    }
    for dtype in [DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q5_1, DType::IQ4_NL, DType::MXFP4]
    {
        suite.compare(ByHead { dtype, ..usual });
        suite.compare(ByHead { dtype, tokens: 70, ..usual });
    }
    suite.compare(ByHead { dtype: DType::Q4_K, columns: 512, each: 512, column: 0, ..usual });
    for dtype in [DType::F32, DType::Q8_0] {
        let all = ByHead { dtype, tokens: 150, ..usual };
        suite.same_bits(format_args!("{all}: together, and one by one"), |backend| {
            let mut alone = Table::new(all.heads * all.rows);
            for token in 0..all.tokens {
                alone.append(all.some(backend, token..token + 1)?);
            }
            Ok((all.some(backend, 0..all.tokens)?, alone))
        });
    }

    let of = |query, latent, turned| LatentHeads { query, latent, turned };
    for dtype in KvDType::ALL {
        let group = KvGroup { layers: 1, kind: KvKind::Latent { width: 48 }, window: None, pages: 2 };
        let spec = KvSpec { groups: vec![group], dtype };
        // Codes are an option that a backend may refuse by name.
        if matches!(suite.backend.alloc_kv(&spec), Err(Error::KvDType { .. })) {
            continue;
        }
        let usual =
            Rows { heads: of(4, 64, 16), each: 40, window: None, dtype, lengths: &LENGTHS, chunk: 100 };
        // Heads that fill sixteen lanes, more, fewer and none of the way; widths that fill no vector.
        for heads in [of(16, 64, 16), of(20, 96, 32), of(1, 20, 4), of(3, 33, 8), of(40, 48, 16)] {
            suite.compare(Rows { heads, ..usual });
        }
        for window in [Some(1), Some(48)] {
            suite.compare(Rows { window, ..usual });
        }
        for chunk in [1, 32, 45] {
            suite.compare(Rows { lengths: &[70, 5], chunk, ..usual });
        }
        // As the largest models have them.
        suite.compare(Rows { heads: of(128, 512, 64), each: 192, lengths: &[40, 3], chunk: 20, ..usual });
    }
    suite.compare(Rows {
        heads: of(2, 32, 8),
        each: 8,
        window: None,
        dtype: KvDType::F16,
        lengths: &[1100],
        chunk: 256,
    });

    for (dtype, window) in
        [(KvDType::F32, None), (KvDType::F16, None), (KvDType::F16, Some(40)), (KvDType::F8, None)]
    {
        let all = Rows { heads: of(6, 48, 16), each: 24, window, dtype, lengths: &LENGTHS, chunk: 100 };
        suite.same_bits(format_args!("{all}: sequences among others, and alone"), |backend| {
            let together = all.attend(backend, &[0, 1, 2, 3, 4, 5], 100)?;
            let mut alone = Table::new(together.columns);
            for sequence in 0..LENGTHS.len() {
                alone.append(all.attend(backend, &[sequence], 100)?);
            }
            Ok((together, alone))
        });
        for chunk in [1, 7, 32, 33, 99] {
            suite.same_bits(format_args!("{all}: whole, and in chunks of {chunk}"), |backend| {
                let last = [LENGTHS.len() - 1];
                Ok((all.attend(backend, &last, 100)?, all.attend(backend, &last, chunk)?))
            });
        }
    }
}

/// A matrix for each head.
#[derive(Clone, Copy)]
struct ByHead {
    heads: usize,
    /// Of each head's matrix.
    rows: usize,
    columns: usize,
    /// Columns of a head's share of a row, and where in it what is multiplied begins.
    each: usize,
    column: usize,
    tokens: usize,
    dtype: DType,
}

impl fmt::Display for ByHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ByHead { heads, rows, columns, each, column, tokens, dtype } = self;
        write!(f, "{dtype} {heads} x {rows}x{columns}, at {column} of {each}, {tokens} tokens")
    }
}

impl Case for ByHead {
    fn op(&self) -> Op {
        Op::HeadProducts
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        self.some(backend, 0..self.tokens)
    }
}

impl ByHead {
    /// The products of some tokens.
    fn some<B: Backend>(&self, backend: &B, tokens: std::ops::Range<usize>) -> Result<Table, Failure> {
        let mut random = Random::of(self);
        let stored: Vec<Stored> = (0..self.heads)
            .map(|_| Stored::matrix(&mut random, self.dtype, self.rows, self.columns))
            .collect();
        let parts: Vec<Part<'_>> = stored.iter().map(Stored::part).collect::<Result<_, _>>()?;
        let weight = backend.upload_heads(&parts, self.heads)?;
        let columns = self.heads * self.each;
        let values = random.values(self.tokens * columns);
        let values = &values[tokens.start * columns..tokens.end * columns];
        let x = Bench::filled(backend, Purpose::Activations, columns, values)?;
        let out_columns = self.heads * self.rows;
        let mut out = Bench::poisoned(backend, Purpose::Activations, tokens.len(), out_columns)?;
        step(backend, &batch(tokens.len(), 0), |step| {
            let products = HeadProducts { heads: self.heads, weight: &weight, column: self.column };
            Ok(backend.head_products(step, &products, &x.buf, &mut out.buf)?)
        })?;
        out.table(backend)
    }
}

/// Sequences that grow together, chunk by chunk, in the second layer of the second group of a cache whose other layers and
/// pages hold other things.
#[derive(Clone, Copy)]
struct Rows {
    heads: LatentHeads,
    /// Columns of a head's share of the rows that begin with what turns.
    each: usize,
    window: Option<u32>,
    dtype: KvDType,
    lengths: &'static [usize],
    /// Tokens that each sequence adds in a step.
    chunk: usize,
}

/// The layer that is looked at, and one whose writes must not be seen in it.
const LAYER: KvLayer = KvLayer { group: 1, layer: 1 };
const OTHER_LAYER: KvLayer = KvLayer { group: 1, layer: 0 };

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LatentHeads { query, latent, turned } = self.heads;
        write!(f, "{} {query} heads over {latent} + {turned}", self.dtype)?;
        write!(f, ", lengths {:?} by {}", self.lengths, self.chunk)?;
        match self.window {
            Some(window) => write!(f, ", window {window}"),
            None => Ok(()),
        }
    }
}

impl Case for Rows {
    fn op(&self) -> Op {
        // A query that sees only itself gives back its stored row, so this is how rows are rounded.
        if self.window == Some(1) { Op::Kv } else { Op::LatentAttention }
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let all: Vec<usize> = (0..self.lengths.len()).collect();
        self.attend(backend, &all, self.chunk)
    }
}

/// What a sequence's tokens bring, by token.
struct Inputs {
    latent: Vec<f32>,
    turned: Vec<f32>,
    queries: Vec<f32>,
    absorbed: Vec<f32>,
}

impl Rows {
    /// Columns of what a token brings, in the order of [`Inputs`].
    fn columns(&self) -> [usize; 4] {
        let LatentHeads { query, latent, turned } = self.heads;
        [latent, turned, query * self.each, query * latent]
    }

    fn inputs(&self, sequence: usize) -> Inputs {
        let LatentHeads { query, latent, turned } = self.heads;
        let mut random = Random::of(format_args!("{query} {latent} {turned} {sequence}"));
        let [latent, turned, queries, absorbed] =
            self.columns().map(|columns| random.values(self.lengths[sequence] * columns));
        Inputs { latent, turned, queries, absorbed }
    }

    /// The outputs of the chosen sequences, one after the other. Their inputs depend on the sequence alone; their pages on
    /// which are chosen and on the chunk.
    fn attend<B: Backend>(&self, backend: &B, chosen: &[usize], chunk: usize) -> Result<Table, Failure> {
        let needed = |sequence: &usize| self.lengths[*sequence].div_ceil(PAGE_TOKENS);
        let pages = 3 + chosen.iter().map(needed).sum::<usize>();
        let kind = KvKind::Latent { width: self.heads.width() };
        let group = |window| KvGroup { layers: 2, kind, window, pages };
        let spec = KvSpec { groups: vec![group(None), group(self.window)], dtype: self.dtype };
        let mut kv = backend.alloc_kv(&spec)?;
        self.poison(backend, pages, &mut kv)?;

        let mut free = Random::of(format_args!("{self} {chosen:?} {chunk}")).pages(pages);
        let tables: Vec<Vec<PageId>> =
            chosen.iter().map(|sequence| free.split_off(free.len() - needed(sequence))).collect();
        let inputs: Vec<Inputs> = chosen.iter().map(|&sequence| self.inputs(sequence)).collect();
        let out_columns = self.heads.query * self.heads.latent;
        let mut outputs = vec![Table::new(out_columns); chosen.len()];
        for start in (0..).step_by(chunk) {
            let mut batch = Batch::default();
            let mut rows = Vec::new();
            let mut step_inputs =
                Inputs { latent: vec![], turned: vec![], queries: vec![], absorbed: vec![] };
            for (at, &sequence) in chosen.iter().enumerate() {
                let len = self.lengths[sequence].saturating_sub(start).min(chunk);
                if len == 0 {
                    continue;
                }
                let table = self.seen_from(start, &tables[at]);
                let row = Row {
                    slot: count(sequence),
                    start: count(start),
                    len: count(len),
                    pages: vec![table.clone(), table],
                    wanted: 0,
                };
                batch.push(row, (0..count(len)).map(Token::Known));
                let of = |values: &[f32], columns: usize| {
                    values[start * columns..(start + len) * columns].to_vec()
                };
                let [latent, turned, queries, absorbed] = self.columns();
                step_inputs.latent.extend(of(&inputs[at].latent, latent));
                step_inputs.turned.extend(of(&inputs[at].turned, turned));
                step_inputs.queries.extend(of(&inputs[at].queries, queries));
                step_inputs.absorbed.extend(of(&inputs[at].absorbed, absorbed));
                rows.push((at, len));
            }
            if rows.is_empty() {
                break;
            }
            let out = self.step(backend, &batch, &step_inputs, &mut kv)?;
            let mut rest = out.values.as_slice();
            for (at, len) in rows {
                let (these, others) = rest.split_at(len * out.columns);
                outputs[at].values.extend_from_slice(these);
                rest = others;
            }
        }
        let mut all = Table::new(out_columns);
        outputs.into_iter().for_each(|output| all.append(output));
        Ok(all)
    }

    /// The page table as the engine hands it over: pages that no query of this step can see any more are gone.
    fn seen_from(&self, start: usize, table: &[PageId]) -> Vec<PageId> {
        let first_seen = self.window.map_or(0, |window| (start + 1).saturating_sub(window as usize));
        let mut table = table.to_vec();
        table[..first_seen / PAGE_TOKENS].fill(PageId::TRASH);
        table
    }

    fn attention(&self, layer: KvLayer) -> LatentAttention {
        let scale = 1.0 / (self.heads.width() as f32).sqrt();
        LatentAttention { heads: self.heads, layer, scale }
    }

    fn step<B: Backend>(
        &self,
        backend: &B,
        batch: &Batch,
        inputs: &Inputs,
        kv: &mut B::Kv,
    ) -> Result<Table, Failure> {
        let [latent_columns, turned_columns, query_columns, absorbed_columns] = self.columns();
        let filled = |columns, values: &[f32]| Bench::filled(backend, Purpose::Activations, columns, values);
        let latent = filled(latent_columns, &inputs.latent)?;
        let turned = filled(turned_columns, &inputs.turned)?;
        let queries = filled(query_columns, &inputs.queries)?;
        let absorbed = filled(absorbed_columns, &inputs.absorbed)?;
        let other: Vec<f32> = inputs.latent.iter().map(|value| 100.0 - value).collect();
        let other = filled(latent_columns, &other)?;
        let mut out = Bench::poisoned(backend, Purpose::Activations, batch.tokens.len(), absorbed_columns)?;
        step(backend, batch, |step| {
            let mut body = || {
                backend.latent_write(step, &self.attention(LAYER), &latent.buf, &turned.buf, kv)?;
                backend.latent_write(step, &self.attention(OTHER_LAYER), &other.buf, &turned.buf, kv)?;
                let attention = self.attention(LAYER);
                backend.latent_attention(step, &attention, &queries.buf, &absorbed.buf, kv, &mut out.buf)
            };
            Ok(backend.record(step, &mut body)?)
        })?;
        out.table(backend)
    }

    /// Fills every page of every layer, the trash page too, with NaN: what a failed request may leave behind.
    fn poison<B: Backend>(&self, backend: &B, pages: usize, kv: &mut B::Kv) -> Result<(), Failure> {
        let table: Vec<PageId> = (0..count(pages)).map(PageId).collect();
        let positions: Vec<usize> = (0..pages * PAGE_TOKENS).collect();
        let [latent_columns, turned_columns, ..] = self.columns();
        for positions in positions.chunks(TOKENS_MAX / PAGE_TOKENS * PAGE_TOKENS) {
            let nan = |columns: usize| {
                let values = vec![f32::NAN; positions.len() * columns];
                Bench::filled(backend, Purpose::Activations, columns, &values)
            };
            let (latent, turned) = (nan(latent_columns)?, nan(turned_columns)?);
            let mut batch = Batch::default();
            let row = Row {
                slot: 0,
                start: count(positions[0]),
                len: count(positions.len()),
                pages: vec![table.clone(), table.clone()],
                wanted: 0,
            };
            batch.push(row, positions.iter().map(|_| Token::Known(0)));
            step(backend, &batch, |step| {
                for (group, layer) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let attention = self.attention(KvLayer { group, layer });
                    backend.latent_write(step, &attention, &latent.buf, &turned.buf, kv)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}
