//! Short convolutions, the gated delta rule and the selective scan: what goes through a sequence token by token.
//!
//! A region's items are a row of the step and some columns of its state: channels of a convolution, a block of
//! [`STATE_LANES`] columns of a head's matrix. An item takes all tokens of its row, prompt or not, so its state stays in the
//! first cache and there is one way through it. Sums go over a fixed tree, and no product is fused with a
//! sum, so every instruction set gives the same bits.

use super::disjoint::{Disjoint, for_each_row};
use super::exp::exp;
use super::glu::silu;
use super::norm::{RowNorm, sum};
use super::pool::Pool;
use super::quant::Simd;
use super::step::{RowState, Slot};
use crate::{ConvForm, DeltaHeads, GateOrder, KeySharing, STATE_LANES, ScanHeads, TAPS_MAX};

/// Sixteen columns of a row of a matrix.
type Lanes = [f32; STATE_LANES];

/// Channels that a convolution takes at once: what it keeps of them lies on the stack.
const CHANNELS: usize = 128;

/// Running sums over the rows of a matrix: row `i` goes to the sum `i` modulo as many.
const SUMS: usize = 4;

/// One layer's states.
pub(super) struct States<'a> {
    values: Disjoint<'a, f32>,
    /// Values of one state.
    each: usize,
    /// Which of the step's groups of states it is.
    group: usize,
}

impl<'a> States<'a> {
    pub(super) fn new(values: &'a mut [f32], each: usize, group: usize) -> States<'a> {
        States { values: Disjoint::new(values), each, group }
    }

    /// `len` values of a state from `at` on.
    ///
    /// # Safety
    /// As for [`Disjoint::part`]: nobody else holds an overlapping part.
    #[expect(clippy::mut_from_ref, reason = "as in `Disjoint`: the caller keeps parts apart")]
    unsafe fn part(&self, page: u32, at: usize, len: usize) -> &mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { self.values.part(self.range(page, at, len)) }
    }

    /// The same to read, perhaps by several at once.
    ///
    /// # Safety
    /// As for [`Disjoint::read`]: nobody writes it meanwhile.
    unsafe fn read(&self, page: u32, at: usize, len: usize) -> &[f32] {
        // SAFETY: the caller's promise.
        unsafe { self.values.read(self.range(page, at, len)) }
    }

    fn range(&self, page: u32, at: usize, len: usize) -> std::ops::Range<usize> {
        assert!(at + len <= self.each, "a part lies within its state");
        let start = page as usize * self.each + at;
        start..start + len
    }
}

/// Some values of one row's state.
struct Part<'s, 'a> {
    states: &'s States<'a>,
    row: RowState<'s>,
    at: usize,
    len: usize,
}

impl<'s> Part<'s, '_> {
    /// Them, to go on from.
    ///
    /// # Safety
    /// Nobody else takes these values of this row's state; what it goes on from is not written by anybody.
    unsafe fn begin(&self) -> &'s mut [f32] {
        // SAFETY: the state is this row's own, and these values of it are the caller's.
        let own = unsafe { self.states.part(self.row.to, self.at, self.len) };
        match self.row.from {
            None => own.fill(0.0),
            Some(from) if from == self.row.to => {}
            // SAFETY: a batch is refused in which a row reads what another one writes.
            Some(from) => own.copy_from_slice(unsafe { self.states.read(from, self.at, self.len) }),
        }
        own
    }

    /// Leaves them where a checkpoint is wanted after so many tokens of the row. `saved` counts those that are left already.
    ///
    /// # Safety
    /// As for `begin`.
    unsafe fn save(&self, tokens: usize, saved: &mut usize, own: &[f32]) {
        while let Some(&(_, page)) = self.row.saves.get(*saved).filter(|(end, _)| *end as usize == tokens) {
            // SAFETY: a checkpoint is written by one row, and these values of it by the caller.
            unsafe { self.states.part(page, self.at, self.len) }.copy_from_slice(own);
            *saved += 1;
        }
    }
}

