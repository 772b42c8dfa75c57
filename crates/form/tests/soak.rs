//! A soak: mixed requests from several callers at once on a real backend, with steps that fail on purpose. Whatever
//! becomes of each, it ends exactly once, nothing of it stays, and memory does not grow.
//!
//! Small by default, on a tiny model. `cargo xtask prove soak` runs it at full scale through two variables: a GGUF
//! file with a byte-level vocabulary (`FORNAX_SOAK_MODEL`) and how many requests (`FORNAX_SOAK_REQUESTS`).
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![expect(clippy::print_stdout, reason = "the proof reads what is printed")]

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use fornax_compute::{
    Batch, Error, KvDType, KvGroup, KvSpec, Memory, Output, SampleRow, Sampling,
    cpu::{Cpu, CpuOptions},
};
use fornax_engine::simulation::Dice;
use fornax_engine::{
    EndReason, Engine, EngineOptions, Event, Grammar, Handle, Local, LocalParts, QueueLimits, Refusal, Reply,
    Request, Runner, StepLimits,
};
use fornax_form::{Form, Grammars, Vocabulary};
use fornax_format::{Checkpoint, Metadata};
use fornax_model::{Config, Limits};
use serde_json::json;

const SEED: u64 = 1;

/// Tokens of a request.
const CONTEXT: usize = 256;

/// Sequences at once.
const SLOTS: usize = 6;

/// Callers at once: more than slots, so that some wait.
const CALLERS: usize = 8;

/// Pages of the pool: too few for all slots at their longest, so that sequences give way, and few enough to be full
/// of old prefixes long before request 100.
const PAGES: usize = 11;

/// Every so many steps, one goes wrong.
const FAULT_EVERY: usize = 40;

/// What a request is, for the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Short,
    Long,
    /// Begins with pages that others have computed.
    Sharing,
    /// Dropped after some tokens.
    Cancelled,
    /// Dropped before anything came.
    Disconnected,
    /// Refused at the door.
    Refused,
    Structured,
    /// Several choices.
    Many,
}

#[test]
fn mixed_requests_leave_nothing_behind() {
    let model = std::env::var_os("FORNAX_SOAK_MODEL").map(PathBuf::from);
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama.gguf");
    let requests = std::env::var("FORNAX_SOAK_REQUESTS").map_or(40, |text| text.parse().unwrap());
    // Panics on purpose are part of the soak.
    std::panic::set_hook(Box::new(|info| {
        if !info.to_string().contains("on purpose") {
            eprintln!("{info}");
        }
    }));
    let soak = Soak::start(&model.unwrap_or(fixture), requests);
    let report = soak.run();
    drop(std::panic::take_hook());
    report.print();
    if requests >= 1000 {
        report.assert_flat();
    }
}

/// The engine, what callers ask of it, and what they saw.
struct Soak {
    handle: Handle,
    engine: thread::JoinHandle<()>,
    requests: usize,
    vocab: u32,
    end_tokens: Vec<u32>,
    /// Prompts begin with a piece of one of these.
    stories: Vec<Vec<u32>>,
    forms: Vec<Grammar>,
    next: AtomicUsize,
    seen: Mutex<Seen>,
}

/// What callers saw.
#[derive(Default)]
struct Seen {
    kinds: BTreeMap<Kind, usize>,
    accepted: u64,
    ended: u64,
    failed: u64,
    dropped: u64,
    tokens: u64,
    /// Resident bytes after each request.
    resident: Vec<u64>,
}

struct Report {
    seen: Seen,
    stats: fornax_engine::Stats,
    elapsed: Duration,
}

impl Soak {
    fn start(model: &Path, requests: usize) -> Soak {
        let checkpoint = Checkpoint::open(model).unwrap();
        let config = Config::read(&checkpoint).unwrap();
        let Checkpoint::Gguf(gguf) = &checkpoint else { panic!("a GGUF file is wanted") };
        let (bytes, end_tokens) = token_bytes(gguf.metadata(), config.vocab);
        let vocab = u32::try_from(bytes.len()).unwrap();
        let ids: HashMap<Vec<u8>, u32> = (0..)
            .zip(&bytes)
            .filter(|(_, bytes)| !bytes.is_empty())
            .map(|(id, bytes)| (bytes.clone(), id))
            .collect();
        let ids = Arc::new(ids);
        let stories = STORIES.iter().map(|story| encoded(&ids, story.repeat(4).as_bytes())).collect();
        let encode = Arc::new(move |bytes: &[u8]| encoded(&ids, bytes));
        let grammars = Grammars::new(Vocabulary { bytes, end_tokens: end_tokens.clone(), encode }).unwrap();
        let forms = forms().iter().map(|form| grammars.compile(form).unwrap()).collect();
        let begin = Instant::now();
        let options = EngineOptions {
            queue: QueueLimits { requests_max: 64, tokens_max: 64 * CONTEXT },
            ..EngineOptions::new(CONTEXT, Arc::new(move || begin.elapsed()))
        };
        let build = move || -> Result<Box<dyn Runner>, Error> {
            Ok(Box::new(Faulty { inner: local(&checkpoint, &config), steps: 0, fault: false }))
        };
        let (handle, engine) = Engine::spawn(build, options).unwrap();
        let (next, seen) = (AtomicUsize::new(0), Mutex::default());
        Soak { handle, engine, requests, vocab, end_tokens, stories, forms, next, seen }
    }

