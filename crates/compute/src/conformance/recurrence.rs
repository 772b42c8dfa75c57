//! Operations over states: short convolutions, the gated delta rule, the selective scan, and the gates and norms beside them.

use std::fmt;

use super::bench::{Bench, Table, batch, count, step};
use super::random::Random;
use super::{Case, Failure, Op, Suite};
use crate::{
    Backend, Batch, ChannelInputs, ChannelScan, ConvForm, DeltaHeads, DeltaRule, GateOrder, GatedNorm,
    KeySharing, KvDType, KvGroup, KvKind, KvLayer, KvSpec, Need, Norm, PAGE_TOKENS, PageId, Purpose, Row,
    RowState, ScanHeads, SelectiveScan, ShortConv, Token, channel_values, conv_values,
};

pub(super) fn cases<B: Backend>(suite: &mut Suite<'_, B>) {
    for columns in [1, 17, 64, 300] {
        // exp overflows f32 beyond 88.
        for size in [1.0, 100.0] {
            suite.compare(Gates { columns, size, kind: GateKind::Sigmoid });
            suite.compare(Gates { columns, size, kind: GateKind::Silu });
            for order in [GateOrder::NormFirst, GateOrder::GatesFirst] {
                for weights in [columns, 3 * columns] {
                    let kind = GateKind::Norm { group: columns, weights, order };
                    suite.compare(Gates { columns: 3 * columns, size, kind });
                }
            }
        }
    }
    let both = [KeySharing::Neighbours, KeySharing::Turns];
    let heads = |key, value, dim_k, dim_v, sharing| DeltaHeads { key, value, dim_k, dim_v, sharing };
    let convolutions = [
        Kind::Conv { channels: 5, taps: 4, form: ConvForm::Silu, biased: false },
        Kind::Conv { channels: 300, taps: 4, form: ConvForm::Silu, biased: false },
        Kind::Conv { channels: 150, taps: 4, form: ConvForm::Silu, biased: true },
        Kind::Conv { channels: 130, taps: 3, form: ConvForm::Gated, biased: false },
        Kind::Conv { channels: 16, taps: 1, form: ConvForm::Gated, biased: false },
    ];
    let rules = [
        Kind::Delta(heads(2, 4, 32, 32, both[0])),
        Kind::Delta(heads(2, 4, 32, 32, both[1])),
        // Sizes that fill neither a block of columns nor the sums over rows.
        Kind::Delta(heads(1, 3, 13, 21, both[0])),
        Kind::Delta(heads(2, 2, 128, 128, both[1])),
    ];
    let scans = [
        Kind::Scan(ScanHeads { heads: 4, groups: 2, dim: 32, state: 32 }),
        Kind::Scan(ScanHeads { heads: 3, groups: 1, dim: 21, state: 13 }),
        Kind::Scan(ScanHeads { heads: 2, groups: 2, dim: 64, state: 128 }),
    ];
    let channels = [
        Kind::Channels { channels: 64, state: 16 },
        Kind::Channels { channels: 21, state: 13 },
        Kind::Channels { channels: 300, state: 8 },
    ];
    for kind in convolutions.into_iter().chain(rules).chain(scans).chain(channels) {
        for chunk in [1, 3, 100] {
            suite.compare(Sequences { kind, lengths: &[40, 2, 35], chunk });
        }
        if kind.needs().iter().any(|need| suite.backend.supports(*need).is_err()) {
            continue;
        }
        let case = Sequences { kind, lengths: &[70, 4, 33], chunk: 100 };
        suite.same_bits(format_args!("{case}: together, and each alone"), |backend| {
            let mut alone = Table::new(kind.out_columns());
            for sequence in 0..case.lengths.len() {
                alone.append(case.run(backend, &[sequence], 100)?);
            }
            Ok((case.run(backend, &[0, 1, 2], 100)?, alone))
        });
        for chunk in [1, 7, 33] {
            suite.same_bits(format_args!("{case}: whole, and in chunks of {chunk}"), |backend| {
                Ok((case.run(backend, &[0], 100)?, case.run(backend, &[0], chunk)?))
            });
        }
        suite.same_bits(format_args!("{case}: whole, and going on from a checkpoint"), |backend| {
            case.resumed_at_a_checkpoint(backend)
        });
    }
}

/// Gates, and what is done beside them.
struct Gates {
    columns: usize,
    size: f32,
    kind: GateKind,
}