/// A convolution whose vectors have been looked at.
pub(super) struct Conv<'a> {
    pub(super) channels: usize,
    pub(super) taps: usize,
    /// (taps, channels)
    pub(super) weight: &'a [f32],
    /// (channels)
    pub(super) bias: Option<&'a [f32]>,
    pub(super) form: ConvForm,
}

impl Conv<'_> {
    /// `out` = the convolution of `x`, whose rows have `columns`.
    pub(super) fn run(
        &self,
        (pool, simd): (&Pool, Simd),
        step: &Slot,
        (x, columns): (&[f32], usize),
        states: &States<'_>,
        out: &mut [f32],
    ) {
        let chunks = self.channels.div_ceil(CHANNELS);
        let out = Disjoint::new(out);
        pool.for_each(step.rows().len() * chunks, |_, items| {
            for item in items {
                let (row, first) = (item / chunks, item % chunks * CHANNELS);
                let width = CHANNELS.min(self.channels - first);
                match simd {
                    Simd::Scalar => self.row(step, (row, first, width), (x, columns), states, &out),
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: the backend was made for a processor with AVX2.
                    Simd::Avx2 => unsafe {
                        self.row_avx2(step, (row, first, width), (x, columns), states, &out);
                    },
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: the backend was made for a processor with AVX-512.
                    Simd::Avx512 | Simd::Amx => unsafe {
                        self.row_avx512(step, (row, first, width), (x, columns), states, &out);
                    },
                    #[cfg(target_arch = "aarch64")]
                    Simd::Neon | Simd::Dotprod | Simd::I8mm => {
                        self.row(step, (row, first, width), (x, columns), states, &out);
                    }
                }
            }
        });
    }

    /// Some channels of a row's tokens.
    #[inline(always)]
    fn row(
        &self,
        step: &Slot,
        (row, first, width): (usize, usize, usize),
        (x, columns): (&[f32], usize),
        states: &States<'_>,
        out: &Disjoint<'_, f32>,
    ) {
        let (channels, before) = (self.channels, self.taps - 1);
        // The inputs before the newest, the oldest first, then the newest: (taps, width).
        let mut seen = [[0.0f32; CHANNELS]; TAPS_MAX];
        let part =
            |tap| Part { states, row: step.state(row, states.group), at: tap * channels + first, len: width };
        for (tap, seen) in seen[..before].iter_mut().enumerate() {
            // SAFETY: an item has its own channels of its row's state.
            seen[..width].copy_from_slice(unsafe { part(tap).begin() });
        }
        let tokens = step.rows()[row];
        let mut saved = 0;
        for at in 0..tokens.len {
            let token = tokens.first + at;
            let x = &x[token * columns..][..columns];
            let newest = &mut seen[before][..width];
            match self.form {
                ConvForm::Silu => newest.copy_from_slice(&x[first..][..width]),
                ConvForm::Gated => {
                    let (b, x) = (&x[first..][..width], &x[2 * channels + first..][..width]);
                    newest.iter_mut().zip(b).zip(x).for_each(|((newest, b), x)| *newest = b * x);
                }
            }
            // SAFETY: an item has its own channels of its row's tokens.
            let out = unsafe { out.part(token * channels + first..token * channels + first + width) };
            match self.bias {
                Some(bias) => out.copy_from_slice(&bias[first..][..width]),
                None => out.fill(0.0),
            }
            for (tap, seen) in seen[..self.taps].iter().enumerate() {
                let weight = &self.weight[tap * channels + first..][..width];
                out.iter_mut().zip(weight).zip(seen).for_each(|((out, weight), seen)| *out += weight * seen);
            }
            match self.form {
                ConvForm::Silu => out.iter_mut().for_each(|out| *out = silu(*out)),
                ConvForm::Gated => {
                    let c = &x[channels + first..][..width];
                    out.iter_mut().zip(c).for_each(|(out, c)| *out *= c);
                }
            }
            seen.copy_within(1..self.taps, 0);
            let due = saved;
            for (tap, seen) in seen[..before].iter().enumerate() {
                saved = due;
                // SAFETY: as above.
                unsafe { part(tap).save(at + 1, &mut saved, &seen[..width]) };
            }
        }
        for (tap, seen) in seen[..before].iter().enumerate() {
            // SAFETY: as above; what was read from it before is on the stack.
            unsafe { states.part(step.state(row, states.group).to, tap * channels + first, width) }
                .copy_from_slice(&seen[..width]);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn row_avx2(
        &self,
        step: &Slot,
        part: (usize, usize, usize),
        x: (&[f32], usize),
        states: &States<'_>,
        out: &Disjoint<'_, f32>,
    ) {
        self.row(step, part, x, states, out);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn row_avx512(
        &self,
        step: &Slot,
        part: (usize, usize, usize),
        x: (&[f32], usize),
        states: &States<'_>,
        out: &Disjoint<'_, f32>,
    ) {
        self.row(step, part, x, states, out);
    }
}

/// What changes matrices, token by token.
pub(super) trait Recurrence: Sync {
    /// Matrices of a sequence.
    fn matrices(&self) -> usize;

    /// (rows, columns) of one.
    fn shape(&self) -> (usize, usize);

    /// A token's change of some columns of a matrix, and what is read from them.
    fn token(&self, token: usize, matrix: usize, columns: (usize, usize), state: &mut [Lanes]) -> Lanes;
}

/// Takes all rows of the step through their matrices, which lie behind `before` other values of their states.
/// `out` is (tokens, matrices x columns).
pub(super) fn recur(
    (pool, simd): (&Pool, Simd),
    recurrence: &impl Recurrence,
    step: &Slot,
    before: usize,
    states: &States<'_>,
    out: &mut [f32],
) {
    let (rows, columns) = recurrence.shape();
    let blocks = columns.div_ceil(STATE_LANES);
    let each = recurrence.matrices() * blocks;
    let out = Disjoint::new(out);
    pool.for_each(step.rows().len() * each, |_, items| {
        for item in items {
            let (row, block) = (item / each, item % each);
            let part = Part {
                states,
                row: step.state(row, states.group),
                at: before + block * rows * STATE_LANES,
                len: rows * STATE_LANES,
            };
            let block = Block { matrix: block / blocks, first: block % blocks * STATE_LANES };
            match simd {
                Simd::Scalar => block.run(recurrence, step, row, &part, &out),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the backend was made for a processor with AVX2.
                Simd::Avx2 => unsafe { block.run_avx2(recurrence, step, row, &part, &out) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the backend was made for a processor with AVX-512.
                Simd::Avx512 | Simd::Amx => unsafe { block.run_avx512(recurrence, step, row, &part, &out) },
                #[cfg(target_arch = "aarch64")]
                Simd::Neon | Simd::Dotprod | Simd::I8mm => block.run(recurrence, step, row, &part, &out),
            }
        }
    });
}

/// Columns of a matrix that lie side by side.
struct Block {
    matrix: usize,
    /// The first of them.
    first: usize,
}

impl Block {
    /// Them, through a row's tokens.
    #[inline(always)]
    fn run(
        &self,
        recurrence: &impl Recurrence,
        step: &Slot,
        row: usize,
        part: &Part<'_, '_>,
        out: &Disjoint<'_, f32>,
    ) {
        let columns = recurrence.shape().1;
        let width = STATE_LANES.min(columns - self.first);
        // SAFETY: an item has its own columns of its row's matrices.
        let own = unsafe { part.begin() };
        let (tokens, mut saved) = (step.rows()[row], 0);
        for at in 0..tokens.len {
            let token = tokens.first + at;
            let (state, _) = own.as_chunks_mut::<STATE_LANES>();
            let read = recurrence.token(token, self.matrix, (self.first, width), state);
            let start = (token * recurrence.matrices() + self.matrix) * columns + self.first;
            // SAFETY: an item has its own columns of its row's tokens.
            unsafe { out.part(start..start + width) }.copy_from_slice(&read[..width]);
            // SAFETY: as above.
            unsafe { part.save(at + 1, &mut saved, own) };
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn run_avx2(
        &self,
        recurrence: &impl Recurrence,
        step: &Slot,
        row: usize,
        part: &Part<'_, '_>,
        out: &Disjoint<'_, f32>,
    ) {
        self.run(recurrence, step, row, part, out);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn run_avx512(
        &self,
        recurrence: &impl Recurrence,
        step: &Slot,
        row: usize,
        part: &Part<'_, '_>,
        out: &Disjoint<'_, f32>,
    ) {
        self.run(recurrence, step, row, part, out);
    }
}

/// Some columns of a row, the rest zeros.
#[inline(always)]
fn lanes(values: &[f32]) -> Lanes {
    let mut lanes = [0.0; STATE_LANES];
    lanes[..values.len()].copy_from_slice(values);
    lanes
}

/// The sums of the tree's leaves.
#[inline(always)]
fn total([a, b, c, d]: [Lanes; SUMS]) -> Lanes {
    let mut total = [0.0; STATE_LANES];
    for (lane, total) in total.iter_mut().enumerate() {
        *total = (a[lane] + b[lane]) + (c[lane] + d[lane]);
    }
    total
}

/// `ln(1 + e^x)`.
#[inline(always)]
pub(super) fn softplus(x: f32) -> f32 {
    // Beyond it the difference to x is below half a unit in the last place.
    if x > 20.0 { x } else { exp(x).ln_1p() }
}

/// The gated delta rule of a step.
pub(super) struct Delta<'a> {
    pub(super) heads: DeltaHeads,
    /// (tokens, queries, keys, values); queries and keys are normalised.
    pub(super) qkv: &'a [f32],
    /// (tokens, columns): the last are what is learned by each value head, then what it keeps.
    pub(super) mixed: &'a [f32],
    pub(super) columns: usize,
}

impl Delta<'_> {
    /// Normalises queries and keys, and makes of betas and decays the shares that are learned and kept.
    pub(super) fn prepare(
        pool: &Pool,
        heads: DeltaHeads,
        (rate, bias): (&[f32], &[f32]),
        qkv: &mut [f32],
        (mixed, columns): (&mut [f32], usize),
    ) {
        const EPS: f32 = 1e-6;
        let DeltaHeads { key, value, dim_k, .. } = heads;
        let root = 1.0 / (dim_k as f32).sqrt();
        for_each_row(pool, qkv, heads.columns(), |_, row| {
            for (head, values) in row[..2 * key * dim_k].chunks_exact_mut(dim_k).enumerate() {
                let squares = sum(values, |value| value * value);
                let factor = 1.0 / (squares + EPS).sqrt() * if head < key { root } else { 1.0 };
                values.iter_mut().for_each(|value| *value *= factor);
            }
        });
        for_each_row(pool, mixed, columns, |_, row| {
            let (betas, decays) = row[columns - 2 * value..].split_at_mut(value);
            betas.iter_mut().for_each(|beta| *beta = 1.0 / (1.0 + exp(-*beta)));
            for ((decay, rate), bias) in decays.iter_mut().zip(rate).zip(bias) {
                *decay = exp(rate * softplus(*decay + bias));
            }
        });
    }
}

impl Recurrence for Delta<'_> {
    fn matrices(&self) -> usize {
        self.heads.value
    }

    fn shape(&self) -> (usize, usize) {
        (self.heads.dim_k, self.heads.dim_v)
    }

    #[inline(always)]
    fn token(
        &self,
        token: usize,
        matrix: usize,
        (first, width): (usize, usize),
        state: &mut [Lanes],
    ) -> Lanes {
        let DeltaHeads { key, value, dim_k, dim_v, sharing } = self.heads;
        let row = &self.qkv[token * self.heads.columns()..][..self.heads.columns()];
        let head = match sharing {
            KeySharing::Neighbours => matrix / (value / key),
            KeySharing::Turns => matrix % key,
        };
        let (q, k) = (&row[head * dim_k..][..dim_k], &row[(key + head) * dim_k..][..dim_k]);
        let v = lanes(&row[2 * key * dim_k + matrix * dim_v + first..][..width]);
        let shares = &self.mixed[(token + 1) * self.columns - 2 * value..][..2 * value];
        let (learned, kept) = (shares[matrix], shares[value + matrix]);

        let mut sums = [[0.0; STATE_LANES]; SUMS];
        for (state, k) in state.chunks_mut(SUMS).zip(k.chunks(SUMS)) {
            for ((sum, state), k) in sums.iter_mut().zip(state).zip(k) {
                for (sum, state) in sum.iter_mut().zip(state) {
                    *state *= kept;
                    *sum += *state * k;
                }
            }
        }
        let mut change = total(sums);
        change.iter_mut().zip(v).for_each(|(known, v)| *known = (v - *known) * learned);
        let mut sums = [[0.0; STATE_LANES]; SUMS];
        for ((state, k), q) in state.chunks_mut(SUMS).zip(k.chunks(SUMS)).zip(q.chunks(SUMS)) {
            for (((sum, state), k), q) in sums.iter_mut().zip(state).zip(k).zip(q) {
                for ((sum, state), change) in sum.iter_mut().zip(state).zip(change) {
                    *state += k * change;
                    *sum += *state * q;
                }
            }
        }
        total(sums)
    }
}

/// The selective scan of a step.
pub(super) struct Scan<'a> {
    pub(super) heads: ScanHeads,
    /// (tokens, values, keys, queries)
    pub(super) x: &'a [f32],
    /// (tokens, columns): the last are how long a step is for each head.
    pub(super) mixed: &'a [f32],
    pub(super) columns: usize,
    pub(super) rate: &'a [f32],
    pub(super) skip: &'a [f32],
}

impl Scan<'_> {
    /// Makes steps of what was asked for.
    pub(super) fn prepare(pool: &Pool, bias: &[f32], (mixed, columns): (&mut [f32], usize)) {
        for_each_row(pool, mixed, columns, |_, row| {
            let steps = &mut row[columns - bias.len()..];
            steps.iter_mut().zip(bias).for_each(|(step, bias)| *step = softplus(*step + bias));
        });
    }
}

impl Recurrence for Scan<'_> {
    fn matrices(&self) -> usize {
        self.heads.heads
    }

    fn shape(&self) -> (usize, usize) {
        (self.heads.state, self.heads.dim)
    }

    #[inline(always)]
    fn token(
        &self,
        token: usize,
        matrix: usize,
        (first, width): (usize, usize),
        state: &mut [Lanes],
    ) -> Lanes {
        let ScanHeads { heads, groups, dim, state: size } = self.heads;
        let row = &self.x[token * self.heads.columns()..][..self.heads.columns()];
        let group = matrix / (heads / groups);
        let (k, q) = row[heads * dim..].split_at(groups * size);
        let (k, q) = (&k[group * size..][..size], &q[group * size..][..size]);
        let v = lanes(&row[matrix * dim + first..][..width]);
        let step = self.mixed[(token + 1) * self.columns - heads + matrix];
        let (kept, skip) = (exp(self.rate[matrix] * step), self.skip[matrix]);

        let mut change = v;
        change.iter_mut().for_each(|v| *v *= step);
        let mut sums = [[0.0; STATE_LANES]; SUMS];
        for ((state, k), q) in state.chunks_mut(SUMS).zip(k.chunks(SUMS)).zip(q.chunks(SUMS)) {
            for (((sum, state), k), q) in sums.iter_mut().zip(state).zip(k).zip(q) {
                for ((sum, state), change) in sum.iter_mut().zip(state).zip(change) {
                    *state = *state * kept + k * change;
                    *sum += *state * q;
                }
            }
        }
        let mut read = total(sums);
        read.iter_mut().zip(v).for_each(|(read, v)| *read += v * skip);
        read
    }
}

