//! The server: flags to its options, a model for it, and the signals that steer it.

mod args;
mod files;
mod roots;

use std::collections::{BTreeMap, HashSet};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use fornax::machine;
use fornax::{Code, Error, Fornax, OpenOptions, Plan, Planned, Unloaded};
use fornax_compute::Purpose;
use fornax_form::Trial;
use fornax_jobs::{RunnerOptions, StoreOptions, WebhookOptions};
use fornax_server::{
    Callback, Ceiling, Device, Failed, JobsOptions, Keeper, ModelCard, ModelFiles, Offer, Progress, Room,
    Served, Server, ServerOptions, TlsFiles,
};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use crate::cli::failure::Failure;
use crate::cli::interrupt::Interrupt;
use crate::cli::{device, headline, locate, output, plan, trial};
pub(crate) use args::Serve;
use args::{LogFormat, LogLevel};
use roots::AdapterRoots;

/// Threads for sockets and streams: they hand tokens on, the engine's threads make them.
const SOCKET_THREADS: usize = 2;

/// Threads for parsing, encoding and compiling; the server lets in as many as there are cores.
const BLOCKING_THREADS: usize = 32;

/// Models of one server: each has its metrics and a worker for its jobs.
const MODELS_MAX: usize = 64;

/// How often a scheduler is called that does not answer, and the pause after the first time: a minute in all.
const CALLBACK_ATTEMPTS: u32 = 7;
const CALLBACK_PAUSE: Duration = Duration::from_secs(1);

/// Secrets shorter than this are guessed.
const SECRET_BYTES_MIN: usize = 16;

/// A shorter lease would be lost by a worker whose disk hesitates.
const JOBS_LEASE_MIN: Duration = Duration::from_millis(500);

pub(crate) fn serve(args: &Serve) -> anyhow::Result<()> {
    serve_with(args, &|options| options)
}

/// The same, with models opened by options that `adapt` changes.
pub(crate) fn serve_with(args: &Serve, adapt: &dyn Fn(OpenOptions) -> OpenOptions) -> anyhow::Result<()> {
    let recipes = recipes(args, adapt)?;
    log(args.log, args.log_level);
    let banner: Vec<String> = recipes.iter().map(|recipe| recipe.headline.clone()).collect();
    let failure = Arc::new(Mutex::new(None));
    let runtime = runtime()?;
    let trial = trial::trial(args.limits.form_memory, args.limits.form_timeout.as_secs().max(1));
    let offer = |recipe| offer(recipe, args.preload, &trial, &failure);
    let offers = recipes.into_iter().map(offer).collect();
    let served = runtime.block_on(run(args, offers, &banner));
    runtime.shutdown_timeout(Duration::from_secs(1));
    let failure = failure.lock().unwrap_or_else(PoisonError::into_inner).take();
    match (served, failure) {
        // Why the model could not be loaded, with its own code, is worth more than that it could not.
        (Err(_), Some(error)) => Err(error.into()),
        (served, _) => served,
    }
}

/// Where sockets and streams are served.
pub(super) fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(SOCKET_THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()
}

/// How one of the models is opened, whenever that is.
struct Recipe {
    path: PathBuf,
    open: OpenOptions,
    card: ModelCard,
    context: usize,
    /// The model in one line.
    headline: String,
    budget: Budget,
    /// Whether the device was left to us.
    auto: bool,
    /// From the plan until the load that follows it.
    drawn: Mutex<Option<Drawn>>,
    /// Where adapters may come from while it runs.
    roots: Option<Arc<AdapterRoots>>,
}

/// A model as it was read and planned for some room, so that neither is done again to load it.
struct Drawn {
    files: Unloaded,
    room: Room,
    planned: Planned,
}

/// What all models together may take.
#[derive(Clone, Copy)]
struct Budget {
    /// Bytes, as they were given or as the machine had them at the start; `None` where the device says.
    bytes: Option<u64>,
    /// Whether what the machine has left when a model is loaded is a limit too.
    asks_machine: bool,
}

impl Budget {
    fn of(args: &Serve) -> Result<Budget, Failure> {
        let asks_machine =
            args.device.memory_limit.is_none() && device::named(&args.device.device)? == fornax::Device::Cpu;
        let machine = if asks_machine { machine::memory_available() } else { None };
        Ok(Budget { bytes: args.device.memory_limit.or(machine), asks_machine })
    }

