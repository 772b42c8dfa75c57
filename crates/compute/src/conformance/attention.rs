//! Positions: rotation, pages of keys and values, attention over them.

use std::fmt;

use crate::{
    Attention, Backend, Batch, Error, GROUP_MAX, GROUP_VALUES_MAX, Heads, KvDType, KvGroup, KvKind, KvLayer,
    KvSpec, Need, PAGE_TOKENS, PageId, Purpose, Rope, Row, Token,
};

use super::bench::{Bench, Table, batch, count, step};
use super::random::Random;
use super::{Case, Failure, Op, Suite, TOKENS_MAX};

/// Around the borders of a page, and beyond three of them.
const LENGTHS: [usize; 6] = [1, 31, 32, 33, 64, 100];

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for (heads, pairs) in [
        (Heads { query: 2, kv: 2, dim: 64 }, 32),
        (Heads { query: 9, kv: 3, dim: 64 }, 32),
        (Heads { query: 7, kv: 1, dim: 128 }, 64),
        // Partial rotary, and a head size that fills no vector.
        (Heads { query: 4, kv: 2, dim: 80 }, 16),
        (Heads { query: 1, kv: 1, dim: 12 }, 3),
    ] {
        for magnitude in [1.0, 1.25] {
            for sections in [false, true] {
                suite.compare(Rotary { heads, pairs, magnitude, sections });
            }
        }
    }

    for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16, KvDType::Q8_0, KvDType::F8] {
        let group = KvGroup { layers: 1, kind: KvKind::pairs(1, 64), window: None, pages: 2 };
        let spec = KvSpec { groups: vec![group], dtype };
        // Codes are an option that a backend may refuse by name.
        if dtype == KvDType::Q8_0 && matches!(suite.backend.alloc_kv(&spec), Err(Error::KvDType { .. })) {
            continue;
        }
        for (query, kv, dim) in [(2, 2, 64), (9, 3, 32), (14, 2, 64), (3, 1, 128), (2, 1, 20), (12, 1, 64)] {
            for window in [None, Some(1), Some(48)] {
                let heads = Heads { query, kv, dim };
                suite.compare(Sequences {
                    heads,
                    window,
                    dtype,
                    lengths: &LENGTHS,
                    chunk: 100,
                    fused: false,
                    extra: None,
                });
            }
        }
        let heads = Heads { query: 6, kv: 2, dim: 64 };
        for chunk in [1, 32, 45] {
            for window in [None, Some(33)] {
                suite.compare(Sequences {
                    heads,
                    window,
                    dtype,
                    lengths: &[70, 5],
                    chunk,
                    fused: false,
                    extra: None,
                });
            }
        }
        for extra in
            [Need::SoftCap, Need::Sinks, Need::BothDirections, Need::Reach, Need::SharedKeys, Need::Chunks]
        {
            for (window, fused) in [(None, false), (Some(33), false), (None, true)] {
                // `attend` writes the keys that it reads.
                let both = matches!(extra, Need::BothDirections | Need::Reach);
                if window.is_some() && both || fused && extra == Need::SharedKeys {
                    continue;
                }
                let extra = Some(extra);
                suite.compare(Sequences {
                    heads,
                    window,
                    dtype,
                    lengths: &LENGTHS,
                    chunk: 100,
                    fused,
                    extra,
                });
            }
        }
        for (heads, lengths, chunk) in [
            (heads, &[40, 3][..], 20),
            (Heads { query: 2, kv: 2, dim: 128 }, &LENGTHS, 100),
            (Heads { query: 14, kv: 2, dim: 128 }, &LENGTHS, 100),
            (Heads { query: 12, kv: 1, dim: 64 }, &LENGTHS, 1),
            // The widest that models have.
            (Heads { query: 8, kv: 1, dim: 512 }, &[40, 3][..], 20),
        ] {
            suite.compare(Sequences { heads, window: None, dtype, lengths, chunk, fused: true, extra: None });
        }
    }
    // Eight streams with so many K/V heads, and heads so large, that a backend's blocks are many and have one tile in
    // fast memory.
    for (dtype, window, fused) in [
        (KvDType::F16, None, false),
        (KvDType::F16, None, true),
        (KvDType::F16, Some(100), true),
        (KvDType::BF16, None, true),
        (KvDType::F8, None, true),
    ] {
        let heads = Heads { query: 34, kv: 34, dim: 72 };
        let lengths = &[129; 8];
        suite.compare(Sequences { heads, window, dtype, lengths, chunk: 32, fused, extra: None });
    }
    suite.same_bits("a prefix computed, and shared from another sequence's page", shared_prefix);

    // Long enough that a backend splits the keys.
    let long = [KvDType::F16, KvDType::F8].map(|dtype| Sequences {
        heads: Heads { query: 2, kv: 1, dim: 32 },
        window: None,
        dtype,
        lengths: &[1100],
        chunk: 256,
        fused: false,
        extra: None,
    });
    long.into_iter().for_each(|long| suite.compare(long));

    let extras = [None, Some(Need::SoftCap), Some(Need::Sinks)];
    let halves =
        [None, Some(40)].into_iter().flat_map(|window| extras.map(|extra| (KvDType::F16, window, extra)));
    for (dtype, window, extra) in halves.chain([None, Some(40)].map(|window| (KvDType::F8, window, None))) {
        if extra.is_some_and(|need| suite.backend.supports(need).is_err()) {
            continue;
        }
        let heads = Heads { query: 6, kv: 2, dim: 64 };
        let all = Sequences { heads, window, dtype, lengths: &LENGTHS, chunk: 100, fused: false, extra };
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
    // With queries rotated wherever a backend does it: prompts beside single tokens, and token by token.
    for (dtype, window) in [(KvDType::F16, None), (KvDType::F16, Some(40)), (KvDType::BF16, None)] {
        let heads = Heads { query: 7, kv: 1, dim: 128 };
        let lengths = &[1, 31, 1, 64, 190];
        let all = Sequences { heads, window, dtype, lengths, chunk: 190, fused: true, extra: None };
        suite.same_bits(format_args!("{all}: sequences among others, and alone"), |backend| {
            let together = all.attend(backend, &[0, 1, 2, 3, 4], 190)?;
            let mut alone = Table::new(together.columns);
            for sequence in 0..lengths.len() {
                alone.append(all.attend(backend, &[sequence], 190)?);
            }
            Ok((together, alone))
        });
        for chunk in [1, 7, 65] {
            suite.same_bits(format_args!("{all}: whole, and in chunks of {chunk}"), |backend| {
                Ok((all.attend(backend, &[4], 190)?, all.attend(backend, &[4], chunk)?))
            });
        }
    }
    for long in long {
        suite.same_bits(format_args!("{long}: chunks of 256, and of 130"), |backend| {
            Ok((long.attend(backend, &[0], 256)?, long.attend(backend, &[0], 130)?))
        });
    }
}

