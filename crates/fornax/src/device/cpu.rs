//! The processor.

use std::path::PathBuf;
use std::sync::Arc;

use fornax_compute::KvDType;
use fornax_compute::conformance::{self, Op, Reference, Subject};
use fornax_compute::cpu::{Activations, Cpu, CpuOptions, CpuRing, CpuRingOptions, CpuSizes, Simd, Watch};
use fornax_engine::{Plan, StepLimits};
use fornax_private::Server;

use super::place::{Arm, Place};
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
    watch: Option<Arc<Watch>>,
}

impl CpuArm {
    pub(crate) fn new(setup: &Setup) -> CpuArm {
        let threads = setup.threads.unwrap_or_else(|| CpuOptions::default().threads);
        CpuArm { activations: setup.activations, threads, watch: setup.watch.clone() }
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
}
