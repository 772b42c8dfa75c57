//! Where a model is computed. With the binary's conformance run, the only place that names a backend.

use std::path::{Path, PathBuf};

use fornax_compute::cpu::{Cpu, CpuOptions};
use fornax_compute::{Backend, Batch, Purpose, Usage};
use fornax_engine::{Local, LocalParts, Runner};
use fornax_gpu::{Cuda, CudaOptions};
use fornax_model::Model;
use fornax_private::{Client, ClientOptions, Integer, Parties, Reference};

use crate::Error;
use crate::open::Blueprint;
use crate::private::Private;

/// A device, by the name that the user has for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU, as the driver counts them.
    Cuda(usize),
}

impl Device {
    /// The first GPU that can be used, else the CPU; and why.
    pub fn auto() -> (Device, String) {
        match Device::Cuda(0).describe() {
            Ok(words) => (Device::Cuda(0), words),
            Err(error) => (Device::Cpu, error.to_string()),
        }
    }

    /// What it is, in words, or what is missing to use it.
    pub fn describe(self) -> Result<String, Error> {
        let Device::Cuda(ordinal) = self else { return Ok("the processor".to_owned()) };
        let found = fornax_gpu::probe(ordinal)?;
        let unavailable =
            |reason| fornax_compute::Error::DeviceUnavailable { device: format!("cuda:{ordinal}"), reason };
        let compiler = fornax_gpu::compiler().map_err(unavailable)?;
        Ok(format!("{}; NVRTC {compiler}", found.words()))
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// A device with everything that a backend on it is made with.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Cpu(CpuOptions),
    Cuda(CudaOptions),
    /// The CPU, with products of integers elsewhere or here.
    Private {
        cpu: CpuOptions,
        private: Private,
        model: PathBuf,
    },
}

impl Place {
    /// Its name with what matters about it, for messages.
    pub(crate) fn words(&self) -> String {
        match self {
            Place::Cpu(options) => format!("cpu, {} threads", options.threads),
            Place::Cuda(options) => format!("cuda:{}", options.device),
            Place::Private { cpu, private, .. } => format!("cpu, {} threads, {private}", cpu.threads),
        }
    }

    pub(crate) fn device(&self) -> Device {
        match self {
            Place::Cpu(_) | Place::Private { .. } => Device::Cpu,
            Place::Cuda(options) => Device::Cuda(options.device),
        }
    }

    /// CPU threads that compute.
    pub(crate) fn threads(&self) -> usize {
        match self {
            Place::Cpu(options) | Place::Private { cpu: options, .. } => options.threads,
            Place::Cuda(_) => 0,
        }
    }
}

/// Loads the model and its cache on the thread that will compute.
pub(crate) fn runner(
    blueprint: &Blueprint,
    vocab: usize,
    progress: &mut dyn FnMut(Loading),
) -> Result<(Box<dyn Runner>, Usage), Error> {
    Ok(match &blueprint.place {
        Place::Cpu(options) => {
            let loaded = Loaded::new(Cpu::new(options.clone())?, blueprint, progress)?;
            local(loaded, options.depth, blueprint, vocab)
        }
        Place::Cuda(options) => {
            let loaded = Loaded::new(cuda(options, blueprint)?, blueprint, progress)?;
            local(loaded, options.depth, blueprint, vocab)
        }
        Place::Private { cpu, private: Private::Parties(parties), model } => {
            let loaded = Loaded::private(cpu, parties, model, blueprint, progress)?;
            local(loaded, cpu.depth, blueprint, vocab)
        }
        Place::Private { cpu, private: Private::Reference, .. } => {
            local(Loaded::reference(cpu, blueprint, progress)?, cpu.depth, blueprint, vocab)
        }
    })
}

/// The device, with memory for all of the plan's weights.
fn cuda(options: &CudaOptions, blueprint: &Blueprint) -> Result<Cuda, Error> {
    let cuda = Cuda::new(options.clone())?;
    cuda.reserve(Purpose::Weights, blueprint.plan.usage().bytes(Purpose::Weights))?;
    Ok(cuda)
}

fn local<B: Backend + 'static>(
    loaded: Loaded<B>,
    depth: usize,
    blueprint: &Blueprint,
    vocab: usize,
) -> (Box<dyn Runner>, Usage) {
    let plan = &blueprint.plan;
    let Loaded { backend, model, kv: cache } = loaded;
    let usage = backend.usage();
    let local = Local::new(LocalParts {
        backend,
        model,
        kv: cache,
        groups: plan.kv.groups.clone(),
        limits: plan.step,
        depth,
        vocab: u32::try_from(vocab).expect("the configuration bounds the vocabulary"),
    });
    (Box::new(local), usage)
}

