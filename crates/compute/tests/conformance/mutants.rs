//! Backends that are wrong on purpose: the suite must find each of them, or it proves nothing.

use std::cell::Cell;

use fornax_compute::conformance::{self, Op, Reference, Report, Subject};
use fornax_compute::cpu::{Activations, Cpu, Simd};
use fornax_compute::operands::Operand;
use fornax_compute::{
    Attention, Backend, Batch, Between, ChannelInputs, ChannelScan, DeltaRule, Error, ExpertRoom, Experts,
    GateOrder, GatedNorm, Glu, HeadProducts, Heads, KeySharing, KvLayer, KvSpec, LatentAttention,
    LatentHeads, LowRank, Memory, Norm, Output, Part, Pointwise, Pooling, Purpose, QkNorm, Rope, Routing,
    Rows, SampleRow, ScanHeads, Scores, SelectiveScan, Shares, ShortConv, Temperature, Token, Usage,
};
use fornax_format::DType;

use crate::{cpu, large};

type Buf = <Cpu as Memory>::Buf;
type Weight = <Cpu as Memory>::Weight;
type Kv = <Cpu as Memory>::Kv;

/// One mistake that somebody could make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// A later chunk reads its first two pages the wrong way round.
    WrongPage,
    /// Rotary positions count from one.
    PositionOffByOne,
    /// All pairs turn by the first section of a position.
    OneSection,
    /// Of given rows the first columns are added.
    GivenFirst,
    /// All layers of a group share the first one's pages.
    OneLayer,
    /// The window is not known.
    WindowIgnored,
    /// The window is one position too long.
    WindowOffByOne,
    /// Keys and values are stored in f32 where a half was asked for.
    KvInF32,
    /// 8-bit floats are stored as 8-bit integers.
    KvFloatsAsIntegers,
    /// Norms divide by the bare root mean square.
    NormWithoutEps,
    /// The last row of a product is not written.
    RowUnwritten,
    /// A product writes one row too many.
    RowTooMany,
    /// A product of several rows is summed in another order.
    SumDependsOnBatch,
    /// Attention of a whole prompt is summed in another order than that of a single token.
    SumDependsOnChunk,
    /// Activations that are to be 8-bit floats stay as they are.
    WideActivations,
    /// Stored row orders are dropped.
    OrderIgnored,
    /// The bias is added to the first row only.
    BiasOnce,
    /// Gate and up are exchanged.
    GateAndUpSwapped,
    /// A shared expert counts in full.
    GateIgnored,
    /// Adapters change nothing.
    AdaptersIgnored,
    /// Every row has the first one's adapter.
    OneAdapter,
    /// The weights of the chosen experts are shares of all.
    SharesOfAll,
    /// Ties go to the highest numbers.
    LastOfEqualExperts,
    /// Each expert's score depends on the others'.
    SoftmaxForSigmoid,
    /// Scores end at one.
    SigmoidForSoftplus,
    /// Experts are chosen by their scores alone.
    CorrectionIgnored,
    /// What chooses also weighs.
    CorrectionWeighs,
    /// A token's experts are of any group.
    GroupsIgnored,
    /// A group is as good as its best expert.
    GroupsByTheBest,
    /// Weights are not scaled.
    RoutedUnscaled,
    /// Nothing is added to what weights are divided by.
    NothingAdded,
    /// What weights are divided by has no bound.
    NoLeastSum,
    /// All tokens get the first one's experts.
    OneChoice,
    /// Experts are added up without their weights.
    ExpertsUnweighed,
    /// Experts without gates have another function.
    ExpertsOfRelu,
    /// The experts' sum depends on how many tokens there are.
    ExpertsDependOnBatch,
    /// The first rows are gathered instead of those that want logits.
    GatherFirst,
    /// Grammar masks are not looked at.
    MaskIgnored,
    /// All requests draw with one seed.
    SeedIgnored,
    /// All requests get the first one's parameters.
    OneSampling,
    /// Nothing that was said before counts.
    HistoryIgnored,
    /// The prompt counts as generated.
    PromptGenerated,
    /// Mirostat starts anew with each token.
    MuIgnored,
    /// Results come in the order of the logits.
    SampledInLogitsOrder,
    /// A sampled token is read from the row's own slot.
    SampledSlotIgnored,
    /// A recorded step is not run again.
    ReplaysNothing,
    /// Buffers are counted twice.
    CountedTwice,
    /// A product takes NaN for zero.
    NanIsZero,
    /// Batches are cut to what fits.
    CutsBatches,
    /// Queries are normalised with the keys' weights.
    KeyNormForQueries,
    /// Values are not normalised.
    ValuesAsTheyAre,
    /// Attention sinks take nothing.
    SinksIgnored,
    /// Scores are not capped.
    CapIgnored,
    /// No query sees what comes after it.
    AlwaysCausal,
    /// A query sees one position too few behind it, or before it.
    ReachOffByOne,
    /// The last row stands for the sequence.
    PoolsLast,
    /// A row goes on from where it writes instead of from where it is told.
    GoesOnFromOwn,
    /// Checkpoints are not left.
    NoCheckpoints,
    /// A convolution's newest input counts as its oldest.
    TapsReversed,
    /// Value heads read the wrong key heads.
    KeysShared,
    /// A state's last bit depends on how long the step is.
    StateDependsOnChunk,
    /// The same of a scan's.
    ScanDependsOnChunk,
    /// All values of a column forget at one rate.
    OneRate,
    /// Nothing goes past the matrices of a scan.
    NothingSkipped,
    /// Every head has keys and queries of the first group.
    OneGroup,
    /// A convolution's sums begin with nothing.
    ConvWithoutBias,
    /// Only the first row is multiplied by the factors of columns.
    FactorsOnce,
    BoundsOnce,
    /// A norm's gates are those of the row's beginning.
    FirstGates,
    /// A norm comes before its gates, whatever is said.
    NormAlwaysFirst,
    /// All of a row is normalised together.
    OneNorm,
    /// Gates let everything through.
    GatesOpen,
    /// What stands beside gates begins at the row's beginning.
    FirstColumns,
    /// All experts have the first one's scale.
    OneScale,
    /// Every head has the first one's share of a row.
    OneShare,
    /// Products of heads depend on how many tokens there are.
    HeadsDependOnBatch,
    /// What turns is not looked at.
    NothingTurns,
    /// All layers of a group share the first one's rows.
    OneLayerOfRows,
    /// Attention over rows of a whole prompt is summed in another order than that of a single token.
    RowsDependOnChunk,
    /// Queries grow by the position of the first.
    OneTemperature,
    /// They grow from the first position on.
    GrowsAtOnce,
    /// Weights of experts multiply what they make, always.
    InputsUnweighed,
    /// A query sees chunks before its own.
    ChunksIgnored,
}

