//! Attention over latent rows, and the writing of them.
//!
//! All queries of a sequence read the same rows, so the queries are the lanes: sixteen of them, a few tokens' heads, go
//! through the rows of a page together, and neither product adds lanes of a register. A row lies in its page as it is, once,
//! and each of its values is spread over the lanes when it is needed. Each query keeps a running softmax over the pages in
//! order, as in `attention.rs`; what a lane computes depends on nothing in the others, so a token's result is the same bits
//! whichever tokens are computed beside it.
//!
//! Rows of halves and codes are brought into f32 for as many queries as a thread takes at once. Behind the codes of a page
//! lie their scales: by (token, block of 32 values), or for 8-bit floats by token.

#![expect(
    clippy::needless_range_loop,
    reason = "one index goes through registers, queries and rows together"
)]

use half::f16;

use super::attention::{LANES, Running, encode, narrow, weigh, widen};
use super::disjoint::Disjoint;
use super::memory::{Geometry, Pages};
use super::pool::Pool;
#[cfg(target_arch = "aarch64")]
use super::quant::Neon;
#[cfg(target_arch = "x86_64")]
use super::quant::{Avx2, Avx512};
use super::quant::{Lanes, Simd, round_row};
use super::step::{Slot, Unit};
use crate::{KV_BLOCK, KvDType, LatentHeads, PAGE_TOKENS, PageId, float8};

/// The most groups of sixteen queries that a thread takes through a page that it has brought into f32.
const GROUPS_MAX: usize = 4;

/// Values of thread scratch that so many groups of queries need: a page, and of each query its values, its state and what
/// it has read.
pub(super) fn scratch_values(heads: LatentHeads, groups: usize) -> usize {
    PAGE_TOKENS * heads.width() + groups * LANES * (heads.width() + heads.latent)
}

/// One layer's attention.
pub(super) struct Layer<'a> {
    pub(super) heads: LatentHeads,
    /// Multiplies the products of queries with rows.
    pub(super) scale: f32,
    /// The layer's KV group, whose page tables it uses.
    pub(super) group: usize,
    /// A query sees this many positions, its own included.
    pub(super) window: Option<u32>,
    pub(super) dtype: KvDType,
    /// Whether queries and weights are one f16 for each value ([`Activations::Half`](super::Activations)). Their rounding
    /// is that of rows of f16; over other rows they are as they are.
    pub(super) halves: bool,
    pub(super) pages: Pages<'a>,
}

/// A batch's queries.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    /// (tokens, heads x latent)
    pub(super) absorbed: &'a [f32],
    /// (tokens, heads x each), where each begins with the turned values.
    pub(super) turned: &'a [f32],
    pub(super) each: usize,
}

/// Sixteen queries side by side. Places behind the last query hold zeros, and are forgotten.
struct Group<'a> {
    /// (width, LANES), already multiplied by the scale.
    values: &'a [f32],
    states: &'a mut [Running; LANES],
    /// (latent, LANES), relative to each query's state.
    read: &'a mut [f32],
}

