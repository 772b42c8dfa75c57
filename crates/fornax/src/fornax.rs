//! An open model: an engine on its own thread, and the text side of it.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fornax_chat::{Ask, READS_NO_IMAGES, Sight};
use fornax_compute::{KvDType, Sampling, Usage};
use fornax_engine::{
    Clock, Engine, EngineOptions, Grammar, Handle, Plan, QueueLimits, Refusal, Runner, Speculation, Stats,
};
use fornax_form::{Form, Grammars};
use fornax_format::AdapterFiles;
use fornax_model::{Adapter, Config};
use fornax_text::{StopStrings, Tokenizer};

use crate::answer::{Answer, Part, failed};
use crate::device::Counted;
use crate::kept::identity;
use crate::open::Blueprint;
use crate::request::{STOP_BYTES_MAX, STOPS_MAX, random_seed};
use crate::sight::Eyes;
use crate::text::Text;
use crate::vocabulary::vocabulary;
use crate::{Completion, Device, Error, Finish, Loading, OpenOptions, Prompt, Request};

/// A loaded model. Clones share it: many callers may ask at once, from any thread, and the last one to go stops the
/// engine.
#[derive(Clone)]
pub struct Fornax {
    shared: Arc<Shared>,
}

struct Shared {
    text: Text,
    config: Config,
    plan: Plan,
    /// Of the model that drafts.
    draft_plan: Option<Plan>,
    threads: usize,
    device: String,
    kind: Device,
    /// What the allocator counted when everything was loaded; nothing but adapters is allocated afterwards, in the room that
    /// was planned for them. And the threads.
    counted: Counted,
    /// Made when the first form is asked for: the trie of a large vocabulary takes a moment and megabytes.
    grammars: OnceLock<Result<Arc<Grammars>, fornax_form::FormError>>,
    /// `None` only while it is dropped.
    engine: Option<(Handle, JoinHandle<()>)>,
}

/// Plan and allocator side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Bytes that the plan said.
    pub planned: Usage,
    /// Bytes that the allocator counted.
    pub allocated: Usage,
}

/// How often a caller that waits for a token is asked whether it still wants it.
const LOOK_UP: Duration = Duration::from_millis(50);