const FAULTS: &[(Fault, Op)] = &[
    (Fault::WrongPage, Op::Attention),
    (Fault::PositionOffByOne, Op::Rope),
    (Fault::OneSection, Op::Rope),
    (Fault::GivenFirst, Op::Add),
    (Fault::OneLayer, Op::Attention),
    (Fault::WindowIgnored, Op::Attention),
    (Fault::WindowOffByOne, Op::Attention),
    (Fault::KvInF32, Op::Kv),
    (Fault::KvFloatsAsIntegers, Op::Kv),
    (Fault::NormWithoutEps, Op::Norm),
    (Fault::RowUnwritten, Op::Matmul),
    (Fault::RowTooMany, Op::Matmul),
    (Fault::SumDependsOnBatch, Op::Invariance),
    (Fault::SumDependsOnChunk, Op::Invariance),
    (Fault::WideActivations, Op::Matmul),
    (Fault::OrderIgnored, Op::Matmul),
    (Fault::BiasOnce, Op::Add),
    (Fault::GateAndUpSwapped, Op::Glu),
    (Fault::GateIgnored, Op::Glu),
    (Fault::AdaptersIgnored, Op::LowRank),
    (Fault::OneAdapter, Op::LowRank),
    (Fault::SharesOfAll, Op::Route),
    (Fault::LastOfEqualExperts, Op::Route),
    (Fault::SoftmaxForSigmoid, Op::Route),
    (Fault::SigmoidForSoftplus, Op::Route),
    (Fault::CorrectionIgnored, Op::Route),
    (Fault::CorrectionWeighs, Op::Route),
    (Fault::GroupsIgnored, Op::Route),
    (Fault::GroupsByTheBest, Op::Route),
    (Fault::RoutedUnscaled, Op::Route),
    (Fault::NothingAdded, Op::Route),
    (Fault::NoLeastSum, Op::Route),
    (Fault::OneChoice, Op::Experts),
    (Fault::ExpertsUnweighed, Op::Experts),
    (Fault::ExpertsOfRelu, Op::Experts),
    (Fault::ExpertsDependOnBatch, Op::Invariance),
    (Fault::GatherFirst, Op::Gather),
    (Fault::MaskIgnored, Op::Sample),
    (Fault::SeedIgnored, Op::Sample),
    (Fault::OneSampling, Op::Sample),
    (Fault::HistoryIgnored, Op::Sample),
    (Fault::PromptGenerated, Op::Sample),
    (Fault::MuIgnored, Op::Sample),
    (Fault::SampledInLogitsOrder, Op::Sample),
    (Fault::SampledSlotIgnored, Op::Sample),
    (Fault::ReplaysNothing, Op::Record),
    (Fault::CountedTwice, Op::Memory),
    (Fault::NanIsZero, Op::Fault),
    (Fault::CutsBatches, Op::Limits),
    (Fault::KeyNormForQueries, Op::Norm),
    (Fault::ValuesAsTheyAre, Op::Norm),
    (Fault::SinksIgnored, Op::Attention),
    (Fault::CapIgnored, Op::Attention),
    (Fault::AlwaysCausal, Op::Attention),
    (Fault::ReachOffByOne, Op::Attention),
    (Fault::PoolsLast, Op::Pool),
    (Fault::GoesOnFromOwn, Op::DeltaRule),
    (Fault::GoesOnFromOwn, Op::ShortConv),
    (Fault::NoCheckpoints, Op::Invariance),
    (Fault::TapsReversed, Op::ShortConv),
    (Fault::KeysShared, Op::DeltaRule),
    (Fault::StateDependsOnChunk, Op::Invariance),
    (Fault::GoesOnFromOwn, Op::SelectiveScan),
    (Fault::NothingSkipped, Op::SelectiveScan),
    (Fault::OneGroup, Op::SelectiveScan),
    (Fault::ScanDependsOnChunk, Op::Invariance),
    (Fault::GoesOnFromOwn, Op::ChannelScan),
    (Fault::NothingSkipped, Op::ChannelScan),
    (Fault::OneRate, Op::ChannelScan),
    (Fault::ConvWithoutBias, Op::ShortConv),
    (Fault::FactorsOnce, Op::Pointwise),
    (Fault::BoundsOnce, Op::Pointwise),
    (Fault::FirstGates, Op::GatedNorm),
    (Fault::NormAlwaysFirst, Op::GatedNorm),
    (Fault::OneNorm, Op::GatedNorm),
    (Fault::GatesOpen, Op::SigmoidGate),
    (Fault::FirstColumns, Op::Glu),
    (Fault::OneScale, Op::Route),
    (Fault::OneShare, Op::HeadProducts),
    (Fault::HeadsDependOnBatch, Op::Invariance),
    (Fault::NothingTurns, Op::LatentAttention),
    (Fault::OneLayerOfRows, Op::LatentAttention),
    (Fault::RowsDependOnChunk, Op::Invariance),
    (Fault::OneTemperature, Op::Pointwise),
    (Fault::GrowsAtOnce, Op::Pointwise),
    (Fault::InputsUnweighed, Op::Experts),
    (Fault::ChunksIgnored, Op::Attention),
];