/// The selective scan of Mamba-1 of a step.
pub(super) struct Channels<'a> {
    pub(super) channels: usize,
    pub(super) state: usize,
    /// (tokens, channels)
    pub(super) x: &'a [f32],
    /// (tokens, state)
    pub(super) keys: &'a [f32],
    /// (tokens, state)
    pub(super) queries: &'a [f32],
    /// (tokens, channels)
    pub(super) steps: &'a [f32],
    /// (state, channels)
    pub(super) rates: &'a [f32],
    pub(super) skip: &'a [f32],
}

impl Recurrence for Channels<'_> {
    fn matrices(&self) -> usize {
        1
    }

    fn shape(&self) -> (usize, usize) {
        (self.state, self.channels)
    }

    #[inline(always)]
    fn token(&self, token: usize, _: usize, (first, width): (usize, usize), state: &mut [Lanes]) -> Lanes {
        let own = |values: &[f32], row: usize| lanes(&values[row * self.channels + first..][..width]);
        let (v, step, skip) = (own(self.x, token), own(self.steps, token), own(self.skip, 0));
        let (k, q) = (&self.keys[token * self.state..], &self.queries[token * self.state..]);
        let mut change = v;
        change.iter_mut().zip(step).for_each(|(v, step)| *v *= step);
        let mut sums = [[0.0; STATE_LANES]; SUMS];
        for (row, state) in state.iter_mut().enumerate() {
            let (rates, k, q, sum) = (own(self.rates, row), k[row], q[row], &mut sums[row % SUMS]);
            for lane in 0..STATE_LANES {
                state[lane] = state[lane] * exp(rates[lane] * step[lane]) + k * change[lane];
                sum[lane] += state[lane] * q;
            }
        }
        let mut read = total(sums);
        read.iter_mut().zip(v).zip(skip).for_each(|((read, v), skip)| *read += v * skip);
        read
    }
}

