//! Attention over pages, and the writing of pages.
//!
//! A unit of work is a few consecutive tokens of one sequence and one K/V head with all query heads that share it, so
//! that a page is read once for all of them; where that makes fewer units than threads, with some of those heads. Each
//! (token, query head) keeps a running softmax over the pages in order. A page is a block of keys aligned to absolute positions, and what a query sees of it depends on the query's
//! position alone: so a token's result is the same bits whichever tokens are computed beside it.
//!
//! Keys lie in a page as (dim, token), values as (token, dim). So neither product adds lanes of a register: scores have
//! a lane for each key, outputs a lane for each value of the head. Few queries read a page as it is stored; many have
//! it widened to f32 once. Both see the same numbers in the same order. Pages of 8-bit codes are always widened: behind
//! the codes of a head, in the order of its keys or values, lie their scales, by (block of 32 values, token) or (token,
//! block), or for 8-bit floats by token alone.

#![expect(
    clippy::needless_range_loop,
    reason = "one index goes through registers, queries and keys together"
)]

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::disjoint::Disjoint;
use super::exp::exp;
use super::glu::soft_cap;
use super::memory::{Geometry, Pages};
use super::pool::Pool;
#[cfg(target_arch = "aarch64")]
use super::quant::Neon;
#[cfg(target_arch = "x86_64")]
use super::quant::{Avx2, Avx512};
use super::quant::{Lanes, Simd};
use super::step::{Slot, StepRow};
use crate::{Heads, KV_BLOCK, KvDType, PAGE_TOKENS, PageId, float8};

/// Tokens of a unit: enough to share the unpacking of a page, few enough to keep all threads busy.
pub(super) const UNIT_TOKENS: usize = 16;
/// From this many queries on a page is widened once instead of by each few of them.
const WIDEN_QUERIES: usize = 9;
/// Values of a head's keys or values that one thread stores: as f16 a line of the cache.
const SHARE_VALUES: usize = 32;
/// From this many tokens on threads share the storing.
const SHARED_TOKENS: usize = 4;
/// Values of a head that one register, or pair of registers, holds.
pub(super) const LANES: usize = 16;

/// Values of thread scratch that a unit needs: one page's keys and values, and each query with its state and output.
pub(super) fn scratch_values(heads: Heads) -> usize {
    2 * PAGE_TOKENS * heads.dim
        + UNIT_TOKENS * (heads.query / heads.kv) * (2 * heads.dim + size_of::<Running>() / size_of::<f32>())
}

/// Into how many parts the query heads of a K/V head are cut, so that there are as many units as threads: parts of the
/// same size, for each part reads the page anew.
fn parts(shared: usize, units: usize, threads: usize) -> usize {
    let enough = |parts: &usize| shared.is_multiple_of(*parts) && units * parts >= threads;
    (1..=shared).find(enough).unwrap_or(shared)
}

/// One layer's attention.
pub(super) struct Layer<'a> {
    pub(super) heads: Heads,
    /// Multiplies query-key products.
    pub(super) scale: f32,
    /// Scaled products `s` become `cap * tanh(s / cap)`.
    pub(super) soft_cap: Option<f32>,
    /// One logit per query head.
    pub(super) sinks: Option<&'a [f32]>,
    /// Whether a query sees nothing behind its own position; else all of its row.
    pub(super) causal: bool,
    /// Whether a query sees as far as the batch says, where it says it.
    pub(super) ahead: bool,
    /// How many positions on each side of its own a query sees that is not causal.
    pub(super) reach: Option<usize>,
    /// How long the chunks are that a query sees nothing outside of.
    pub(super) chunk: Option<usize>,
    /// The layer's KV group, whose page tables it uses.
    pub(super) group: usize,
    /// Columns of the rows that begin with the queries: of fused ones, or the queries alone.
    pub(super) columns: usize,
    /// A query sees this many positions, its own included.
    pub(super) window: Option<u32>,
    pub(super) dtype: KvDType,
    pub(super) pages: Pages<'a>,
}

/// How far the queries of a unit see.
#[derive(Clone, Copy)]
struct Sees<'a> {
    /// Behind the last position of their row.
    row_end: usize,
    /// The last position that each of them sees, where the batch says it.
    lasts: Option<&'a [u32]>,
}

/// Softmax so far: the largest score, and the sum of exponentials relative to it. Two values, as the scratch holds it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Running {
    pub(super) max: f32,
    pub(super) sum: f32,
}

/// The queries of a unit: token after token, and of each token the heads that share the K/V head.
struct Queries<'a> {
    dim: usize,
    /// (queries, dim), already multiplied by the scale.
    values: &'a [f32],
    /// (queries)
    states: &'a mut [Running],
    /// (queries, dim), relative to each query's state.
    outputs: &'a mut [f32],
}

impl Queries<'_> {
    /// Some of them.
    fn part(&mut self, queries: std::ops::Range<usize>) -> Queries<'_> {
        let values = queries.start * self.dim..queries.end * self.dim;
        Queries {
            dim: self.dim,
            values: &self.values[values.clone()],
            states: &mut self.states[queries],
            outputs: &mut self.outputs[values],
        }
    }
}

/// One head's page as some queries see it.
#[derive(Clone, Copy)]
struct Page<'a> {
    dtype: KvDType,
    soft_cap: Option<f32>,
    /// (dim, PAGE_TOKENS)
    keys: &'a [u8],
    /// (PAGE_TOKENS, dim)
    values: &'a [u8],
    /// Tokens from here on,
    first: usize,
    /// up to here are seen; others may never have been written.
    end: usize,
}