/// Runs the suite's cases of some operations on a backend with this fault, up to the first that finds it.
fn report(fault: Fault, ops: &[Op], reference: &Reference) -> Report {
    let mutant =
        Mutant { inner: cpu(Simd::detect(), Activations::Float, 1), fault, recorded: Cell::new(false) };
    let sizes = mutant.inner.sizes();
    let subject = Subject { backend: &mutant, sizes, reference, invariant: true };
    let found = Cell::new(false);
    let chosen = |op: Op, case: &str| !found.get() && ops.contains(&op) && !large(op, case);
    conformance::run_where(&chosen, &subject, &mut |result| found.set(found.get() | result.outcome.is_err()))
}

#[test]
fn every_wrong_backend_is_found() {
    let reference = Reference::new(Activations::Float).unwrap();
    for &(fault, op) in FAULTS {
        assert!(
            !report(fault, &[op], &reference).failed.is_empty(),
            "{fault:?} was not found among the {op} cases"
        );
    }
}

#[test]
fn without_its_fault_a_mutant_conforms() {
    let ops: Vec<Op> = FAULTS.iter().map(|(_, op)| *op).collect();
    let reference = Reference::new(Activations::Float).unwrap();
    assert!(report(Fault::None, &ops, &reference).conforms());
}

/// A correct backend with one fault.
struct Mutant {
    inner: Cpu,
    fault: Fault,
    recorded: Cell<bool>,
}

/// The real step beside what the faults need to know of its batch.
struct Step {
    inner: <Cpu as Backend>::Step,
    tokens: usize,
    wanted: usize,
}

impl Step {
    fn count(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.tokens,
            Rows::Wanted => self.wanted,
        }
    }
}

impl Mutant {
    fn has(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    /// Changes the last bit of every value, which no bound notices.
    fn nudge(&self, buf: &mut Buf, rows: usize) -> Result<(), Error> {
        let values: Vec<f32> = self.inner.read(buf, 0, rows)?.iter().map(|value| value.next_up()).collect();
        self.inner.write(buf, 0, &values)
    }

    /// The same rows, with the first group's keys and queries in every group.
    fn first_group(&self, heads: ScanHeads, x: &Buf, tokens: usize) -> Result<Buf, Error> {
        let ScanHeads { groups, state, .. } = heads;
        let mut values = self.inner.read(x, 0, tokens)?;
        for row in values.chunks_exact_mut(heads.columns()) {
            let shared = row.split_at_mut(heads.heads * heads.dim).1;
            for kind in shared.chunks_exact_mut(groups * state) {
                (1..groups).for_each(|group| kind.copy_within(..state, group * state));
            }
        }
        let mut copy = self.inner.alloc(Purpose::Activations, tokens, heads.columns())?;
        self.inner.write(&mut copy, 0, &values)?;
        Ok(copy)
    }

    /// Another vector of the same values.
    fn copy(&self, vector: &Buf) -> Result<Buf, Error> {
        self.inner.upload_values(&self.inner.read(vector, 0, 1)?)
    }
}

impl Memory for Mutant {
    type Weight = Weight;
    type Buf = Buf;
    type Kv = Kv;