impl Layer<'_> {
    /// `out` (tokens, heads x latent); `scratch` has the same stretch for each thread.
    pub(super) fn attend(
        &self,
        (pool, simd): (&Pool, Simd),
        step: &Slot,
        queries: Queries<'_>,
        scratch: &mut [f32],
        out: &mut [f32],
    ) {
        let units = step.units();
        let scratch_len = scratch.len() / pool.threads();
        // Few queries are divided as finely as they can be.
        let all: usize = units.iter().map(|unit| self.groups(unit)).sum();
        let fits = |groups: &usize| scratch_values(self.heads, *groups) <= scratch_len;
        let many = (1..=GROUPS_MAX).rev().find(fits).expect("checked before");
        let each = if all < 2 * many * pool.threads() { 1 } else { many };
        // Behind the shares of each unit: where the next one's begin.
        let mut ends = Vec::with_capacity(units.len());
        for unit in units {
            ends.push(ends.last().unwrap_or(&0) + self.groups(unit).div_ceil(each));
        }
        let (scratch, out) = (Disjoint::new(scratch), Disjoint::new(out));
        let items = ends.last().copied().unwrap_or(0);
        // Later units of a sequence see more rows: starting with them evens out the end.
        pool.for_each_claimed(items, |thread, item| {
            let item = items - 1 - item;
            let unit = ends.partition_point(|end| *end <= item);
            let share = item - if unit == 0 { 0 } else { ends[unit - 1] };
            // SAFETY: each thread takes its own stretch.
            let scratch = unsafe { scratch.part(thread * scratch_len..(thread + 1) * scratch_len) };
            let count = units[unit].tokens.len * self.heads.query;
            let some = share * each * LANES..count.min((share + 1) * each * LANES);
            self.attend_some(simd, step, &units[unit], some, queries, scratch, &out);
        });
    }

    /// Groups of sixteen that a unit's queries make.
    fn groups(&self, unit: &Unit) -> usize {
        (unit.tokens.len * self.heads.query).div_ceil(LANES)
    }

    /// Some queries of a unit, which are counted token by token and head by head.
    #[expect(clippy::too_many_arguments, reason = "a leaf of the one loop above, which made them all")]
    fn attend_some(
        &self,
        simd: Simd,
        step: &Slot,
        unit: &Unit,
        some: std::ops::Range<usize>,
        queries: Queries<'_>,
        scratch: &mut [f32],
        out: &Disjoint<'_, f32>,
    ) {
        let LatentHeads { query: heads, latent, turned } = self.heads;
        let width = latent + turned;
        let groups = some.len().div_ceil(LANES);
        let (wide, rest) = scratch.split_at_mut(PAGE_TOKENS * width);
        let (values, rest) = rest.split_at_mut(groups * LANES * width);
        let read = &mut rest[..groups * LANES * latent];
        values.fill(0.0);
        read.fill(0.0);
        let mut states = [[Running { max: f32::NEG_INFINITY, sum: 0.0 }; LANES]; GROUPS_MAX];
        for (place, query) in some.clone().enumerate() {
            let (token, head) = (unit.tokens.first + query / heads, query % heads);
            let lane = &mut values[place / LANES * LANES * width + place % LANES..];
            let absorbed = &queries.absorbed[(token * heads + head) * latent..][..latent];
            let own = &queries.turned[(token * heads + head) * queries.each..][..turned];
            if self.halves {
                let mut query: Vec<f32> = absorbed.iter().chain(own).copied().collect();
                let inverse = round_row(&mut query);
                for (to, value) in lane.iter_mut().step_by(LANES).zip(query) {
                    *to = value * inverse * self.scale;
                }
                continue;
            }
            for (to, value) in lane.iter_mut().step_by(LANES).zip(absorbed.iter().chain(own)) {
                *to = value * self.scale;
            }
        }

        // What the token of a query sees: from its window's first position to its own, or to the last that is said.
        let lasts = step.lasts().get(unit.tokens.first..unit.tokens.first + unit.tokens.len);
        let seen_of = |query: usize| {
            let token = query / heads;
            let position = unit.tokens.start + token;
            let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
            first..lasts.map_or(position, |lasts| lasts[token] as usize) + 1
        };
        let first_seen = seen_of(some.start).start;
        let end = some.clone().map(|query| seen_of(query).end).max().unwrap_or(0);
        let table = step.table(unit.row, self.group);
        for page in first_seen / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS) {
            let stored = self.pages.keys(table[page], 0);
            let rows: &[f32] = match self.dtype {
                KvDType::F32 => bytemuck::cast_slice(stored),
                KvDType::F16 | KvDType::BF16 => {
                    widen(self.dtype, stored, wide);
                    wide
                }
                KvDType::Q8_0 | KvDType::F8 => {
                    decode(self.dtype, stored, wide);
                    wide
                }
            };
            // What a query sees of the page.
            let here = |query: usize| {
                let seen = seen_of(query);
                let clip = |at: usize| at.saturating_sub(page * PAGE_TOKENS).min(PAGE_TOKENS);
                clip(seen.start)..clip(seen.end)
            };
            for index in 0..groups {
                let mut group = Group {
                    values: &values[index * LANES * width..][..LANES * width],
                    states: &mut states[index],
                    read: &mut read[index * LANES * latent..][..LANES * latent],
                };
                let own = some.start + index * LANES..some.end.min(some.start + (index + 1) * LANES);
                // The queries of one token see the same; where those of all see it, all go at once.
                let mut from = own.start;
                while from < own.end {
                    let seen = here(from);
                    let to = (from..own.end).find(|query| here(*query) != seen).unwrap_or(own.end);
                    if !seen.is_empty() {
                        group.step(simd, self.halves, rows, seen, from - own.start..to - own.start);
                    }
                    from = to;
                }
            }
        }

        for (place, query) in some.clone().enumerate() {
            let state = states[place / LANES][place % LANES];
            // A query that saw nothing has a sum of zero and keeps its zeros.
            let inverse = if state.sum == 0.0 { 0.0 } else { 1.0 / state.sum };
            let at = (unit.tokens.first * heads + query) * latent;
            // SAFETY: a query is in one share of one unit.
            let to = unsafe { out.part(at..at + latent) };
            let lane = &read[place / LANES * LANES * latent + place % LANES..];
            to.iter_mut().zip(lane.iter().step_by(LANES)).for_each(|(to, from)| *to = from * inverse);
        }
    }
}

