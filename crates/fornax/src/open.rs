//! How a model is opened: options, and everything that follows from them before a weight is touched.

use std::path::PathBuf;

use fornax_compute::cpu::{Activations, CpuOptions, CpuSizes};
use fornax_compute::{Counting, KvDType, Purpose};
use fornax_engine::{Ask, Change, Plan, Planner, Remedy, StepLimits};
use fornax_format::Checkpoint;
use fornax_model::{Config, Limits};

use crate::text::Text;
use crate::{Error, Fornax};

/// How a model is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    path: PathBuf,
    context: Option<usize>,
    parallel: usize,
    logit_rows: usize,
    drafts: bool,
    kv_dtype: Option<KvDType>,
    activations: Activations,
    threads: Option<usize>,
    memory_limit: Option<u64>,
    chat_template: Option<String>,
}

/// Tokens of one step: long enough that each weight is read once for many tokens, short enough that activations stay
/// small beside the weights of a small model.
const STEP_TOKENS: usize = 256;

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
    /// by default: its own context, one request at a time, integer activations, keys and values in f16, every core.
    pub fn new(path: impl Into<PathBuf>) -> OpenOptions {
        OpenOptions {
            path: path.into(),
            context: None,
            parallel: 1,
            logit_rows: LOGIT_ROWS,
            drafts: true,
            kv_dtype: None,
            activations: Activations::Integer,
            threads: None,
            memory_limit: None,
            chat_template: None,
        }
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

    /// How keys and values are stored. By default f16, and f32 with float activations: whoever asks for full precision
    /// means all of it (f16 keys alone move log-probabilities by up to 0.02).
    pub fn kv_dtype(mut self, dtype: KvDType) -> OpenOptions {
        self.kv_dtype = Some(dtype);
        self
    }

    /// How activations enter products with quantised weights.
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

    /// A Jinja chat template in place of the model's own.
    pub fn chat_template(mut self, template: String) -> OpenOptions {
        self.chat_template = Some(template);
        self
    }

    /// Reads, plans and loads the model.
    pub fn open(self) -> Result<Fornax, Error> {
        self.open_with(&mut |_, _| {})
    }

    /// The same; `progress` is told the bytes of weights loaded and the bytes there are.
    pub fn open_with(self, progress: &mut dyn FnMut(u64, u64)) -> Result<Fornax, Error> {
        Fornax::load(self.blueprint()?, progress)
    }

    /// What the model will take, from headers and options alone, and what would fit if that does not.
    pub fn plan(&self) -> Result<Planned, Error> {
        self.planned(&Checkpoint::open(&self.path)?)
    }

    fn planned(&self, checkpoint: &Checkpoint) -> Result<Planned, Error> {
        let planner = Planner::new(checkpoint, |step| CpuSizes::new(&self.cpu(step)))?;
        let ask = Ask {
            context: self.context,
            parallel: self.parallel,
            kv_dtype: self.kv_dtype.unwrap_or(match self.activations {
                Activations::Float => KvDType::F32,
                Activations::Integer => KvDType::F16,
            }),
            step_tokens: STEP_TOKENS,
            logit_rows: self.logit_rows,
            runtime_bytes: RUNTIME_BYTES + RUNTIME_BYTES_PER_TOKEN * vocabulary_tokens(checkpoint),
            limit_bytes: self.memory_limit.unwrap_or(u64::MAX),
        };
        let plan = planner.plan(&ask)?;
        if plan.context > plan.context_trained {
            return Err(Error::ContextTooLong { asked: plan.context, trained: plan.context_trained });
        }
        let remedies = if plan.fits() { Vec::new() } else { planner.remedies(&ask)? };
        Ok(Planned { plan, remedies, device: "cpu" })
    }

    /// The backend for steps of these bounds.
    fn cpu(&self, step: StepLimits) -> CpuOptions {
        let options = CpuOptions {
            activations: self.activations,
            tokens_max: step.tokens_max,
            slots: step.slots,
            depth: 0,
            ..CpuOptions::default()
        };
        CpuOptions { threads: self.threads.unwrap_or(options.threads), ..options }
    }

    /// What follows from the options and the files' headers. What does not fit is refused here, before anything is
    /// loaded.
    pub(crate) fn blueprint(self) -> Result<Blueprint, Error> {
        let checkpoint = Checkpoint::open(&self.path)?;
        let config = Config::read(&checkpoint)?;
        let planned = self.planned(&checkpoint)?;
        let step = planned.plan.step;
        let limits = Limits { tokens_max: step.tokens_max, wanted_max: step.wanted_max };
        let mut cpu = self.cpu(step);
        if planned.plan.unsupported.is_some() {
            // The plan was made from the table of tensors; this says by name what cannot be computed.
            fornax_model::measure(&checkpoint, &config, &Counting::new(CpuSizes::new(&cpu)), limits)?;
        }
        if !planned.plan.fits() {
            return Err(planned.refusal());
        }
        let text = Text::open(&checkpoint, self.chat_template.as_deref(), config.vocab)?;
        // What was not planned is not allocated.
        cpu.memory_limit = Some(planned.plan.usage.total());
        Ok(Blueprint { checkpoint, config, text, plan: planned.plan, cpu, limits, drafts: self.drafts })
    }
}

/// A model that is about to be loaded.
pub(crate) struct Blueprint {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) config: Config,
    pub(crate) text: Text,
    pub(crate) plan: Plan,
    pub(crate) cpu: CpuOptions,
    pub(crate) limits: Limits,
    /// Whether answers are drafted.
    pub(crate) drafts: bool,
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
            weights: plan.usage.bytes(Purpose::Weights),
            kv: plan.usage.bytes(Purpose::Kv),
            context: plan.context,
            limit: plan.limit_bytes,
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