/// What is reported while a request runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// The prompt is being computed, and there is no token yet.
    Prompt {
        /// Tokens computed or found in the cache so far. Where other requests run, theirs are counted in.
        computed: usize,
        /// Tokens that there are.
        total: usize,
    },
    /// Nothing has come for a moment.
    Waiting,
    /// More text. Concatenated, these are [`Completion::text`].
    Text(&'a str),
    /// More of what is thought, where parts are told apart.
    Thought(&'a str),
    /// A tool of that name is called.
    Call(&'a str),
    /// More of the last call's arguments, which together are JSON unless the answer is cut.
    Arguments(&'a str),
}

/// Whether to go on.
fn heard(flow: ControlFlow<()>) -> Result<(), Error> {
    if flow.is_break() { Err(Error::Cancelled) } else { Ok(()) }
}

impl Fornax {
    /// Opens the model at `path` with the default options.
    pub fn open(path: impl AsRef<Path>) -> Result<Fornax, Error> {
        OpenOptions::new(path.as_ref()).open()
    }

    /// Builds the runner on the engine's thread, since device memory never leaves the thread that it belongs to.
    pub(crate) fn load(blueprint: Blueprint, progress: &mut dyn FnMut(Loading)) -> Result<Fornax, Error> {
        let (text, config, plan) = (blueprint.text.clone(), blueprint.config.clone(), blueprint.plan.clone());
        let draft_plan = blueprint.draft.as_ref().map(|draft| draft.plan.clone());
        let sight = match (&blueprint.reading, text.tokenizer()) {
            (Ok(reading), Some(tokenizer)) => {
                let eyes: Arc<dyn Sight> = Arc::new(Eyes::open(&blueprint.checkpoint, reading, tokenizer)?);
                Ok(eyes)
            }
            (Ok(_), None) => Err(READS_NO_IMAGES),
            (Err(reason), _) => Err(*reason),
        };
        let text = text.with_sight(sight);
        let (threads, vocab) = (blueprint.place.threads(), text.vocab());
        let mut options = EngineOptions::new(plan.context, clock());
        if !blueprint.drafts {
            options.speculation = Speculation::Off;
        }
        options.prefix_reuse = blueprint.prefix_reuse;
        options.tier =
            blueprint.kv_disk.as_ref().and_then(|disk| disk.open(&blueprint.model, &identity(&blueprint)));
        options.fast_forward = blueprint.fast_forward;
        if let Some(requests_max) = blueprint.queue {
            options.queue =
                QueueLimits { requests_max, tokens_max: plan.context.saturating_mul(requests_max) };
        }
        let (device, kind) = (blueprint.place.words(), blueprint.place.device());
        let (tell, told) = mpsc::channel();
        let counted = Arc::new(Mutex::new(Counted::default()));
        let tell_counted = Arc::clone(&counted);
        let build = move || -> Result<Box<dyn Runner>, Error> {
            let mut progress = |loading| {
                // Nobody listens any more only when the caller is gone, and then nothing is left to report to.
                tell.send(loading).unwrap_or_default();
            };
            let opened = blueprint.place.runner(&blueprint, vocab, &mut progress)?;
            *tell_counted.lock().unwrap_or_else(PoisonError::into_inner) = opened.counted;
            Ok(opened.runner)
        };
        let engine = thread::scope(|scope| {
            let spawned = scope.spawn(|| Engine::spawn(build, options));
            // Ends when the builder is done with its end of the channel.
            for loading in told {
                progress(loading);
            }
            spawned.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        let counted = *counted.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = Shared {
            text,
            config,
            plan,
            draft_plan,
            threads,
            device,
            kind,
            counted,
            grammars: OnceLock::new(),
            engine: Some(engine),
        };
        Ok(Fornax { shared: Arc::new(shared) })
    }

    /// Tokenizer and chat template.
    pub fn text(&self) -> &Text {
        &self.shared.text
    }

    /// The numbers of the model.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// How keys and values are stored.
    pub fn kv_dtype(&self) -> KvDType {
        self.shared.plan.kv.dtype
    }

    /// Most tokens of a request, prompt and answer together.
    pub fn context(&self) -> usize {
        self.shared.plan.context
    }

    /// Requests computed at once.
    pub fn parallel(&self) -> usize {
        self.shared.plan.parallel
    }

    /// Where it is computed.
    pub fn kind(&self) -> Device {
        self.shared.kind
    }

    /// The same in words.
    pub fn device(&self) -> &str {
        &self.shared.device
    }

    /// CPU threads that compute; 0 where it is not the CPU.
    pub fn threads(&self) -> usize {
        self.shared.threads
    }

    /// Of those, the ones that compute a step of few tokens, such as the next token of one request: where nobody said how
    /// many threads there are, as many as were fastest when the model was loaded.
    pub fn threads_for_few(&self) -> usize {
        self.shared.counted.threads_for_few
    }

    /// Bytes by purpose: as planned, and as the allocator counted them when everything was loaded.
    pub fn memory(&self) -> Memory {
        let planned = self.shared.plan.usage();
        let planned = match &self.shared.draft_plan {
            Some(draft) => planned.and(&draft.usage()),
            None => planned,
        };
        Memory { planned, allocated: self.shared.counted.usage }
    }

    /// The plan that it was loaded by.
    pub fn plan(&self) -> &Plan {
        &self.shared.plan
    }

    /// How the engine stands.
    pub fn stats(&self) -> Stats {
        self.handle().stats()
    }

    /// The way into the engine, for whoever speaks in tokens.
    pub fn handle(&self) -> &Handle {
        let (handle, _) = self.shared.engine.as_ref().expect("taken only when dropped");
        handle
    }

    /// Loads a low-rank adapter from a folder as PEFT writes it, while the model runs, into the room that was planned for
    /// it ([`OpenOptions::adapter_room`](crate::OpenOptions::adapter_room)). Returns the number by which requests of the
    /// engine's own kind name it. Messages call it `name`.
    pub fn load_adapter(&self, name: &str, folder: &Path) -> Result<u32, Error> {
        let adapter = Adapter::new(name, AdapterFiles::open(folder)?)?;
        Ok(self.handle().load_adapter(adapter)?)
    }

    /// Lets no request name this adapter any more; `false` where there is none of this number. Those under way keep it.
    pub fn unload_adapter(&self, number: u32) -> bool {
        self.handle().unload_adapter(number)
    }

    /// Compiles forms for this model's vocabulary.
    pub fn grammars(&self) -> Result<&Arc<Grammars>, Error> {
        let text = &self.shared.text;
        let tokenizer: &Arc<Tokenizer> = text.tokenizer().ok_or(Error::NoTokenizer)?;
        let make = || {
            let mut vocabulary = vocabulary(tokenizer, text.vocab());
            // An encoder ends no answer and is asked for no form; the compiler wants an end all the same.
            if self.handle().capacity().encodes && vocabulary.end_tokens.is_empty() {
                vocabulary.end_tokens.push(0);
            }
            Grammars::new(vocabulary).map(Arc::new)
        };
        let made = self.shared.grammars.get_or_init(make);
        made.as_ref().map_err(|error| Error::Form(error.clone()))
    }

    /// Answers a request with one choice.
    pub fn generate(&self, request: &Request) -> Result<Completion, Error> {
        self.complete(request, &mut |_| ControlFlow::Continue(()))
    }

    /// The same, handing out text as it is made. The pieces joined are the completion's text; breaking cancels.
    pub fn stream(
        &self,
        request: &Request,
        mut text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Completion, Error> {
        self.complete(request, &mut |event| match event {
            Event::Text(piece) => text(piece),
            _ => ControlFlow::Continue(()),
        })
    }

    /// The same, reporting as it goes; `report` cancels by breaking, also while nothing comes.
    pub fn complete(
        &self,
        request: &Request,
        report: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Completion, Error> {
        let before = self.stats().prompt_tokens;
        let mut answers = self.submit(&Request { choices: 1, ..request.clone() })?;
        let mut answer = answers.pop().expect("one choice, one answer");
        let total = answer.prompt_tokens();
        let (mut tokens, mut cached) = (0, 0);
        loop {
            let event = match answer.next_within(LOOK_UP) {
                Err(_) if tokens > 0 => Event::Waiting,
                Err(_) => {
                    let meanwhile = self.stats().prompt_tokens.saturating_sub(before);
                    let meanwhile = usize::try_from(meanwhile).unwrap_or(usize::MAX);
                    Event::Prompt { computed: meanwhile.saturating_add(cached).min(total), total }
                }
                Ok(None) => return Err(Error::Cancelled),
                Ok(Some(part)) => match part? {
                    Part::End(completion) => return whole(completion),
                    Part::Text(text) => {
                        heard(report(Event::Text(&text)))?;
                        continue;
                    }
                    Part::Thought(text) => {
                        heard(report(Event::Thought(&text)))?;
                        continue;
                    }
                    Part::Call { name } => {
                        heard(report(Event::Call(&name)))?;
                        continue;
                    }
                    Part::Arguments(text) => {
                        heard(report(Event::Arguments(&text)))?;
                        continue;
                    }
                    Part::Token(_) => {
                        tokens += 1;
                        // Reported even when no text comes of it: whoever listens may want to stop.
                        Event::Text("")
                    }
                    Part::Started { cached_tokens, .. } => {
                        cached = cached_tokens;
                        continue;
                    }
                },
            };
            heard(report(event))?;
        }
    }

    /// Answers a request with all its choices, which are computed together as far as [`OpenOptions::parallel`] allows.
    /// `report` cancels them by breaking.
    pub fn complete_all(
        &self,
        request: &Request,
        report: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<Completion>, Error> {
        let mut answers = self.submit(request)?;
        let mut completions: Vec<Option<Completion>> = answers.iter().map(|_| None).collect();
        while completions.iter().any(Option::is_none) {
            for (answer, completion) in answers.iter_mut().zip(&mut completions) {
                // In turn and not one after the other: a stop string must cancel its choice at once.
                while completion.is_none() {
                    match answer.next_within(LOOK_UP / 10) {
                        Err(_) => break,
                        Ok(None) => return Err(Error::Cancelled),
                        Ok(Some(part)) => {
                            if let Part::End(end) = part? {
                                *completion = Some(whole(end)?);
                            }
                        }
                    }
                }
                if report().is_break() {
                    return Err(Error::Cancelled);
                }
            }
        }
        Ok(completions.into_iter().flatten().collect())
    }

    /// What the model makes of each prompt, which is at least one token, in their order; as many are computed together
    /// as [`OpenOptions::parallel`] allows. `report` is told how many are done, and cancels by breaking.
    pub fn embed(
        &self,
        prompts: &[Vec<u32>],
        report: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Vec<Vec<f32>>, Error> {
        let mut waiting = prompts.iter();
        let mut asked = VecDeque::new();
        let mut embeddings = Vec::with_capacity(prompts.len());
        loop {
            while asked.len() < self.parallel()
                && let Some(prompt) = waiting.next()
            {
                let request = fornax_engine::Request {
                    embeds: true,
                    ..fornax_engine::Request::new(prompt.clone(), 0, Sampling::greedy())
                };
                asked.extend(self.handle().submit(request)?);
            }
            // In turn: those behind are computed meanwhile.
            let Some(reply) = asked.front_mut() else { return Ok(embeddings) };
            match reply.recv_timeout(LOOK_UP) {
                Err(_) => {}
                Ok(Some(fornax_engine::Event::Embedding(values))) => embeddings.push(values),
                Ok(Some(fornax_engine::Event::Failed(failure))) => return Err(failed(failure)),
                Ok(Some(_)) => {}
                Ok(None) => drop(asked.pop_front()),
            }
            if report(embeddings.len()).is_break() {
                return Err(Error::Cancelled);
            }
        }
    }

    /// Refuses what [`submit`](Fornax::submit) would refuse of the request itself, without computing anything.
    pub fn check(&self, request: &Request) -> Result<(), Error> {
        Ok(self.prepare(request, false)?.request.check(&self.handle().capacity())?)
    }

    /// Hands a request to the engine, or says at once why not: one answer for each choice, in the order of their
    /// numbers.
    pub fn submit(&self, request: &Request) -> Result<Vec<Answer>, Error> {
        let started = Instant::now();
        let ask = self.prepare(request, true)?;
        let wants_logprobs = ask.request.sampling.top_logprobs.is_some();
        let answers = fornax_chat::Answer::submit(self.handle(), self.shared.text.tokenizer(), ask)?;
        let answer = |inner| Answer::new(self.clone(), inner, wants_logprobs, started);
        Ok(answers.into_iter().map(answer).collect())
    }

    /// The request in tokens, as the engine takes it, and how its answers are read. Its pictures are looked at where that
    /// is asked for.
    fn prepare(&self, request: &Request, looks: bool) -> Result<Ask, Error> {
        if self.handle().capacity().encodes {
            return Err(Error::Embeds);
        }
        check_stops(request)?;
        let text = &self.shared.text;
        let (prompt, shown, form, reading) = match request.question() {
            None => (text.request_tokens(request)?, Vec::new(), request.form.clone(), None),
            Some(question) => {
                let grammars = if request.tools.is_some() { Some(self.grammars()?) } else { None };
                let compile = |form: &_| grammars.expect("only tools are held to forms").compile(form);
                let prepared = question.prepare(text.model()?, &compile)?;
                text.check_tokens(&prepared.prompt)?;
                let reading = request.has_parts().then_some(prepared.reading);
                (prepared.prompt, prepared.shown, prepared.form.map(|(_, form)| form), reading)
            }
        };
        if form.is_some() && !request.stop.is_empty() {
            return Err(Error::StopInForm);
        }
        let max_tokens = self.room(prompt.len(), request.max_tokens)?;
        let mut sampling = request.sampling.clone();
        if sampling.min_tokens as usize > max_tokens {
            let value = sampling.min_tokens.to_string();
            return Err(Refusal::Parameter { name: "min_tokens", value, wanted: "at most max_tokens" }.into());
        }
        if let Some(tokenizer) = text.tokenizer().filter(|_| !request.ignore_eos) {
            sampling.end_tokens.extend_from_slice(tokenizer.end_tokens());
        }
        // Last: everything else is known to be right, and the prompt to fit.
        let pieces = match &text.sight() {
            Ok(sight) if looks => {
                shown.iter().map(|shown| shown.look(&**sight, None, &|| true)).collect::<Result<_, _>>()?
            }
            _ => Vec::new(),
        };
        let engine = fornax_engine::Request {
            pieces,
            seed: request.seed.unwrap_or_else(random_seed),
            grammar: form.as_ref().map(|form| self.grammar(form)).transpose()?,
            choices: request.choices,
            prompt_logprobs: request.prompt_logprobs,
            ..fornax_engine::Request::new(prompt, max_tokens, sampling)
        };
        Ok(Ask {
            stops: StopStrings::new(request.stop.iter().map(String::as_str))?,
            // Otherwise the prompt is the text's beginning, so a space at the start is its own.
            starts_text: matches!(request.prompt, Prompt::Chat(_)),
            reading,
            tells_tokens: true,
            ..Ask::new(engine)
        })
    }

    fn grammar(&self, form: &Form) -> Result<Grammar, Error> {
        self.grammars()?.compile(form).map_err(Error::Form)
    }

    /// How many tokens may follow a prompt of this many: as many as asked for, else what is left of the context. What
    /// does not fit is refused here, with counts, and never cut.
    pub fn room(&self, prompt: usize, max_tokens: Option<usize>) -> Result<usize, Error> {
        let (context, trained) = (self.context(), self.plan().context_trained);
        let left = context.saturating_sub(prompt);
        match max_tokens {
            _ if prompt > context => Err(Error::PromptTooLong { prompt, context, trained }),
            None | Some(1..) if left == 0 => Err(Error::PromptTooLong { prompt, context, trained }),
            Some(max_tokens) if max_tokens > left => {
                Err(Error::RequestTooLong { prompt, max_tokens, context, left, trained })
            }
            Some(max_tokens) => Ok(max_tokens),
            None => Ok(left),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some((handle, thread)) = self.engine.take() {
            drop(handle);
            // The memory is free when this returns; an engine that panicked has said so to every caller already.
            drop(thread.join());
        }
    }
}

fn clock() -> Clock {
    let start = Instant::now();
    Arc::new(move || start.elapsed())
}

/// An answer in a form is whole or it is none.
fn whole(completion: Completion) -> Result<Completion, Error> {
    match completion.finish {
        Finish::Truncated => Err(Error::OutputTruncated { tokens: completion.tokens.len() }),
        Finish::Stop | Finish::Length => Ok(completion),
    }
}

fn check_stops(request: &Request) -> Result<(), Error> {
    if request.stop.len() > STOPS_MAX {
        return Err(Error::TooManyStops { stops: request.stop.len(), most: STOPS_MAX });
    }
    if let Some((index, stop)) = request.stop.iter().enumerate().find(|(_, stop)| stop.len() > STOP_BYTES_MAX)
    {
        return Err(Error::StopTooLong { index, bytes: stop.len(), most: STOP_BYTES_MAX });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fornax_compute::Sampling;
    use fornax_compute::cpu::Activations;

    use super::*;
    use crate::{Choice, Definition, Message, Thinking, Tools, random_model};

    fn path() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama")
    }

    fn tiny() -> Fornax {
        Fornax::open(path()).unwrap()
    }

    fn eight() -> Request {
        let ids = (0..40).map(|i| i * 7 % 120).collect();
        Request { max_tokens: Some(8), ..Request::tokens(ids) }
    }

    fn carry_on(_: Event<'_>) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    #[test]
    fn what_is_still_in_the_cache_is_not_computed_again_and_changes_nothing() {
        let model = tiny();
        let first = model.generate(&eight()).unwrap();
        let second = model.generate(&eight()).unwrap();
        // Whole pages of 32 tokens are shared.
        assert_eq!((first.cached_tokens, second.cached_tokens), (0, 32));
        assert_eq!(first.tokens, second.tokens);
    }

    #[test]
    fn many_callers_at_once_get_what_each_gets_alone() {
        let request = |seed| Request {
            seed: Some(seed),
            sampling: Sampling { temperature: 1.5, ..Sampling::greedy() },
            ..eight()
        };
        let wanted: Vec<Vec<u32>> =
            (0..6).map(|seed| tiny().generate(&request(seed)).unwrap().tokens).collect();
        let model = OpenOptions::new(path()).parallel(3).open().unwrap();
        let got: Vec<Vec<u32>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..6)
                .map(|seed| {
                    let (model, request) = (model.clone(), request(seed));
                    scope.spawn(move || model.generate(&request).unwrap().tokens)
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(got, wanted);
        assert_ne!(got[0], got[1]);
    }

    #[test]
    fn choices_differ_and_the_first_is_the_single_answer() {
        let model = OpenOptions::new(path()).parallel(2).open().unwrap();
        let request = Request {
            seed: Some(3),
            choices: 4,
            sampling: Sampling { temperature: 1.5, ..Sampling::greedy() },
            ..eight()
        };
        let all = model.complete_all(&request, &mut || ControlFlow::Continue(())).unwrap();
        assert_eq!(all.len(), 4);
        assert_eq!(all[0].tokens, model.generate(&request).unwrap().tokens);
        assert!(all[1..].iter().all(|other| other.tokens != all[0].tokens));
        assert_eq!(all[0].seed, 3);
        // Each says the seed by which it comes again.
        let again = Request { seed: Some(all[2].seed), choices: 1, ..request };
        assert_eq!(model.generate(&again).unwrap().tokens, all[2].tokens);
    }

    #[test]
    fn a_prompt_is_scored_without_an_answer() {
        let ids: Vec<u32> = (0..40).map(|i| i * 7 % 120).collect();
        let request =
            Request { max_tokens: Some(0), prompt_logprobs: Some(2), ..Request::tokens(ids.clone()) };
        // Also where it fills the context.
        let scored = OpenOptions::new(path()).context(40).open().unwrap().generate(&request).unwrap();
        assert_eq!((scored.tokens.len(), scored.finish), (0, Finish::Length));
        let told: Vec<u32> = scored.prompt_logprobs.iter().map(|(token, _)| *token).collect();
        assert_eq!(told, ids[1..]);
        let mut evaluator = OpenOptions::new(path()).evaluator(8, &mut |_| {}).unwrap();
        let mut wanted = Vec::new();
        let visit = &mut |position: usize, row: &[f32]| {
            let Some(&next) = ids.get(position + 1) else { return ControlFlow::Continue(()) };
            let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
            wanted.push(f64::from(row[next as usize]) - sum.ln());
            ControlFlow::Continue(())
        };
        evaluator.logits(&ids, false, visit).unwrap();
        for ((_, opinion), wanted) in scored.prompt_logprobs.iter().zip(wanted) {
            assert!((f64::from(opinion.logprob.unwrap()) - wanted).abs() < 1e-3, "{opinion:?} {wanted}");
            assert_eq!(opinion.top.len(), 2);
        }
    }

    #[test]
    fn breaking_cancels_and_the_next_request_is_unharmed() {
        let model = tiny();
        let whole = model.generate(&eight()).unwrap().tokens;
        let mut left = 3;
        let cancelled = model.complete(&eight(), &mut |_| {
            left -= 1;
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(cancelled, Err(Error::Cancelled)));
        assert_eq!(model.complete(&eight(), &mut carry_on).unwrap().tokens, whole);
        // What was cancelled holds no page, once the turn that ended it is over.
        let deadline = Instant::now() + Duration::from_secs(30);
        while model.stats().running > 0 || model.stats().pages[0].referenced > 0 {
            assert!(Instant::now() < deadline, "{:?}", model.stats());
            thread::yield_now();
        }
    }

    #[test]
    fn a_stop_string_beyond_the_bound_is_refused_with_its_size() {
        let stop = |stop: Vec<String>| tiny().generate(&Request { stop, ..eight() }).unwrap_err().to_string();
        let said = stop(vec!["x".to_owned(), "y".repeat(10 << 20)]);
        assert!(said.contains("stop string 1 has 10485760 bytes"), "{said}");
        assert!(stop(vec!["x".to_owned(); 100]).contains("100 stop strings"));
        assert!(stop(vec![String::new()]).contains("empty"));
    }

    #[test]
    fn what_cannot_be_answered_is_refused_by_name() {
        let model = tiny();
        let check = |request: Request, words: &str| {
            let said = model.generate(&request).unwrap_err().to_string();
            assert!(said.contains(words), "{said:?} lacks {words:?}");
        };
        check(Request { max_tokens: Some(0), ..eight() }, "max_tokens is 0");
        let long = Sampling { min_tokens: 9, ..Sampling::greedy() };
        check(Request { sampling: long, ..eight() }, "min_tokens is 9; wanted at most max_tokens");
        let hot = Sampling { temperature: f32::NAN, ..Sampling::greedy() };
        check(Request { sampling: hot, ..eight() }, "temperature is NaN");
        check(Request::tokens(vec![]), "empty");
        let all =
            model.complete_all(&Request { choices: 1000, ..eight() }, &mut || ControlFlow::Continue(()));
        assert!(all.unwrap_err().to_string().contains("n is 1000"));
        check(Request { form: Some(Form::JsonObject), ..eight() }, "no tokenizer");
    }

    /// A model of random weights whose tokenizer spells every text, with a chat template.
    fn chatting(folder: &tempfile::TempDir, template: &str) -> Fornax {
        OpenOptions::new(random_file(folder)).chat_template(template.to_owned()).open().unwrap()
    }

    /// Its file.
    fn random_file(folder: &tempfile::TempDir) -> std::path::PathBuf {
        let path = folder.path().join("random.gguf");
        let go_on = &mut |_: u64, _: u64| ControlFlow::Continue(());
        random_model::write_repeating(&path, &random_model::SHAPES[0], random_model::Types::Q4_K_M, go_on)
            .unwrap();
        path
    }

    #[test]
    fn a_call_comes_out_typed_and_its_result_goes_back() {
        let folder = tempfile::tempdir().unwrap();
        let template = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for message in messages %}\
            [{{ message.role }}]{{ message.name }} {{ message.content }}\
            {% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}[assistant]";
        let model = chatting(&folder, template);
        let zone = serde_json::json!({"enum": ["UTC", "CET"]});
        let parameters = serde_json::json!({"type": "object", "properties": {"zone": zone}, "required": ["zone"], "additionalProperties": false});
        let definition =
            Definition { name: "get_time".to_owned(), parameters: Some(parameters), ..Definition::default() };
        let tools = |choice| Tools::new(std::slice::from_ref(&definition), &choice).unwrap();
        let mut messages = vec![Message::user("What time is it?")];
        let request = Request {
            tools: tools(Choice::Required),
            max_tokens: Some(64),
            ..Request::chat(messages.clone())
        };
        let mut said = Vec::new();
        let called = model.complete(&request, &mut |event| {
            if let Event::Call(name) | Event::Arguments(name) = event {
                said.push(name.to_owned());
            }
            ControlFlow::Continue(())
        });
        let called = called.unwrap();
        let [call] = &called.calls[..] else { panic!("one call: {called:?}") };
        assert_eq!((call.name.as_str(), called.text.as_str()), ("get_time", ""));
        assert!(["UTC", "CET"].contains(&call.arguments["zone"].as_str().unwrap()), "{call:?}");
        assert_eq!(said.concat(), format!("get_time{}", serde_json::json!(call.arguments)));
        messages.push(called.message());
        messages.push(Message::result(call.id.clone().unwrap(), "12:00"));
        let next = Request { tools: tools(Choice::Auto), max_tokens: Some(4), ..Request::chat(messages) };
        let prompt = model.text().tokenizer().unwrap().decode(&model.text().request_tokens(&next).unwrap());
        assert!(prompt.contains("[tool]get_time 12:00[assistant]"), "{prompt}");
        assert!(model.generate(&next).is_ok());
        // Without tools in the template nothing is guessed.
        let folder = tempfile::tempdir().unwrap();
        let refused = chatting(&folder, "{{ messages[0].content }}").generate(&request).unwrap_err();
        assert!(refused.to_string().contains("does not tell the model of tools"), "{refused}");
    }

    #[test]
    fn thinking_ends_at_its_budget() {
        let folder = tempfile::tempdir().unwrap();
        let template =
            "{% for message in messages %}{{ message.content }}</think>{% endfor %}[assistant]<think>\n";
        let model = chatting(&folder, template);
        let answer = |budget| {
            let request = Request {
                max_tokens: Some(48),
                ignore_eos: true,
                parts: true,
                thinking: Thinking { budget, effort: None },
                ..Request::chat(vec![Message::user("Why?")])
            };
            model.generate(&request).unwrap()
        };
        let free = answer(None);
        assert!(!free.thought.is_empty() && free.text.is_empty(), "{free:?}");
        let short = answer(Some(8));
        assert!(!short.thought.is_empty() && !short.text.is_empty(), "{short:?}");
        assert!(free.thought.starts_with(&short.thought), "{short:?}");
        assert_eq!((short.tokens.len(), short.finish), (48, Finish::Length));
        let none = answer(Some(0));
        assert!(none.thought.is_empty() && !none.text.is_empty(), "{none:?}");
    }

    #[test]
    fn private_inference_refuses_what_would_ask_anew_in_the_middle_of_an_answer() {
        let folder = tempfile::tempdir().unwrap();
        let template = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{{ messages[0].content }}</think>\
                        [assistant]<think>\n";
        let path = random_file(&folder);
        let model = |adapt: fn(OpenOptions) -> OpenOptions| {
            let options = OpenOptions::new(&path).private(crate::Private::Reference).context(256);
            adapt(options.chat_template(template.to_owned())).open().unwrap()
        };
        let (closed, open) = (model(|options| options), model(|options| options.asks_anew(true)));
        // Four tokens are too few for most calls, which is no refusal.
        let refusal = |answer: Result<Completion, Error>| match answer {
            Ok(_) | Err(Error::OutputTruncated { .. }) => None,
            Err(error) => Some(error.to_string()),
        };
        let asked = |budget, tools| Request {
            max_tokens: Some(4),
            parts: true,
            thinking: Thinking { budget, effort: None },
            tools,
            ..Request::chat(vec![Message::user("Why?")])
        };
        let tools = |strict, choice, parallel| {
            let definition = Definition { name: "get_time".to_owned(), strict, ..Definition::default() };
            Tools::new(&[definition], &choice).unwrap().map(|tools| tools.parallel(parallel))
        };
        let leaking = [
            (asked(Some(8), None), "the thinking budget: "),
            (asked(None, tools(true, Choice::Auto, None)), "tools: "),
            (asked(None, tools(false, Choice::Required, Some(true))), "tools: "),
        ];
        for (request, place) in leaking {
            let refused = closed.generate(&request).unwrap_err().to_string();
            assert!(refused.starts_with(place) && refused.contains("--ask-anew"), "{refused}");
            assert_eq!(refusal(open.generate(&request)), None);
        }
        let harmless = [
            asked(None, None),
            asked(Some(0), None),
            asked(None, tools(false, Choice::Auto, Some(true))),
            asked(None, tools(true, Choice::Required, None)),
        ];
        for request in harmless {
            assert_eq!(refusal(closed.generate(&request)), None, "{:?}", request.tools);
        }
    }

    #[test]
    fn the_plan_is_what_the_allocator_counts_for_every_purpose() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
        for name in ["llama", "llama.gguf", "qwen2.gguf", "mistral", "llama-bias.gguf"] {
            for (parallel, activations) in [(1, Activations::Integer), (3, Activations::Float)] {
                let options =
                    OpenOptions::new(fixtures.join(name)).parallel(parallel).activations(activations);
                let planned = options.plan().unwrap().plan;
                let memory = options.open().unwrap().memory();
                assert_eq!(memory.planned, planned.usage(), "{name}");
                assert_eq!(memory.allocated, memory.planned, "{name}");
            }
        }
    }

    #[test]
    fn what_fits_to_the_byte_is_loaded_and_what_does_not_is_refused() {
        let plan = |limit| OpenOptions::new(path()).memory_limit(limit).plan().unwrap().plan;
        // The margin is at its least for every limit here, so that the total does not move with the limit.
        let needed = plan(256 << 20).total_bytes();
        assert!(OpenOptions::new(path()).memory_limit(needed).open().is_ok());
        let refused = OpenOptions::new(path()).memory_limit(needed - 1).open();
        assert!(matches!(refused, Err(Error::DoesNotFit { needed: n, .. }) if n == needed));
        // The pool gives way first, down to one context.
        let wide = |limit| OpenOptions::new(path()).parallel(64).memory_limit(limit).plan().unwrap().plan;
        let whole = wide(600 << 20);
        assert_eq!(whole.pool_tokens(), whole.pool_tokens_wanted());
        let tight = wide(whole.total_bytes() - 100_000);
        assert!(tight.fits() && tight.pool_tokens() < tight.pool_tokens_wanted(), "{tight:?}");
        assert!(tight.pool_tokens() >= tight.context);
    }
}