struct Rotary {
    heads: Heads,
    pairs: usize,
    magnitude: f32,
    /// Pairs are turned by three sections of a position, in turns.
    sections: bool,
}

impl fmt::Display for Rotary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} pairs, magnitude {}", Shown(self.heads), self.pairs, self.magnitude)?;
        if self.sections { f.write_str(", by sections") } else { Ok(()) }
    }
}

impl Case for Rotary {
    fn op(&self) -> Op {
        Op::Rope
    }

    fn needs(&self) -> Vec<Need> {
        if self.sections { vec![Need::Sections] } else { Vec::new() }
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let mut rope = rope(backend, self.pairs, self.magnitude)?;
        if self.sections {
            rope.sections = (0..self.pairs).map(|pair| [0, 1, 2][pair % 3]).collect();
        }
        let positions = [1, 0, 2, 31, 32, 1000, 8191, 100_000, 5, 5];
        let columns = self.heads.qkv_columns();
        let values = Random::of(self).values(positions.len() * columns);
        let mut qkv = Bench::filled(backend, Purpose::Activations, columns, &values)?;
        let mut batch = batch(positions.len(), 0);
        batch.positions = positions.to_vec();
        if self.sections {
            let turned =
                |by: usize| (0..positions.len()).map(|at| positions[(at + by) % positions.len()]).collect();
            batch.sections = vec![turned(1), turned(4)];
        }
        step(backend, &batch, |step| Ok(backend.rope(step, self.heads, &rope, &mut qkv.buf)?))?;
        qkv.table(backend)
    }
}

fn rope<B: Backend>(backend: &B, pairs: usize, magnitude: f32) -> Result<Rope<B::Buf>, Failure> {
    let frequencies: Vec<f32> = (0..pairs).map(|pair| 1e4f32.powf(-(pair as f32) / pairs as f32)).collect();
    let frequencies = backend.upload_values(&frequencies)?;
    Ok(Rope { frequencies, pairs, magnitude, sections: Vec::new() })
}

/// Sequences that grow together, chunk by chunk, in the second layer of the second group of a cache whose other layers
/// and pages hold other things.
#[derive(Clone, Copy)]
struct Sequences {
    heads: Heads,
    window: Option<u32>,
    dtype: KvDType,
    lengths: &'static [usize],
    /// Tokens that each sequence adds in a step.
    chunk: usize,
    /// Through `attend` in a recorded step, as models do it, instead of `kv_write` and `attention`.
    fused: bool,
    /// What not every backend has.
    extra: Option<Need>,
}