    /// Bytes for a model that finds this room.
    fn left(self, room: Room) -> Option<u64> {
        let mut left = self.bytes?.saturating_sub(room.taken);
        if self.asks_machine && room != Room::default() {
            // Neighbours may have grown since the start.
            let now = machine::memory_available().map(|bytes| bytes.saturating_add(room.returning));
            left = left.min(now.unwrap_or(u64::MAX));
        }
        Some(left)
    }
}

impl Recipe {
    /// The plan of a model that finds this room, kept for [`drawn`](Recipe::drawn). The files of one that does not fit
    /// are closed again.
    fn planned(&self, room: Room) -> Result<Planned, Error> {
        let mut kept = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        let drawn = match kept.take() {
            Some(drawn) if drawn.room == room => drawn,
            Some(drawn) => self.draw(drawn.files, room)?,
            None => self.draw(self.read()?, room)?,
        };
        let planned = drawn.planned.clone();
        if planned.plan.fits() {
            *kept = Some(drawn);
            Ok(planned)
        } else {
            Err(planned.refusal())
        }
    }

    /// The model's files, and the device held until it is loaded there.
    fn read(&self) -> Result<Unloaded, Error> {
        let mut files = self.open.clone().read()?;
        files.hold();
        Ok(files)
    }

    fn draw(&self, files: Unloaded, room: Room) -> Result<Drawn, Error> {
        let planned = files.plan_within(self.budget.left(room), room.returning)?;
        Ok(Drawn { files, room, planned })
    }

    /// What was planned for this room, or is now. Whether it fits is said when it is loaded.
    fn drawn(&self, room: Room) -> Result<Drawn, Error> {
        let kept = self.drawn.lock().unwrap_or_else(PoisonError::into_inner).take();
        match kept {
            Some(drawn) if drawn.room == room => Ok(drawn),
            Some(drawn) => self.draw(drawn.files, room),
            None => self.draw(self.read()?, room),
        }
    }
}

