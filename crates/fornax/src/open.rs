//! How a model is opened: options, and everything that follows from them before a weight is touched.

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::thread;

use fornax_compute::cpu::{Activations, CpuOptions, CpuSizes, Simd};
use fornax_compute::{Counting, KvDType, PAGE_TOKENS, Purpose, Sizes};
use fornax_engine::{Ask, Change, Plan, Planner, Remedy, StepLimits};
use fornax_format::{AdapterFiles, Checkpoint, DType};
use fornax_gpu::{CudaOptions, CudaSizes, Opening};
use fornax_model::{Adapter, Config, Limits};
use fornax_private::IntegerSizes;

use crate::device::Place;
use crate::private::Private;
use crate::text::Text;
use crate::{Device, Error, Fornax, Loading};

/// How a model is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    path: PathBuf,
    device: Device,
    kernel_folder: Option<PathBuf>,
    context: Option<usize>,
    parallel: usize,
    logit_rows: usize,
    drafts: bool,
    prefix_reuse: bool,
    fast_forward: bool,
    private: Option<Private>,
    kv_dtype: Option<KvDType>,
    activations: Activations,
    threads: Option<usize>,
    memory_limit: Option<u64>,
    returning: u64,
    chat_template: Option<String>,
    queue: Option<usize>,
    quantize: Option<DType>,
    /// Names and folders.
    adapters: Vec<(String, PathBuf)>,
}

/// Tokens of one step: long enough that each weight is read once for many tokens, short enough that activations stay
/// small beside the weights of a small model.
const STEP_TOKENS: usize = 256;
/// A GPU's matrix units are busy from a thousand tokens on, and activations are little beside its memory. Where streams wait
/// for a step, the engine makes it shorter.
const GPU_STEP_TOKENS: usize = 2048;

/// The longest context that page tables on a GPU have room for where none is asked for.
const CONTEXT_MAX: usize = 1 << 18;

/// Rows of logits beyond one for each request: for drafts that are verified and prompts that are scored. They take 10 MB
/// for a vocabulary of 150,000.
const LOGIT_ROWS: usize = 15;

/// What the process takes beside the model: code, stacks, page tables, buffers of the command line. Measured as the
/// peak less what the allocator counted: 21 MiB with a vocabulary of 49,152 tokens, 41 MiB with 151,936.
const RUNTIME_BYTES: u64 = 16 << 20;
/// And for each token of the vocabulary: 200 bytes in the tokenizer, 300 more once a form is asked for.
const RUNTIME_BYTES_PER_TOKEN: u64 = 600;

impl OpenOptions {
    /// The model at `path` (a GGUF file, the first shard of a split one, or a Hugging Face directory) with everything
    /// by default: on the CPU, its own context, one request at a time, integer activations, keys and values in f16,
    /// every core.
    pub fn new(path: impl Into<PathBuf>) -> OpenOptions {
        OpenOptions {
            path: path.into(),
            device: Device::Cpu,
            kernel_folder: None,
            context: None,
            parallel: 1,
            logit_rows: LOGIT_ROWS,
            drafts: true,
            prefix_reuse: true,
            fast_forward: true,
            private: None,
            kv_dtype: None,
            activations: Activations::Integer,
            threads: None,
            memory_limit: None,
            returning: 0,
            chat_template: None,
            queue: None,
            quantize: None,
            adapters: Vec::new(),
        }
    }

    /// Where it is computed. Nothing moves to another device than this one.
    pub fn device(mut self, device: Device) -> OpenOptions {
        self.device = device;
        self
    }

    /// Where a GPU's compiled kernels are kept; without it they are compiled anew each time.
    pub fn kernel_folder(mut self, folder: impl Into<PathBuf>) -> OpenOptions {
        self.kernel_folder = Some(folder.into());
        self
    }

    /// Most tokens of a request, prompt and answer together.
    pub fn context(mut self, tokens: usize) -> OpenOptions {
        self.context = Some(tokens);
        self
    }

    /// Requests computed at once; others wait. The cache holds a whole context for each.
    pub fn parallel(mut self, requests: usize) -> OpenOptions {
        self.parallel = requests.max(1);
        self
    }

    /// Rows of logits in a step beyond one for each request; each takes four bytes for every token of the vocabulary.
    pub fn logit_rows(mut self, rows: usize) -> OpenOptions {
        self.logit_rows = rows;
        self
    }