/// `x` = the norm of each group of its values where there is one, times silu of the gates: as many of their row from `column`
/// on as `x` has.
pub(super) fn gated_norm(
    (pool, simd): (&Pool, Simd),
    (norm, group, order): (Option<RowNorm<'_>>, usize, GateOrder),
    (gates, gate_columns, column): (&[f32], usize, usize),
    (x, columns): (&mut [f32], usize),
) {
    for_each_row(pool, x, columns, |row, x| {
        let gates = &gates[row * gate_columns + column..][..columns];
        let gate = |x: &mut [f32]| x.iter_mut().zip(gates).for_each(|(x, gate)| *x *= silu(*gate));
        if order == GateOrder::GatesFirst {
            gate(x);
        }
        if let Some(norm) = norm {
            let own = norm.weight.len();
            for (at, x) in x.chunks_exact_mut(group).enumerate() {
                // Each group has the same weights, or its own.
                let weight = &norm.weight[at * group % own..][..group];
                RowNorm { weight, ..norm }.row(simd, x);
            }
        }
        if order == GateOrder::NormFirst {
            gate(x);
        }
    });
}

/// `x` *= sigmoid of the gates.
pub(super) fn sigmoid_gate(pool: &Pool, columns: usize, gates: &[f32], x: &mut [f32]) {
    for_each_row(pool, x, columns, |row, x| {
        let gates = &gates[row * columns..][..columns];
        x.iter_mut().zip(gates).for_each(|(x, gate)| *x *= 1.0 / (1.0 + exp(-gate)));
    });
}
