//! The suite that every backend passes: operation by operation, type by type and shape by shape against the scalar
//! CPU reference, through the public traits alone, so that a new backend runs it unchanged.
//!
//! What a backend says it does not have ([`Need`]) is not asked of it: models that need it are refused there.
//!
//! Three kinds of case. *Compared*: the subject and the reference compute the same thing from the same seed, and each
//! output row must lie within the operation's bound. *Invariant*: the subject is compared with itself, bit for bit,
//! under another batching of the same work. *Checked*: a promise about refusals, steps or accounting.
//!
//! Every output is NaN before its operation, every buffer has rows beyond the step's that must come back untouched,
//! and every page of a KV cache holds NaN until its sequence writes it: what is not written, written too far, or read
//! too far is seen. That the suite can fail is itself tested, with backends that are wrong on purpose.

mod attention;
mod bench;
mod experts;
mod faults;
mod latent;
mod layer;
mod linear;
mod low_rank;
mod random;
mod recurrence;
mod ring;
mod rows;
mod sampling;
mod steps;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;

use fornax_format::DType;

use crate::cpu::{Activations, Cpu};
use crate::{Backend, Error, Need, Sizes};

use bench::Table;
pub use random::WEIGHT_TYPES;
pub use ring::run_ring;

/// Tokens that the subject must take in one step.
pub const TOKENS_MAX: usize = 288;
/// Sequence slots that the subject must have.
pub const SLOTS: usize = 8;

/// Largest error of each operation's output: the mean squared difference of a row over its mean square. 0 asks for
/// equal bits: the operation only copies, or rounds once.
const BOUNDS: &[(Op, f64)] = &[
    (Op::Embed, 1e-7),
    (Op::Matmul, 1e-7),
    (Op::Linear, 1e-7),
    (Op::Vector, 0.0),
    (Op::Copy, 0.0),
    (Op::Add, 0.0),
    (Op::Norm, 1e-7),
    (Op::Rope, 1e-7),
    (Op::Kv, 0.0),
    (Op::Attention, 1e-7),
    (Op::Glu, 1e-7),
    (Op::Route, 1e-7),
    (Op::Experts, 1e-7),
    (Op::LowRank, 1e-7),
    (Op::Pointwise, 1e-7),
    (Op::Gather, 0.0),
    (Op::Pool, 1e-7),
    (Op::Sample, 1e-7),
    (Op::Fault, 0.0),
    (Op::Record, 1e-7),
    // Two layers one behind the other, whose softmax and norms make of a small difference a larger one.
    (Op::Layer, 1e-5),
    (Op::ShortConv, 1e-7),
    (Op::DeltaRule, 1e-7),
    (Op::SelectiveScan, 1e-7),
    (Op::ChannelScan, 1e-7),
    (Op::GatedNorm, 1e-7),
    (Op::SigmoidGate, 1e-7),
    (Op::HeadProducts, 1e-7),
    (Op::LatentAttention, 1e-7),
    (Op::Invariance, 0.0),
    (Op::Limits, 0.0),
    (Op::Memory, 0.0),
    (Op::Ring, 0.0),
];

/// What a case is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names of the operations and promises")]
pub enum Op {
    Embed,
    Matmul,
    Linear,
    Vector,
    Copy,
    Add,
    Norm,
    Rope,
    Kv,
    Attention,
    Glu,
    Route,
    Experts,
    LowRank,
    Pointwise,
    Gather,
    Pool,
    Sample,
    Fault,
    Record,
    Layer,
    ShortConv,
    DeltaRule,
    SelectiveScan,
    ChannelScan,
    GatedNorm,
    SigmoidGate,
    HeadProducts,
    LatentAttention,
    Invariance,
    Limits,
    Memory,
    Ring,
}

/// The same where roundings to f16 of two computations fall to different sides, and softmax and norms enlarge it.
const LAYER_BOUND_HALF: f64 = 3e-4;
/// Of experts against a formula that rounds nothing: two products one behind the other, of weights and activations in
/// f16.
const EXPERTS_BOUND_HALF: f64 = 1e-5;

/// Of products of 8-bit floats: tensor cores keep about 14 bits of the sums of 128 columns.
const FLOATS8_BOUND_HALF: f64 = 3e-7;