    /// Whether answers are drafted from their own repetitions where that helps. It changes no token, only the speed.
    pub fn drafts(mut self, drafts: bool) -> OpenOptions {
        self.drafts = drafts;
        self
    }

    /// Whether cached prefixes are used again. It changes no token, only the speed.
    pub fn prefix_reuse(mut self, reuse: bool) -> OpenOptions {
        self.prefix_reuse = reuse;
        self
    }

    /// Whether tokens that a form leaves no choice about are computed together. It changes no token, only the speed.
    pub fn fast_forward(mut self, forward: bool) -> OpenOptions {
        self.fast_forward = forward;
        self
    }

    /// Products with weights are done as private inference does them, everything else on the CPU. What would make the
    /// rows of a round depend on what is said (drafts, reuse of prefixes, forced tokens together) is off from here on.
    pub fn private(mut self, private: Private) -> OpenOptions {
        self.private = Some(private);
        self.drafts(false).prefix_reuse(false).fast_forward(false)
    }

    /// How keys and values are stored. By default f16, and f32 with float activations: whoever asks for full precision
    /// means all of it (f16 keys alone move log-probabilities by up to 0.02).
    pub fn kv_dtype(mut self, dtype: KvDType) -> OpenOptions {
        self.kv_dtype = Some(dtype);
        self
    }

    /// How activations enter products with quantised weights on the CPU; on a GPU they are float. [`Activations::Half`] is
    /// slow: the specification of what a GPU computes, to compare it with.
    pub fn activations(mut self, activations: Activations) -> OpenOptions {
        self.activations = activations;
        self
    }

    /// CPU threads.
    pub fn threads(mut self, threads: usize) -> OpenOptions {
        self.threads = Some(threads);
        self
    }

    /// The most bytes to use.
    pub fn memory_limit(mut self, bytes: u64) -> OpenOptions {
        self.memory_limit = Some(bytes);
        self
    }

    /// Bytes of the device's memory that others will have given back before this model is loaded: for plans of what would
    /// fit then.
    pub fn returning(mut self, bytes: u64) -> OpenOptions {
        self.returning = bytes;
        self
    }

    /// A Jinja chat template in place of the model's own.
    pub fn chat_template(mut self, template: String) -> OpenOptions {
        self.chat_template = Some(template);
        self
    }

    /// Requests that may wait for those being computed; further ones are refused.
    pub fn queue(mut self, requests: usize) -> OpenOptions {
        self.queue = Some(requests);
        self
    }

    /// Brings the matrices of a safetensors model into Q8_0, MXFP8 or Q4_K while they are loaded, which loses some precision;
    /// a GGUF file is refused. Rows that do not fill blocks of Q4_K become Q8_0.
    pub fn quantize(mut self, dtype: DType) -> OpenOptions {
        self.quantize = Some(dtype);
        self
    }

    /// Loads a low-rank adapter beside the model, from a folder as PEFT writes it. Requests of the engine's own kind
    /// ([`Fornax::handle`]) take it by its place among all that were named; each may take another one, in one batch. On
    /// the CPU only.
    pub fn adapter(mut self, name: impl Into<String>, folder: impl Into<PathBuf>) -> OpenOptions {
        self.adapters.push((name.into(), folder.into()));
        self
    }

    /// Reads, plans and loads the model.
    pub fn open(self) -> Result<Fornax, Error> {
        self.open_with(&mut |_| {})
    }

    /// The same; `progress` is told how far it is.
    pub fn open_with(self, progress: &mut dyn FnMut(Loading)) -> Result<Fornax, Error> {
        Fornax::load(self.blueprint()?, progress)
    }

    /// What the model will take, from headers and options alone, and what would fit if that does not.
    pub fn plan(&self) -> Result<Planned, Error> {
        self.planned(&self.checkpoint()?, &self.read_adapters()?)
    }

    /// The adapters' files.
    fn read_adapters(&self) -> Result<Vec<Adapter>, Error> {
        let read = |(name, folder): &(String, PathBuf)| Ok(Adapter::new(name, AdapterFiles::open(folder)?)?);
        self.adapters.iter().map(read).collect()
    }

