//! A server under test: real sockets, a real engine, and a runner that says what a script says.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    path::Path,
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver},
    },
    time::{Duration, Instant},
};

use fornax_chat::Sight;
use fornax_compute::{Batch, Error, KvGroup, KvKind, Output, SampleFault, SampleRow, Sampled, Sampling};
use fornax_engine::{Engine, EngineOptions, Handle, QueueLimits, Runner, StepLimits};
use fornax_form::{Form, Grammars, Trial, Vocabulary};
use fornax_format::Gguf;
use fornax_jobs::{RunnerOptions, StoreOptions, WebhookOptions};
use fornax_server::{
    Code, Device, Failed, JobsOptions, Keeper, ModelCard, ModelFiles, Offer, Progress, Served, Server,
    ServerOptions,
};
use fornax_text::{ChatTemplate, Special, Tokenizer};
use serde_json::json;
use tokio::{
    net::TcpListener,
    sync::{mpsc as tokio_mpsc, oneshot, watch},
    task::JoinHandle,
};

use crate::client::{Response, get, raw, request};

/// Bytes are tokens of the same number; then the two markers of a chat.
const IM_START: u32 = 256;
const IM_END: u32 = 257;
/// Before, behind and in the place of a gap, for models that fill some.
const GAP: [&str; 3] = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];

/// Tokens of a model that fills none.
const VOCAB: u32 = 258;

/// Knows neither tools nor thoughts.
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Knows both, as Hermes and Qwen write them.
pub(crate) const TOOL_TEMPLATE: &str = "{% if tools %}Tools: {{ tools | tojson }} in <tool_call>{% endif %}\
    {% for message in messages %}<|im_start|>{{ message.role }}\n\
    {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or '' }}\
    {% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}";

/// What the device was last asked to choose by.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Asked {
    pub(crate) seed: u64,
    pub(crate) sampling: Sampling,
}

/// What a test wants of its world.
pub(crate) struct Setup {
    pub(crate) options: ServerOptions,
    /// What every answer says, byte by byte; then it ends. What is asked for anew in an answer's middle says the next act,
    /// if there are several: form feeds stand between them.
    pub(crate) script: String,
    /// The answer fails before this token.
    pub(crate) fails_at: Option<u32>,
    /// Each step waits for a word from here, until the other end is gone.
    pub(crate) gate: Option<Receiver<()>>,
    pub(crate) context: usize,
    pub(crate) queue: QueueLimits,
    pub(crate) stuck_after: Duration,
    /// Loading waits for this.
    pub(crate) load: Option<oneshot::Receiver<Result<(), Failed>>>,
    pub(crate) slots: usize,
    pub(crate) template: &'static str,
    /// Where forms are compiled first.
    pub(crate) trial: Option<Trial>,
    /// Whether the model has tokens for gaps.
    pub(crate) fills: bool,
    /// Whether adapters may be loaded while it runs.
    pub(crate) loads_adapters: bool,
    /// What looks at pictures, if anything does: their rows have one value.
    pub(crate) sight: Option<Arc<dyn Sight>>,
    /// Whether it reads two texts together and answers nothing.
    pub(crate) pairs: bool,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            options: ServerOptions::default(),
            script: "The sky is blue.".to_owned(),
            fails_at: None,
            gate: None,
            context: 4096,
            queue: QueueLimits { requests_max: 256, tokens_max: 1 << 20 },
            stuck_after: Duration::from_secs(60),
            load: None,
            slots: 8,
            template: TEMPLATE,
            trial: None,
            fills: false,
            loads_adapters: false,
            sight: None,
            pairs: false,
        }
    }
}

impl Setup {
    pub(crate) fn saying(script: &str) -> Setup {
        Setup { script: script.to_owned(), ..Setup::default() }
    }

    /// A model that knows tools and thoughts.
    pub(crate) fn skilled(script: &str) -> Setup {
        Setup { template: TOOL_TEMPLATE, ..Setup::saying(script) }
    }
}

/// A setup whose jobs are kept in a folder.
pub(crate) fn keeping(folder: &Path, mut setup: Setup) -> Setup {
    let database = folder.join("jobs.db").to_str().unwrap().to_owned();
    setup.options.jobs = Some(JobsOptions {
        store: StoreOptions { queue_max: 20, ..StoreOptions::new(database) },
        runner: RunnerOptions { patience: Duration::from_millis(20), ..RunnerOptions::default() },
        webhooks: WebhookOptions {
            hosts: vec!["hooks.example".to_owned(), "127.0.0.1".to_owned()],
            ..WebhookOptions::default()
        },
    });
    setup
}