enum GateKind {
    /// `sigmoid_gate`
    Sigmoid,
    /// `gated_norm` without a norm
    Silu,
    /// `gated_norm` of so many values together, with so many weights
    Norm { group: usize, weights: usize, order: GateOrder },
}

impl fmt::Display for Gates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Gates { columns, size, kind } = self;
        write!(f, "{columns} columns, gates up to {size}")?;
        match kind {
            GateKind::Sigmoid => Ok(()),
            GateKind::Silu => write!(f, ", no norm"),
            GateKind::Norm { group, weights, order } => {
                write!(f, ", norm of {group} with {weights} weights, {order:?}")
            }
        }
    }
}

impl Case for Gates {
    fn op(&self) -> Op {
        if let GateKind::Sigmoid = self.kind { Op::SigmoidGate } else { Op::GatedNorm }
    }

    fn needs(&self) -> Vec<Need> {
        vec![if let GateKind::Sigmoid = self.kind { Need::SigmoidGate } else { Need::GatedNorm }]
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        const ROWS: usize = 9;
        let mut random = Random::of(self);
        let mut x =
            Bench::filled(backend, Purpose::Activations, self.columns, &random.values(ROWS * self.columns))?;
        let mut gates = |columns: usize| -> Result<_, Failure> {
            let values: Vec<f32> =
                random.values(ROWS * columns).iter().map(|gate| gate * self.size).collect();
            Ok(Bench::filled(backend, Purpose::Activations, columns, &values)?)
        };
        if let GateKind::Sigmoid = self.kind {
            let gates = gates(self.columns)?;
            step(backend, &batch(ROWS, 0), |step| Ok(backend.sigmoid_gate(step, &gates.buf, &mut x.buf)?))?;
            return x.table(backend);
        }
        // Other things stand before and behind the gates.
        let gates = gates(self.columns + 7)?;
        let (norm, group, order) = match self.kind {
            GateKind::Norm { group, weights, order } => {
                (Some(Norm::rms(backend.upload_values(&random.values(weights))?, 1e-5)), group, order)
            }
            _ => (None, 1, GateOrder::NormFirst),
        };
        let gated = GatedNorm { norm, group, column: 5, order };
        step(backend, &batch(ROWS, 0), |step| Ok(backend.gated_norm(step, &gated, &gates.buf, &mut x.buf)?))?;
        x.table(backend)
    }
}

/// What goes through a sequence.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Conv { channels: usize, taps: usize, form: ConvForm, biased: bool },
    Delta(DeltaHeads),
    Scan(ScanHeads),
    Channels { channels: usize, state: usize },
}

/// Values of a state before the matrices, and columns before betas and steps.
const BEFORE: usize = 6;

impl Kind {
    fn needs(self) -> Vec<Need> {
        match self {
            Kind::Conv { .. } => vec![Need::States, Need::ShortConv],
            Kind::Delta(_) => vec![Need::States, Need::DeltaRule],
            Kind::Scan(_) => vec![Need::States, Need::SelectiveScan],
            Kind::Channels { .. } => vec![Need::States, Need::ChannelScan],
        }
    }

    fn state_values(self) -> usize {
        match self {
            Kind::Conv { channels, taps, .. } => conv_values(channels, taps).max(1),
            Kind::Delta(heads) => BEFORE + heads.state_values(),
            Kind::Scan(heads) => BEFORE + heads.state_values(),
            Kind::Channels { channels, state } => BEFORE + channel_values(state, channels),
        }
    }

    /// Columns of what is read, and of betas and decays, or of steps, with what stands before them.
    fn columns(self) -> (usize, usize) {
        match self {
            // One more than it reads.
            Kind::Conv { channels, form, .. } => (form.columns(channels) + 1, 0),
            Kind::Delta(heads) => (heads.columns(), BEFORE + 2 * heads.value),
            Kind::Scan(heads) => (heads.columns(), BEFORE + heads.heads),
            // Values, keys and queries, and steps; none stands beside the other.
            Kind::Channels { channels, state } => (channels + 2 * state, channels),
        }
    }

    fn out_columns(self) -> usize {
        match self {
            Kind::Conv { channels, .. } => channels,
            Kind::Delta(heads) => heads.value * heads.dim_v,
            Kind::Scan(heads) => heads.heads * heads.dim,
            Kind::Channels { channels, .. } => channels,
        }
    }
}

/// Sequences that grow together, chunk by chunk, in the second layer of a group of states behind one of pages. A sequence
/// leaves each step's state in another place than it found it, as after a prefix hit.
#[derive(Clone, Copy)]
struct Sequences {
    kind: Kind,
    lengths: &'static [usize],
    chunk: usize,
}