impl Group<'_> {
    /// Takes what is seen of a page into the running softmax of the queries in these lanes.
    fn step(
        &mut self,
        simd: Simd,
        halves: bool,
        rows: &[f32],
        seen: std::ops::Range<usize>,
        lanes: std::ops::Range<usize>,
    ) {
        let (width, latent) = (self.values.len() / LANES, self.read.len() / LANES);
        assert_eq!(rows.len(), PAGE_TOKENS * width, "rows of a page");
        assert!(latent <= width && self.values.len() == LANES * width, "values of a group");
        assert!(seen.end <= PAGE_TOKENS && lanes.end <= LANES, "what is seen of a page");
        let mut scores = [[f32::NEG_INFINITY; LANES]; PAGE_TOKENS];
        match simd {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the backend was made for a processor with AVX2; lengths are asserted above.
            Simd::Avx2 => unsafe { score_avx2(rows, self.values, seen.clone(), &mut scores) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the backend was made for a processor with AVX-512; lengths are asserted above.
            Simd::Avx512 | Simd::Amx => unsafe { score_avx512(rows, self.values, seen.clone(), &mut scores) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: the backend was made for a processor with NEON; lengths are asserted above.
            Simd::Neon | Simd::Dotprod | Simd::I8mm => unsafe {
                score_neon(rows, self.values, seen.clone(), &mut scores)
            },
            _ => score_plain(rows, self.values, seen.clone(), &mut scores),
        }
        // Lanes that are not meant keep what they have read: theirs is not stored.
        let mut weights = [[0.0; LANES]; PAGE_TOKENS];
        let mut shrinks = [1.0; LANES];
        for lane in lanes.clone() {
            let mut own = [f32::NEG_INFINITY; PAGE_TOKENS];
            own.iter_mut().zip(&scores).for_each(|(own, scores)| *own = scores[lane]);
            let (mut weighed, shrink) = weigh(&mut own, None, seen.clone(), &mut self.states[lane]);
            if halves {
                // Divided by the sum of what is multiplied.
                for weight in &mut weighed {
                    let half = f16::from_f32(*weight).to_f32();
                    self.states[lane].sum += half - *weight;
                    *weight = half;
                }
            }
            weights.iter_mut().zip(weighed).for_each(|(weights, weight)| weights[lane] = weight);
            shrinks[lane] = shrink;
        }
        match simd {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Simd::Avx2 => unsafe { read_avx2(rows, &weights, &shrinks, seen, lanes, self.read) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Simd::Avx512 | Simd::Amx => unsafe {
                read_avx512(rows, &weights, &shrinks, seen, lanes, self.read)
            },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Simd::Neon | Simd::Dotprod | Simd::I8mm => unsafe {
                read_neon(rows, &weights, &shrinks, seen, lanes, self.read)
            },
            _ => read_plain(rows, &weights, &shrinks, seen, lanes, self.read),
        }
    }
}

/// The scores of the rows that are seen, by (row, lane).
type Scores = [[f32; LANES]; PAGE_TOKENS];

/// The specification: a score sums the products in order.
fn score_plain(rows: &[f32], values: &[f32], seen: std::ops::Range<usize>, scores: &mut Scores) {
    let width = values.len() / LANES;
    for token in seen {
        scores[token] = [0.0; LANES];
        for (value, queries) in rows[token * width..][..width].iter().zip(values.chunks_exact(LANES)) {
            for (score, query) in scores[token].iter_mut().zip(queries) {
                *score += query * value;
            }
        }
    }
}

/// The specification: what was read, scaled to the new maximum, takes the rows' values row by row.
fn read_plain(
    rows: &[f32],
    weights: &Scores,
    shrinks: &[f32; LANES],
    seen: std::ops::Range<usize>,
    lanes: std::ops::Range<usize>,
    read: &mut [f32],
) {
    let width = rows.len() / PAGE_TOKENS;
    for (i, read) in read.chunks_exact_mut(LANES).enumerate() {
        for lane in lanes.clone() {
            read[lane] *= shrinks[lane];
            for token in seen.clone() {
                read[lane] += weights[token][lane] * rows[token * width + i];
            }
        }
    }
}

/// `T` rows at once.
#[inline(always)]
unsafe fn score_lanes<L: Lanes, const T: usize>(
    rows: &[f32],
    values: &[f32],
    seen: std::ops::Range<usize>,
    scores: &mut Scores,
) {
    let width = values.len() / LANES;
    let mut first = seen.start;
    while first < seen.end {
        // Rows behind the last are computed as the last once more, and stored over it.
        let row = |at: usize| (first + at).min(seen.end - 1);
        // SAFETY: the caller has checked that there are as many values as lanes of the width, and rows of a page.
        unsafe {
            let mut sums = [L::splat(&0.0); T];
            for i in 0..width {
                let query = L::floats(values.as_ptr().add(i * LANES));
                for at in 0..T {
                    sums[at] = L::fma(L::splat(rows.as_ptr().add(row(at) * width + i)), query, sums[at]);
                }
            }
            for at in 0..T {
                L::store(sums[at], scores[row(at)].as_mut_ptr());
            }
        }
        first += T;
    }
}

/// `D` values of what is read at once.
#[inline(always)]
unsafe fn read_lanes<L: Lanes, const D: usize>(
    rows: &[f32],
    weights: &Scores,
    shrinks: &[f32; LANES],
    seen: std::ops::Range<usize>,
    lanes: std::ops::Range<usize>,
    read: &mut [f32],
) {
    let (width, latent) = (rows.len() / PAGE_TOKENS, read.len() / LANES);
    let mut first = 0;
    while first < latent {
        let value = |at: usize| (first + at).min(latent - 1);
        // SAFETY: the caller has checked the lengths.
        unsafe {
            let shrink = L::floats(shrinks.as_ptr());
            let mut sums = [shrink; D];
            for at in 0..D {
                sums[at] = L::mul(L::floats(read.as_ptr().add(value(at) * LANES)), shrink);
            }
            for token in seen.clone() {
                let weight = L::floats(weights[token].as_ptr());
                for at in 0..D {
                    sums[at] =
                        L::fma(L::splat(rows.as_ptr().add(token * width + value(at))), weight, sums[at]);
                }
            }
            for at in 0..D.min(latent - first) {
                if lanes.len() == LANES {
                    L::store(sums[at], read.as_mut_ptr().add((first + at) * LANES));
                    continue;
                }
                let mut all = [0.0; LANES];
                L::store(sums[at], all.as_mut_ptr());
                let own = &mut read[(first + at) * LANES..][..LANES];
                own[lanes.clone()].copy_from_slice(&all[lanes.clone()]);
            }
        }
        first += D;
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score_avx2(rows: &[f32], values: &[f32], seen: std::ops::Range<usize>, scores: &mut Scores) {
    // SAFETY: as the caller's.
    unsafe { score_lanes::<Avx2, 4>(rows, values, seen, scores) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn score_avx512(rows: &[f32], values: &[f32], seen: std::ops::Range<usize>, scores: &mut Scores) {
    // SAFETY: as the caller's.
    unsafe { score_lanes::<Avx512, 8>(rows, values, seen, scores) }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn score_neon(rows: &[f32], values: &[f32], seen: std::ops::Range<usize>, scores: &mut Scores) {
    // SAFETY: as the caller's.
    unsafe { score_lanes::<Neon<4>, 4>(rows, values, seen, scores) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn read_avx2(
    rows: &[f32],
    weights: &Scores,
    shrinks: &[f32; LANES],
    seen: std::ops::Range<usize>,
    lanes: std::ops::Range<usize>,
    read: &mut [f32],
) {
    // SAFETY: as the caller's.
    unsafe { read_lanes::<Avx2, 4>(rows, weights, shrinks, seen, lanes, read) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn read_avx512(
    rows: &[f32],
    weights: &Scores,
    shrinks: &[f32; LANES],
    seen: std::ops::Range<usize>,
    lanes: std::ops::Range<usize>,
    read: &mut [f32],
) {
    // SAFETY: as the caller's.
    unsafe { read_lanes::<Avx512, 8>(rows, weights, shrinks, seen, lanes, read) }
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn read_neon(
    rows: &[f32],
    weights: &Scores,
    shrinks: &[f32; LANES],
    seen: std::ops::Range<usize>,
    lanes: std::ops::Range<usize>,
    read: &mut [f32],
) {
    // SAFETY: as the caller's.
    unsafe { read_lanes::<Neon<4>, 4>(rows, weights, shrinks, seen, lanes, read) }
}

/// A page of codes as f32: a code times its scale.
fn decode(dtype: KvDType, stored: &[u8], rows: &mut [f32]) {
    let width = rows.len() / PAGE_TOKENS;
    let (codes, scales) = stored.split_at(PAGE_TOKENS * width);
    let tokens = rows.chunks_exact_mut(width).zip(codes.chunks_exact(width));
    if dtype == KvDType::F8 {
        for ((row, codes), exponent) in tokens.zip(scales) {
            let scale = float8::power(*exponent);
            row.iter_mut().zip(codes).for_each(|(value, code)| *value = scale * float8::value(*code));
        }
        return;
    }
    let scales: &[f16] = bytemuck::cast_slice(scales);
    for ((row, codes), scales) in tokens.zip(scales.chunks_exact(width.div_ceil(KV_BLOCK))) {
        let blocks = row.chunks_mut(KV_BLOCK).zip(codes.chunks(KV_BLOCK)).zip(scales);
        for ((row, codes), scale) in blocks {
            let scale = scale.to_f32();
            for (value, code) in row.iter_mut().zip(codes) {
                *value = scale * f32::from(code.cast_signed());
            }
        }
    }
}

/// Where a batch's rows go.
pub(super) struct Writer<'a> {
    pub(super) heads: LatentHeads,
    pub(super) group: usize,
    pub(super) dtype: KvDType,
    pub(super) geometry: Geometry,
    /// The layer's pages.
    pub(super) pages: &'a mut [u8],
}

impl Writer<'_> {
    /// Stores every token's row. There is one, whatever the heads: not worth waking anybody.
    pub(super) fn write(self, step: &Slot, latent: &[f32], turned: &[f32]) {
        let LatentHeads { latent: latent_columns, turned: turned_columns, .. } = self.heads;
        let width = self.heads.width();
        let mut whole = vec![0.0; width];
        for (index, row) in step.rows().iter().enumerate() {
            let table = step.table(index, self.group);
            for token in 0..row.len {
                let (page, at) = ((row.start + token) / PAGE_TOKENS, (row.start + token) % PAGE_TOKENS);
                if table[page] == PageId::TRASH {
                    continue;
                }
                let from = row.first + token;
                whole[..latent_columns].copy_from_slice(&latent[from * latent_columns..][..latent_columns]);
                whole[latent_columns..].copy_from_slice(&turned[from * turned_columns..][..turned_columns]);
                let page = &mut self.pages[self.geometry.keys(table[page], 0)..][..self.geometry.head_bytes];
                store(self.dtype, &whole, at, page);
            }
        }
    }
}

/// Stores the row of token `at` of a page.
fn store(dtype: KvDType, row: &[f32], at: usize, page: &mut [u8]) {
    let width = row.len();
    if let KvDType::F32 | KvDType::F16 | KvDType::BF16 = dtype {
        let bytes = dtype.bytes_of(width);
        // Through f32, so that it is aligned for every type.
        let mut stored = [0.0_f32; LANES];
        let stored: &mut [u8] = bytemuck::cast_slice_mut(&mut stored);
        let to = page[at * bytes..][..bytes].chunks_mut(LANES * bytes / width);
        for (row, to) in row.chunks(LANES).zip(to) {
            narrow(dtype, row, &mut stored[..to.len()]);
            to.copy_from_slice(&stored[..to.len()]);
        }
        return;
    }
    let (codes, scales) = page.split_at_mut(PAGE_TOKENS * width);
    let codes = codes[at * width..][..width].chunks_mut(KV_BLOCK);
    if dtype == KvDType::F8 {
        let exponent = float8::exponent(row);
        row.chunks(KV_BLOCK).zip(codes).for_each(|(row, codes)| float8::encode(row, exponent, codes));
        scales[at] = exponent;
        return;
    }
    let blocks = width.div_ceil(KV_BLOCK);
    let scales = scales[2 * at * blocks..][..2 * blocks].as_chunks_mut::<2>().0;
    for ((row, to), scale) in row.chunks(KV_BLOCK).zip(codes).zip(scales) {
        let mut block = [0; KV_BLOCK];
        *scale = encode(row, &mut block).to_ne_bytes();
        to.copy_from_slice(bytemuck::cast_slice(&block[..row.len()]));
    }
}