/// A running server.
pub(crate) struct World {
    pub(crate) address: SocketAddr,
    /// A second way into the engine, to see what the server did.
    pub(crate) engine: Handle,
    pub(crate) asked: Arc<Mutex<Option<Asked>>>,
    pub(crate) progress: watch::Sender<Progress>,
    pub(crate) reload: tokio_mpsc::Sender<()>,
    stop: Option<oneshot::Sender<()>>,
    pub(crate) running: JoinHandle<Result<(), fornax_server::Error>>,
}

impl World {
    /// Starts a server; returns when it listens.
    pub(crate) async fn listening(setup: Setup) -> World {
        let Setup {
            options,
            script,
            fails_at,
            gate,
            context,
            queue,
            stuck_after,
            load,
            slots,
            template,
            trial,
            fills,
            loads_adapters,
            sight,
            pairs,
        } = setup;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let began = Instant::now();
        let mut engine_options = EngineOptions::new(context, Arc::new(move || began.elapsed()));
        engine_options.queue = queue;
        engine_options.stuck_after = stuck_after;
        let asked = Arc::new(Mutex::new(None));
        let mut script = Script {
            fails_at,
            gate: gate.map(Mutex::new),
            slots,
            asked: Arc::clone(&asked),
            vocab: VOCAB + if fills { 3 } else { 0 },
            given: sight.as_ref().map(|_| 1),
            pairs,
            ..Script::new(script)
        };
        // A page of its own for each 32 tokens of the longest request, and the one that nobody reads.
        script.groups[0].pages = script.groups[0].pages.max(context.div_ceil(32) + 1);
        let build = move || Ok::<_, Failed>(Box::new(script) as Box<dyn Runner>);
        let (engine, _thread) = Engine::spawn(build, engine_options).unwrap();
        let (progress, progress_seen) = watch::channel(Progress::default());
        let (reload, reload_asked) = tokio_mpsc::channel(1);
        let (stop, stopped) = oneshot::channel();
        let (handle, load, progress_seen) = (engine.clone(), Mutex::new(load), Mutex::new(progress_seen));
        let offer = Offer {
            card: card("script"),
            context,
            preload: false,
            plan: Box::new(|_| Ok(())),
            load: Box::new(move |_, progress| {
                if let Some(load) = load.lock().unwrap().take() {
                    wait(load, progress, &mut progress_seen.lock().unwrap())?;
                }
                // It may be unloaded and loaded again, as often as somebody asks for that.
                let mut served = served(handle.clone(), template, card("script"), Keeper::new(()));
                if let Some(sight) = &sight {
                    served.sight = Ok(Arc::clone(sight));
                }
                if fills {
                    served.tokenizer = Arc::new(tokenizer(&GAP));
                }
                if loads_adapters {
                    served.load_adapter = Some(Box::new(loader));
                }
                if let Some(trial) = &trial {
                    served.grammars.try_with(Arc::clone(trial));
                }
                Ok(served)
            }),
        };
        let server = Server::new(listener, options, vec![offer]).await.unwrap();
        let address = server.address();
        let stop_asked = async { drop(stopped.await) };
        let running = tokio::spawn(server.run(stop_asked, reload_asked));
        World { address, engine, asked, progress, reload, stop: Some(stop), running }
    }

    /// Starts a server; returns when it is ready.
    pub(crate) async fn ready(setup: Setup) -> World {
        let world = World::listening(setup).await;
        world.until("/ready", |response| response.status == 200).await;
        world
    }

    /// The same, and each step waits for a word from now on; with the sender gone, none does.
    pub(crate) async fn gated(setup: Setup) -> (World, mpsc::Sender<()>) {
        let (gate, steps) = mpsc::channel();
        // The server's own question takes two.
        (0..2).for_each(|_| gate.send(()).unwrap());
        (World::ready(Setup { gate: Some(steps), ..setup }).await, gate)
    }

    /// Asks until the answer is as wanted.
    pub(crate) async fn until(&self, path: &str, wanted: impl Fn(&Response) -> bool) {
        until(self.address, path, wanted).await;
    }