    /// The files, as the options say to read them.
    fn checkpoint(&self) -> Result<Checkpoint, Error> {
        let mut checkpoint = Checkpoint::open(&self.path)?;
        if let Some(dtype) = self.quantize {
            checkpoint.quantize(dtype)?;
        }
        Ok(checkpoint)
    }

    fn planned(&self, checkpoint: &Checkpoint, adapters: &[Adapter]) -> Result<Planned, Error> {
        let ask = Ask {
            context: self.context,
            parallel: self.parallel,
            kv_dtype: self.kv_dtype.unwrap_or(match (self.device, self.activations) {
                (Device::Cpu, Activations::Float) => KvDType::F32,
                _ => KvDType::F16,
            }),
            step_tokens: if self.device == Device::Cpu { STEP_TOKENS } else { GPU_STEP_TOKENS },
            logit_rows: self.logit_rows,
            runtime_bytes: match self.device {
                Device::Cpu => RUNTIME_BYTES + RUNTIME_BYTES_PER_TOKEN * vocabulary_tokens(checkpoint),
                // The process lies in the machine's memory, not in the card's.
                Device::Cuda(_) => 0,
            },
            limit_bytes: self.memory_limit.unwrap_or(u64::MAX),
        };
        match self.device {
            Device::Cpu if self.private.is_some() => planned(
                (checkpoint, adapters),
                |step| IntegerSizes(CpuSizes::new(&self.cpu(step))),
                &ask,
                "cpu",
            ),
            Device::Cpu => {
                planned((checkpoint, adapters), |step| CpuSizes::new(&self.cpu(step)), &ask, "cpu")
            }
            Device::Cuda(ordinal) => {
                // What is free on the card is a limit too.
                let free = fornax_gpu::probe(ordinal)?.memory_free.saturating_add(self.returning);
                let limit_bytes = ask.limit_bytes.min(free);
                let ask = Ask { limit_bytes, ..ask };
                planned(
                    (checkpoint, adapters),
                    |step| CudaSizes::new(&self.cuda(ordinal, step)),
                    &ask,
                    "cuda",
                )
            }
        }
    }

    /// The backend for steps of these bounds.
    fn cpu(&self, step: StepLimits) -> CpuOptions {
        let options = CpuOptions {
            activations: self.activations,
            simd: if self.activations == Activations::Half { Simd::Scalar } else { Simd::detect() },
            tokens_max: step.tokens_max,
            slots: step.slots,
            depth: 0,
            ..CpuOptions::default()
        };
        CpuOptions { threads: self.threads.unwrap_or(options.threads), ..options }
    }

    /// The same on a GPU. Page tables have room for every page of the context of each request, in two groups.
    fn cuda(&self, device: usize, step: StepLimits) -> CudaOptions {
        let pages = self.context.unwrap_or(CONTEXT_MAX).div_ceil(PAGE_TOKENS).saturating_mul(step.slots);
        CudaOptions {
            device,
            tokens_max: step.tokens_max,
            wanted_max: step.wanted_max,
            slots: step.slots,
            pages_max: pages.saturating_add(step.tokens_max).saturating_mul(2),
            kernel_folder: self.kernel_folder.clone(),
            ..CudaOptions::default()
        }
    }