impl Op {
    fn bound(self, activations: Activations) -> f64 {
        if self == Op::Layer && activations == Activations::Half {
            return LAYER_BOUND_HALF;
        }
        if self == Op::Experts && activations == Activations::Half {
            return EXPERTS_BOUND_HALF;
        }
        let row = BOUNDS.iter().find(|(op, _)| *op == self);
        row.expect("every operation has its bound").1
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Op::Embed => "embed",
            Op::Matmul => "matmul",
            Op::Linear => "linear",
            Op::Vector => "vector",
            Op::Copy => "copy",
            Op::Add => "add",
            Op::Norm => "norm",
            Op::Rope => "rope",
            Op::Kv => "kv",
            Op::Attention => "attention",
            Op::Glu => "glu",
            Op::Route => "route",
            Op::Experts => "experts",
            Op::LowRank => "low_rank",
            Op::Pointwise => "pointwise",
            Op::Gather => "gather",
            Op::Pool => "pool",
            Op::Sample => "sample",
            Op::Fault => "fault",
            Op::Record => "record",
            Op::Layer => "layer",
            Op::ShortConv => "short_conv",
            Op::DeltaRule => "delta_rule",
            Op::SelectiveScan => "selective_scan",
            Op::ChannelScan => "channel_scan",
            Op::GatedNorm => "gated_norm",
            Op::SigmoidGate => "sigmoid_gate",
            Op::HeadProducts => "head_products",
            Op::LatentAttention => "latent_attention",
            Op::Invariance => "invariance",
            Op::Limits => "limits",
            Op::Memory => "memory",
            Op::Ring => "ring",
        })
    }
}

/// What a backend is held against: the scalar specification of its kind of activations, and what it has computed so
/// far. Who judges several backends by it pays for that once.
pub struct Reference {
    cpu: Cpu,
    computed: RefCell<HashMap<(Op, String), Rc<Table>>>,
}

impl Reference {
    /// Fails only if the scalar CPU cannot be made.
    pub fn new(activations: Activations) -> Result<Reference, Error> {
        Ok(Reference { cpu: Cpu::reference(activations)?, computed: RefCell::default() })
    }

    fn activations(&self) -> Activations {
        self.cpu.options().activations
    }

    /// What a case's output has to be. Its words say everything about it: they are its seed.
    fn wanted(
        &self,
        op: Op,
        words: &str,
        compute: impl FnOnce(&Cpu) -> Result<Table, Failure>,
    ) -> Result<Rc<Table>, Failure> {
        let key = (op, words.to_owned());
        if let Some(known) = self.computed.borrow().get(&key) {
            return Ok(Rc::clone(known));
        }
        let table = Rc::new(compute(&self.cpu)?);
        self.computed.borrow_mut().insert(key, Rc::clone(&table));
        Ok(table)
    }
}

/// A backend to be judged, and what it promises. It takes at least [`TOKENS_MAX`] tokens a step and has [`SLOTS`]
/// sequence slots.
#[derive(Clone, Copy)]
pub struct Subject<'a, B, S> {
    /// The backend. No step may be in flight.
    pub backend: &'a B,
    /// Its size functions.
    pub sizes: &'a S,
    /// What it is held against, which is made for how it multiplies.
    pub reference: &'a Reference,
    /// Whether it promises equal bits however work is batched.
    pub invariant: bool,
}

/// One case and how it went.
#[derive(Clone, Debug)]
pub struct CaseResult {
    /// What it is about.
    pub op: Op,
    /// Types, shapes and circumstances.
    pub case: String,
    /// The worst row's error, or why the case failed.
    pub outcome: Result<f64, String>,
}

impl fmt::Display for CaseResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CaseResult { op, case, outcome } = self;
        match outcome {
            Ok(error) => write!(f, "ok    {op:<10} {case}  error {error:.1e}"),
            Err(why) => write!(f, "FAIL  {op:<10} {case}: {why}"),
        }
    }
}

/// What a whole run found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Cases that held.
    pub passed: usize,
    /// Cases that did not.
    pub failed: Vec<CaseResult>,
    /// The largest error of each operation among its passed cases.
    pub worst: Vec<(Op, f64)>,
}

