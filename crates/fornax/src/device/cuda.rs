//! NVIDIA GPUs.

use std::path::PathBuf;

use fornax_compute::conformance::{self, Op, Reference, Subject};
use fornax_compute::cpu::Activations;
use fornax_compute::{PAGE_TOKENS, Purpose};
use fornax_engine::{Plan, StepLimits};
use fornax_gpu::{Cuda, CudaOptions, CudaRing, CudaRingOptions, CudaSizes, Opening};
use fornax_private::Server;

use super::place::{Arm, Held, Place};
use super::{Device, DeviceRates, Kind, Setup, Share, Suite};
use crate::Error;
use crate::private::loaded;

/// A GPU's tensor cores are busy from a thousand tokens on, and activations are little beside its memory. Where streams
/// wait for a step, the engine makes it shorter.
const STEP_TOKENS: usize = 2048;

/// The longest context that page tables have room for where none is asked for.
const CONTEXT_MAX: usize = 1 << 18;

/// Words that a sequence has for its states and their checkpoints: of three groups with a few checkpoints each.
const STATE_WORDS: usize = 64;

pub(super) struct Nvidia;

impl Kind for Nvidia {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn is_numbered(&self) -> bool {
        true
    }

    fn describe(&self, ordinal: usize) -> Result<String, Error> {
        let found = fornax_gpu::probe(ordinal)?;
        let unavailable =
            |reason| fornax_compute::Error::DeviceUnavailable { device: format!("cuda:{ordinal}"), reason };
        let compiler = fornax_gpu::compiler().map_err(unavailable)?;
        Ok(format!("{}; NVRTC {compiler}", found.words()))
    }

    fn place(&self, ordinal: usize, setup: &Setup) -> Box<dyn Place> {
        Box::new(CudaArm::new(ordinal, setup))
    }

    fn serve_ring(&self, device: usize, share: Share) -> Result<Server, Error> {
        let Share { model, ring, listener, options } = share;
        Server::start(listener, options, move || {
            let kernel_folder = ring.kernel_folder;
            let options = CudaRingOptions { device, kernel_folder, ..CudaRingOptions::default() };
            loaded(&model, CudaRing::new(&options)?)
        })
    }

    fn conformance(
        &self,
        device: usize,
        kernel_folder: Option<PathBuf>,
        only: &str,
        suite: &mut Suite<'_>,
    ) -> Result<(), Error> {
        let chosen = |op: Op, case: &str| conformance::named(only, op, case);
        let folder = kernel_folder.clone();
        let cuda = Cuda::new(CudaOptions { device, kernel_folder, ..CudaOptions::default() })?;
        let reference = &Reference::new(Activations::Half)?;
        let subject = Subject { backend: &cuda, sizes: cuda.sizes(), reference, invariant: true };
        let title = format!("conformance of cuda:{device} (half activations)");
        suite(&title, &mut |on_case| drop(conformance::run_where(&chosen, &subject, on_case)));
        if chosen(Op::Ring, "") {
            let options = CudaRingOptions { device, memory_limit: None, kernel_folder: folder };
            let ring = CudaRing::new(&options)?;
            let title = format!("exact products mod 2^32 of cuda:{device}");
            suite(&title, &mut |on_case| drop(conformance::run_ring(&ring, on_case)));
        }
        Ok(())
    }

    fn free_bytes(&self, ordinal: usize) -> Result<Option<u64>, Error> {
        Ok(Some(fornax_gpu::probe(ordinal)?.memory_free))
    }

    fn rates(&self, ordinal: usize, kernel_folder: Option<PathBuf>) -> Result<Option<DeviceRates>, Error> {
        let fornax_gpu::Rates { copy, host_to_device, matrix } = fornax_gpu::rates(ordinal, kernel_folder)?;
        Ok(Some(DeviceRates { copy, host_to_device, matrix }))
    }
}

/// A GPU with the options that its backend is made with.
#[derive(Clone, Debug)]
pub(crate) struct CudaArm {
    ordinal: usize,
    context: Option<usize>,
    assumed_bytes: Option<u64>,
    kernel_folder: Option<PathBuf>,
}

impl CudaArm {
    pub(crate) fn new(ordinal: usize, setup: &Setup) -> CudaArm {
        let Setup { context, assumed_bytes, .. } = *setup;
        CudaArm { ordinal, context, assumed_bytes, kernel_folder: setup.kernel_folder.clone() }
    }

    /// Page tables have room for every page of the context of each request, in two groups; and what sequences do with
    /// their states, for a few groups of them.
    fn options(&self, step: StepLimits) -> CudaOptions {
        let pages = self.context.unwrap_or(CONTEXT_MAX).div_ceil(PAGE_TOKENS).saturating_mul(step.slots);
        CudaOptions {
            device: self.ordinal,
            tokens_max: step.tokens_max,
            wanted_max: step.wanted_max,
            slots: step.slots,
            pages_max: pages
                .saturating_add(step.tokens_max)
                .saturating_mul(2)
                .saturating_add(step.slots.saturating_mul(STATE_WORDS)),
            kernel_folder: self.kernel_folder.clone(),
            ..CudaOptions::default()
        }
    }
}

impl Arm for CudaArm {
    type Backend = Cuda;
    type Sizes = CudaSizes;

    fn device(&self) -> Device {
        Device::Cuda(self.ordinal)
    }

    fn step_tokens(&self) -> usize {
        STEP_TOKENS
    }

    /// The process lies in the machine's memory, not in the card's.
    fn runtime_bytes(&self, _: u64) -> u64 {
        0
    }

    fn free_bytes(&self) -> Result<Option<u64>, Error> {
        match self.assumed_bytes {
            Some(bytes) => Ok(Some(bytes)),
            None => Ok(Some(fornax_gpu::probe(self.ordinal)?.memory_free)),
        }
    }

    fn sizes(&self, step: StepLimits) -> CudaSizes {
        CudaSizes::new(&self.options(step))
    }

    fn hold(&self) -> Option<Held> {
        Some(Box::new(Opening::begin(self.ordinal)))
    }

    fn depth(&self) -> usize {
        CudaOptions::default().depth
    }

    /// With memory for all of the plan's weights.
    fn open(&self, plan: &Plan) -> Result<Cuda, Error> {
        let memory_limit = Some(plan.usage().total());
        let cuda = Cuda::new(CudaOptions { memory_limit, ..self.options(plan.step) })?;
        cuda.reserve(Purpose::Weights, plan.usage().bytes(Purpose::Weights))?;
        Ok(cuda)
    }
}