impl fmt::Display for Sequences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, lengths {:?} by {}", self.kind, self.lengths, self.chunk)
    }
}

/// The layer that is looked at.
const LAYER: KvLayer = KvLayer { group: 1, layer: 1 };

impl Case for Sequences {
    fn op(&self) -> Op {
        match self.kind {
            Kind::Conv { .. } => Op::ShortConv,
            Kind::Delta(_) => Op::DeltaRule,
            Kind::Scan(_) => Op::SelectiveScan,
            Kind::Channels { .. } => Op::ChannelScan,
        }
    }

    fn needs(&self) -> Vec<Need> {
        self.kind.needs()
    }

    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure> {
        self.run(backend, &(0..self.lengths.len()).collect::<Vec<_>>(), self.chunk)
    }
}

impl Sequences {
    /// The outputs of the chosen sequences, one after the other.
    fn run<B: Backend>(&self, backend: &B, chosen: &[usize], chunk: usize) -> Result<Table, Failure> {
        let mut kv = self.states(backend)?;
        let mut outputs = vec![Table::new(self.kind.out_columns()); chosen.len()];
        let longest = chosen.iter().map(|&sequence| self.lengths[sequence]).max().unwrap_or(0);
        for (odd, start) in (0..longest).step_by(chunk).enumerate() {
            let mut rows = Vec::new();
            for (at, &sequence) in chosen.iter().enumerate() {
                let end = self.lengths[sequence].min(start + chunk);
                if start < end {
                    let place = |odd: usize| PageId(count(1 + 2 * sequence + odd % 2));
                    let from = (start > 0).then(|| place(odd));
                    let state = RowState { from, to: place(odd + 1), saves: Vec::new() };
                    rows.push((at, sequence, start..end, state));
                }
            }
            let shares: Vec<_> =
                rows.iter().map(|(_, sequence, range, state)| (*sequence, range.clone(), state)).collect();
            let out = self.step(backend, &shares, &mut kv)?;
            let mut rest = out.values.as_slice();
            for (at, _, range, _) in rows {
                let (own, others) = rest.split_at(range.len() * out.columns);
                outputs[at].values.extend_from_slice(own);
                rest = others;
            }
        }
        let mut all = Table::new(self.kind.out_columns());
        outputs.into_iter().for_each(|output| all.append(output));
        Ok(all)
    }

    /// The first sequence from its second page on: as part of the whole, and from two checkpoints that a first step left.
    fn resumed_at_a_checkpoint<B: Backend>(&self, backend: &B) -> Result<(Table, Table), Failure> {
        let mut kv = self.states(backend)?;
        let saves = vec![(count(PAGE_TOKENS), PageId(4)), (count(2 * PAGE_TOKENS), PageId(2))];
        let state = RowState { from: None, to: PageId(1), saves };
        let mut whole = self.step(backend, &[(0, 0..self.lengths[0], &state)], &mut kv)?;
        whole.values.drain(..PAGE_TOKENS * whole.columns);
        let first = RowState { from: Some(PageId(4)), to: PageId(5), saves: Vec::new() };
        let mut parts = self.step(backend, &[(0, PAGE_TOKENS..2 * PAGE_TOKENS, &first)], &mut kv)?;
        let second = RowState { from: Some(PageId(2)), to: PageId(3), saves: Vec::new() };
        parts.append(self.step(backend, &[(0, 2 * PAGE_TOKENS..self.lengths[0], &second)], &mut kv)?);
        Ok((whole, parts))
    }

    fn states<B: Backend>(&self, backend: &B) -> Result<B::Kv, Failure> {
        let bytes = size_of::<f32>() * self.kind.state_values();
        let group = |kind, pages| KvGroup { layers: 2, kind, window: None, pages };
        let groups = vec![
            group(KvKind::pairs(1, 16), 8),
            group(KvKind::State { bytes, every: PAGE_TOKENS }, 1 + 2 * self.lengths.len()),
        ];
        Ok(backend.alloc_kv(&KvSpec { groups, dtype: KvDType::F16 })?)
    }

