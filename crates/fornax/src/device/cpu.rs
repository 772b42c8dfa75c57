//! The processor.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fornax_compute::conformance::{self, Op, Reference, Subject};
use fornax_compute::cpu::{Activations, Cpu, CpuOptions, CpuRing, CpuRingOptions, CpuSizes, Simd, Watch};
use fornax_compute::{Batch, KvDType, PageId, Row, RowState, Token};
use fornax_engine::{Plan, StepLimits};
use fornax_private::Server;

use super::place::{Arm, Loaded, Place};
use super::{Device, DeviceRates, Kind, Setup, Share, Suite};
use crate::Error;
use crate::private::loaded;

/// Tokens of one step: long enough that each weight is read once for many tokens, short enough that activations stay
/// small beside the weights of a small model.
const STEP_TOKENS: usize = 256;

/// What the process takes beside the model: code, stacks, page tables, buffers of the command line. Measured as the
/// peak less what the allocator counted: 21 MiB with a vocabulary of 49,152 tokens, 41 MiB with 151,936.
const RUNTIME_BYTES: u64 = 16 << 20;
/// And for each token of the vocabulary: 200 bytes in the tokenizer, 300 more once a form is asked for.
const RUNTIME_BYTES_PER_TOKEN: u64 = 600;

/// From this many threads on it is measured how many of them compute a token fastest.
const TRIED_FROM: usize = 3;
/// For how long each number of them computes tokens, and how many: a few where each takes long.
const TRIAL: Duration = Duration::from_millis(30);
const STEPS_LEAST: usize = 3;
const STEPS_MOST: usize = 30;
/// Fewer threads have to be this much faster.
const CLEARLY: f64 = 0.97;
/// Where fewer are this much slower, still fewer are not tried.
const FAR: f64 = 1.3;

pub(super) struct Processor;

impl Kind for Processor {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn is_numbered(&self) -> bool {
        false
    }

    fn describe(&self, _: usize) -> Result<String, Error> {
        Ok("the processor".to_owned())
    }

    fn place(&self, _: usize, setup: &Setup) -> Box<dyn Place> {
        let cpu = CpuArm::new(setup);
        match &setup.private {
            None => Box::new(cpu),
            Some(private) => super::private::place(cpu, private, &setup.model),
        }
    }

    fn serve_ring(&self, _: usize, share: Share) -> Result<Server, Error> {
        let Share { model, ring, listener, options } = share;
        // A processor is lent to whoever receives a product while nothing waits.
        Server::start_lending(listener, options, move || {
            let defaults = CpuRingOptions::default();
            let threads = ring.threads.unwrap_or(defaults.threads);
            loaded(&model, CpuRing::new(&CpuRingOptions { threads, ..defaults })?)
        })
    }

    fn conformance(
        &self,
        _: usize,
        _: Option<PathBuf>,
        only: &str,
        suite: &mut Suite<'_>,
    ) -> Result<(), Error> {
        let chosen = |op: Op, case: &str| conformance::named(only, op, case);
        for (name, activations) in [("float", Activations::Float), ("int8", Activations::Integer)] {
            let options = CpuOptions { activations, ..CpuOptions::default() };
            let title = format!("conformance of cpu ({}, {name} activations)", options.simd.name());
            let cpu = Cpu::new(options)?;
            let reference = &Reference::new(activations)?;
            let subject = Subject { backend: &cpu, sizes: cpu.sizes(), reference, invariant: true };
            suite(&title, &mut |on_case| drop(conformance::run_where(&chosen, &subject, on_case)));
        }
        if chosen(Op::Ring, "") {
            let ring = CpuRing::new(&CpuRingOptions::default())?;
            let cases = &mut |on_case: &mut dyn FnMut(&_)| drop(conformance::run_ring(&ring, on_case));
            suite("exact products mod 2^32 of cpu", cases);
        }
        Ok(())
    }

    fn free_bytes(&self, _: usize) -> Result<Option<u64>, Error> {
        Ok(None)
    }