    /// What follows from the options and the files' headers. What does not fit is refused here, before anything is
    /// loaded.
    pub(crate) fn blueprint(self) -> Result<Blueprint, Error> {
        let checkpoint = self.checkpoint()?;
        let mut config = Config::read(&checkpoint)?;
        let adapters = self.read_adapters()?;
        // Held until the model is loaded.
        let opening = match self.device {
            Device::Cpu => None,
            Device::Cuda(ordinal) => Some(Opening::begin(ordinal)),
        };
        // The plan waits for the device, and a tokenizer takes as long to read.
        let (planned, text) = thread::scope(|scope| {
            let text = || Text::open(&checkpoint, self.chat_template.as_deref(), config.vocab);
            let text = scope.spawn(text);
            let planned = self.planned(&checkpoint, &adapters);
            (planned, text.join().unwrap_or_else(|panic| resume_unwind(panic)))
        });
        let planned = planned?;
        config.limit_context(u32::try_from(planned.plan.context).unwrap_or(u32::MAX));
        let step = planned.plan.step;
        let limits = Limits { tokens_max: step.tokens_max, wanted_max: step.wanted_max };
        if planned.plan.unsupported.is_some() {
            // The plan was made from the table of tensors; this says by name what cannot be computed.
            match self.device {
                Device::Cpu => {
                    let memory = Counting::new(CpuSizes::new(&self.cpu(step)));
                    fornax_model::measure(&checkpoint, &config, &memory, limits)?;
                }
                Device::Cuda(ordinal) => {
                    let memory = Counting::new(CudaSizes::new(&self.cuda(ordinal, step)));
                    fornax_model::measure(&checkpoint, &config, &memory, limits)?;
                }
            }
        }
        if !planned.plan.fits() {
            return Err(planned.refusal());
        }
        let text = text?;
        // What was not planned is not allocated.
        let memory_limit = Some(planned.plan.usage().total());
        let place = match self.device {
            Device::Cpu if let Some(private) = self.private.clone() => {
                let cpu = CpuOptions { memory_limit, ..self.cpu(step) };
                Place::Private { cpu, private, model: self.path.clone() }
            }
            Device::Cpu => Place::Cpu(CpuOptions { memory_limit, ..self.cpu(step) }),
            Device::Cuda(ordinal) => Place::Cuda(CudaOptions { memory_limit, ..self.cuda(ordinal, step) }),
        };
        Ok(Blueprint {
            checkpoint,
            adapters,
            config,
            text,
            plan: planned.plan,
            queue: self.queue,
            place,
            _opening: opening,
            limits,
            drafts: self.drafts,
            prefix_reuse: self.prefix_reuse,
            fast_forward: self.fast_forward,
        })
    }
}

/// A plan of what is asked for on a kind of device, and what would fit if it does not.
fn planned<S: Sizes>(
    (checkpoint, adapters): (&Checkpoint, &[Adapter]),
    sizes: impl Fn(StepLimits) -> S,
    ask: &Ask,
    device: &'static str,
) -> Result<Planned, Error> {
    let planner = Planner::new(checkpoint, sizes)?.with_adapters(adapters)?;
    let plan = planner.plan(ask)?;
    if plan.context > plan.context_trained {
        return Err(Error::ContextTooLong { asked: plan.context, trained: plan.context_trained });
    }
    let remedies = if plan.fits() { Vec::new() } else { planner.remedies(ask)? };
    Ok(Planned { plan, remedies, device })
}

/// A model that is about to be loaded.
pub(crate) struct Blueprint {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) adapters: Vec<Adapter>,
    pub(crate) config: Config,
    pub(crate) text: Text,
    pub(crate) plan: Plan,
    /// Requests that may wait.
    pub(crate) queue: Option<usize>,
    pub(crate) place: Place,
    /// Holds the device open between those who look at it.
    _opening: Option<Opening>,
    pub(crate) limits: Limits,
    /// Whether answers are drafted.
    pub(crate) drafts: bool,
    /// Whether cached prefixes are used again.
    pub(crate) prefix_reuse: bool,
    /// Whether forced tokens are computed together.
    pub(crate) fast_forward: bool,
}

/// A plan, and what would fit where it does not.
#[derive(Clone, Debug)]
pub struct Planned {
    /// What was asked for.
    pub plan: Plan,
    /// What would fit instead; empty where the plan fits.
    pub remedies: Vec<Remedy>,
    /// The device that it is a plan of.
    pub device: &'static str,
}

impl Planned {
    /// The error of a plan that does not fit.
    pub fn refusal(&self) -> Error {
        let plan = &self.plan;
        let advice: Vec<String> = self
            .remedies
            .iter()
            .map(|remedy| match remedy.change {
                Change::Context(context) => format!("--context {context}"),
                Change::Parallel(parallel) => format!("--parallel {parallel}"),
                Change::Quant(dtype) => format!("a version of the model in {dtype}"),
            })
            .collect();
        Error::DoesNotFit {
            needed: plan.total_bytes(),
            weights: plan.usage().bytes(Purpose::Weights),
            kv: plan.usage().bytes(Purpose::Kv),
            context: plan.context,
            limit: plan.limit_bytes(),
            advice: if advice.is_empty() {
                "no shorter --context would fit either: use a smaller model or a larger --memory-limit"
                    .to_owned()
            } else {
                format!("use {}, or a larger --memory-limit", advice.join(", or "))
            },
        }
    }
}