    /// All callers to their ends, then the books.
    fn run(self) -> Report {
        let begin = Instant::now();
        thread::scope(|scope| {
            for _ in 0..CALLERS {
                scope.spawn(|| {
                    loop {
                        let index = self.next.fetch_add(1, Ordering::Relaxed);
                        if index >= self.requests {
                            return;
                        }
                        self.call(index);
                    }
                });
            }
        });
        // Dropped requests are noticed at the next turn: wait on the state.
        let idle =
            |stats: &fornax_engine::Stats| stats.running + stats.preempted + stats.requests_waiting == 0;
        let deadline = Instant::now() + Duration::from_secs(120);
        while !idle(&self.handle.stats()) || self.handle.stats().step_running_for.is_some() {
            assert!(Instant::now() < deadline, "sequences stay behind: {:?}", self.handle.stats());
            thread::yield_now();
        }
        let stats = self.handle.stats();
        drop(self.handle);
        self.engine.join().unwrap();
        let seen = self.seen.into_inner().unwrap();
        let ended = stats.ended;
        assert_eq!(stats.tokens_waiting, 0);
        assert!(
            stats.pages.iter().all(|pages| pages.referenced == 0),
            "pages stay behind: {:?}",
            stats.pages
        );
        let all = ended.end_token + ended.form_complete + ended.length + ended.cancelled + ended.failed;
        assert_eq!(all, seen.accepted, "every choice ends exactly once");
        assert_eq!(
            seen.ended + seen.failed + seen.dropped,
            seen.accepted,
            "every caller was told, or had gone"
        );
        Report { seen, stats, elapsed: begin.elapsed() }
    }

    /// One request, read to its end or dropped on the way.
    fn call(&self, index: usize) {
        let mut dice = Dice::new(SEED.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ index as u64);
        let kind = match dice.below(100) {
            0..24 => Kind::Short,
            24..31 => Kind::Long,
            31..45 => Kind::Sharing,
            45..60 => Kind::Cancelled,
            60..70 => Kind::Disconnected,
            70..75 => Kind::Refused,
            75..88 => Kind::Structured,
            _ => Kind::Many,
        };
        let request = self.request(kind, &mut dice);
        // Nobody else reads these replies, so a full queue only means: again, when there is room.
        let replies = loop {
            match self.handle.submit(request.clone()) {
                Ok(replies) => break replies,
                Err(Refusal::QueueFull { .. }) => thread::yield_now(),
                Err(_) if kind == Kind::Refused => break Vec::new(),
                Err(other) => panic!("request {index}, {kind:?}: {other}"),
            }
        };
        assert_eq!(replies.is_empty(), kind == Kind::Refused);
        let keep = match kind {
            Kind::Cancelled => dice.below(10),
            Kind::Disconnected => 0,
            _ => usize::MAX,
        };
        let mut seen = Seen { accepted: replies.len() as u64, ..Seen::default() };
        for reply in replies {
            read(reply, &request, keep, &mut seen);
        }
        let mut all = self.seen.lock().unwrap();
        *all.kinds.entry(kind).or_default() += 1;
        all.accepted += seen.accepted;
        all.ended += seen.ended;
        all.failed += seen.failed;
        all.dropped += seen.dropped;
        all.tokens += seen.tokens;
        all.resident.push(resident());
    }