/// A model on a device, one step at a time on the caller's thread.
pub(crate) trait Forward {
    /// Computes a batch and returns the first `rows` rows of logits.
    fn forward(&mut self, batch: &Batch, rows: usize) -> Result<Vec<f32>, Error>;
}

/// How far a model is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loading {
    /// Weights are on their way to the device.
    Weights {
        /// Bytes of them that have been sent.
        bytes: u64,
        /// Bytes that there are.
        total: u64,
    },
    /// They are there, and the programs of a GPU are being compiled.
    Kernels {
        /// Programs that are.
        compiled: usize,
        /// Programs that there are.
        total: usize,
    },
}

/// Loads the model for [`Forward`].
pub(crate) fn forward(
    blueprint: &Blueprint,
    progress: &mut dyn FnMut(Loading),
) -> Result<Box<dyn Forward>, Error> {
    Ok(match &blueprint.place {
        Place::Cpu(options) => Box::new(Loaded::new(Cpu::new(options.clone())?, blueprint, progress)?),
        Place::Cuda(options) => Box::new(Loaded::new(cuda(options, blueprint)?, blueprint, progress)?),
        Place::Private { cpu, private: Private::Parties(parties), model } => {
            Box::new(Loaded::private(cpu, parties, model, blueprint, progress)?)
        }
        Place::Private { cpu, private: Private::Reference, .. } => {
            Box::new(Loaded::reference(cpu, blueprint, progress)?)
        }
    })
}

/// Fields in the order in which they may go: memory before the device that it lies on.
struct Loaded<B: Backend> {
    model: Box<dyn Model<B>>,
    kv: B::Kv,
    backend: B,
}

impl<B: Backend + 'static> Loaded<B> {
    fn new(backend: B, blueprint: &Blueprint, progress: &mut dyn FnMut(Loading)) -> Result<Loaded<B>, Error> {
        let Blueprint { checkpoint, adapters, config, plan, limits, .. } = blueprint;
        let mut all = 0;
        let mut weights = |bytes, total| {
            all = total;
            progress(Loading::Weights { bytes, total });
        };
        let model = fornax_model::load_with(checkpoint, config, adapters, &backend, *limits, &mut weights)?;
        // Room for keys and values is given when all weights are there.
        let kv = backend.alloc_kv(&plan.kv)?;
        progress(Loading::Weights { bytes: all, total: all });
        backend.ready(&mut |compiled, total| progress(Loading::Kernels { compiled, total }))?;
        Ok(Loaded { model, kv, backend })
    }
}

impl Loaded<Integer<Client>> {
    /// Finds the servers first, so that what is wrong with them is known before anything is loaded.
    fn private(
        cpu: &CpuOptions,
        parties: &ClientOptions,
        model: &Path,
        blueprint: &Blueprint,
        progress: &mut dyn FnMut(Loading),
    ) -> Result<Loaded<Integer<Client>>, Error> {
        let path = model.to_owned();
        let recompute = move |number| crate::private::matrix(&path, number);
        let client = Client::new(Parties::connect(parties.clone())?, Box::new(recompute));
        let loaded = Loaded::new(Integer::new(Cpu::new(cpu.clone())?, client), blueprint, progress)?;
        loaded.backend.with_products(Client::ready)?;
        Ok(loaded)
    }
}

impl Loaded<Integer<Reference>> {
    fn reference(
        cpu: &CpuOptions,
        blueprint: &Blueprint,
        progress: &mut dyn FnMut(Loading),
    ) -> Result<Loaded<Integer<Reference>>, Error> {
        let products = Reference::new(cpu.threads);
        Loaded::new(Integer::new(Cpu::new(cpu.clone())?, products), blueprint, progress)
    }
}

impl<B: Backend> Forward for Loaded<B> {
    fn forward(&mut self, batch: &Batch, rows: usize) -> Result<Vec<f32>, Error> {
        let step = self.backend.begin(batch)?;
        let (backend, model, kv) = (&self.backend, &mut self.model, &mut self.kv);
        backend.record(&step, &mut || model.forward(backend, kv, &step))?;
        backend.finish(step)?;
        Ok(self.backend.read(self.model.logits(), 0, rows)?)
    }
}
