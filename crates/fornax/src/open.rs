//! How a model is opened: options, and everything that follows from them before a weight is touched.

use std::path::PathBuf;

use fornax_compute::cpu::{Activations, CpuOptions, CpuSizes};
use fornax_compute::{Counting, KvDType, KvSpec, Memory, PAGE_TOKENS, Purpose, Usage};
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

impl OpenOptions {
    /// The model at `path` (a GGUF file, the first shard of a split one, or a Hugging Face directory) with everything
    /// by default: its own context, one request at a time, activations in int8, keys and values in f16, every core.
    pub fn new(path: impl Into<PathBuf>) -> OpenOptions {
        OpenOptions {
            path: path.into(),
            context: None,
            parallel: 1,
            logit_rows: LOGIT_ROWS,
            kv_dtype: None,
            activations: Activations::Int8,
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
        let rows = self.parallel.saturating_add(self.logit_rows);
        Fornax::load(self.blueprint(rows)?, progress)
    }

    /// What follows from the options and the files' headers, with room for `rows` rows of logits in a step. What does
    /// not fit is refused here, before anything is loaded.
    pub(crate) fn blueprint(self, rows: usize) -> Result<Blueprint, Error> {
        let checkpoint = Checkpoint::open(&self.path)?;
        let config = Config::read(&checkpoint)?;
        let trained = config.context as usize;
        let context = self.context.unwrap_or(trained);
        if context > trained {
            return Err(Error::ContextTooLong { asked: context, trained });
        }
        let text = Text::open(&checkpoint, self.chat_template.as_deref(), config.vocab)?;
        let limits = Limits { tokens_max: STEP_TOKENS.min(context).max(self.parallel), wanted_max: rows };
        let mut cpu = CpuOptions {
            activations: self.activations,
            memory_limit: self.memory_limit,
            tokens_max: limits.tokens_max,
            slots: self.parallel,
            depth: 0,
            ..CpuOptions::default()
        };
        cpu.threads = self.threads.unwrap_or(cpu.threads);
        let dtype = self.kv_dtype.unwrap_or(match self.activations {
            Activations::Float => KvDType::F32,
            Activations::Int8 => KvDType::F16,
        });
        let pages = context.div_ceil(PAGE_TOKENS).saturating_mul(self.parallel).saturating_add(1);
        let kv = KvSpec { groups: config.kv_groups(pages), dtype };
        if let Some(limit) = self.memory_limit {
            let plan = Counting::new(CpuSizes::new(&cpu));
            fornax_model::measure(&checkpoint, &config, &plan, limits)?;
            plan.alloc_kv(&kv)?;
            fits(plan.usage(), limit, context)?;
        }
        Ok(Blueprint { checkpoint, config, text, context, parallel: self.parallel, kv, cpu, limits })
    }
}

/// A model that is about to be loaded.
pub(crate) struct Blueprint {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) config: Config,
    pub(crate) text: Text,
    /// Tokens of one request.
    pub(crate) context: usize,
    /// Requests computed at once.
    pub(crate) parallel: usize,
    pub(crate) kv: KvSpec,
    pub(crate) cpu: CpuOptions,
    pub(crate) limits: Limits,
}

/// Refuses what does not fit.
fn fits(plan: Usage, limit: u64, context: usize) -> Result<(), Error> {
    let needed = plan.total();
    if needed <= limit {
        return Ok(());
    }
    let (weights, kv) = (plan.bytes(Purpose::Weights), plan.bytes(Purpose::Kv));
    Err(Error::DoesNotFit { needed, weights, kv, context, limit })
}