impl Report {
    /// Whether the backend may be used.
    pub fn conforms(&self) -> bool {
        self.failed.is_empty() && self.passed > 0
    }

    fn add(&mut self, result: CaseResult) {
        let Ok(error) = result.outcome else {
            self.failed.push(result);
            return;
        };
        self.passed += 1;
        match self.worst.iter_mut().find(|(op, _)| *op == result.op) {
            Some((_, worst)) => *worst = worst.max(error),
            None => self.worst.push((result.op, error)),
        }
    }
}

/// Runs the cases that `chosen` says yes to, by their operation and their words; `on_case` hears each result as it
/// comes.
pub fn run_where<B: Backend, S: Sizes + Clone>(
    chosen: &dyn Fn(Op, &str) -> bool,
    subject: &Subject<'_, B, S>,
    on_case: &mut dyn FnMut(&CaseResult),
) -> Report {
    let mut suite = Suite {
        backend: subject.backend,
        invariant: subject.invariant,
        chosen,
        reference: subject.reference,
        on_case,
        report: Report::default(),
    };
    linear::cases(&mut suite);
    rows::cases(&mut suite);
    experts::cases(&mut suite);
    low_rank::cases(&mut suite);
    recurrence::cases(&mut suite);
    attention::cases(&mut suite);
    latent::cases(&mut suite);
    sampling::cases(&mut suite);
    faults::cases(&mut suite);
    layer::cases(&mut suite);
    steps::cases(&mut suite, subject.sizes);
    suite.report
}

/// Whether a case is among those that `words` name, alternatives with commas between: each is part of its operation and
/// its words ("matmul Q4_K"), and with `!` in front leaves such cases out ("sample,!many tokens"). Nothing names all.
pub fn named(words: &str, op: Op, case: &str) -> bool {
    let line = format!("{op} {case}");
    let wanted = words.split(',').map(str::trim).filter(|word| !word.is_empty());
    let (mut any, mut asked) = (false, false);
    for word in wanted {
        match word.strip_prefix('!') {
            Some(word) if line.contains(word) => return false,
            Some(_) => {}
            None => (asked, any) = (true, any || line.contains(word)),
        }
    }
    any || !asked
}

/// Why a case failed, in words.
#[derive(Debug)]
struct Failure(String);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure(format!("refused: {error}"))
    }
}

/// Something that any backend can compute from a seed.
trait Case: fmt::Display {
    /// Which bound applies.
    fn op(&self) -> Op;
    /// How far off a row may be.
    fn bound(&self, activations: Activations) -> f64 {
        self.op().bound(activations)
    }
    /// What a backend may say that it does not have.
    fn needs(&self) -> Vec<Need> {
        Vec::new()
    }
    /// The outputs, each read from a buffer that was NaN before.
    fn compute<B: Backend>(&self, backend: &B) -> Result<Table, Failure>;
}

struct Suite<'a, B> {
    backend: &'a B,
    invariant: bool,
    chosen: &'a dyn Fn(Op, &str) -> bool,
    reference: &'a Reference,
    on_case: &'a mut dyn FnMut(&CaseResult),
    report: Report,
}