    fn rates(&self, _: usize, _: Option<PathBuf>) -> Result<Option<DeviceRates>, Error> {
        Ok(None)
    }
}

/// The processor with the options that its backend is made with.
#[derive(Clone, Debug)]
pub(crate) struct CpuArm {
    activations: Activations,
    threads: usize,
    /// Whether somebody said how many.
    told: bool,
    watch: Option<Arc<Watch>>,
}

impl CpuArm {
    pub(crate) fn new(setup: &Setup) -> CpuArm {
        let threads = setup.threads.unwrap_or_else(|| CpuOptions::default().threads);
        let (told, watch) = (setup.threads.is_some(), setup.watch.clone());
        CpuArm { activations: setup.activations, threads, told, watch }
    }

    fn options(&self, step: StepLimits) -> CpuOptions {
        CpuOptions {
            activations: self.activations,
            simd: if self.activations == Activations::Half { Simd::Scalar } else { Simd::detect() },
            tokens_max: step.tokens_max,
            slots: step.slots,
            depth: self.depth(),
            threads: self.threads,
            watch: self.watch.clone(),
            ..CpuOptions::default()
        }
    }
}

impl Arm for CpuArm {
    type Backend = Cpu;
    type Sizes = CpuSizes;

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn words(&self) -> String {
        format!("cpu, {} threads", self.threads)
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn step_tokens(&self) -> usize {
        STEP_TOKENS
    }

    fn kv_dtype(&self) -> KvDType {
        if self.activations == Activations::Float { KvDType::F32 } else { KvDType::F16 }
    }

    fn runtime_bytes(&self, vocabulary: u64) -> u64 {
        RUNTIME_BYTES + RUNTIME_BYTES_PER_TOKEN * vocabulary
    }

    /// The caller says how much of the machine's memory may be used.
    fn free_bytes(&self) -> Result<Option<u64>, Error> {
        Ok(None)
    }

    fn sizes(&self, step: StepLimits) -> CpuSizes {
        CpuSizes::new(&self.options(step))
    }

    fn depth(&self) -> usize {
        0
    }

    fn open(&self, plan: &Plan) -> Result<Cpu, Error> {
        let memory_limit = Some(plan.usage().total());
        Ok(Cpu::new(CpuOptions { memory_limit, ..self.options(plan.step) })?)
    }

    fn loaded(&self, loaded: &mut Loaded<Cpu>, plan: &Plan) -> Result<(), Error> {
        // What is watched must see nothing but what is asked.
        if self.told || self.watch.is_some() || self.threads < TRIED_FROM {
            return Ok(());
        }
        let batch = first_token(plan);
        let fastest = fastest(self.threads, |threads| {
            loaded.backend.use_threads_for_few(threads);
            let began = Instant::now();
            loaded.compute(&batch)?;
            Ok(began.elapsed())
        });
        // A step that fails says nothing of threads; the first request will tell why.
        loaded.backend.use_threads_for_few(fastest.unwrap_or(self.threads));
        Ok(())
    }

    fn threads_for_few(&self, backend: &Cpu) -> usize {
        backend.threads_for_few()
    }
}

/// A step of one token, whose keys and values the first request that gets this page writes over.
fn first_token(plan: &Plan) -> Batch {
    let (states, paged): (Vec<_>, Vec<_>) = plan.kv.groups.iter().partition(|group| group.kind.is_state());
    let mut batch = Batch::default();
    let pages = vec![vec![PageId(1)]; paged.len()];
    batch.push(Row { slot: 0, start: 0, len: 1, pages, wanted: 1 }, [Token::Known(0)]);
    if !states.is_empty() {
        let state = RowState { from: None, to: PageId(1), saves: Vec::new() };
        batch.states.push(vec![state; states.len()]);
    }
    batch
}

/// How many of these threads are fastest: all, unless fewer are clearly faster.
fn fastest(all: usize, mut time: impl FnMut(usize) -> Result<Duration, Error>) -> Result<usize, Error> {
    let (mut best, mut least) = (all, Duration::MAX);
    for quarters in (1..=4).rev() {
        let threads = (all * quarters).div_ceil(4);
        // The first one wakes threads that sleep, and reads what is in no cache yet.
        time(threads)?;
        let (mut spent, mut own) = (Duration::ZERO, Duration::MAX);
        for step in 0..STEPS_MOST {
            let step_time = time(threads)?;
            (spent, own) = (spent + step_time, own.min(step_time));
            if step + 1 >= STEPS_LEAST && spent >= TRIAL {
                break;
            }
        }
        if least == Duration::MAX || own < least.mul_f64(CLEARLY) {
            (best, least) = (threads, own);
        } else if own > least.mul_f64(FAR) {
            break;
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use super::*;
    use crate::OpenOptions;
    use crate::device::Place;
    use crate::random_model::{SHAPES, Types, write_repeating};

    #[test]
    fn a_loaded_model_has_computed_a_token_on_several_numbers_of_threads() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["tiny", "tiny-hybrid-moe"] {
            let shape = SHAPES.iter().find(|shape| shape.name == name).unwrap();
            let path = folder.path().join(format!("{name}.gguf"));
            write_repeating(&path, shape, Types::Q4_K_M, &mut |_, _| ControlFlow::Continue(())).unwrap();
            let options = OpenOptions::new(&path).device(Device::Cpu).threads(4).context(64);
            let blueprint = options.blueprint().unwrap();
            let arm = |told| CpuArm { activations: Activations::Integer, threads: 4, told, watch: None };
            let mut loaded = Loaded::new(&arm(true), &blueprint, &mut |_| ()).unwrap();
            loaded.compute(&first_token(&blueprint.plan)).unwrap();
            assert_eq!(loaded.backend.threads_for_few(), 4, "{name}: as somebody said");
            let few = |told| {
                let opened = Place::runner(&arm(told), &blueprint, 1024, &mut |_| ()).unwrap();
                opened.counted.threads_for_few
            };
            assert_eq!(few(true), 4, "{name}");
            assert!((1..=4).contains(&few(false)), "{name}");
        }
    }

    #[test]
    fn as_many_threads_compute_a_token_as_are_fastest() {
        let check = |all: usize, micros: fn(usize) -> u64, wanted: usize| {
            let found = fastest(all, |threads| Ok(Duration::from_micros(micros(threads)))).unwrap();
            assert_eq!(found, wanted, "of {all}");
        };
        check(16, |threads| 16_000 / threads as u64, 16);
        // Beyond eight each costs something.
        check(16, |threads| 8000 / threads.min(8) as u64 + 100 * threads as u64, 8);
        // A little faster is not worth it: what is measured varies.
        check(16, |threads| 1000 + threads as u64, 16);
        check(16, |threads| threads as u64 * 10, 4);
        check(3, |threads| if threads == 3 { 900 } else { 500 }, 2);
        check(1, |_| 5, 1);
    }

    #[test]
    fn a_trial_takes_few_steps_where_steps_are_long_and_many_where_they_are_short() {
        let steps = |micros: u64| {
            let mut steps = 0;
            fastest(16, |_| {
                steps += 1;
                Ok(Duration::from_micros(micros))
            })
            .unwrap();
            steps
        };
        assert_eq!(steps(1_000_000), 4 * (1 + STEPS_LEAST));
        assert_eq!(steps(1), 4 * (1 + STEPS_MOST));
        assert_eq!(steps(3000), 4 * (1 + 10));
    }

    #[test]
    fn a_number_of_threads_that_fails_is_an_error() {
        let failed =
            fastest(
                8,
                |threads| {
                    if threads == 6 { Err(Error::Cancelled) } else { Ok(Duration::from_micros(9)) }
                },
            );
        assert!(matches!(failed, Err(Error::Cancelled)));
    }
}