/// Tokens that the tokenizer will hold, as the headers count them.
fn vocabulary_tokens(checkpoint: &Checkpoint) -> u64 {
    match checkpoint {
        Checkpoint::Gguf(gguf) => {
            let tokens = gguf.metadata().opt_strings("tokenizer.ggml.tokens").ok().flatten();
            tokens.map_or(0, |tokens| tokens.len() as u64)
        }
        Checkpoint::HuggingFace(model) => {
            let tokens = model.config().get("vocab_size").and_then(|tokens| tokens.as_u64());
            tokens.filter(|_| model.tokenizer_json().is_some()).unwrap_or(0)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Code;

    #[test]
    fn a_plan_for_a_gpu_counts_keys_and_values_as_they_are_allocated() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
        // A page of its 8-bit floats is 16.5 times what memory is cut in.
        let path = fixtures.join("yarn");
        let checkpoint = Checkpoint::open(&path).unwrap();
        let options = OpenOptions::new(path);
        let sizes = |step| CudaSizes::new(&options.cuda(0, step));
        for kv_dtype in [KvDType::F32, KvDType::F16, KvDType::F8] {
            for (context, limit_bytes) in [(33, 1 << 30), (100, 1 << 30), (128, 600 << 20)] {
                let ask = Ask {
                    context: Some(context),
                    parallel: 3,
                    kv_dtype,
                    step_tokens: 64,
                    logit_rows: 0,
                    runtime_bytes: 0,
                    limit_bytes,
                };
                let plan = planned((&checkpoint, &[]), sizes, &ask, "cuda").unwrap().plan;
                let taken = sizes(plan.step).kv_bytes(&plan.kv);
                assert_eq!(plan.usage().bytes(Purpose::Kv), taken, "{kv_dtype}, {context} tokens");
                assert_eq!(taken % 256, 0);
            }
        }
    }

    #[test]
    fn a_plan_refuses_keys_and_values_that_a_gpu_does_not_keep_and_says_which_it_does() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/yarn");
        let checkpoint = Checkpoint::open(&path).unwrap();
        let options = OpenOptions::new(path);
        let ask = |kv_dtype| Ask {
            context: Some(64),
            parallel: 1,
            kv_dtype,
            step_tokens: 64,
            logit_rows: 0,
            runtime_bytes: 0,
            limit_bytes: 1 << 30,
        };
        for kv_dtype in KvDType::ALL {
            let ask = ask(kv_dtype);
            let cpu = planned((&checkpoint, &[]), |step| CpuSizes::new(&options.cpu(step)), &ask, "cpu");
            assert_eq!(cpu.unwrap().plan.kv.dtype, kv_dtype);
            let cuda =
                planned((&checkpoint, &[]), |step| CudaSizes::new(&options.cuda(0, step)), &ask, "cuda");
            if kv_dtype != KvDType::Q8_0 {
                assert_eq!(cuda.unwrap().plan.kv.dtype, kv_dtype);
                continue;
            }
            let refused = cuda.unwrap_err();
            let wanted = "keys and values in q8_0 are not available on cuda; use f32, f16, bf16 or fp8";
            assert_eq!((refused.to_string().as_str(), refused.code()), (wanted, Code::InvalidInput));
        }
    }

    #[test]
    fn what_matrices_can_be_brought_into_is_computed_on_every_device() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/yarn");
        let options = OpenOptions::new(path.clone());
        let step = StepLimits { tokens_max: 1, wanted_max: 1, slots: 1 };
        for quant in [DType::Q8_0, DType::MXFP8, DType::Q4_K] {
            let mut checkpoint = Checkpoint::open(&path).unwrap();
            checkpoint.quantize(quant).unwrap();
            let config = Config::read(&checkpoint).unwrap();
            let limits = Limits { tokens_max: 1, wanted_max: 1 };
            let cpu = Counting::new(CpuSizes::new(&options.cpu(step)));
            fornax_model::measure(&checkpoint, &config, &cpu, limits).unwrap();
            let cuda = Counting::new(CudaSizes::new(&options.cuda(0, step)));
            fornax_model::measure(&checkpoint, &config, &cuda, limits).unwrap();
        }
    }
}