    fn request(&self, kind: Kind, dice: &mut Dice) -> Request {
        let (prompt_len, max_tokens) = match kind {
            Kind::Long => (dice.between(60, 160), dice.between(16, 48)),
            Kind::Sharing => (dice.between(70, 80), dice.between(1, 10)),
            Kind::Refused => (dice.between(1, 20), CONTEXT),
            Kind::Structured => (dice.between(1, 20), dice.between(2, 30)),
            _ => (dice.between(1, 24), dice.between(1, 10)),
        };
        // Two pages of one of two stories are enough to be found again.
        let (stories, shared) = match kind {
            Kind::Sharing => (2, 68),
            _ => (self.stories.len(), dice.below(prompt_len + 1)),
        };
        let story = &self.stories[dice.below(stories)];
        let mut prompt: Vec<u32> = story.iter().copied().cycle().take(shared).collect();
        prompt.extend((shared..prompt_len).map(|_| u32::try_from(dice.below(self.vocab as usize)).unwrap()));
        let sampling = Sampling {
            temperature: if dice.below(2) == 0 { 0.0 } else { 0.8 },
            top_p: 0.95,
            repetition_penalty: if dice.below(4) == 0 { 1.1 } else { 1.0 },
            end_tokens: self.end_tokens.clone(),
            ..Sampling::greedy()
        };
        Request {
            seed: dice.any(),
            grammar: (kind == Kind::Structured).then(|| self.forms[dice.below(self.forms.len())].clone()),
            choices: if kind == Kind::Many { 3 } else { 1 },
            priority: [0, 0, 0, -1, 1][dice.below(5)],
            salt: ["", "", "", "tenant"][dice.below(4)].into(),
            ..Request::new(prompt, max_tokens, sampling)
        }
    }
}

/// Reads a reply, all of it or so many events, and checks that it has exactly one end.
fn read(mut reply: Reply, request: &Request, keep: usize, seen: &mut Seen) {
    let mut tokens = 0;
    for _ in 0..keep {
        let event = reply.recv().expect("an end comes before nothing does");
        match &event {
            Event::Token { .. } => tokens += 1,
            Event::End { reason, usage } => {
                assert_eq!(usage.generated_tokens, tokens);
                assert!(tokens <= request.max_tokens);
                assert_ne!(*reason, EndReason::Cancelled, "nobody cancelled");
                assert_eq!(reply.recv(), None, "an event after the last");
                seen.ended += 1;
                seen.tokens += tokens as u64;
                return;
            }
            Event::Failed(failure) => {
                assert!(failure.to_string().contains("on purpose"), "{failure}");
                assert_eq!(reply.recv(), None, "an event after the last");
                seen.failed += 1;
                return;
            }
            _ => {}
        }
    }
    seen.dropped += 1;
}

impl Report {
    /// Facts, one to a line, as `name: value`.
    fn print(&self) {
        let (seen, stats) = (&self.seen, &self.stats);
        let kinds: Vec<String> = seen.kinds.iter().map(|(kind, count)| format!("{count} {kind:?}")).collect();
        println!("seed: {SEED}");
        println!("requests: {} ({})", seen.resident.len(), kinds.join(", ").to_lowercase());
        println!(
            "choices: {} accepted, {} answered, {} failed on purpose, {} dropped by their callers, each ended once",
            seen.accepted, seen.ended, seen.failed, seen.dropped
        );
        println!(
            "engine: {} steps, {} tokens, {} of {} prompt tokens from cached prefixes, {} preemptions",
            stats.steps, stats.generated_tokens, stats.prefix_hits, stats.prefix_queries, stats.preemptions
        );
        println!("left behind: 0 sequences, 0 referenced pages");
        if let [first, .., last] = self.medians()[..] {
            let most = self.medians().into_iter().max().unwrap_or(last);
            let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
            println!(
                "resident memory: median {} of requests 101 to 200, {} of the last 100, {} the highest such median",
                mib(first),
                mib(last),
                mib(most)
            );
            println!(
                "bound: no median of 100 requests is more than 1 % and 1 MiB above that of requests 101 to 200"
            );
        }
        println!("time: {:.0} s", self.elapsed.as_secs_f64());
    }

    /// Medians of resident bytes over a hundred requests each, from request 101 on.
    fn medians(&self) -> Vec<u64> {
        let median = |window: &[u64]| {
            let mut sorted = window.to_vec();
            sorted.sort_unstable();
            sorted[sorted.len() / 2]
        };
        let judged = self.seen.resident.get(100..).unwrap_or_default();
        judged.chunks_exact(100).map(median).collect()
    }

    /// The allocator may still settle by a megabyte; what is kept of every request would be more than that.
    fn assert_flat(&self) {
        let medians = self.medians();
        let bound = medians[0] + medians[0] / 100 + (1 << 20);
        assert!(medians.iter().all(|&median| median <= bound), "memory grew: {medians:?}");
    }
}

/// The real runner, but every so many steps something goes wrong: an error, a panic, an error at the end.
struct Faulty {
    inner: Local<Cpu>,
    steps: usize,
    /// The step under way fails when it is collected.
    fault: bool,
}

impl Runner for Faulty {
    fn launch(&mut self, batch: &Batch) -> Result<(), Error> {
        self.steps += 1;
        if self.steps.is_multiple_of(FAULT_EVERY) {
            match self.steps / FAULT_EVERY % 3 {
                0 => return Err(failure()),
                1 => panic!("a panic on purpose"),
                _ => self.fault = true,
            }
        }
        self.inner.launch(batch)
    }

    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<(), Error> {
        self.inner.sample(rows)
    }