impl fmt::Display for Sequences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}, lengths {:?} by {}", self.dtype, Shown(self.heads), self.lengths, self.chunk)?;
        if let Some(window) = self.window {
            write!(f, ", window {window}")?;
        }
        if let Some(extra) = self.extra {
            write!(f, ", {extra}")?;
        }
        if self.fused { f.write_str(", with rope") } else { Ok(()) }
    }
}

impl Case for Sequences {
    fn op(&self) -> Op {
        // A query that sees only itself gives back its stored value, so this is how values are rounded.
        if self.window == Some(1) { Op::Kv } else { Op::Attention }
    }

    fn needs(&self) -> Vec<Need> {
        let Heads { query, kv, dim } = self.heads;
        let wide = query / kv > GROUP_MAX || query / kv * dim > GROUP_VALUES_MAX;
        self.extra.into_iter().chain(wide.then_some(Need::WideGroups)).collect()
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        let all: Vec<usize> = (0..self.lengths.len()).collect();
        self.attend(backend, &all, self.chunk)
    }
}

/// A sequence of 40 tokens, and the same again where the first page is the other's.
fn shared_prefix<B: Backend>(backend: &B) -> Result<(Table, Table), Failure> {
    const LEN: usize = 40;
    let heads = Heads { query: 3, kv: 1, dim: 64 };
    let case = Sequences {
        heads,
        window: None,
        dtype: KvDType::F16,
        lengths: &[LEN],
        chunk: LEN,
        fused: false,
        extra: None,
    };
    let group = KvGroup { layers: 2, kind: KvKind::pairs(1, 64), window: None, pages: 5 };
    let mut kv = backend.alloc_kv(&KvSpec { groups: vec![group.clone(), group], dtype: KvDType::F16 })?;
    case.poison(backend, 5, &mut kv)?;
    let values = Random::of("shared prefix").values(LEN * heads.qkv_columns());
    let mut from = |start: usize, slot: u32, pages: [u32; 2]| {
        let mut batch = Batch::default();
        let table = pages.map(PageId).to_vec();
        let (start_u32, len) = (count(start), count(LEN - start));
        let row = Row { slot, start: start_u32, len, pages: vec![table.clone(), table], wanted: 0 };
        batch.push(row, (0..len).map(Token::Known));
        case.step(backend, &batch, &values[start * heads.qkv_columns()..], &mut kv)
    };
    let mut whole = from(0, 0, [4, 1])?;
    let shared = from(PAGE_TOKENS, 1, [4, 2])?;
    whole.values.drain(..PAGE_TOKENS * whole.columns);
    Ok((whole, shared))
}

/// The layer that is looked at, and one whose writes must not be seen in it.
const LAYER: KvLayer = KvLayer { group: 1, layer: 1 };
const OTHER_LAYER: KvLayer = KvLayer { group: 1, layer: 0 };