impl Layer<'_> {
    /// `out` (tokens, query heads x dim) from the queries in `qkv`; `scratch` has the same stretch for each thread.
    pub(super) fn attend(
        &self,
        pool: &Pool,
        simd: Simd,
        step: &Slot,
        qkv: &[f32],
        scratch: &mut [f32],
        out: &mut [f32],
    ) {
        let units = step.units();
        let scratch_len = scratch.len() / pool.threads();
        let (scratch, out) = (Disjoint::new(scratch), Disjoint::new(out));
        let shared = self.heads.query / self.heads.kv;
        let parts = parts(shared, units.len() * self.heads.kv, pool.used());
        let each = shared / parts;
        let sharings = self.heads.kv * parts;
        // Later units of a sequence see more keys: starting with them evens out the end.
        pool.for_each_claimed(units.len() * sharings, |thread, item| {
            let (unit, head) = (&units[units.len() - 1 - item / sharings], item % sharings / parts);
            let first = item % parts * each;
            let heads = head * shared + first..head * shared + first + each;
            // SAFETY: each thread takes its own stretch.
            let scratch = unsafe { scratch.part(thread * scratch_len..(thread + 1) * scratch_len) };
            let table = step.table(unit.row, self.group);
            let row = step.rows()[unit.row];
            let lasts = step.lasts().get(unit.tokens.first..unit.tokens.first + unit.tokens.len);
            let lasts = lasts.filter(|_| self.ahead);
            let sees = Sees { row_end: row.start + row.len, lasts };
            self.attend_unit(simd, &unit.tokens, sees, table, heads, qkv, scratch, &out);
        });
    }

    /// One unit: `tokens` consecutive tokens of a sequence, some query heads of one K/V head.
    #[expect(clippy::too_many_arguments, reason = "a leaf of the one loop above, which made them all")]
    fn attend_unit(
        &self,
        simd: Simd,
        tokens: &StepRow,
        sees: Sees<'_>,
        table: &[PageId],
        heads: Range<usize>,
        qkv: &[f32],
        scratch: &mut [f32],
        out: &Disjoint<'_, f32>,
    ) {
        let Heads { query, kv, dim } = self.heads;
        let (head, shared) = (heads.start / (query / kv), heads.len());
        let count = tokens.len * shared;
        let (wide_keys, rest) = scratch.split_at_mut(PAGE_TOKENS * dim);
        let (wide_values, rest) = rest.split_at_mut(PAGE_TOKENS * dim);
        let (values, rest) = rest.split_at_mut(count * dim);
        let (outputs, rest) = rest.split_at_mut(count * dim);
        for (token, values) in values.chunks_exact_mut(shared * dim).enumerate() {
            let at = (tokens.first + token) * self.columns + heads.start * dim;
            for (value, query) in values.iter_mut().zip(&qkv[at..]) {
                *value = query * self.scale;
            }
        }
        let states: &mut [Running] = bytemuck::cast_slice_mut(&mut rest[..2 * count]);
        states.fill(Running { max: f32::NEG_INFINITY, sum: 0.0 });
        if let Some(sinks) = self.sinks {
            // A sink is the first to be seen, with a value of nothing.
            for states in states.chunks_exact_mut(shared) {
                for (state, &sink) in states.iter_mut().zip(&sinks[heads.start..]) {
                    *state = Running { max: sink, sum: 1.0 };
                }
            }
        }
        outputs.fill(0.0);
        let mut queries = Queries { dim, values, states, outputs };

        let first_seen = self.first_seen(tokens.start);
        // The first position that a query does not see.
        let end_of = |position: usize| match sees.lasts {
            Some(lasts) => lasts[position - tokens.start] as usize + 1,
            None if self.causal => position + 1,
            None => self.reach.map_or(sees.row_end, |reach| sees.row_end.min(position + reach + 1)),
        };
        let last = tokens.start + tokens.len - 1;
        let end = sees
            .lasts
            .map_or(end_of(last), |lasts| lasts.iter().fold(0, |end, &last| end.max(last as usize + 1)));
        let seen_pages = first_seen / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS);
        for (&id, page_start) in
            table[seen_pages.clone()].iter().zip(seen_pages.map(|page| page * PAGE_TOKENS))
        {
            let mut page = Page {
                dtype: self.dtype,
                soft_cap: self.soft_cap,
                keys: self.pages.keys(id, head),
                values: self.pages.values(id, head),
                first: 0,
                end: PAGE_TOKENS,
            };
            if matches!(self.dtype, KvDType::Q8_0 | KvDType::F8) {
                page = page.decoded(simd, dim, wide_keys, wide_values);
            } else if count >= WIDEN_QUERIES && self.dtype != KvDType::F32 {
                page = page.widened(wide_keys, wide_values);
            }
            // What a token sees of the page.
            let seen = |position: usize| {
                let first = self.first_seen(position).max(page_start) - page_start;
                first..end_of(position).min(page_start + PAGE_TOKENS).saturating_sub(page_start)
            };
            let (by_first, by_last) = (seen(tokens.start), seen(last));
            // Where nothing is said of single tokens, those between the first and the last see as much.
            let alike =
                || sees.lasts.is_none() || (tokens.start..last).all(|position| seen(position) == by_first);
            if by_first == by_last && !by_first.is_empty() && alike() {
                page = Page { first: by_first.start, end: by_first.end, ..page };
                page.step(simd, &mut queries);
                continue;
            }
            for token in 0..tokens.len {
                let seen = seen(tokens.start + token);
                if !seen.is_empty() {
                    let page = Page { first: seen.start, end: seen.end, ..page };
                    page.step(simd, &mut queries.part(token * shared..(token + 1) * shared));
                }
            }
        }
        for (token, from) in queries.outputs.chunks_exact(shared * dim).enumerate() {
            let at = (tokens.first + token) * query * dim + heads.start * dim;
            // SAFETY: no two units share a token and a head, and a unit looks at one token at a time.
            let to = unsafe { out.part(at..at + shared * dim) };
            let states = &queries.states[token * shared..][..shared];
            for ((to, from), state) in to.chunks_exact_mut(dim).zip(from.chunks_exact(dim)).zip(states) {
                // A query that saw nothing has a sum of zero and keeps its zeros.
                let inverse = if state.sum == 0.0 { 0.0 } else { 1.0 / state.sum };
                to.iter_mut().zip(from).for_each(|(to, from)| *to = from * inverse);
            }
        }
    }

    /// The first position that a query at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        let near = self.reach.map_or(0, |reach| position.saturating_sub(reach));
        let near = near.max(self.chunk.map_or(0, |chunk| position / chunk * chunk));
        near.max(self.window.map_or(0, |window| (position + 1).saturating_sub(window as usize)))
    }
}