    /// Waits until a step is under way.
    pub(crate) async fn until_stepping(&self) {
        in_time(async {
            while self.engine.stats().step_running_for.is_none() {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    /// Tells the server to stop, as SIGTERM does.
    pub(crate) fn stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until it has stopped.
    pub(crate) async fn stopped(mut self) -> Result<(), fornax_server::Error> {
        self.stop();
        self.running.await.unwrap()
    }
}

/// How long anything may take before a test fails: far more than it does on a slow and busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What comes of it, which must not take for ever.
pub(crate) async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("it never came")
}

/// Asks a server until its answer is as wanted.
pub(crate) async fn until(address: SocketAddr, path: &str, wanted: impl Fn(&Response) -> bool) {
    in_time(async {
        while !wanted(&get(address, path).await) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// The same, with a key.
pub(crate) async fn until_keyed(
    address: SocketAddr,
    key: &str,
    path: &str,
    wanted: impl Fn(&Response) -> bool,
) {
    let bearer = format!("Bearer {key}");
    let request = request("GET", path, &[("Authorization", &bearer)], b"");
    in_time(async {
        while !wanted(&raw(address, &request).await) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Waits for a word, handing progress on meanwhile.
fn wait(
    mut load: oneshot::Receiver<Result<(), Failed>>,
    progress: &watch::Sender<Progress>,
    seen: &mut watch::Receiver<Progress>,
) -> Result<(), Failed> {
    tokio::runtime::Handle::current().block_on(async {
        loop {
            tokio::select! {
                biased;
                Ok(()) = seen.changed() => drop(progress.send_replace(seen.borrow_and_update().clone())),
                loaded = &mut load => return loaded.unwrap(),
            }
        }
    })
}

pub(crate) fn card(name: &str) -> ModelCard {
    ModelCard {
        name: name.to_owned(),
        aliases: Vec::new(),
        adapters: Vec::new(),
        reference: "script.gguf".to_owned(),
        architecture: "scripted".to_owned(),
        quant: "Q4_1".to_owned(),
        files: ModelFiles { format: "gguf", bytes: 2048, parameters: 134_515_008, digest: "ab".repeat(32) },
        created: 1_700_000_000,
    }
}

/// What stands in for the binary's loading of adapters: one path is there.
fn loader(_name: &str, path: &str) -> Result<u32, Failed> {
    match path {
        "here" => Ok(0),
        _ => Err(Failed { code: Code::ModelNotFound, message: format!("there is no {path:?}") }),
    }
}

pub(crate) fn served(engine: Handle, template: &str, card: ModelCard, keeper: Keeper) -> Served {
    let tokenizer = Arc::new(tokenizer(&[]));
    let encoder = Arc::clone(&tokenizer);
    let encode = Arc::new(move |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) => encoder.encode(text, Special::AsText).unwrap(),
        Err(_) => bytes.iter().map(|&byte| u32::from(byte)).collect(),
    });
    let mut bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    bytes.extend([Vec::new(), Vec::new()]);
    let grammars = Grammars::new(Vocabulary { bytes, end_tokens: vec![IM_END], encode }).unwrap();
    // Compiling works before any request asks for it.
    grammars.compile(&Form::JsonObject).unwrap();
    Served {
        engine,
        tokenizer,
        template: Arc::new(ChatTemplate::new(template)),
        asks_anew: true,
        sight: Err(fornax_chat::READS_NO_IMAGES),
        grammars: Arc::new(grammars),
        card,
        devices: vec![Device {
            name: "cpu".to_owned(),
            bytes: BTreeMap::from([("weights".to_owned(), 1000), ("kv".to_owned(), 24)]),
        }],
        plan: json!({"fits": true}),
        load_seconds: 0.25,
        planned_bytes: 1024,
        load_adapter: None,
        keeper,
    }
}

/// The tokenizer of a GGUF file made here: byte-level, without merges, with these control tokens behind the others.
fn tokenizer(more: &[&str]) -> Tokenizer {
    fn string(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    }
    fn key(out: &mut Vec<u8>, name: &str, kind: u32) {
        string(out, name);
        out.extend(kind.to_le_bytes());
    }
    const U32: u32 = 4;
    const I32: u32 = 5;
    const STRING: u32 = 8;
    const ARRAY: u32 = 9;
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend(0u64.to_le_bytes());
    file.extend(7u64.to_le_bytes());
    for (name, value) in
        [("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "gpt-2")]
    {
        key(&mut file, name, STRING);
        string(&mut file, value);
    }
    key(&mut file, "tokenizer.ggml.tokens", ARRAY);
    let vocab = VOCAB + u32::try_from(more.len()).unwrap();
    file.extend(STRING.to_le_bytes());
    file.extend(u64::from(vocab).to_le_bytes());
    let mut beyond = 256u32;
    for byte in 0..=255u8 {
        // GPT-2's table: printable bytes are themselves, the others follow from 256 on.
        let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let shown = if printable { u32::from(byte) } else { beyond };
        beyond += u32::from(!printable);
        string(&mut file, &char::from_u32(shown).unwrap().to_string());
    }
    string(&mut file, "<|im_start|>");
    string(&mut file, "<|im_end|>");
    more.iter().for_each(|token| string(&mut file, token));
    key(&mut file, "tokenizer.ggml.token_type", ARRAY);
    file.extend(I32.to_le_bytes());
    file.extend(u64::from(vocab).to_le_bytes());
    for token in 0..vocab {
        let kind: i32 = if token >= IM_START { 3 } else { 1 };
        file.extend(kind.to_le_bytes());
    }
    key(&mut file, "tokenizer.ggml.merges", ARRAY);
    file.extend(STRING.to_le_bytes());
    file.extend(0u64.to_le_bytes());
    key(&mut file, "tokenizer.ggml.eos_token_id", U32);
    file.extend(IM_END.to_le_bytes());
    file.resize(file.len().next_multiple_of(32), 0);
    Tokenizer::from_gguf(Gguf::from_bytes(vec![file]).unwrap().metadata()).unwrap()
}

/// A runner that chooses the tokens of a text.
pub(crate) struct Script {
    acts: Vec<Vec<u8>>,
    /// Where answers began: one that is asked for anew begins further on. The self-test is the first.
    begun: Mutex<Vec<u32>>,
    fails_at: Option<u32>,
    pub(crate) gate: Option<Mutex<Receiver<()>>>,
    groups: Vec<KvGroup>,
    slots: usize,
    steps: VecDeque<Vec<Sampled>>,
    asked: Arc<Mutex<Option<Asked>>>,
    vocab: u32,
    given: Option<usize>,
    pairs: bool,
}

impl Script {
    pub(crate) fn new(text: String) -> Script {
        Script {
            acts: text.split('\x0c').map(|act| act.as_bytes().to_vec()).collect(),
            begun: Mutex::default(),
            fails_at: None,
            gate: None,
            groups: vec![KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 1025 }],
            slots: 1,
            steps: VecDeque::new(),
            asked: Arc::default(),
            vocab: VOCAB,
            given: None,
            pairs: false,
        }
    }

    /// What is said by an answer that began there.
    fn act(&self, place: u32) -> &[u8] {
        let mut begun = self.begun.lock().unwrap();
        let known = begun.iter().position(|other| *other == place);
        let number = known.unwrap_or_else(|| {
            begun.push(place);
            begun.len() - 1
        });
        &self.acts[number.saturating_sub(1).min(self.acts.len() - 1)]
    }

    fn choose(&self, row: &SampleRow<'_>) -> Sampled {
        let top = |token: u32, count: u32| {
            (0..count).map(|rank| ((token + rank) % VOCAB, -0.5 - rank as f32)).collect()
        };
        if let Some(given) = &row.given {
            return Sampled {
                token: given.token,
                logprob: Some(-0.25),
                top: top(given.token, 2),
                mu: 0.0,
                fault: None,
            };
        }
        *self.asked.lock().unwrap() = Some(Asked { seed: row.seed, sampling: row.sampling.clone() });
        if self.fails_at == Some(row.generated) {
            return Sampled::fault(SampleFault::Logits);
        }
        let act = self.act(row.position - row.generated);
        let scripted = act.get(row.generated as usize).map_or(IM_END, |&byte| u32::from(byte));
        let listed = row.sampling.allowed_token_ids.as_ref();
        let allowed = |token: &u32| {
            row.mask.is_none_or(|mask| mask[*token as usize / 32] >> (token % 32) & 1 == 1)
                && listed.is_none_or(|ids| ids.contains(token))
        };
        let token = (scripted..VOCAB).chain(0..scripted).find(allowed).unwrap();
        let count = row.sampling.top_logprobs;
        Sampled {
            token,
            logprob: count.map(|_| -0.5),
            top: top(token, count.unwrap_or(0)),
            mu: 0.0,
            fault: None,
        }
    }
}

impl Runner for Script {
    fn launch(&mut self, _: &Batch) -> Result<(), Error> {
        self.steps.push_back(Vec::new());
        Ok(())
    }

    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<(), Error> {
        let sampled = rows.iter().map(|row| self.choose(row)).collect();
        *self.steps.back_mut().unwrap() = sampled;
        Ok(())
    }

    fn hidden(&mut self, wanted: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        // Three and four: of length five.
        Ok(vec![vec![3.0, 0.0, -4.0]; wanted.len()])
    }

    fn collect(&mut self) -> Result<Output, Error> {
        if let Some(gate) = &self.gate {
            // The self-test and whatever follows wait alike; a closed gate is open.
            gate.lock().unwrap().recv().unwrap_or_default();
        }
        Ok(Output { sampled: self.steps.pop_front().unwrap() })
    }

    fn reset(&mut self) {
        self.steps.clear();
    }

    fn depth(&self) -> usize {
        0
    }

    fn limits(&self) -> StepLimits {
        StepLimits { tokens_max: 512, wanted_max: 64, slots: self.slots }
    }

    fn groups(&self) -> &[KvGroup] {
        &self.groups
    }

    fn vocab(&self) -> u32 {
        self.vocab
    }

    fn given(&self) -> Option<usize> {
        self.given
    }

    fn encodes(&self) -> bool {
        self.pairs
    }

    fn pairs(&self) -> Option<u32> {
        self.pairs.then_some(0)
    }
}