/// Every model that was named. Before anything is listened on: one that would not fit if it were alone, or that cannot
/// be run, is refused at once.
fn recipes(args: &Serve, adapt: &dyn Fn(OpenOptions) -> OpenOptions) -> anyhow::Result<Vec<Recipe>> {
    if args.models.len() > MODELS_MAX {
        let message = format!("{} models are too many: at most {MODELS_MAX}", args.models.len());
        return Err(Failure::usage(message).into());
    }
    let budget = Budget::of(args)?;
    let default = [fornax::catalog::DEFAULT.to_owned()];
    let named = if args.models.is_empty() { &default[..] } else { &args.models };
    let mut recipes: Vec<Recipe> = Vec::new();
    let (mut taken_bytes, mut taken_names) = (0, HashSet::new());
    let adapters = args.adapter.iter().map(|text| AdapterFlag::parse(text));
    let mut adapters = adapters.collect::<Result<Vec<_>, _>>()?;
    let roots = AdapterRoots::of(args)?;
    let mut contexts: Vec<&(String, usize)> = args.model_context.iter().collect();
    let mut drafts: Vec<DraftFlag<'_>> = args.draft.iter().map(|text| DraftFlag::parse(text)).collect();
    for text in named {
        let (names, reference) = named_model(text);
        let path = locate::locate(Some(reference))?;
        let mut open =
            device::options(&path, &args.device)?.parallel(args.parallel).queue(args.limits.max_queue);
        let is_first = recipes.is_empty();
        open = args.kv_disk.apply(open, |what| tracing::warn!("{what}"))?;
        if let Some(file) = args.chat_template_file.as_ref().filter(|_| is_first) {
            open = open.chat_template(output::text_of(file)?);
        }
        if let Some(pooling) = args.pooling.filter(|_| is_first) {
            open = open.pooling(pooling.of_model());
        }
        if roots.is_some() {
            open = open.adapter_room(args.adapter_places, args.adapter_rank);
        }
        let served_name = args.served_model_name.as_deref().filter(|_| is_first);
        let mut card = card(&path, served_name.into_iter().chain(names).collect(), reference);
        let own = |adapter: &AdapterFlag<'_>| match adapter.of {
            Some(model) => card.name == model || card.aliases.iter().any(|alias| alias == model),
            None => is_first,
        };
        let (own, others) = adapters.into_iter().partition::<Vec<_>, _>(own);
        adapters = others;
        for adapter in own {
            card.adapters.push(adapter.name.to_owned());
            open = open.adapter(adapter.name, adapter.folder);
        }
        let own = contexts.iter().position(|(name, _)| names_of(&card).any(|own| own == name));
        if let Some(index) = own {
            open = open.context(contexts.remove(index).1);
        }
        let own = drafts.iter().position(|draft| match draft.of {
            Some(model) => names_of(&card).any(|own| own == model),
            None => is_first,
        });
        if let Some(index) = own {
            open = open.draft(locate::locate(Some(drafts.remove(index).model))?);
        }
        if let Some(name) = names_of(&card).find(|name| !taken_names.insert((*name).to_owned())) {
            let message = format!("two models are called {name:?}; say NAME=MODEL for one of them");
            return Err(Failure::usage(message).into());
        }
        let auto = args.device.device == "auto";
        let drawn = Mutex::new(None);
        let headline = String::new();
        let (roots, open) = (roots.clone(), adapt(open));
        let mut recipe = Recipe { path, open, card, context: 0, headline, budget, auto, drawn, roots };
        let Planned { plan, device, .. } = recipe.planned(Room::default())?;
        if args.preload && taken_bytes > 0 {
            let beside = recipe.planned(Room { taken: taken_bytes, returning: 0 });
            beside.map_err(|error| match error {
                Error::DoesNotFit { .. } => {
                    let words = format!("{error}, beside {}", names_told(&recipes));
                    Failure::new(Code::ModelDoesNotFit, words).into()
                }
                other => anyhow::Error::from(other),
            })?;
        }
        if !(is_first || args.preload) {
            // Nobody knows when it will be loaded, and from which files by then.
            recipe.drawn = Mutex::new(None);
        }
        taken_bytes += planned_bytes(&plan);
        recipe.context = plan.context;
        recipe.card.quant = headline::quant(&plan).to_owned();
        let bytes = output::binary(plan.total_bytes());
        recipe.headline = format!("{} · {device} · {bytes}", headline::model(&recipe.card.name, &plan));
        recipes.push(recipe);
    }
    let left = contexts.first().map(|(name, tokens)| {
        format!("--model-context {name}={tokens}: no model is called {name:?}, or it was named before")
    });
    let left = left.or_else(|| {
        let AdapterFlag { name, of, .. } = adapters.first()?;
        let model = of.unwrap_or_default();
        Some(format!("--adapter {name}@{model}: no model is called {model:?}"))
    });
    let left = left.or_else(|| {
        let DraftFlag { of, model } = drafts.first()?;
        let of = of.map_or_else(
            || "the first model has one already".to_owned(),
            |of| format!("no model is called {of:?}, or it has one already"),
        );
        Some(format!("--draft {model}: {of}"))
    });
    match left {
        None => Ok(recipes),
        Some(left) => Err(Failure::usage(format!("{left}; there are {}", names_told(&recipes))).into()),
    }
}

/// The names of models, as messages tell them.
fn names_told(recipes: &[Recipe]) -> String {
    let names: Vec<String> = recipes.iter().map(|recipe| format!("{:?}", recipe.card.name)).collect();
    names.join(", ")
}

/// `NAME[@MODEL]=FOLDER`.
struct AdapterFlag<'a> {
    name: &'a str,
    /// The model that it is for; the first where none is named.
    of: Option<&'a str>,
    folder: &'a str,
}

impl<'a> AdapterFlag<'a> {
    fn parse(text: &'a str) -> Result<AdapterFlag<'a>, Failure> {
        let wrong = || {
            Failure::usage(format!("--adapter {text:?} is no adapter; one looks like NAME[@MODEL]=FOLDER"))
        };
        let (names, folder) = text.split_once('=').ok_or_else(wrong)?;
        let (name, of) = match names.split_once('@') {
            Some((name, model)) => (name, Some(model)),
            None => (names, None),
        };
        if name.is_empty() || of == Some("") {
            return Err(wrong());
        }
        Ok(AdapterFlag { name, of, folder })
    }
}

/// `[NAME=]MODEL`.
struct DraftFlag<'a> {
    /// The model that it drafts for; the first where none is named.
    of: Option<&'a str>,
    model: &'a str,
}