impl<'a> Page<'a> {
    /// The same page in f32.
    fn widened(self, keys: &'a mut [f32], values: &'a mut [f32]) -> Page<'a> {
        widen(self.dtype, self.keys, keys);
        widen(self.dtype, self.values, values);
        let (keys, values) = (bytemuck::cast_slice(keys), bytemuck::cast_slice(values));
        Page { dtype: KvDType::F32, keys, values, ..self }
    }

    /// The same page in f32, of 8-bit codes.
    fn decoded(self, simd: Simd, dim: usize, keys: &'a mut [f32], values: &'a mut [f32]) -> Page<'a> {
        match simd {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the backend was made for a processor with AVX2.
            Simd::Avx2 | Simd::Avx512 | Simd::Amx => unsafe { decode_avx2(self, dim, keys, values) },
            _ => decode(self, dim, keys, values),
        }
        let (keys, values) = (bytemuck::cast_slice(keys), bytemuck::cast_slice(values));
        Page { dtype: KvDType::F32, keys, values, ..self }
    }

    /// Takes what is seen of the page into the running softmax of every query.
    fn step(self, simd: Simd, queries: &mut Queries<'_>) {
        let dim = queries.dim;
        assert_eq!(self.keys.len(), PAGE_TOKENS * self.dtype.bytes_of(dim), "keys of a page");
        assert_eq!(self.values.len(), self.keys.len(), "values of a page");
        assert!(self.first < self.end && self.end <= PAGE_TOKENS, "what is seen of a page");
        let count = queries.states.len();
        match simd {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 if dim.is_multiple_of(LANES) => {
                for first in (0..count).step_by(2) {
                    let mut some = queries.part(first..count.min(first + 2));
                    // SAFETY: the backend was made for a processor with AVX2; lengths are asserted above.
                    unsafe { step_avx2(self, &mut some) };
                }
            }
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 | Simd::Amx if dim.is_multiple_of(LANES) => {
                for first in (0..count).step_by(4) {
                    let mut some = queries.part(first..count.min(first + 4));
                    // SAFETY: the backend was made for a processor with AVX-512; lengths are asserted above.
                    unsafe { step_avx512(self, &mut some) };
                }
            }
            #[cfg(target_arch = "aarch64")]
            Simd::Neon | Simd::Dotprod | Simd::I8mm if dim.is_multiple_of(LANES) => {
                for first in (0..count).step_by(2) {
                    let mut some = queries.part(first..count.min(first + 2));
                    // SAFETY: the backend was made for a processor with NEON; lengths are asserted above.
                    unsafe { step_neon(self, &mut some) };
                }
            }
            _ => (0..count).for_each(|query| self.step_plain(&mut queries.part(query..query + 1))),
        }
    }

    /// The specification, one query at a time: a score sums the products in order; then the output, scaled to the new
    /// maximum, takes the values key by key.
    fn step_plain(self, query: &mut Queries<'_>) {
        let dim = query.dim;
        let mut scores = [f32::NEG_INFINITY; PAGE_TOKENS];
        for key in self.first..self.end {
            scores[key] = 0.0;
            for (i, value) in query.values.iter().enumerate() {
                scores[key] += value * number(self.dtype, self.keys, i * PAGE_TOKENS + key);
            }
        }
        let seen = self.first..self.end;
        let (weights, shrink) = weigh(&mut scores, self.soft_cap, seen, &mut query.states[0]);
        for (i, out) in query.outputs.iter_mut().enumerate() {
            *out *= shrink;
            for key in self.first..self.end {
                *out += weights[key] * number(self.dtype, self.values, key * dim + i);
            }
        }
    }
}

/// Why no step sees codes.
const DECODED: &str = "pages of codes are decoded before they are used";

/// One stored number.
fn number(dtype: KvDType, stored: &[u8], index: usize) -> f32 {
    match dtype {
        KvDType::F32 => bytemuck::cast_slice::<_, f32>(stored)[index],
        KvDType::F16 => bytemuck::cast_slice::<_, f16>(stored)[index].to_f32(),
        KvDType::BF16 => bytemuck::cast_slice::<_, bf16>(stored)[index].to_f32(),
        KvDType::Q8_0 | KvDType::F8 => unreachable!("{DECODED}"),
    }
}