impl<B: Backend> Suite<'_, B> {
    /// The types of weights that the subject multiplies by.
    fn weight_types(&self) -> Vec<DType> {
        let takes = |dtype: &DType| *dtype != DType::FP8_A8 || self.backend.supports(Need::Floats8).is_ok();
        WEIGHT_TYPES.into_iter().filter(takes).collect()
    }

    /// The subject's outputs against the reference's, unless the subject says that it does not have the operation.
    fn compare(&mut self, case: impl Case) {
        let lacks = |need: &Need| self.backend.supports(*need).is_err();
        let words = case.to_string();
        if !(self.chosen)(case.op(), &words) || case.needs().iter().any(lacks) {
            return;
        }
        let wanted = self.reference.wanted(case.op(), &words, |cpu| case.compute(cpu));
        let outcome = wanted.and_then(|wanted| {
            let got = case.compute(self.backend)?;
            within(case.bound(self.reference.activations()), &got, &wanted)
        });
        self.conclude(case.op(), words, outcome);
    }

    /// The subject's outputs against a formula's.
    fn against(
        &mut self,
        op: Op,
        case: impl fmt::Display,
        wanted: &Table,
        compute: impl FnOnce(&B) -> Result<Table, Failure>,
    ) {
        let words = case.to_string();
        if (self.chosen)(op, &words) {
            let bound = op.bound(self.reference.activations());
            let outcome = compute(self.backend).and_then(|got| within(bound, &got, wanted));
            self.conclude(op, words, outcome);
        }
    }

    /// Two ways for the subject to compute the same thing, equal in every bit. Not asked of a backend that promises
    /// nothing of the kind.
    fn same_bits(
        &mut self,
        case: impl fmt::Display,
        compute: impl FnOnce(&B) -> Result<(Table, Table), Failure>,
    ) {
        let words = case.to_string();
        if self.invariant && (self.chosen)(Op::Invariance, &words) {
            let outcome = compute(self.backend).and_then(|(one, other)| within(0.0, &one, &other));
            self.conclude(Op::Invariance, words, outcome);
        }
    }

    /// A promise that holds or not.
    fn check(&mut self, op: Op, case: impl fmt::Display, holds: impl FnOnce(&B) -> Result<(), Failure>) {
        let words = case.to_string();
        if (self.chosen)(op, &words) {
            let outcome = holds(self.backend).map(|()| 0.0);
            self.conclude(op, words, outcome);
        }
    }

    fn conclude(&mut self, op: Op, case: String, outcome: Result<f64, Failure>) {
        let result = CaseResult { op, case, outcome: outcome.map_err(|failure| failure.0) };
        (self.on_case)(&result);
        self.report.add(result);
    }
}

/// The worst row's error, if no row is beyond the bound. Row by row: a wrong row must not drown among right ones.
fn within(bound: f64, got: &Table, wanted: &Table) -> Result<f64, Failure> {
    if (got.columns, got.values.len()) != (wanted.columns, wanted.values.len()) {
        return Err(Failure(format!("{} values, wanted {}", got.values.len(), wanted.values.len())));
    }
    let mut worst = 0.0f64;
    for (row, (got, wanted)) in got.rows().zip(wanted.rows()).enumerate() {
        if let Some(column) = wanted.iter().position(|value| !value.is_finite()) {
            return Err(Failure(format!(
                "the reference itself holds {} at row {row} column {column}",
                wanted[column]
            )));
        }
        if let Some(column) = got.iter().position(|value| !value.is_finite()) {
            return Err(Failure(format!(
                "row {row} column {column} is {}: not written, or garbage was read",
                got[column]
            )));
        }
        let different = got.iter().zip(wanted).position(|(got, wanted)| got.to_bits() != wanted.to_bits());
        let Some(column) = different else { continue };
        let error = normalized_error(got, wanted);
        worst = worst.max(error);
        if bound == 0.0 || error > bound {
            return Err(Failure(format!(
                "row {row} has error {error:.1e}, at most {bound:.0e}; first differs at column {column}: {:e}, wanted {:e}",
                got[column], wanted[column]
            )));
        }
    }
    Ok(worst)
}

/// Squared difference over squared size. A row of zeros, or of what rounding leaves where everything cancels, is
/// measured against one.
fn normalized_error(got: &[f32], wanted: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let difference = squares(&mut got.iter().zip(wanted).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    let size = squares(&mut wanted.iter().map(|value| f64::from(*value)));
    difference / if size < 1e-9 { 1.0 } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_named_by_parts_of_their_words_and_left_out_by_others() {
        let check = |words: &str, wanted: [bool; 3]| {
            let cases = [(Op::Matmul, "Q4_K 8x256"), (Op::Sample, "greedy"), (Op::Sample, "greedy of many")];
            assert_eq!(cases.map(|(op, case)| named(words, op, case)), wanted, "{words:?}");
        };
        check("", [true; 3]);
        check("sample", [false, true, true]);
        check("matmul Q4_K, sample greedy", [true; 3]);
        check("matmul Q8_0", [false; 3]);
        check("!of many", [true, true, false]);
        check("sample,!of many", [false, true, false]);
    }
}