    /// One step of some positions of some sequences, whose inputs depend on the sequence alone.
    fn step<B: Backend>(
        &self,
        backend: &B,
        shares: &[(usize, std::ops::Range<usize>, &RowState)],
        kv: &mut B::Kv,
    ) -> Result<Table, Failure> {
        let (columns, mixed_columns) = self.kind.columns();
        let (mut batch, mut x, mut mixed) = (Batch::default(), Vec::new(), Vec::new());
        for (sequence, range, state) in shares {
            let pages = range.end.div_ceil(PAGE_TOKENS);
            // Nobody writes these: they are there because every row has a table.
            let table = vec![PageId::TRASH; pages];
            let (start, len) = (count(range.start), count(range.len()));
            batch.push(
                Row { slot: count(*sequence), start, len, pages: vec![table], wanted: 0 },
                (0..len).map(Token::Known),
            );
            batch.states.push(vec![(*state).clone()]);
            let mut random = Random::of(format_args!("{:?} {sequence}", self.kind));
            let own = |values: Vec<f32>, columns: usize| {
                values[range.start * columns..range.end * columns].to_vec()
            };
            x.extend(own(random.values(self.lengths[*sequence] * columns), columns));
            mixed.extend(own(random.values(self.lengths[*sequence] * mixed_columns), mixed_columns));
        }
        let rows = x;
        let mut x = Bench::filled(backend, Purpose::Activations, columns, &rows)?;
        let tokens = batch.tokens.len();
        let mut out = Bench::poisoned(backend, Purpose::Activations, tokens, self.kind.out_columns())?;
        let mut random = Random::of(format_args!("{:?} weights", self.kind));
        match self.kind {
            Kind::Conv { channels, taps, form, biased } => {
                let weight = backend.upload_values(&random.values(taps * channels))?;
                let bias = biased.then(|| backend.upload_values(&random.values(channels))).transpose()?;
                let conv = ShortConv { layer: LAYER, channels, taps, weight, bias, form };
                step(backend, &batch, |step| {
                    Ok(backend.short_conv(step, &conv, &x.buf, kv, &mut out.buf)?)
                })?;
            }
            Kind::Delta(heads) => {
                let rate: Vec<f32> = random.values(heads.value).iter().map(|rate| -rate.abs()).collect();
                let rule = DeltaRule {
                    layer: LAYER,
                    heads,
                    before: BEFORE,
                    rate: backend.upload_values(&rate)?,
                    bias: backend.upload_values(&random.values(heads.value))?,
                };
                let mut mixed = Bench::filled(backend, Purpose::Activations, mixed_columns, &mixed)?;
                step(backend, &batch, |step| {
                    Ok(backend.delta_rule(step, &rule, &mut x.buf, &mut mixed.buf, kv, &mut out.buf)?)
                })?;
                mixed.table(backend)?;
            }
            Kind::Scan(heads) => {
                let rate: Vec<f32> = random.values(heads.heads).iter().map(|rate| -rate.abs()).collect();
                let scan = SelectiveScan {
                    layer: LAYER,
                    heads,
                    before: BEFORE,
                    rate: backend.upload_values(&rate)?,
                    bias: backend.upload_values(&random.values(heads.heads))?,
                    skip: backend.upload_values(&random.values(heads.heads))?,
                };
                let mut mixed = Bench::filled(backend, Purpose::Activations, mixed_columns, &mixed)?;
                step(backend, &batch, |step| {
                    Ok(backend.selective_scan(step, &scan, &x.buf, &mut mixed.buf, kv, &mut out.buf)?)
                })?;
                mixed.table(backend)?;
            }
            Kind::Channels { channels, state } => {
                let rates = random.values(channels * state);
                let rates: Vec<f32> = rates.iter().map(|rate| -rate.abs()).collect();
                let scan = ChannelScan {
                    layer: LAYER,
                    channels,
                    state,
                    before: BEFORE,
                    rates: backend.upload_values(&rates)?,
                    bias: backend.upload_values(&random.values(channels))?,
                    skip: backend.upload_values(&random.values(channels))?,
                };
                let part = |first: usize, own: usize| {
                    let of_row = |row: &[f32]| row[first..first + own].to_vec();
                    let values: Vec<f32> = rows.chunks_exact(columns).flat_map(of_row).collect();
                    Bench::filled(backend, Purpose::Activations, own, &values)
                };
                let (x, keys, queries) =
                    (part(0, channels)?, part(channels, state)?, part(channels + state, state)?);
                let mut steps = Bench::filled(backend, Purpose::Activations, mixed_columns, &mixed)?;
                let inputs = ChannelInputs { x: &x.buf, keys: &keys.buf, queries: &queries.buf };
                step(backend, &batch, |step| {
                    Ok(backend.channel_scan(step, &scan, &inputs, &mut steps.buf, kv, &mut out.buf)?)
                })?;
                steps.table(backend)?;
            }
        }
        out.table(backend)
    }
}