/// Takes a page's scores into a query's state: the weight of each key, zero for what is not seen, and what the output
/// so far is to be multiplied by.
#[inline(always)]
pub(super) fn weigh(
    scores: &mut [f32; PAGE_TOKENS],
    cap: Option<f32>,
    seen: std::ops::Range<usize>,
    state: &mut Running,
) -> ([f32; PAGE_TOKENS], f32) {
    if let Some(cap) = cap {
        for score in &mut *scores {
            *score = soft_cap(cap, *score);
        }
    }
    // Not f32::max, which drops a NaN: a fault has to reach the logits.
    let max = scores[seen.clone()]
        .iter()
        .fold(state.max, |max, &score| if score > max || score.is_nan() { score } else { max });
    let shrink = exp(state.max - max);
    let mut weights = [0.0; PAGE_TOKENS];
    for (weight, score) in weights.iter_mut().zip(&*scores) {
        *weight = exp(score - max);
    }
    weights[..seen.start].fill(0.0);
    weights[seen.end..].fill(0.0);
    let mut lanes = [0.0; 8];
    for chunk in weights.as_chunks::<8>().0 {
        for (lane, weight) in lanes.iter_mut().zip(chunk) {
            *lane += weight;
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    let sum = ((a + e) + (c + g)) + ((b + f) + (d + h));
    *state = Running { max, sum: state.sum * shrink + sum };
    (weights, shrink)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn step_avx2(page: Page<'_>, queries: &mut Queries<'_>) {
    // SAFETY: as the caller's.
    unsafe { step_stored::<Avx2, 2>(page, queries) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn step_avx512(page: Page<'_>, queries: &mut Queries<'_>) {
    // SAFETY: as the caller's.
    unsafe { step_stored::<Avx512, 4>(page, queries) }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn step_neon(page: Page<'_>, queries: &mut Queries<'_>) {
    // SAFETY: as the caller's.
    unsafe { step_stored::<Neon<4>, 2>(page, queries) }
}

/// How sixteen stored numbers are read.
///
/// # Safety
///
/// Of `read`: the caller has the instructions of `L` and sixteen stored numbers.
trait Stored {
    const BYTES: usize;
    unsafe fn read<L: Lanes>(from: *const u8) -> L::Floats;
}

enum Single {}
enum Half {}
enum Brain {}

impl Stored for Single {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn read<L: Lanes>(from: *const u8) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { L::floats(from.cast()) }
    }
}

impl Stored for Half {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn read<L: Lanes>(from: *const u8) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { L::halves(from) }
    }
}

impl Stored for Brain {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn read<L: Lanes>(from: *const u8) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { L::brains(from) }
    }
}

/// At most `N` queries at once.
#[inline(always)]
unsafe fn step_stored<L: Lanes, const N: usize>(page: Page<'_>, queries: &mut Queries<'_>) {
    // SAFETY: as the caller's.
    unsafe {
        match page.dtype {
            KvDType::F32 => step_lanes::<L, Single, N>(page, queries),
            KvDType::F16 => step_lanes::<L, Half, N>(page, queries),
            KvDType::BF16 => step_lanes::<L, Brain, N>(page, queries),
            KvDType::Q8_0 | KvDType::F8 => unreachable!("{DECODED}"),
        }
    }
}

/// Scores: a lane for each key. Outputs: a lane for each value of the head.
#[inline(always)]
unsafe fn step_lanes<L: Lanes, S: Stored, const N: usize>(page: Page<'_>, queries: &mut Queries<'_>) {
    let (dim, count) = (queries.dim, queries.states.len());
    let mut scores = [[0.0; PAGE_TOKENS]; N];
    let mut weights = [[0.0; PAGE_TOKENS]; N];
    let mut shrinks = [0.0; N];
    // Places beyond the last query compute it once more, and are forgotten.
    let row = |place: usize| place.min(count - 1) * dim;
    // SAFETY: the caller has checked the page's length, and that its head is a multiple of sixteen values.
    unsafe {
        let values = queries.values.as_ptr();
        let mut sums = [[L::splat(&0.0); 2]; N];
        for i in 0..dim {
            let key = page.keys.as_ptr().add(i * PAGE_TOKENS * S::BYTES);
            let (first, second) = (S::read::<L>(key), S::read::<L>(key.add(LANES * S::BYTES)));
            for n in 0..N {
                let value = L::splat(values.add(row(n) + i));
                sums[n] = [L::fma(first, value, sums[n][0]), L::fma(second, value, sums[n][1])];
            }
        }
        for n in 0..N {
            L::store(sums[n][0], scores[n].as_mut_ptr());
            L::store(sums[n][1], scores[n].as_mut_ptr().add(LANES));
        }
    }
    for n in 0..count {
        let seen = page.first..page.end;
        (weights[n], shrinks[n]) = weigh(&mut scores[n], page.soft_cap, seen, &mut queries.states[n]);
    }
    // SAFETY: as above.
    unsafe {
        let outputs = queries.outputs.as_mut_ptr();
        for lane in (0..dim).step_by(LANES) {
            let mut sums = [L::splat(&0.0); N];
            for n in 0..N {
                sums[n] = L::mul(L::floats(outputs.add(row(n) + lane)), L::splat(&shrinks[n]));
            }
            for token in page.first..page.end {
                let value = S::read::<L>(page.values.as_ptr().add((token * dim + lane) * S::BYTES));
                for n in 0..N {
                    sums[n] = L::fma(L::splat(&weights[n][token]), value, sums[n]);
                }
            }
            for n in 0..count {
                L::store(sums[n], outputs.add(row(n) + lane));
            }
        }
    }
}

/// One head's page as f32.
pub(super) fn widen(dtype: KvDType, stored: &[u8], room: &mut [f32]) {
    match dtype {
        KvDType::F32 => room.copy_from_slice(bytemuck::cast_slice(stored)),
        KvDType::F16 => bytemuck::cast_slice::<_, f16>(stored).convert_to_f32_slice(room),
        KvDType::BF16 => bytemuck::cast_slice::<_, bf16>(stored).convert_to_f32_slice(room),
        KvDType::Q8_0 | KvDType::F8 => unreachable!("{DECODED}"),
    }
}

/// One head's page of codes as f32: a code times its scale.
#[inline(always)]
fn decode(page: Page<'_>, dim: usize, keys: &mut [f32], values: &mut [f32]) {
    if page.dtype == KvDType::F8 {
        decode_floats(page, dim, keys, values)
    } else {
        decode_integers(page, dim, keys, values)
    }
}

/// Of 8-bit floats.
#[inline(always)]
fn decode_floats(page: Page<'_>, dim: usize, keys: &mut [f32], values: &mut [f32]) {
    let (codes, exponents) = page.keys.split_at(PAGE_TOKENS * dim);
    let mut scales = [0.0; PAGE_TOKENS];
    for (scale, exponent) in scales.iter_mut().zip(exponents) {
        *scale = float8::power(*exponent);
    }
    let keys = keys.as_chunks_mut::<PAGE_TOKENS>().0;
    for (keys, codes) in keys.iter_mut().zip(codes.as_chunks::<PAGE_TOKENS>().0) {
        for token in 0..PAGE_TOKENS {
            keys[token] = scales[token] * float8::value(codes[token]);
        }
    }
    let (codes, exponents) = page.values.split_at(PAGE_TOKENS * dim);
    let tokens = values.chunks_exact_mut(dim).zip(codes.chunks_exact(dim)).zip(exponents);
    for ((values, codes), exponent) in tokens {
        let scale = float8::power(*exponent);
        for (value, code) in values.iter_mut().zip(codes) {
            *value = scale * float8::value(*code);
        }
    }
}

/// Of 8-bit integers.
#[inline(always)]
fn decode_integers(page: Page<'_>, dim: usize, keys: &mut [f32], values: &mut [f32]) {
    let blocks = dim.div_ceil(KV_BLOCK);
    let (codes, scales) = codes_and_scales(page.keys, dim);
    for (block, scales) in scales.chunks_exact(PAGE_TOKENS).enumerate() {
        let mut wide = [0.0; PAGE_TOKENS];
        scales.convert_to_f32_slice(&mut wide);
        let these = block * KV_BLOCK * PAGE_TOKENS..dim.min((block + 1) * KV_BLOCK) * PAGE_TOKENS;
        let keys = keys[these.clone()].as_chunks_mut::<PAGE_TOKENS>().0;
        for (keys, codes) in keys.iter_mut().zip(codes[these].as_chunks::<PAGE_TOKENS>().0) {
            for token in 0..PAGE_TOKENS {
                keys[token] = wide[token] * f32::from(codes[token]);
            }
        }
    }
    let (codes, scales) = codes_and_scales(page.values, dim);
    let tokens = values.chunks_exact_mut(dim).zip(codes.chunks_exact(dim)).zip(scales.chunks_exact(blocks));
    for ((values, codes), scales) in tokens {
        let parts = values.chunks_mut(KV_BLOCK).zip(codes.chunks(KV_BLOCK)).zip(scales);
        for ((values, codes), scale) in parts {
            let scale = scale.to_f32();
            for (value, code) in values.iter_mut().zip(codes) {
                *value = scale * f32::from(*code);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_avx2(page: Page<'_>, dim: usize, keys: &mut [f32], values: &mut [f32]) {
    decode(page, dim, keys, values);
}

/// One head's keys or values of a page, stored as codes.
fn codes_and_scales(stored: &[u8], dim: usize) -> (&[i8], &[f16]) {
    let (codes, scales) = stored.split_at(PAGE_TOKENS * dim);
    (bytemuck::cast_slice(codes), bytemuck::cast_slice(scales))
}

/// At most 32 values as codes, ggml's way: the largest becomes 127 or -127, ties go away from zero. What holds a NaN or
/// an infinity has a scale of NaN, so that the fault is seen downstream; what is nearly zero is zero.
pub(super) fn encode(values: &[f32], codes: &mut [i8; KV_BLOCK]) -> f16 {
    const MAGNITUDE_MIN: f32 = f32::MIN_POSITIVE * 256.0;
    // As bits, magnitudes order like the values, with infinity and then NaN above every finite one.
    let bits = values.iter().map(|value| value.to_bits() & 0x7fff_ffff).max().unwrap_or_default();
    let magnitude = f32::from_bits(bits);
    codes.fill(0);
    if !magnitude.is_finite() || magnitude < MAGNITUDE_MIN {
        return if magnitude.is_finite() { f16::ZERO } else { f16::NAN };
    }
    let scale = magnitude / 127.0;
    let inverse = 1.0 / scale;
    for (code, value) in codes.iter_mut().zip(values) {
        *code = (value * inverse).round() as i8;
    }
    f16::from_f32(scale)
}

/// Where a batch's keys and values go.
pub(super) struct Writer<'a> {
    pub(super) heads: Heads,
    pub(super) group: usize,
    pub(super) dtype: KvDType,
    pub(super) geometry: Geometry,
    /// The layer's pages.
    pub(super) pages: &'a mut [u8],
}

impl Writer<'_> {
    /// Stores every token's keys and values. Threads divide the heads and their values, so whatever the page tables say,
    /// no two of them write to one place.
    pub(super) fn write(mut self, pool: &Pool, step: &Slot, qkv: &[f32]) {
        let Heads { query, kv, dim } = self.heads;
        let pages = Disjoint::new(std::mem::take(&mut self.pages));
        // SAFETY: what is asked for belongs to one share of one head in a page: no other thread touches that, and no two
        // parts of it are held at a time.
        let room = |to: usize, bytes: usize| unsafe { pages.part(to..to + bytes) };
        // Codes have scales that several values share.
        let coded = matches!(self.dtype, KvDType::Q8_0 | KvDType::F8);
        let shares = if coded { 1 } else { dim.div_ceil(SHARE_VALUES) };
        // Share after share of head after head.
        let write_shares = |mine: Range<usize>| {
            for (index, row) in step.rows().iter().enumerate() {
                let table = step.table(index, self.group);
                for token in 0..row.len {
                    let (page, at) = ((row.start + token) / PAGE_TOKENS, (row.start + token) % PAGE_TOKENS);
                    if table[page] == PageId::TRASH {
                        continue;
                    }
                    let qkv = &qkv[(row.first + token) * self.heads.qkv_columns()..];
                    for (head, share) in mine.clone().map(|item| (item / shares, item % shares)) {
                        let key = &qkv[(query + head) * dim..][..dim];
                        let value = &qkv[(query + kv + head) * dim..][..dim];
                        let keys = self.geometry.keys(table[page], head);
                        let values = self.geometry.values(table[page], head);
                        if self.dtype == KvDType::Q8_0 {
                            write_codes(room, (keys, key), (values, value), at);
                            continue;
                        }
                        if self.dtype == KvDType::F8 {
                            write_floats(room, (keys, key), (values, value), at);
                            continue;
                        }
                        let (bytes, token_bytes) = (self.dtype.bytes_of(1), self.geometry.token_bytes);
                        let these = share * SHARE_VALUES..dim.min((share + 1) * SHARE_VALUES);
                        // As f32, so that it is aligned for every type.
                        let mut stored = [0.0_f32; SHARE_VALUES];
                        let stored: &mut [u8] = bytemuck::cast_slice_mut(&mut stored);
                        let stored = &mut stored[..these.len() * bytes];
                        narrow(self.dtype, &key[these.clone()], stored);
                        let lines = PAGE_TOKENS * bytes;
                        let keys = keys + these.start * lines + at * bytes;
                        match bytes {
                            2 => scatter::<2>(stored, |i| room(keys + i * lines, 2)),
                            _ => scatter::<4>(stored, |i| room(keys + i * lines, 4)),
                        }
                        let to = values + at * token_bytes + these.start * bytes;
                        narrow(self.dtype, &value[these.clone()], room(to, these.len() * bytes));
                    }
                }
            }
        };
        // A token or two are not worth telling anybody.
        if step.tokens().len() < SHARED_TOKENS {
            write_shares(0..kv * shares);
        } else {
            pool.for_each(kv * shares, |_, mine| write_shares(mine));
        }
    }
}

/// Writes each number, of so many bytes, where `room` says.
#[inline(always)]
fn scatter<'p, const BYTES: usize>(stored: &[u8], room: impl Fn(usize) -> &'p mut [u8]) {
    for (i, number) in stored.as_chunks::<BYTES>().0.iter().enumerate() {
        *room(i).as_mut_array::<BYTES>().expect("room for one") = *number;
    }
}

/// Stores token `at`'s keys and values of a head as codes; each with where its stretch of the page begins.
fn write_codes<'p>(
    room: impl Fn(usize, usize) -> &'p mut [u8],
    (keys, key): (usize, &[f32]),
    (values, value): (usize, &[f32]),
    at: usize,
) {
    let (dim, mut codes) = (key.len(), [0; KV_BLOCK]);
    let blocks = dim.div_ceil(KV_BLOCK);
    let write = |to: usize, bytes: &[u8]| room(to, bytes.len()).copy_from_slice(bytes);
    for (block, (key, value)) in key.chunks(KV_BLOCK).zip(value.chunks(KV_BLOCK)).enumerate() {
        let scale = encode(key, &mut codes);
        for (i, code) in codes[..key.len()].iter().enumerate() {
            write(keys + (block * KV_BLOCK + i) * PAGE_TOKENS + at, &code.to_le_bytes());
        }
        write(keys + PAGE_TOKENS * dim + (block * PAGE_TOKENS + at) * 2, &scale.to_ne_bytes());
        let scale = encode(value, &mut codes);
        write(values + at * dim + block * KV_BLOCK, bytemuck::cast_slice(&codes[..value.len()]));
        write(values + PAGE_TOKENS * dim + (at * blocks + block) * 2, &scale.to_ne_bytes());
    }
}

/// The same as 8-bit floats.
fn write_floats<'p>(
    room: impl Fn(usize, usize) -> &'p mut [u8],
    (keys, key): (usize, &[f32]),
    (values, value): (usize, &[f32]),
    at: usize,
) {
    let (dim, mut codes) = (key.len(), [0; KV_BLOCK]);
    let (key_exponent, value_exponent) = (float8::exponent(key), float8::exponent(value));
    for (block, (key, value)) in key.chunks(KV_BLOCK).zip(value.chunks(KV_BLOCK)).enumerate() {
        let codes = &mut codes[..key.len()];
        float8::encode(key, key_exponent, codes);
        for (i, code) in codes.iter().enumerate() {
            room(keys + (block * KV_BLOCK + i) * PAGE_TOKENS + at, 1)[0] = *code;
        }
        float8::encode(value, value_exponent, codes);
        room(values + at * dim + block * KV_BLOCK, codes.len()).copy_from_slice(codes);
    }
    room(keys + PAGE_TOKENS * dim + at, 1)[0] = key_exponent;
    room(values + PAGE_TOKENS * dim + at, 1)[0] = value_exponent;
}

/// Stores f32 values, rounded to nearest even.
pub(super) fn narrow(dtype: KvDType, values: &[f32], stored: &mut [u8]) {
    match dtype {
        KvDType::F32 => stored.copy_from_slice(bytemuck::cast_slice(values)),
        KvDType::F16 => bytemuck::cast_slice_mut::<_, f16>(stored).convert_from_f32_slice(values),
        KvDType::BF16 => bytemuck::cast_slice_mut::<_, bf16>(stored).convert_from_f32_slice(values),
        KvDType::Q8_0 | KvDType::F8 => unreachable!("codes are written with their scales"),
    }
}

#[cfg(test)]
mod tests {
    use crate::cpu::testing::{bits, numbers};
    use crate::cpu::{Cpu, CpuOptions, Simd};
    use crate::{
        Attention, Backend, Batch, Heads, KvDType, KvGroup, KvKind, KvLayer, KvSpec, Memory, PAGE_TOKENS,
        PageId, Purpose, Row, Token,
    };

    const HEADS: Heads = Heads { query: 6, kv: 2, dim: 20 };
    const LAYER: KvLayer = KvLayer { group: 1, layer: 1 };
    const SCALE: f32 = 0.7;
    /// Tokens of two sequences that step together.
    const LENS: [usize; 2] = [101, 40];

    fn spec(dtype: KvDType, window: Option<u32>) -> KvSpec {
        let group = |layers| KvGroup { layers, kind: KvKind::pairs(HEADS.kv, HEADS.dim), window, pages: 20 };
        KvSpec { groups: vec![group(1), group(2)], dtype }
    }

    /// Pages of a sequence, in no order.
    fn table(slot: usize) -> Vec<PageId> {
        let pages = [[7, 3, 11, 5], [2, 14, 9, 1]];
        pages[slot].map(PageId).to_vec()
    }

    fn qkv(slot: usize) -> Vec<f32> {
        numbers(slot as u64 + 5, LENS[slot] * HEADS.qkv_columns()).iter().map(|x| x * 2.0).collect()
    }

    /// Both sequences in chunks: `steps[i]` says how many tokens each takes in step i. Answers each one's outputs.
    fn outputs(
        options: CpuOptions,
        dtype: KvDType,
        window: Option<u32>,
        steps: &[[usize; 2]],
    ) -> [Vec<f32>; 2] {
        let cpu = Cpu::new(CpuOptions { slots: 2, ..options }).unwrap();
        let mut kv = cpu.alloc_kv(&spec(dtype, window)).unwrap();
        let attention = Attention::causal(HEADS, LAYER, SCALE);
        let columns = HEADS.query * HEADS.dim;
        let mut done = [0; 2];
        let mut outputs = [vec![], vec![]];
        for &lens in steps {
            let mut batch = Batch::default();
            let mut inputs = vec![];
            for slot in 0..2 {
                if lens[slot] > 0 {
                    let pages = vec![vec![PageId::TRASH; 4], table(slot)];
                    let (start, len) = (done[slot] as u32, lens[slot] as u32);
                    let row = Row { slot: slot as u32, start, len, pages, wanted: 0 };
                    batch.push(row, std::iter::repeat_n(Token::Known(0), lens[slot]));
                    let from = done[slot] * HEADS.qkv_columns();
                    inputs.extend_from_slice(&qkv(slot)[from..][..lens[slot] * HEADS.qkv_columns()]);
                }
            }
            let tokens = lens[0] + lens[1];
            let mut x = cpu.alloc(Purpose::Activations, tokens, HEADS.qkv_columns()).unwrap();
            let mut out = cpu.alloc(Purpose::Activations, tokens + 1, columns).unwrap();
            cpu.write(&mut x, 0, &inputs).unwrap();
            cpu.write(&mut out, 0, &vec![f32::NAN; (tokens + 1) * columns]).unwrap();
            let step = cpu.begin(&batch).unwrap();
            cpu.kv_write(&step, HEADS, LAYER, &x, &mut kv).unwrap();
            cpu.attention(&step, &attention, &x, &kv, &mut out).unwrap();
            cpu.finish(step).unwrap();
            let mut row = 0;
            for slot in 0..2 {
                outputs[slot].extend(cpu.read(&out, row, lens[slot]).unwrap());
                row += lens[slot];
                done[slot] += lens[slot];
            }
            assert!(cpu.read(&out, row, 1).unwrap().iter().all(|x| x.is_nan()), "a row beyond the step");
        }
        assert_eq!(done, LENS);
        outputs
    }

    /// Softmax attention as the paper writes it, in f64, on the values as they are stored.
    fn truth(slot: usize, dtype: KvDType, window: Option<u32>) -> Vec<f64> {
        let qkv = qkv(slot);
        // A head of 20 values is one block: as ggml's quantize_row_q8_0 reads.
        let coded = |token: usize, head: usize, value: f32| {
            let head = &qkv[token * HEADS.qkv_columns() + head * HEADS.dim..][..HEADS.dim];
            let scale = head.iter().fold(0.0f32, |max, value| max.max(value.abs())) / 127.0;
            (value * (1.0 / scale)).round() * half::f16::from_f32(scale).to_f32()
        };
        // The nearest of all that 8-bit floats can say beside the power of two that suits the head's largest.
        let floats: Vec<f64> = (0..127i32)
            .map(|code| match (code / 8, code % 8) {
                (0, mantissa) => f64::from(mantissa) / 512.0,
                (exponent, mantissa) => f64::from(8 + mantissa) * 2f64.powi(exponent - 10),
            })
            .collect();
        let floating = |token: usize, head: usize, value: f32| {
            let head = &qkv[token * HEADS.qkv_columns() + head * HEADS.dim..][..HEADS.dim];
            let largest = f64::from(head.iter().fold(0.0f32, |max, value| max.max(value.abs())));
            let power =
                (-40..40).map(|power| 2f64.powi(power)).find(|power| largest <= 448.0 * power).unwrap();
            let error = |float: &f64| (float * power - f64::from(value).abs()).abs();
            let nearest = floats.iter().copied().min_by(|a, b| error(a).total_cmp(&error(b))).unwrap();
            (nearest * power) as f32 * value.signum()
        };
        let at =
            |token: usize, head: usize, i: usize| qkv[token * HEADS.qkv_columns() + head * HEADS.dim + i];
        let stored = |token: usize, head: usize, i: usize| {
            let value = at(token, head, i);
            f64::from(match dtype {
                KvDType::F32 => value,
                KvDType::F16 => half::f16::from_f32(value).to_f32(),
                KvDType::BF16 => half::bf16::from_f32(value).to_f32(),
                KvDType::Q8_0 => coded(token, head, value),
                KvDType::F8 => floating(token, head, value),
            })
        };
        let mut out = vec![];
        for token in 0..LENS[slot] {
            for head in 0..HEADS.query {
                let (key, value) = (HEADS.query + head / 3, HEADS.query + HEADS.kv + head / 3);
                let seen = (0..=token).filter(|&j| window.is_none_or(|window| token - j < window as usize));
                let weight = |j: usize| {
                    let dot = (0..HEADS.dim).map(|i| f64::from(at(token, head, i)) * stored(j, key, i));
                    (dot.sum::<f64>() * f64::from(SCALE)).exp()
                };
                let weights: Vec<_> = seen.map(|j| (j, weight(j))).collect();
                let total = weights.iter().map(|&(_, weight)| weight).sum::<f64>();
                for i in 0..HEADS.dim {
                    let sum: f64 = weights.iter().map(|&(j, weight)| weight * stored(j, value, i)).sum();
                    out.push(if weights.is_empty() { 0.0 } else { sum / total });
                }
            }
        }
        out
    }

    #[test]
    fn every_storage_window_and_chunking_gives_the_same_bits_near_the_true_value() {
        let whole: &[[usize; 2]] = &[LENS];
        let chunked: [&[[usize; 2]]; 3] = [
            &[[33, 0], [1, 40], [67, 0]],
            &[[32, 31], [5, 1], [64, 8]],
            &[[7, 0], [0, 9], [90, 0], [1, 30], [3, 1]],
        ];
        for simd in Simd::present() {
            for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16, KvDType::Q8_0, KvDType::F8] {
                for window in [None, Some(0), Some(33), Some(70)] {
                    let options = |threads| CpuOptions { threads, simd, ..CpuOptions::default() };
                    let first = outputs(options(1), dtype, window, whole);
                    for (slot, first) in first.iter().enumerate() {
                        for (got, wanted) in first.iter().zip(truth(slot, dtype, window)) {
                            let error = (f64::from(*got) - wanted).abs();
                            assert!(error < 3e-6, "{dtype} {window:?}: {got} {wanted}");
                        }
                    }
                    for (threads, steps) in (1..=3).flat_map(|threads| chunked.map(|steps| (threads, steps)))
                    {
                        let again = outputs(options(threads), dtype, window, steps);
                        for slot in 0..2 {
                            assert_eq!(
                                bits(&again[slot]),
                                bits(&first[slot]),
                                "{dtype} {window:?} {steps:?}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn pages_that_a_window_has_left_are_never_read() {
        let cpu = Cpu::new(CpuOptions::default()).unwrap();
        let mut kv = cpu.alloc_kv(&spec(KvDType::F16, Some(8))).unwrap();
        let start = 3 * PAGE_TOKENS as u32;
        let pages = vec![vec![PageId::TRASH; 4], vec![PageId::TRASH, PageId::TRASH, PageId(4), PageId(6)]];
        let (mut outs, columns) = (vec![], HEADS.query * HEADS.dim);
        // Positions 88.. fill the window of position 96; what lies in the trash page differs between the two runs.
        for trash in [1.0, f32::NAN] {
            let mut batch = Batch::default();
            let row = Row { slot: 0, start: start - 8, len: 9, pages: pages.clone(), wanted: 0 };
            batch.push(row, [Token::Known(0); 9]);
            let mut x = cpu.alloc(Purpose::Activations, 9, HEADS.qkv_columns()).unwrap();
            let mut out = cpu.alloc(Purpose::Activations, 9, columns).unwrap();
            cpu.write(&mut x, 0, &numbers(3, 9 * HEADS.qkv_columns())).unwrap();
            let step = cpu.begin(&batch).unwrap();
            let (geometry, bytes) = kv.pages_mut(LAYER);
            let first = geometry.keys(PageId(1), 0);
            bytes[..first].fill(half::f16::from_f32(trash).to_le_bytes()[1]);
            cpu.kv_write(&step, HEADS, LAYER, &x, &mut kv).unwrap();
            let attention = Attention::causal(HEADS, LAYER, SCALE);
            cpu.attention(&step, &attention, &x, &kv, &mut out).unwrap();
            outs.push(cpu.read(&out, 8, 1).unwrap());
        }
        assert!(outs[0].iter().all(|x| x.is_finite()));
        assert_eq!(bits(&outs[0]), bits(&outs[1]));
    }

    #[test]
    fn each_token_sees_up_to_its_own_last_position() {
        const TOKENS: usize = 70;
        let cpu = Cpu::new(CpuOptions::default()).unwrap();
        let mut kv = cpu.alloc_kv(&spec(KvDType::F16, None)).unwrap();
        let mut x = cpu.alloc(Purpose::Activations, TOKENS, HEADS.qkv_columns()).unwrap();
        let mut out = cpu.alloc(Purpose::Activations, TOKENS, HEADS.query * HEADS.dim).unwrap();
        cpu.write(&mut x, 0, &numbers(3, TOKENS * HEADS.qkv_columns())).unwrap();
        let mut attend_by = |causal: bool, ahead: bool, lasts: Vec<u32>| {
            let mut batch = Batch::default();
            let row =
                Row { slot: 0, start: 0, len: TOKENS as u32, pages: vec![table(0), table(0)], wanted: 0 };
            batch.push(row, [Token::Known(0); TOKENS]);
            batch.lasts = lasts;
            let step = cpu.begin(&batch).unwrap();
            cpu.kv_write(&step, HEADS, LAYER, &x, &mut kv).unwrap();
            let attention = Attention { causal, ahead, ..Attention::causal(HEADS, LAYER, SCALE) };
            cpu.attention(&step, &attention, &x, &kv, &mut out).unwrap();
            (0..TOKENS).map(|token| bits(&cpu.read(&out, token, 1).unwrap())).collect::<Vec<_>>()
        };
        let last = TOKENS as u32 - 1;
        // A layer that does not look ahead.
        let blind = attend_by(true, false, vec![last; TOKENS]);
        let mut attend = |causal, lasts| attend_by(causal, true, lasts);
        let (text, both) = (attend(true, vec![]), attend(false, vec![]));
        assert_eq!(attend(true, (0..=last).collect()), text);
        assert_eq!(blind, text);
        assert_eq!(attend(true, vec![last; TOKENS]), both);
        // A piece of an image among text: its positions see each other, and the text around them only what was before.
        let piece = 3..50;
        let seen = |token| if piece.contains(&token) { piece.end - 1 } else { token };
        let mixed = attend(true, (0..=last).map(seen).collect());
        for (token, row) in mixed.iter().enumerate() {
            let own = !piece.contains(&(token as u32)) || token as u32 == piece.end - 1;
            assert_eq!(*row == text[token], own, "token {token}");
        }
        let refused = |lasts: Vec<u32>| {
            let mut batch = Batch::default();
            let row = Row { slot: 0, start: 0, len: 2, pages: vec![table(0), table(0)], wanted: 0 };
            batch.push(row, [Token::Known(0); 2]);
            batch.lasts = lasts;
            cpu.begin(&batch).map(drop).unwrap_err().to_string()
        };
        assert_eq!(refused(vec![0]), "batch: last positions seen: 1, wanted 2");
        assert_eq!(refused(vec![0, 2]), "batch: last position seen 2 beyond the limit 1");
        assert_eq!(refused(vec![0, 0]), "batch: own position 1 beyond the limit 0");
    }

    #[test]
    fn a_nan_in_a_key_reaches_the_output() {
        let types = [KvDType::F32, KvDType::Q8_0, KvDType::F8];
        for (simd, dtype) in Simd::present().flat_map(|simd| types.map(|dtype| (simd, dtype))) {
            let cpu = Cpu::new(CpuOptions { simd, ..CpuOptions::default() }).unwrap();
            let mut kv = cpu.alloc_kv(&spec(dtype, None)).unwrap();
            let mut batch = Batch::default();
            let row = Row { slot: 0, start: 0, len: 40, pages: vec![table(0), table(0)], wanted: 0 };
            batch.push(row, [Token::Known(0); 40]);
            let mut x = cpu.alloc(Purpose::Activations, 40, HEADS.qkv_columns()).unwrap();
            let mut out = cpu.alloc(Purpose::Activations, 40, HEADS.query * HEADS.dim).unwrap();
            let mut inputs = numbers(3, 40 * HEADS.qkv_columns());
            inputs[4 * HEADS.qkv_columns() + HEADS.query * HEADS.dim] = f32::NAN;
            cpu.write(&mut x, 0, &inputs).unwrap();
            let step = cpu.begin(&batch).unwrap();
            cpu.kv_write(&step, HEADS, LAYER, &x, &mut kv).unwrap();
            let attention = Attention::causal(HEADS, LAYER, SCALE);
            cpu.attention(&step, &attention, &x, &kv, &mut out).unwrap();
            let row = |token| cpu.read(&out, token, 1).unwrap();
            assert!(row(3).iter().all(|x| x.is_finite()));
            assert!(row(39)[..3 * HEADS.dim].iter().all(|x| x.is_nan()));
            assert!(row(39)[3 * HEADS.dim..].iter().all(|x| x.is_finite()));
        }
    }
}