    fn hidden(&mut self, wanted: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        self.inner.hidden(wanted)
    }

    fn collect(&mut self) -> Result<Output, Error> {
        let output = self.inner.collect();
        if std::mem::take(&mut self.fault) { Err(failure()) } else { output }
    }

    fn reset(&mut self) {
        self.inner.reset();
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn limits(&self) -> StepLimits {
        self.inner.limits()
    }

    fn groups(&self) -> &[KvGroup] {
        self.inner.groups()
    }

    fn vocab(&self) -> u32 {
        self.inner.vocab()
    }
}

fn failure() -> Error {
    Error::Unsupported { what: "a failure on purpose".to_owned(), backend: "soak" }
}

fn local(checkpoint: &Checkpoint, config: &Config) -> Local<Cpu> {
    let tokens_max = 128;
    let backend =
        Cpu::new(CpuOptions { tokens_max, slots: SLOTS, depth: 0, ..CpuOptions::default() }).unwrap();
    let wanted_max = SLOTS + 16;
    let limits = Limits { tokens_max, wanted_max };
    let model = fornax_model::load(checkpoint, config, &backend, limits, &mut |_, _| {}).unwrap();
    let groups = config.kv_groups(PAGES);
    let kv = backend.alloc_kv(&KvSpec { groups: groups.clone(), dtype: KvDType::F16 }).unwrap();
    Local::new(LocalParts {
        backend,
        model,
        kv,
        groups,
        limits: StepLimits { tokens_max, wanted_max, slots: SLOTS },
        depth: 0,
        vocab: u32::try_from(config.vocab).unwrap(),
    })
}

fn forms() -> Vec<Form> {
    let person = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    vec![
        Form::JsonSchema(person),
        Form::JsonSchema(
            json!({"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4}),
        ),
        Form::JsonObject,
        Form::Regex("[0-9]{3}-[0-9]{4}".to_owned()),
        Form::Choice(vec!["yes".to_owned(), "no".to_owned(), "not sure".to_owned()]),
        Form::Grammar("start: \"(\" start \")\" | /[a-z]{1,8}/".to_owned()),
    ]
}

const STORIES: [&str; 4] = [
    "Once upon a time there was a small engine that answered every letter it received. It never lost one. ",
    "The harbour was quiet in the morning, and the first boats came back before anybody had opened a window. ",
    "A list of things to bring: bread, a lamp, two pencils, the blue notebook, and something to sit on. ",
    "In the year that the bridge was built, three engineers wrote down what they had learned from the old one. ",
];

/// Tokens as bytes and the tokens that end an answer. Tiny models have no words: their tokens are letters here.
fn token_bytes(metadata: &Metadata, vocab: usize) -> (Vec<Vec<u8>>, Vec<u32>) {
    if vocab < 1000 {
        let letter = |id: usize| u8::try_from(id + 0x1f).ok().filter(u8::is_ascii).map(|byte| vec![byte]);
        return ((0..vocab).map(|id| letter(id).filter(|_| id > 0).unwrap_or_default()).collect(), vec![0]);
    }
    // Byte-level vocabularies write each byte as a printable character.
    let printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 256..;
    let characters: HashMap<char, u8> = (0..=255_u8)
        .map(|byte| {
            if printable(byte) {
                (byte as char, byte)
            } else {
                (char::from_u32(others.next().unwrap()).unwrap(), byte)
            }
        })
        .collect();
    let kinds = metadata.i32s("tokenizer.ggml.token_type").unwrap();
    let text =
        |token: &String| -> Option<Vec<u8>> { token.chars().map(|c| characters.get(&c).copied()).collect() };
    let tokens = metadata.strings("tokenizer.ggml.tokens").unwrap().iter().zip(kinds.iter());
    // Kind 1 is text; the others are control tokens, which no form contains.
    let bytes = tokens.map(|(token, &kind)| text(token).filter(|_| kind == 1).unwrap_or_default()).collect();
    (bytes, vec![metadata.u32("tokenizer.ggml.eos_token_id").unwrap()])
}

/// The longest token first: not what the model's tokenizer does, but text all the same.
fn encoded(ids: &HashMap<Vec<u8>, u32>, mut bytes: &[u8]) -> Vec<u32> {
    let mut tokens = Vec::new();
    while !bytes.is_empty() {
        let longest = (1..=bytes.len().min(24)).rev().find_map(|len| Some((len, *ids.get(&bytes[..len])?)));
        // A tiny model has no letter for it.
        let (len, token) = longest.unwrap_or((1, 1));
        tokens.push(token);
        bytes = &bytes[len..];
    }
    tokens
}

/// Bytes of this process in memory; 0 where the system does not tell.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
}