impl Sequences {
    /// The outputs of the chosen sequences, one after the other. Their inputs depend on the sequence alone; their pages
    /// on which are chosen and on the chunk.
    fn attend<B: Backend>(&self, backend: &B, chosen: &[usize], chunk: usize) -> Result<Table, Failure> {
        let needed = |sequence: &usize| self.lengths[*sequence].div_ceil(PAGE_TOKENS);
        let pages = 3 + chosen.iter().map(needed).sum::<usize>();
        let Heads { kv: heads, dim, .. } = self.heads;
        let group = |window| KvGroup { layers: 2, kind: KvKind::pairs(heads, dim), window, pages };
        let spec = KvSpec { groups: vec![group(None), group(self.window)], dtype: self.dtype };
        let mut kv = backend.alloc_kv(&spec)?;
        self.poison(backend, pages, &mut kv)?;

        let mut free = Random::of(format_args!("{self} {chosen:?} {chunk}")).pages(pages);
        let tables: Vec<Vec<PageId>> =
            chosen.iter().map(|sequence| free.split_off(free.len() - needed(sequence))).collect();
        let columns = self.heads.qkv_columns();
        let inputs: Vec<Vec<f32>> = chosen
            .iter()
            .map(|&sequence| {
                Random::of(format_args!("{} {sequence}", Shown(self.heads)))
                    .values(self.lengths[sequence] * columns)
            })
            .collect();

        let mut outputs = vec![Table::new(self.heads.query * dim); chosen.len()];
        for start in (0..).step_by(chunk) {
            let (mut batch, mut values, mut rows) = (Batch::default(), Vec::new(), Vec::new());
            for (at, &sequence) in chosen.iter().enumerate() {
                let len = self.lengths[sequence].saturating_sub(start).min(chunk);
                if len > 0 {
                    let table = self.seen_from(start, &tables[at]);
                    let row = Row {
                        slot: count(sequence),
                        start: count(start),
                        len: count(len),
                        pages: vec![table.clone(), table],
                        wanted: 0,
                    };
                    batch.push(row, (0..count(len)).map(Token::Known));
                    values.extend_from_slice(&inputs[at][start * columns..][..len * columns]);
                    rows.push((at, len));
                }
            }
            if rows.is_empty() {
                break;
            }
            let out = self.step(backend, &batch, &values, &mut kv)?;
            let mut rest = out.values.as_slice();
            for (at, len) in rows {
                let (these, others) = rest.split_at(len * out.columns);
                outputs[at].values.extend_from_slice(these);
                rest = others;
            }
        }
        let mut all = Table::new(self.heads.query * dim);
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

    fn step<B: Backend>(
        &self,
        backend: &B,
        batch: &Batch,
        values: &[f32],
        kv: &mut B::Kv,
    ) -> Result<Table, Failure> {
        let columns = self.heads.qkv_columns();
        let mut qkv = Bench::filled(backend, Purpose::Activations, columns, values)?;
        let other: Vec<f32> = values.iter().map(|value| 100.0 - value).collect();
        let other = Bench::filled(backend, Purpose::Activations, columns, &other)?;
        let rope = rope(backend, self.heads.dim / 2, 1.0)?;
        let mut out = Bench::poisoned(
            backend,
            Purpose::Activations,
            batch.tokens.len(),
            self.heads.query * self.heads.dim,
        )?;
        // The keys are there; what reads them brings queries of its own and nothing else.
        let queries = match self.extra {
            Some(Need::SharedKeys) => {
                let own = self.heads.query * self.heads.dim;
                let rows = values.chunks_exact(columns);
                let alone: Vec<f32> =
                    rows.flat_map(|row| row[..own].iter().map(|value| 0.5 - value)).collect();
                Some(Bench::filled(backend, Purpose::Activations, own, &alone)?)
            }
            _ => None,
        };
        let scale = 1.0 / (self.heads.dim as f32).sqrt();
        let mut attention = Attention::causal(self.heads, LAYER, scale);
        match self.extra {
            Some(Need::SoftCap) => attention.soft_cap = Some(0.7),
            Some(Need::Sinks) => {
                let sinks = Random::of("sinks").values(self.heads.query);
                attention.sinks = Some(backend.upload_values(&sinks)?);
            }
            Some(Need::BothDirections) => attention.causal = false,
            Some(Need::Reach) => (attention.causal, attention.reach) = (false, Some(20)),
            Some(Need::Chunks) => attention.chunk = Some(33),
            _ => {}
        }
        step(backend, batch, |step| {
            if self.fused {
                let (qkv, out) = (&mut qkv.buf, &mut out.buf);
                let mut body = || backend.attend(step, &attention, Some(&rope), qkv, kv, out);
                return Ok(backend.record(step, &mut body)?);
            }
            backend.kv_write(step, self.heads, LAYER, &qkv.buf, kv)?;
            backend.kv_write(step, self.heads, OTHER_LAYER, &other.buf, kv)?;
            let rows = queries.as_ref().unwrap_or(&qkv);
            Ok(backend.attention(step, &attention, &rows.buf, kv, &mut out.buf)?)
        })?;
        out.table(backend)
    }

    /// Fills every page of every layer, the trash page too, with NaN: what a failed request may leave behind.
    fn poison<B: Backend>(&self, backend: &B, pages: usize, kv: &mut B::Kv) -> Result<(), Failure> {
        let table: Vec<PageId> = (0..count(pages)).map(PageId).collect();
        let positions: Vec<usize> = (0..pages * PAGE_TOKENS).collect();
        for positions in positions.chunks(TOKENS_MAX / PAGE_TOKENS * PAGE_TOKENS) {
            let nan = vec![f32::NAN; positions.len() * self.heads.qkv_columns()];
            let qkv = Bench::filled(backend, Purpose::Activations, self.heads.qkv_columns(), &nan)?;
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
                    backend.kv_write(step, self.heads, KvLayer { group, layer }, &qkv.buf, kv)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// Heads as cases name them.
struct Shown(Heads);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "heads {}/{} of {}", self.0.query, self.0.kv, self.0.dim)
    }
}
