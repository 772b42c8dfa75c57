//! An open model: files, tokenizer, template, and the session that computes.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use fornax_compute::cpu::{Activations, Cpu, CpuOptions, CpuSizes};
use fornax_compute::{Counting, KvDType, KvSpec, Memory, Purpose, SampleRow, Sampling as Choice, Usage};
use fornax_format::Checkpoint;
use fornax_model::{Config, Limits};
use fornax_text::{Chat, ChatTemplate, Detokenizer, Special, StopStrings, Tokenizer};
use serde_json::json;

use crate::request::random_seed;
use crate::session::{Session, SessionLimits, pages_for};
use crate::{Completion, Error, Event, Finish, Message, Prompt, Sampling, Timings};

/// How a model is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    path: PathBuf,
    context: Option<usize>,
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

impl OpenOptions {
    /// The model at `path` (a GGUF file, the first shard of a split one, or a Hugging Face directory) with everything
    /// by default: its own context, activations in int8, keys and values in f16, every core.
    pub fn new(path: impl Into<PathBuf>) -> OpenOptions {
        OpenOptions {
            path: path.into(),
            context: None,
            logit_rows: 1,
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

    /// Logit rows computed at once by [`Fornax::logits`]; each takes four bytes for every token of the vocabulary.
    pub fn logit_rows(mut self, rows: usize) -> OpenOptions {
        self.logit_rows = rows.max(1);
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
        Fornax::from_checkpoint(&Checkpoint::open(&self.path)?, self, progress)
    }
}

/// A loaded model that answers one request at a time.
pub struct Fornax {
    /// Some checkpoints carry none: they take and give ids.
    tokenizer: Option<Tokenizer>,
    template: Result<ChatTemplate, fornax_text::Error>,
    config: Config,
    kv_dtype: KvDType,
    session: Session<Cpu>,
}

impl Fornax {
    /// Opens the model at `path` with the default options.
    pub fn open(path: impl AsRef<Path>) -> Result<Fornax, Error> {
        OpenOptions::new(path.as_ref()).open()
    }

    fn from_checkpoint(
        checkpoint: &Checkpoint,
        options: OpenOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Fornax, Error> {
        let config = Config::read(checkpoint)?;
        let trained = config.context as usize;
        let context = options.context.unwrap_or(trained);
        if context > trained {
            return Err(Error::ContextTooLong { asked: context, trained });
        }
        let tokenizer = tokenizer(checkpoint)?;
        let template = match options.chat_template {
            Some(source) => Ok(ChatTemplate::new(&source)?),
            // A model whose template is missing or broken still continues texts.
            None => ChatTemplate::open(checkpoint),
        };

        let limits = Limits { tokens_max: STEP_TOKENS.min(context), wanted_max: options.logit_rows };
        let mut cpu = CpuOptions {
            activations: options.activations,
            memory_limit: options.memory_limit,
            tokens_max: limits.tokens_max,
            slots: 1,
            depth: 0,
            ..CpuOptions::default()
        };
        cpu.threads = options.threads.unwrap_or(cpu.threads);
        let kv_dtype = options.kv_dtype.unwrap_or(match options.activations {
            Activations::Float => KvDType::F32,
            Activations::Int8 => KvDType::F16,
        });
        let kv = KvSpec { groups: config.kv_groups(pages_for(context)), dtype: kv_dtype };
        if let Some(limit) = options.memory_limit {
            let plan = Counting::new(CpuSizes::new(&cpu));
            fornax_model::measure(checkpoint, &config, &plan, limits)?;
            plan.alloc_kv(&kv)?;
            fits(plan.usage(), limit, context)?;
        }
        let backend = Cpu::new(cpu)?;
        let model = fornax_model::load(checkpoint, &config, &backend, limits, progress)?;
        let limits = SessionLimits { context, tokens: limits.tokens_max, wanted: limits.wanted_max };
        let session = Session::new(backend, model, &kv, limits)?;
        Ok(Fornax { tokenizer, template, config, kv_dtype, session })
    }

    /// How keys and values are stored.
    pub fn kv_dtype(&self) -> KvDType {
        self.kv_dtype
    }

    /// The numbers of the model.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The model's tokenizer, if it has one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Tokens that exist. The model's table may have more rows: padding, which is never chosen.
    pub fn vocab(&self) -> usize {
        let rows = self.config.vocab;
        self.tokenizer.as_ref().map_or(rows, |tokenizer| tokenizer.vocab_len().min(rows))
    }

    /// Most tokens of a request, prompt and answer together.
    pub fn context(&self) -> usize {
        self.session.limits().context
    }

    /// CPU threads that compute.
    pub fn threads(&self) -> usize {
        self.session.backend().options().threads
    }

    /// Bytes in use by purpose.
    pub fn usage(&self) -> Usage {
        self.session.backend().usage()
    }

    /// Continues a text.
    pub fn generate(&mut self, text: &str, sampling: &Sampling) -> Result<Completion, Error> {
        let prompt = Prompt::Text { text: text.to_owned(), special: false };
        self.complete(&prompt, sampling, &mut |_| ControlFlow::Continue(()))
    }

    /// Answers a conversation.
    pub fn chat(&mut self, messages: &[Message], sampling: &Sampling) -> Result<Completion, Error> {
        let prompt = Prompt::Chat(messages.to_vec());
        self.complete(&prompt, sampling, &mut |_| ControlFlow::Continue(()))
    }

    /// Continues or answers, handing out text as it is made. The pieces joined are the completion's text.
    pub fn stream(
        &mut self,
        prompt: &Prompt,
        sampling: &Sampling,
        mut text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Completion, Error> {
        self.complete(prompt, sampling, &mut |event| match event {
            Event::Text(piece) => text(piece),
            Event::Prompt { .. } => ControlFlow::Continue(()),
        })
    }

    /// The tokens of a prompt, checked against the vocabulary and the context.
    pub fn prompt_tokens(&self, prompt: &Prompt) -> Result<Vec<u32>, Error> {
        let tokens = match prompt {
            Prompt::Text { text, special } => self.text_tokens(text, *special)?,
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Chat(messages) => {
                let unusable = |error: &fornax_text::Error| Error::ChatTemplate { reason: error.to_string() };
                let template = self.template.as_ref().map_err(unusable)?;
                let messages = messages
                    .iter()
                    .map(|Message { role, content }| json!({"role": role, "content": content}));
                let tokenizer = self.tokenizer.as_ref().ok_or(Error::NoTokenizer)?;
                tokenizer.encode_chat(&template.render(&Chat::new(messages.collect()), tokenizer)?)?
            }
        };
        self.check_tokens(&tokens)?;
        Ok(tokens)
    }

    /// A text's tokens with BOS in front, exactly once, where the model wants it.
    pub fn text_tokens(&self, text: &str, special: bool) -> Result<Vec<u32>, Error> {
        let tokenizer = self.tokenizer.as_ref().ok_or(Error::NoTokenizer)?;
        let special = if special { Special::Parse } else { Special::AsText };
        let mut tokens = tokenizer.encode(text, special)?;
        if let Some(bos) = tokenizer.bos().filter(|_| tokenizer.add_bos())
            && tokens.first() != Some(&bos)
        {
            tokens.insert(0, bos);
        }
        Ok(tokens)
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), Error> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let vocab = self.config.vocab;
        match tokens.iter().position(|&token| token as usize >= vocab) {
            Some(position) => Err(Error::UnknownToken { token: tokens[position], position, vocab }),
            None => Ok(()),
        }
    }

    /// Runs one request to its end, reporting as it goes; `report` stops it by breaking.
    pub fn complete(
        &mut self,
        prompt: &Prompt,
        sampling: &Sampling,
        report: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Completion, Error> {
        let started = Instant::now();
        let mut tokens = self.prompt_tokens(prompt)?;
        let prompt_tokens = tokens.len();
        let max_tokens = self.room(prompt_tokens, sampling.max_tokens)?;
        let seed = sampling.seed.unwrap_or_else(random_seed);
        let tokenizer = self.tokenizer.as_ref();
        let end_tokens = tokenizer.filter(|_| !sampling.ignore_eos).map_or(&[][..], Tokenizer::end_tokens);
        let mut text = Text {
            detokenizer: tokenizer.map(match prompt {
                Prompt::Chat(_) => Detokenizer::new,
                // The prompt is the text's beginning, so a space at the start is its own.
                Prompt::Text { .. } | Prompt::Tokens(_) => Detokenizer::continuing,
            }),
            stops: StopStrings::new(sampling.stop.iter().map(String::as_str))?,
            whole: String::new(),
        };
        let vocab = self.vocab() as u32;
        let choice = Choice {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            ..Choice::greedy()
        };
        let row = |position| SampleRow {
            wanted: 0,
            slot: 0,
            position,
            seed,
            vocab,
            sampling: &choice,
            // None of these parameters looks back.
            history: &[],
            generated: 0,
            mask: None,
            given: None,
            mirostat_mu: 0.0,
        };

        self.session.rewind(&tokens);
        let cached_tokens = self.session.computed();
        let mut timings = Timings::default();
        let finish = loop {
            if tokens.len() == prompt_tokens + max_tokens {
                break Finish::Length;
            }
            let sampled = loop {
                match self.session.sample(&tokens, row)? {
                    Some(sampled) => break sampled,
                    None => carry_on(report(Event::Prompt {
                        computed: self.session.computed(),
                        total: prompt_tokens,
                    }))?,
                }
            };
            tokens.push(sampled.token);
            let elapsed = started.elapsed();
            if tokens.len() == prompt_tokens + 1 {
                timings.first_token = elapsed;
            }
            timings.decode = elapsed.saturating_sub(timings.first_token);
            if end_tokens.contains(&sampled.token) {
                break Finish::Stop;
            }
            if text.push(sampled.token, report)? {
                break Finish::Stop;
            }
        };
        Ok(Completion {
            text: text.finish(report)?,
            tokens: tokens.split_off(prompt_tokens),
            finish,
            prompt_tokens,
            cached_tokens,
            seed,
            timings,
        })
    }

    /// How many tokens may follow a prompt of so many: as many as asked for, else what is left of the context. What
    /// does not fit is refused here, with counts, and never cut.
    pub fn room(&self, prompt: usize, max_tokens: Option<usize>) -> Result<usize, Error> {
        let context = self.context();
        let left = context.saturating_sub(prompt);
        match max_tokens {
            _ if prompt > context => Err(Error::PromptTooLong { prompt, context }),
            None | Some(1..) if left == 0 => Err(Error::PromptTooLong { prompt, context }),
            Some(max_tokens) if max_tokens > left => {
                Err(Error::RequestTooLong { prompt, max_tokens, context, left })
            }
            Some(max_tokens) => Ok(max_tokens),
            None => Ok(left),
        }
    }

    /// Computes `tokens` from their start and hands out the logits after each: `visit(position, logits)`. With
    /// `last` it is only those after the last token. `visit` stops it by breaking.
    pub fn logits(
        &mut self,
        tokens: &[u32],
        last: bool,
        visit: &mut dyn FnMut(usize, &[f32]) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        self.check_tokens(tokens)?;
        self.room(tokens.len(), Some(0))?;
        self.session.rewind(&[]);
        while self.session.computed() < tokens.len() {
            let logits = self.session.logits(tokens, !last)?;
            let rows = logits.len() / self.config.vocab;
            let first = self.session.computed() - rows;
            for (position, row) in (first..).zip(logits.chunks_exact(self.config.vocab)) {
                if !row.iter().all(|value| value.is_finite()) {
                    return Err(Error::NumericFault { position });
                }
                carry_on(visit(position, row))?;
            }
        }
        Ok(())
    }
}

/// The text of a request on its way out.
struct Text<'t> {
    detokenizer: Option<Detokenizer<&'t Tokenizer>>,
    stops: StopStrings,
    whole: String,
}

impl Text<'_> {
    /// Takes the next token; true when a stop string is complete.
    fn push(
        &mut self,
        token: u32,
        report: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<bool, Error> {
        let piece = self.detokenizer.as_mut().map(|detokenizer| detokenizer.push(token)).unwrap_or_default();
        let released = self.stops.push(&piece);
        self.whole.push_str(&released.text);
        // Reported even when nothing is released: whoever listens may want to stop.
        carry_on(report(Event::Text(&released.text)))?;
        Ok(released.stop.is_some())
    }

    /// Releases what was held back and returns the whole.
    fn finish(mut self, report: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>) -> Result<String, Error> {
        let held = self.detokenizer.map(Detokenizer::finish).unwrap_or_default();
        let mut rest = self.stops.push(&held).text;
        rest.push_str(&self.stops.finish());
        self.whole.push_str(&rest);
        carry_on(report(Event::Text(&rest)))?;
        Ok(self.whole)
    }
}

fn carry_on(flow: ControlFlow<()>) -> Result<(), Error> {
    match flow {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::Cancelled),
    }
}

/// The checkpoint's tokenizer; `None` where it has none. One that it has and that cannot be used is an error.
fn tokenizer(checkpoint: &Checkpoint) -> Result<Option<Tokenizer>, Error> {
    let present = match checkpoint {
        Checkpoint::Gguf(gguf) => gguf.metadata().get("tokenizer.ggml.model").is_some(),
        Checkpoint::HuggingFace(directory) => directory.tokenizer_json().is_some(),
    };
    Ok(if present { Some(Tokenizer::open(checkpoint)?) } else { None })
}

/// Refuses what does not fit before anything is loaded.
fn fits(plan: Usage, limit: u64, context: usize) -> Result<(), Error> {
    let needed = plan.total();
    if needed <= limit {
        return Ok(());
    }
    let (weights, kv) = (plan.bytes(Purpose::Weights), plan.bytes(Purpose::Kv));
    Err(Error::DoesNotFit { needed, weights, kv, context, limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Fornax {
        Fornax::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama")).unwrap()
    }

    fn ids() -> Prompt {
        Prompt::Tokens((0..40).map(|i| i * 7 % 120).collect())
    }

    fn eight() -> Sampling {
        Sampling { max_tokens: Some(8), ..Sampling::default() }
    }

    fn complete(model: &mut Fornax, sampling: &Sampling) -> Completion {
        model.complete(&ids(), sampling, &mut |_| ControlFlow::Continue(())).unwrap()
    }

    #[test]
    fn what_is_still_in_the_cache_is_not_computed_again_and_changes_nothing() {
        let mut model = tiny();
        let first = complete(&mut model, &eight());
        let second = complete(&mut model, &eight());
        assert_eq!((first.cached_tokens, second.cached_tokens), (0, 39));
        assert_eq!(first.tokens, second.tokens);
        // Another prompt in between overwrites the cache.
        model.complete(&Prompt::Tokens(vec![5; 50]), &eight(), &mut |_| ControlFlow::Continue(())).unwrap();
        let third = complete(&mut model, &eight());
        assert_eq!((third.cached_tokens, third.tokens), (0, first.tokens));
    }

    #[test]
    fn breaking_cancels_and_the_next_request_is_unharmed() {
        let mut model = tiny();
        let whole = complete(&mut model, &eight()).tokens;
        let mut left = 3;
        let cancelled = model.complete(&ids(), &eight(), &mut |_| {
            left -= 1;
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(cancelled, Err(Error::Cancelled)));
        assert_eq!(complete(&mut model, &eight()).tokens, whole);
    }

    #[test]
    fn no_token_is_generated_where_none_is_asked_for() {
        let nothing = complete(&mut tiny(), &Sampling { max_tokens: Some(0), ..Sampling::default() });
        assert_eq!((nothing.tokens, nothing.finish), (Vec::new(), Finish::Length));
    }

    #[test]
    fn the_plan_is_what_the_allocator_counts() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama");
        let used = tiny().usage().total();
        let open =
            |limit| OpenOptions::new(&path).memory_limit(limit).open().map(|model| model.usage().total());
        assert_eq!(open(used).unwrap(), used);
        assert!(matches!(open(used - 1), Err(Error::DoesNotFit { needed, .. }) if needed == used));
    }
}