    fn upload(&self, parts: &[Part<'_>]) -> Result<Weight, Error> {
        let mut parts = parts.to_vec();
        if self.has(Fault::OrderIgnored) {
            parts.iter_mut().for_each(|part| part.rows = None);
        }
        if self.has(Fault::WideActivations) {
            let rounding = parts.iter_mut().filter(|part| part.view.dtype == DType::FP8_A8);
            rounding.for_each(|part| part.view.dtype = DType::FP8_128);
        }
        self.inner.upload(&parts)
    }

    fn upload_experts(&self, parts: &[Part<'_>], experts: usize) -> Result<Weight, Error> {
        self.inner.upload_experts(parts, experts)
    }

    fn upload_vector(&self, parts: &[Part<'_>]) -> Result<Buf, Error> {
        self.inner.upload_vector(parts)
    }

    fn upload_values(&self, values: &[f32]) -> Result<Buf, Error> {
        self.inner.upload_values(values)
    }

    fn alloc(&self, purpose: Purpose, rows: usize, columns: usize) -> Result<Buf, Error> {
        if self.has(Fault::CountedTwice) && rows == 7 {
            std::mem::forget(self.inner.alloc(purpose, rows, columns)?);
        }
        self.inner.alloc(purpose, rows, columns)
    }

    fn alloc_kv(&self, spec: &KvSpec) -> Result<Kv, Error> {
        let mut spec = spec.clone();
        for group in &mut spec.groups {
            match self.fault {
                Fault::WindowIgnored => group.window = None,
                Fault::WindowOffByOne => group.window = group.window.map(|window| window + 1),
                _ => {}
            }
        }
        if self.has(Fault::KvInF32) {
            spec.dtype = fornax_compute::KvDType::F32;
        }
        if self.has(Fault::KvFloatsAsIntegers) && spec.dtype == fornax_compute::KvDType::F8 {
            spec.dtype = fornax_compute::KvDType::Q8_0;
        }
        self.inner.alloc_kv(&spec)
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }
}

impl Backend for Mutant {
    type Step = Step;

    fn name(&self) -> &'static str {
        "mutant"
    }

    fn begin(&self, batch: &Batch) -> Result<Step, Error> {
        let mut batch = batch.clone();
        match self.fault {
            Fault::WrongPage => {
                let grown = batch.rows.iter_mut().filter(|row| row.start >= 64);
                grown.flat_map(|row| &mut row.pages).for_each(|table| table.swap(0, 1));
            }
            Fault::PositionOffByOne => batch.positions.iter_mut().for_each(|position| *position += 1),
            Fault::GoesOnFromOwn => {
                let states = batch.states.iter_mut().flatten();
                states.for_each(|state| state.from = state.from.map(|_| state.to));
            }
            Fault::NoCheckpoints => batch.states.iter_mut().flatten().for_each(|state| state.saves.clear()),
            Fault::OneAdapter => {
                let first = batch.adapters.iter().flatten().next().copied();
                batch.adapters.fill(first);
            }
            Fault::SampledSlotIgnored => {
                let slots: Vec<u32> = batch
                    .rows
                    .iter()
                    .flat_map(|row| std::iter::repeat_n(row.slot, row.len as usize))
                    .collect();
                for (token, own) in batch.tokens.iter_mut().zip(slots) {
                    if let Token::Sampled(slot) = token {
                        *slot = own;
                    }
                }
            }
            Fault::CutsBatches if batch.tokens.len() > 512 => {
                batch.tokens.truncate(512);
                batch.positions.truncate(512);
                batch.rows[0].len = 512;
            }
            _ => {}
        }
        Ok(Step { inner: self.inner.begin(&batch)?, tokens: batch.tokens.len(), wanted: batch.wanted() })
    }

    fn record(&self, step: &Step, body: &mut dyn FnMut() -> Result<(), Error>) -> Result<(), Error> {
        if self.has(Fault::ReplaysNothing) && self.recorded.replace(true) {
            return Ok(());
        }
        self.inner.record(&step.inner, body)
    }

    fn finish(&self, step: Step) -> Result<Output, Error> {
        self.inner.finish(step.inner)
    }

    fn write(&self, buf: &mut Buf, row: usize, values: &[f32]) -> Result<(), Error> {
        self.inner.write(buf, row, values)
    }

    fn read(&self, buf: &Buf, row: usize, rows: usize) -> Result<Vec<f32>, Error> {
        self.inner.read(buf, row, rows)
    }

    fn embed(&self, step: &Step, table: &Weight, out: &mut Buf) -> Result<(), Error> {
        self.inner.embed(&step.inner, table, out)
    }

    fn matmul(&self, step: &Step, rows: Rows, weight: &Weight, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        let count = step.count(rows);
        if count == 0 {
            return self.inner.matmul(&step.inner, rows, weight, x, out);
        }
        let last = self.inner.read(out, count - 1, 1)?;
        self.inner.matmul(&step.inner, rows, weight, x, out)?;
        match self.fault {
            Fault::RowUnwritten => self.inner.write(out, count - 1, &last),
            Fault::RowTooMany => self.inner.write(out, count, &vec![0.0; last.len()]),
            Fault::SumDependsOnBatch if count > 1 => self.nudge(out, count),
            Fault::NanIsZero => {
                let values = self.inner.read(out, 0, count)?;
                let finite: Vec<f32> =
                    values.iter().map(|value| if value.is_nan() { 0.0 } else { *value }).collect();
                self.inner.write(out, 0, &finite)
            }
            _ => Ok(()),
        }
    }

    fn add_vector(&self, step: &Step, rows: Rows, vector: &Buf, x: &mut Buf) -> Result<(), Error> {
        let rest = self.inner.read(x, 1, step.count(rows) - 1)?;
        self.inner.add_vector(&step.inner, rows, vector, x)?;
        if self.has(Fault::BiasOnce) { self.inner.write(x, 1, &rest) } else { Ok(()) }
    }

    fn add(&self, step: &Step, rows: Rows, y: &Buf, x: &mut Buf) -> Result<(), Error> {
        self.inner.add(&step.inner, rows, y, x)
    }

    fn add_positions(&self, step: &Step, table: &Weight, x: &mut Buf) -> Result<(), Error> {
        self.inner.add_positions(&step.inner, table, x)
    }

    fn pointwise(&self, step: &Step, rows: Rows, function: Pointwise, x: &mut Buf) -> Result<(), Error> {
        self.inner.pointwise(&step.inner, rows, function, x)
    }

    fn clamp(&self, step: &Step, bounds: &Buf, x: &mut Buf) -> Result<(), Error> {
        let rest = self.inner.read(x, 1, step.tokens - 1)?;
        self.inner.clamp(&step.inner, bounds, x)?;
        if self.has(Fault::BoundsOnce) { self.inner.write(x, 1, &rest) } else { Ok(()) }
    }

    fn scale_columns(&self, step: &Step, factors: &Buf, x: &mut Buf) -> Result<(), Error> {
        let rest = self.inner.read(x, 1, step.tokens - 1)?;
        self.inner.scale_columns(&step.inner, factors, x)?;
        if self.has(Fault::FactorsOnce) { self.inner.write(x, 1, &rest) } else { Ok(()) }
    }

    fn norm(&self, step: &Step, rows: Rows, norm: &Norm<Buf>, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        if !self.has(Fault::NormWithoutEps) {
            return self.inner.norm(&step.inner, rows, norm, x, out);
        }
        let weight = self.copy(&norm.weight)?;
        let bias = norm.bias.as_ref().map(|bias| self.copy(bias)).transpose()?;
        self.inner.norm(&step.inner, rows, &Norm { kind: norm.kind, weight, bias, eps: 0.0 }, x, out)
    }

    fn qk_norm(&self, step: &Step, heads: Heads, norm: &QkNorm<Buf>, qkv: &mut Buf) -> Result<(), Error> {
        let copied = |norm: &Norm<Buf>| Ok::<_, Error>(Norm::rms(self.copy(&norm.weight)?, norm.eps));
        let (key, value) = (copied(&norm.key)?, norm.value.as_ref().map(copied).transpose()?);
        let (query, value) = match self.fault {
            Fault::KeyNormForQueries => (copied(&norm.key)?, value),
            Fault::ValuesAsTheyAre => (copied(&norm.query)?, None),
            _ => return self.inner.qk_norm(&step.inner, heads, norm, qkv),
        };
        self.inner.qk_norm(&step.inner, heads, &QkNorm { query, key, value }, qkv)
    }

    fn add_given(&self, step: &Step, column: usize, x: &mut Buf) -> Result<(), Error> {
        let column = if self.has(Fault::GivenFirst) { 0 } else { column };
        self.inner.add_given(&step.inner, column, x)
    }

    fn rope(&self, step: &Step, heads: Heads, rope: &Rope<Buf>, qkv: &mut Buf) -> Result<(), Error> {
        if self.has(Fault::OneSection) {
            let frequencies = self.inner.upload_values(rope.frequencies.values())?;
            let one = Rope { frequencies, sections: Vec::new(), ..*rope };
            return self.inner.rope(&step.inner, heads, &one, qkv);
        }
        self.inner.rope(&step.inner, heads, rope, qkv)
    }

    fn kv_write(
        &self,
        step: &Step,
        heads: Heads,
        mut layer: KvLayer,
        qkv: &Buf,
        kv: &mut Kv,
    ) -> Result<(), Error> {
        if self.has(Fault::OneLayer) {
            layer.layer = 0;
        }
        self.inner.kv_write(&step.inner, heads, layer, qkv, kv)
    }

    fn attention(
        &self,
        step: &Step,
        attention: &Attention<Buf>,
        qkv: &Buf,
        kv: &Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let sinks = attention.sinks.as_ref().map(|sinks| self.copy(sinks)).transpose()?;
        let mut attention = Attention { sinks, ..*attention };
        match self.fault {
            Fault::OneLayer => attention.layer.layer = 0,
            Fault::SinksIgnored => attention.sinks = None,
            Fault::CapIgnored => attention.soft_cap = None,
            Fault::AlwaysCausal => attention.causal = true,
            Fault::ChunksIgnored => attention.chunk = None,
            Fault::ReachOffByOne => attention.reach = attention.reach.map(|reach| reach - 1),
            _ => {}
        }
        self.inner.attention(&step.inner, &attention, qkv, kv, out)?;
        if self.has(Fault::SumDependsOnChunk) && step.tokens > 64 {
            self.nudge(out, step.tokens)
        } else {
            Ok(())
        }
    }

    fn glu(&self, step: &Step, kind: Glu, gate_up: &Buf, out: &mut Buf) -> Result<(), Error> {
        if !self.has(Fault::GateAndUpSwapped) {
            return self.inner.glu(&step.inner, kind, gate_up, out);
        }
        let values = self.inner.read(gate_up, 0, step.tokens)?;
        let columns = values.len() / step.tokens;
        let swapped: Vec<f32> = values
            .chunks_exact(columns)
            .flat_map(|row| row[columns / 2..].iter().chain(&row[..columns / 2]).copied())
            .collect();
        let mut buf = self.inner.alloc(Purpose::Activations, step.tokens, columns)?;
        self.inner.write(&mut buf, 0, &swapped)?;
        self.inner.glu(&step.inner, kind, &buf, out)
    }

    fn add_gated(&self, step: &Step, gate: &Buf, y: &Buf, x: &mut Buf) -> Result<(), Error> {
        if self.has(Fault::GateIgnored) {
            return self.inner.add(&step.inner, Rows::Tokens, y, x);
        }
        self.inner.add_gated(&step.inner, gate, y, x)
    }

    fn low_rank(
        &self,
        step: &Step,
        changes: &[Vec<LowRank<Buf>>],
        x: &Buf,
        out: &mut Buf,
    ) -> Result<(), Error> {
        if self.has(Fault::AdaptersIgnored) {
            return Ok(());
        }
        self.inner.low_rank(&step.inner, changes, x, out)
    }

    fn short_conv(
        &self,
        step: &Step,
        conv: &ShortConv<Buf>,
        x: &Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let ShortConv { layer, channels, taps, form, .. } = *conv;
        let mut weight = self.inner.read(&conv.weight, 0, 1)?;
        if self.has(Fault::TapsReversed) {
            let reversed = weight.chunks_exact(channels).rev().flatten().copied();
            weight = reversed.collect();
        }
        let weight = self.inner.upload_values(&weight)?;
        let bias = match &conv.bias {
            Some(bias) if !self.has(Fault::ConvWithoutBias) => Some(self.copy(bias)?),
            _ => None,
        };
        let conv = ShortConv { layer, channels, taps, weight, bias, form };
        self.inner.short_conv(&step.inner, &conv, x, kv, out)
    }

    fn delta_rule(
        &self,
        step: &Step,
        rule: &DeltaRule<Buf>,
        qkv: &mut Buf,
        mixed: &mut Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let mut heads = rule.heads;
        if self.has(Fault::KeysShared) {
            heads.sharing = match heads.sharing {
                KeySharing::Neighbours => KeySharing::Turns,
                KeySharing::Turns => KeySharing::Neighbours,
            };
        }
        let (rate, bias) = (self.copy(&rule.rate)?, self.copy(&rule.bias)?);
        let rule = DeltaRule { layer: rule.layer, heads, before: rule.before, rate, bias };
        self.inner.delta_rule(&step.inner, &rule, qkv, mixed, kv, out)?;
        let nudged = self.has(Fault::StateDependsOnChunk) && step.tokens > 1;
        if nudged { self.nudge(out, step.tokens) } else { Ok(()) }
    }

    fn gated_norm(&self, step: &Step, norm: &GatedNorm<Buf>, gates: &Buf, x: &mut Buf) -> Result<(), Error> {
        let column = if self.has(Fault::FirstGates) { 0 } else { norm.column };
        let order = if self.has(Fault::NormAlwaysFirst) { GateOrder::NormFirst } else { norm.order };
        let mut group = norm.group;
        let norm = match &norm.norm {
            None => None,
            Some(norm) => {
                if self.has(Fault::OneNorm) && norm.weight.columns() == x.columns() {
                    group = x.columns();
                }
                Some(Norm::rms(self.copy(&norm.weight)?, norm.eps))
            }
        };
        self.inner.gated_norm(&step.inner, &GatedNorm { norm, group, column, order }, gates, x)
    }

    fn selective_scan(
        &self,
        step: &Step,
        scan: &SelectiveScan<Buf>,
        x: &Buf,
        mixed: &mut Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let SelectiveScan { layer, heads, before, .. } = *scan;
        let (rate, bias) = (self.copy(&scan.rate)?, self.copy(&scan.bias)?);
        let mut skip = self.inner.read(&scan.skip, 0, 1)?;
        if self.has(Fault::NothingSkipped) {
            skip.fill(0.0);
        }
        let skip = self.inner.upload_values(&skip)?;
        let of_first;
        let x = if self.has(Fault::OneGroup) {
            of_first = self.first_group(heads, x, step.tokens)?;
            &of_first
        } else {
            x
        };
        let scan = SelectiveScan { layer, heads, before, rate, bias, skip };
        self.inner.selective_scan(&step.inner, &scan, x, mixed, kv, out)?;
        let nudged = self.has(Fault::ScanDependsOnChunk) && step.tokens > 1;
        if nudged { self.nudge(out, step.tokens) } else { Ok(()) }
    }

    fn channel_scan(
        &self,
        step: &Step,
        scan: &ChannelScan<Buf>,
        inputs: &ChannelInputs<'_, Buf>,
        steps: &mut Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let ChannelScan { layer, channels, state, before, .. } = *scan;
        let mut rates = self.inner.read(&scan.rates, 0, 1)?;
        if self.has(Fault::OneRate) {
            let first = rates[..channels].to_vec();
            rates.chunks_exact_mut(channels).for_each(|row| row.copy_from_slice(&first));
        }
        let mut skip = self.inner.read(&scan.skip, 0, 1)?;
        if self.has(Fault::NothingSkipped) {
            skip.fill(0.0);
        }
        let [rates, skip] = [self.inner.upload_values(&rates)?, self.inner.upload_values(&skip)?];
        let bias = self.copy(&scan.bias)?;
        let scan = ChannelScan { layer, channels, state, before, rates, bias, skip };
        self.inner.channel_scan(&step.inner, &scan, inputs, steps, kv, out)
    }

    fn sigmoid_gate(&self, step: &Step, gates: &Buf, x: &mut Buf) -> Result<(), Error> {
        if self.has(Fault::GatesOpen) { Ok(()) } else { self.inner.sigmoid_gate(&step.inner, gates, x) }
    }

    fn glu_beside(
        &self,
        step: &Step,
        kind: Glu,
        up: &Buf,
        column: usize,
        gate: &mut Buf,
    ) -> Result<(), Error> {
        let column = if self.has(Fault::FirstColumns) { 0 } else { column };
        self.inner.glu_beside(&step.inner, kind, up, column, gate)
    }

    fn scale_chosen(&self, step: &Step, scales: &Buf, chosen: &mut Buf) -> Result<(), Error> {
        if !self.has(Fault::OneScale) {
            return self.inner.scale_chosen(&step.inner, scales, chosen);
        }
        let all = vec![scales.values()[0]; scales.values().len()];
        self.inner.scale_chosen(&step.inner, &self.inner.upload_values(&all)?, chosen)
    }

    fn scale_by_position(
        &self,
        step: &Step,
        temperature: Temperature,
        columns: usize,
        x: &mut Buf,
    ) -> Result<(), Error> {
        let offset = if self.has(Fault::GrowsAtOnce) { temperature.length } else { temperature.offset };
        let temperature = Temperature { offset, ..temperature };
        let rest = self.inner.read(x, 1, step.tokens.saturating_sub(1))?;
        self.inner.scale_by_position(&step.inner, temperature, columns, x)?;
        if self.has(Fault::OneTemperature) { self.inner.write(x, 1, &rest) } else { Ok(()) }
    }

    fn head_products(
        &self,
        step: &Step,
        products: &HeadProducts<'_, Mutant>,
        x: &Buf,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let HeadProducts { heads, weight, column } = *products;
        let mut values = self.inner.read(x, 0, step.tokens)?;
        if self.has(Fault::OneShare) {
            for row in values.chunks_exact_mut(x.columns()) {
                let each = row.len() / heads;
                (1..heads).for_each(|head| row.copy_within(..each, head * each));
            }
        }
        let mut copy = self.inner.alloc(Purpose::Activations, step.tokens, x.columns())?;
        self.inner.write(&mut copy, 0, &values)?;
        self.inner.head_products(&step.inner, &HeadProducts { heads, weight, column }, &copy, out)?;
        let nudged = self.has(Fault::HeadsDependOnBatch) && step.tokens > 1;
        if nudged { self.nudge(out, step.tokens) } else { Ok(()) }
    }

    fn latent_write(
        &self,
        step: &Step,
        attention: &LatentAttention,
        latent: &Buf,
        turned: &Buf,
        kv: &mut Kv,
    ) -> Result<(), Error> {
        let mut attention = *attention;
        if self.has(Fault::OneLayerOfRows) {
            attention.layer.layer = 0;
        }
        self.inner.latent_write(&step.inner, &attention, latent, turned, kv)
    }

    fn latent_attention(
        &self,
        step: &Step,
        attention: &LatentAttention,
        queries: &Buf,
        absorbed: &Buf,
        kv: &Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let mut attention = *attention;
        if self.has(Fault::OneLayerOfRows) {
            attention.layer.layer = 0;
        }
        let mut copy = self.inner.alloc(Purpose::Activations, step.tokens, queries.columns())?;
        let mut values = self.inner.read(queries, 0, step.tokens)?;
        if self.has(Fault::NothingTurns) {
            let LatentHeads { query, turned, .. } = attention.heads;
            for share in values.chunks_exact_mut(queries.columns() / query) {
                share[..turned].fill(0.0);
            }
        }
        self.inner.write(&mut copy, 0, &values)?;
        self.inner.latent_attention(&step.inner, &attention, &copy, absorbed, kv, out)?;
        let nudged = self.has(Fault::RowsDependOnChunk) && step.tokens > 64;
        if nudged { self.nudge(out, step.tokens) } else { Ok(()) }
    }

    fn route(
        &self,
        step: &Step,
        routing: &Routing,
        logits: &Buf,
        correction: Option<&Buf>,
        chosen: &mut Buf,
    ) -> Result<(), Error> {
        let (mut routing, mut correction) = (*routing, correction);
        match self.fault {
            Fault::SharesOfAll => routing.shares = Shares::OfAll,
            Fault::SoftmaxForSigmoid if routing.scores == Scores::Sigmoid => routing.scores = Scores::Softmax,
            Fault::SigmoidForSoftplus if routing.scores == Scores::SqrtSoftplus => {
                routing.scores = Scores::Sigmoid;
            }
            Fault::CorrectionIgnored => correction = None,
            Fault::GroupsIgnored => routing.groups = None,
            Fault::GroupsByTheBest => routing.groups.iter_mut().for_each(|groups| groups.by_two = false),
            Fault::RoutedUnscaled => routing.scale = 1.0,
            Fault::NothingAdded => routing.added = 0.0,
            Fault::NoLeastSum => routing.least = 0.0,
            _ => {}
        }
        self.inner.route(&step.inner, &routing, logits, correction, chosen)?;
        if self.has(Fault::CorrectionWeighs)
            && let Some(correction) = correction
        {
            // The correction of an expert is in its weight.
            let correction = self.inner.read(correction, 0, 1)?;
            let mut values = self.inner.read(chosen, 0, step.tokens)?;
            for row in values.chunks_exact_mut(2 * routing.chosen) {
                let (numbers, weights) = row.split_at_mut(routing.chosen);
                #[expect(clippy::cast_sign_loss, reason = "no number of an expert is negative")]
                let own = |number: &f32| correction[*number as usize];
                weights.iter_mut().zip(&*numbers).for_each(|(weight, number)| *weight += own(number));
            }
            self.inner.write(chosen, 0, &values)?;
        }
        if !self.has(Fault::LastOfEqualExperts) {
            return Ok(());
        }
        // The mirror image of what the mirror image of the logits gives.
        let (mut values, experts) = (self.inner.read(logits, 0, step.tokens)?, routing.experts);
        values.chunks_exact_mut(experts).for_each(<[f32]>::reverse);
        let mut mirrored = self.inner.alloc(Purpose::Logits, step.tokens, experts)?;
        self.inner.write(&mut mirrored, 0, &values)?;
        self.inner.route(&step.inner, &routing, &mirrored, None, chosen)?;
        let mut values = self.inner.read(chosen, 0, step.tokens)?;
        for row in values.chunks_exact_mut(2 * routing.chosen) {
            let (numbers, weights) = row.split_at_mut(routing.chosen);
            numbers.iter_mut().for_each(|number| *number = (experts - 1) as f32 - *number);
            numbers.reverse();
            weights.reverse();
        }
        self.inner.write(chosen, 0, &values)
    }

    fn experts(
        &self,
        step: &Step,
        experts: &Experts<'_, Mutant>,
        chosen: &Buf,
        x: &Buf,
        room: &mut ExpertRoom<Buf>,
        residual: &mut Buf,
    ) -> Result<(), Error> {
        let mut values = self.inner.read(chosen, 0, step.tokens)?;
        let columns = values.len() / step.tokens;
        let first = values[..columns].to_vec();
        for row in values.chunks_exact_mut(columns) {
            match self.fault {
                Fault::OneChoice => row.copy_from_slice(&first),
                Fault::ExpertsUnweighed => row[columns / 2..].fill(1.0),
                _ => {}
            }
        }
        let mut chosen = self.inner.alloc(Purpose::Residual, step.tokens, columns)?;
        self.inner.write(&mut chosen, 0, &values)?;
        let Experts { count, gate_up, gate_up_bias, down, down_bias, mut between, weighs_inputs } = *experts;
        if let (Between::Function(function), true) = (&mut between, self.has(Fault::ExpertsOfRelu)) {
            *function = Pointwise::Relu;
        }
        let weighs_inputs = weighs_inputs && !self.has(Fault::InputsUnweighed);
        let inner = Experts { count, gate_up, gate_up_bias, down, down_bias, between, weighs_inputs };
        self.inner.experts(&step.inner, &inner, &chosen, x, room, residual)?;
        let nudged = self.has(Fault::ExpertsDependOnBatch) && step.tokens > 1;
        if nudged { self.nudge(residual, step.tokens) } else { Ok(()) }
    }

    fn gather_wanted(&self, step: &Step, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        if self.has(Fault::GatherFirst) {
            return self.inner.write(out, 0, &self.inner.read(x, 0, step.wanted)?);
        }
        self.inner.gather_wanted(&step.inner, x, out)
    }

    fn pool(&self, step: &Step, pooling: Pooling, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        let pooling = if self.has(Fault::PoolsLast) { Pooling::Last } else { pooling };
        self.inner.pool(&step.inner, pooling, x, out)
    }

    fn sample(&self, step: &mut Step, logits: &Buf, rows: &[SampleRow<'_>]) -> Result<(), Error> {
        let mut rows = rows.to_vec();
        match self.fault {
            Fault::MaskIgnored => rows.iter_mut().for_each(|row| row.mask = None),
            Fault::SeedIgnored => rows.iter_mut().for_each(|row| row.seed = 0),
            Fault::OneSampling => {
                let first = rows.first().map(|row| row.sampling);
                rows.iter_mut().for_each(|row| row.sampling = first.unwrap_or(row.sampling));
            }
            Fault::HistoryIgnored => rows.iter_mut().for_each(|row| row.history = &[]),
            Fault::PromptGenerated => {
                rows.iter_mut().for_each(|row| row.generated = row.history.len() as u32)
            }
            Fault::MuIgnored => {
                rows.iter_mut().for_each(|row| row.mirostat_mu = row.sampling.mirostat_start())
            }
            Fault::SampledInLogitsOrder => rows.sort_by_key(|row| row.wanted),
            _ => {}
        }
        self.inner.sample(&mut step.inner, logits, &rows)
    }
}