impl<'a> DraftFlag<'a> {
    fn parse(text: &'a str) -> DraftFlag<'a> {
        let (names, model) = named_model(text);
        DraftFlag { of: names.first().copied(), model }
    }
}

/// What a model takes of the budget. The margin is for what nobody counts, and there once.
fn planned_bytes(plan: &Plan) -> u64 {
    plan.usage().total().saturating_add(plan.runtime_bytes())
}

/// The names and the model of `NAME[,ALIAS...]=MODEL`. A file whose name looks so is a file.
fn named_model(text: &str) -> (Vec<&str>, &str) {
    match text.split_once('=') {
        Some((names, model)) if !names.is_empty() && !Path::new(text).exists() => {
            (names.split(',').filter(|name| !name.is_empty()).collect(), model)
        }
        _ => (Vec::new(), text),
    }
}

fn names_of(card: &ModelCard) -> impl Iterator<Item = &str> {
    [&card.name].into_iter().chain(&card.aliases).chain(&card.adapters).map(String::as_str)
}

/// What can be said of the model before it is loaded. It is called by the type that holds most of its weights.
fn card(path: &Path, names: Vec<&str>, reference: &str) -> ModelCard {
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let own = if Path::new(reference).exists() { stem } else { reference.to_owned() };
    let mut names = names.into_iter().map(str::to_owned);
    let card = card_named(&names.next().unwrap_or(own));
    let (aliases, files) = (names.collect(), files::of(path));
    ModelCard { aliases, reference: reference.to_owned(), files, ..card }
}

/// The card of a model of which nothing but a name is known.
pub(super) fn card_named(name: &str) -> ModelCard {
    ModelCard {
        name: name.to_owned(),
        aliases: Vec::new(),
        adapters: Vec::new(),
        reference: name.to_owned(),
        architecture: String::new(),
        quant: String::new(),
        files: ModelFiles::default(),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    }
}

/// A model as the server asks for it. Why it could not be loaded is left in `failure`, as the process ends with it.
fn offer(recipe: Recipe, preload: bool, trial: &Trial, failure: &Arc<Mutex<Option<Error>>>) -> Offer {
    let (failure, trial) = (Arc::clone(failure), Arc::clone(trial));
    let recipe = Arc::new(recipe);
    let planning = Arc::clone(&recipe);
    Offer {
        card: recipe.card.clone(),
        context: recipe.context,
        preload,
        plan: Box::new(move |room| planning.planned(room).map(drop).map_err(|error| failed(&error))),
        load: Box::new(move |room, progress| {
            let loaded = load(&recipe, room, progress).map_err(|error| {
                let failed = failed(&error);
                *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                failed
            })?;
            loaded.grammars.try_with(Arc::clone(&trial));
            Ok(loaded)
        }),
    }
}

pub(super) fn failed(error: &Error) -> Failed {
    Failed { code: error.code(), message: error.to_string() }
}

/// Serves until it is told to stop.
async fn run(args: &Serve, offers: Vec<Offer>, models: &[String]) -> anyhow::Result<()> {
    let address = (args.host.as_str(), args.port);
    let listener = TcpListener::bind(address).await.map_err(|error| {
        Failure::usage(format!(
            "cannot listen on {}:{}: {error}; use another --host or --port",
            args.host, args.port
        ))
    })?;
    let server = Server::new(listener, options(args)?, offers)
        .await
        .map_err(|error| Failure::usage(error.to_string()))?;
    let scheme = if server.is_tls() { "https" } else { "http" };
    writeln!(io::stdout(), "listening on {scheme}://{}", server.address())?;
    io::stdout().flush()?;
    if args.log == LogFormat::Text {
        banner(&format!("{scheme}://{}", server.address()), models);
    }

    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Interrupt::leave();
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let mut hang_up = signal(SignalKind::hangup())?;
    let (ask_reload, reload) = mpsc::channel(1);
    tokio::spawn(async move { while hang_up.recv().await.is_some() && ask_reload.send(()).await.is_ok() {} });
    server.run(stop, reload).await.map_err(|error| {
        match &error {
            fornax_server::Error::Failed(failed) => Failure::new(failed.code, failed.message.clone()),
            _ => Failure::usage(error.to_string()),
        }
        .into()
    })
}

/// What there is and where, for whoever starts the server by hand.
fn banner(address: &str, models: &[String]) {
    let mut lines: Vec<String> = models.iter().map(|model| format!("  model    {model}")).collect();
    lines.push(format!("  console  {address}/"));
    lines.push(format!("  APIs     {address}/v1 (OpenAI's and Anthropic's), {address}/api (Ollama's)"));
    lines.push("  Ctrl-C ends it when what runs is done.".to_owned());
    // Nobody reading it is no reason to stop.
    drop(writeln!(io::stderr(), "{}", lines.join("\n")));
}

/// Loads a model and makes of it what the server asks for.
fn load(recipe: &Recipe, room: Room, progress: &watch::Sender<Progress>) -> Result<Served, Error> {
    let began = Instant::now();
    let Drawn { files, planned, .. } = recipe.drawn(room)?;
    let model = files.load(planned.clone(), &mut |loading| {
        progress.send_replace(match loading {
            fornax::Loading::Weights { bytes, total } => {
                Progress { stage: "weights".to_owned(), bytes, bytes_total: total }
            }
            fornax::Loading::Kernels { .. } => {
                Progress { stage: "kernels".to_owned(), ..Progress::default() }
            }
        });
    })?;
    // What `auto` chose is said once, like everything else here in the log.
    let auto = recipe.auto.then(|| device::auto().1.as_str());
    tracing::info!(model = recipe.card.name, device = model.device(), auto, "loaded");
    let report = serde_json::to_value(plan::report(&recipe.path, &planned)).unwrap_or_default();
    let load_adapter = recipe.roots.as_ref().map(|roots| roots.loader(&model));
    let served = served(model, recipe.card.clone(), (report, planned_bytes(&planned.plan)), began)?;
    Ok(Served { load_adapter, ..served })
}

/// An open model as the server takes it, with its plan and the bytes of it, and when it began to be loaded.
pub(super) fn served(
    model: Fornax,
    card: ModelCard,
    (plan, planned_bytes): (serde_json::Value, u64),
    began: Instant,
) -> Result<Served, Error> {
    let tokenizer = Arc::clone(model.text().tokenizer().ok_or(Error::NoTokenizer)?);
    let usage = model.memory().allocated;
    let bytes = Purpose::ALL.into_iter().map(|purpose| (purpose.to_string(), usage.bytes(purpose)));
    let bytes: BTreeMap<String, u64> = bytes.collect();
    Ok(Served {
        engine: model.handle().clone(),
        tokenizer,
        template: model.text().shared_template(),
        asks_anew: model.text().asks_anew(),
        sight: model.text().sight(),
        // Now and not with the first schema: the trie of a large vocabulary takes a moment.
        grammars: Arc::clone(model.grammars()?),
        card: ModelCard { architecture: model.config().facts.name.to_owned(), ..card },
        plan,
        devices: vec![Device { name: model.kind().to_string(), bytes }],
        load_seconds: began.elapsed().as_secs_f64(),
        planned_bytes,
        load_adapter: None,
        keeper: Keeper::new(model),
    })
}

fn options(args: &Serve) -> anyhow::Result<ServerOptions> {
    let (access, limits) = (&args.access, &args.limits);
    let tls = access.tls_cert.clone().zip(access.tls_key.clone());
    let body_bytes_max = usize::try_from(limits.max_body).unwrap_or(usize::MAX);
    let defaults = ServerOptions::default();
    Ok(ServerOptions {
        api_key_file: access.api_key_file.clone(),
        metrics_open: access.metrics_open,
        cors_origins: access.cors_origin.clone(),
        hosts: vec![args.host.clone()],
        tls: tls.map(|(cert, key)| TlsFiles { cert, key }),
        body_bytes_max,
        health_when_ready: limits.health_when_ready,
        any_model_name: limits.any_model_name,
        file_bytes_max: usize::try_from(limits.max_file).unwrap_or(usize::MAX),
        bodies_bytes_max: defaults.bodies_bytes_max.max(body_bytes_max.saturating_mul(2)),
        rows_bytes_max: usize::try_from(limits.max_image_rows).unwrap_or(usize::MAX),
        per_key_max: limits.max_per_key,
        priority_open: access.allow_priority,
        shared_prefixes: access.share_prefixes,
        prepare_timeout: limits.prepare_timeout,
        ceiling: Some(ceiling(limits.host_memory_limit)),
        request_timeout: Some(limits.request_timeout),
        drain_timeout: limits.drain_timeout,
        idle_unload: args.idle_unload,
        callback: args.callback_url.clone().map(|url| Callback {
            url,
            worker_id: args.worker_id.clone().unwrap_or_else(|| format!("{}:{}", args.host, args.port)),
            uri: args.worker_uri.clone(),
            attempts: CALLBACK_ATTEMPTS,
            pause: CALLBACK_PAUSE,
        }),
        jobs: jobs(args)?,
        otlp: args.otlp.clone(),
        ..defaults
    })
}

/// Bytes that this process may still take: what the machine has, and what is left of a limit.
fn ceiling(limit: Option<u64>) -> Ceiling {
    Ceiling::new(move || {
        let own = limit.zip(machine::own_bytes()).map(|(limit, own)| limit.saturating_sub(own));
        match (own, machine::memory_available()) {
            (Some(own), Some(machine)) => Some(own.min(machine)),
            (own, machine) => own.or(machine),
        }
    })
}

/// Where durable jobs are kept. The file is called by the port, so that servers beside each other have their own.
fn jobs(args: &Serve) -> anyhow::Result<Option<JobsOptions>> {
    let flags = &args.jobs;
    let database = match flags.jobs_db.as_deref() {
        Some("none") => return Ok(None),
        Some(database) => database.to_owned(),
        None if args.port == 0 => return Ok(None),
        None => {
            let file = locate::cache_dir()?.join("jobs").join(format!("{}.db", args.port));
            file.to_str().context("the cache folder's name is not UTF-8; use --jobs-db")?.to_owned()
        }
    };
    let secret = match &flags.webhook_secret_file {
        Some(file) => output::secret_of(file)?.trim().as_bytes().to_vec(),
        None => Vec::new(),
    };
    if !flags.webhook_host.is_empty() && secret.len() < SECRET_BYTES_MIN {
        let message = format!(
            "--webhook-host needs --webhook-secret-file with a secret of at least {SECRET_BYTES_MIN} characters"
        );
        return Err(Failure::usage(message).into());
    }
    Ok(Some(JobsOptions {
        store: StoreOptions {
            queue_max: flags.jobs_queue as u64,
            job_bytes_max: flags.jobs_max_bytes,
            attempts_max: i64::try_from(flags.jobs_attempts).unwrap_or(i64::MAX),
            retention: flags.jobs_retention,
            ..StoreOptions::new(database)
        },
        runner: RunnerOptions {
            jobs: flags.jobs_parallel,
            lease: flags.jobs_lease.max(JOBS_LEASE_MIN),
            execution_timeout: flags.jobs_timeout,
            patience: args.limits.drain_timeout,
            ..RunnerOptions::default()
        },
        webhooks: WebhookOptions {
            hosts: flags.webhook_host.clone(),
            allow_private: flags.webhook_allow_private,
            secret,
        },
    }))
}

/// Standard error, whose reader may be gone. Lines that cannot be written are lost; a logger that is told so panics,
/// and takes the request along.
struct Lines;

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        drop(io::stderr().write_all(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines on standard error: what happened to each request, and nothing of what it said.
fn log(format: LogFormat, level: LogLevel) {
    let level = match level {
        LogLevel::Warn => tracing::Level::WARN,
        LogLevel::Info => tracing::Level::INFO,
        LogLevel::Debug => tracing::Level::DEBUG,
    };
    let lines = tracing_subscriber::fmt().with_writer(|| Lines).with_target(false).with_ansi(false);
    let lines = lines.with_max_level(level);
    match format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::{Cli, Command};
    use clap::Parser as _;

    /// The arguments of `serve` as they are typed.
    fn args(words: &[&str]) -> Serve {
        match Cli::try_parse_from(["fornax", "serve"].iter().chain(words)).unwrap().command {
            Command::Serve(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_model_that_is_loaded_at_the_start_is_read_once_and_one_that_is_not_is_read_when_it_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama.gguf");
        let (first, other) = (folder.path().join("first.gguf"), folder.path().join("other.gguf"));
        for path in [&first, &other] {
            std::fs::copy(&fixture, path).unwrap();
        }
        let args = args(&["--device", "cpu", first.to_str().unwrap(), other.to_str().unwrap()]);
        let recipes = recipes(&args, &|options| options).unwrap();
        // Whoever opened them once more would not find them.
        for path in [&first, &other] {
            std::fs::remove_file(path).unwrap();
        }
        let progress = watch::Sender::new(Progress::default());
        let load = |recipe: &Recipe| {
            recipe.planned(Room::default())?;
            load(recipe, Room::default(), &progress).map(drop)
        };
        load(&recipes[0]).unwrap();
        assert!(progress.borrow().bytes > 0, "weights were loaded");
        assert_eq!(load(&recipes[1]).unwrap_err().code(), Code::ModelNotFound);
        assert_eq!(
            load(&recipes[0]).unwrap_err().code(),
            Code::ModelNotFound,
            "the second time it is read anew"
        );
    }
}
