//! The server: flags to its options, a model for it, and the signals that steer it.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use fornax::{Code, Error, Fornax, OpenOptions};
use fornax_compute::Purpose;
use fornax_engine::Stored;
use fornax_jobs::{RunnerOptions, StoreOptions, WebhookOptions};
use fornax_server::{
    Callback, Controls, Device, Failed, JobsOptions, ModelCard, Progress, Served, Server, ServerOptions,
    TlsFiles,
};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use super::args::{LogFormat, Serve};
use super::failure::Failure;
use super::{device, locate, output, plan};

/// Threads for sockets and streams: they hand tokens on, the engine's threads make them.
const SOCKET_THREADS: usize = 2;

/// Threads for parsing, encoding and compiling; the server lets in as many as there are cores.
const BLOCKING_THREADS: usize = 32;

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

/// The same, with the model opened by options that `adapt` changes.
pub(crate) fn serve_with(args: &Serve, adapt: &dyn Fn(OpenOptions) -> OpenOptions) -> anyhow::Result<()> {
    let path = locate::locate(args.model.as_deref())?;
    let mut open = device::options(&path, &args.device)?.parallel(args.parallel).queue(args.limits.max_queue);
    if let Some(file) = &args.chat_template_file {
        open = open.chat_template(output::text_of(file)?);
    }
    let open = adapt(open);
    // Before anything is listened on: a model that does not fit, or cannot be run, is refused at once.
    let planned = open.plan()?;
    if !planned.plan.fits() {
        return Err(planned.refusal().into());
    }
    let plan = serde_json::to_value(plan::report(&path, &planned))?;
    let card = card(&path, args, &planned.plan.stored);
    log(args.log);
    // Before the runtime, and so dropped after it: its engine waits for tasks that hold ways into it.
    let model = Arc::new(OnceLock::new());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(SOCKET_THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()?;
    let loading = Loading { open, card, plan, auto: args.device.device == "auto" };
    let served = runtime.block_on(run(args, loading, Arc::clone(&model)));
    // Tasks hold ways into the engine, which waits for the last of them.
    runtime.shutdown_timeout(Duration::from_secs(1));
    match (served, Arc::into_inner(model).and_then(OnceLock::into_inner)) {
        // Why the model could not be loaded, with its own code, is worth more than that it could not.
        (Err(_), Some(Err(error))) => Err(error.into()),
        (served, _) => served,
    }
}

/// A model that is about to be loaded.
struct Loading {
    open: OpenOptions,
    card: ModelCard,
    plan: Value,
    /// Whether the device was left to us.
    auto: bool,
}

/// Serves until it is told to stop. The model is left in `model`: it must outlive everything that asks it.
async fn run(
    args: &Serve,
    loading: Loading,
    model: Arc<OnceLock<Result<Fornax, Error>>>,
) -> anyhow::Result<()> {
    let address = (args.host.as_str(), args.port);
    let listener = TcpListener::bind(address).await.map_err(|error| {
        Failure::usage(format!(
            "cannot listen on {}:{}: {error}; use another --host or --port",
            args.host, args.port
        ))
    })?;
    let server =
        Server::new(listener, options(args)?).await.map_err(|error| Failure::usage(error.to_string()))?;
    let scheme = if server.is_tls() { "https" } else { "http" };
    writeln!(io::stdout(), "listening on {scheme}://{}", server.address())?;
    io::stdout().flush()?;

    let (progress, progress_seen) = watch::channel(Progress::default());
    let load = async move {
        let loaded = tokio::task::spawn_blocking(move || load(loading, &progress, &model)).await;
        loaded.unwrap_or_else(|_| {
            Err(Failed { code: Code::Internal.to_string(), message: "loading the model panicked".to_owned() })
        })
    };
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let mut hang_up = signal(SignalKind::hangup())?;
    let (ask_reload, reload) = mpsc::channel(1);
    tokio::spawn(async move { while hang_up.recv().await.is_some() && ask_reload.send(()).await.is_ok() {} });
    server.run(load, stop, Controls { progress: progress_seen, reload }).await.map_err(|error| {
        match &error {
            fornax_server::Error::Failed(failed) => Failure::new(Code::Internal, failed.message.clone()),
            _ => Failure::usage(error.to_string()),
        }
        .into()
    })
}

/// Loads the model and makes of it what the server asks for.
fn load(
    loading: Loading,
    progress: &watch::Sender<Progress>,
    model: &OnceLock<Result<Fornax, Error>>,
) -> Result<Served, Failed> {
    let began = Instant::now();
    let Loading { open, card, plan, auto } = loading;
    let opened = open.open_with(&mut |bytes, bytes_total| {
        progress.send_replace(Progress { stage: "weights".to_owned(), bytes, bytes_total });
    });
    let made = opened.and_then(|opened| Ok((served(&opened, card, plan, began.elapsed())?, opened)));
    let failed = |error: &Error| Failed { code: error.code().to_string(), message: error.to_string() };
    match made {
        Ok((served, opened)) => {
            // What `auto` chose is said once, like everything else here in the log.
            let auto = auto.then(|| fornax::Device::auto().1);
            tracing::info!(device = opened.device(), auto, "loaded");
            drop(model.set(Ok(opened)));
            Ok(served)
        }
        Err(error) => {
            let failed = failed(&error);
            drop(model.set(Err(error)));
            Err(failed)
        }
    }
}

fn served(model: &Fornax, card: ModelCard, plan: Value, load: Duration) -> Result<Served, Error> {
    let tokenizer = Arc::clone(model.text().tokenizer().ok_or(Error::NoTokenizer)?);
    let usage = model.memory().allocated;
    let bytes = Purpose::ALL.into_iter().map(|purpose| (purpose.to_string(), usage.bytes(purpose)));
    let bytes: BTreeMap<String, u64> = bytes.collect();
    Ok(Served {
        engine: model.handle().clone(),
        tokenizer,
        template: model.text().shared_template(),
        // Now and not with the first schema: the trie of a large vocabulary takes a moment.
        grammars: Arc::clone(model.grammars()?),
        card: ModelCard { architecture: model.config().facts.name.to_owned(), ..card },
        plan,
        devices: vec![Device { name: model.kind().to_string(), bytes }],
        load_seconds: load.as_secs_f64(),
    })
}

/// What can be said of the model before it is loaded. It is called by the type that holds most of its weights.
fn card(path: &Path, args: &Serve, stored: &[Stored]) -> ModelCard {
    let reference = args.model.clone().unwrap_or_else(|| fornax::catalog::DEFAULT.to_owned());
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let own = if Path::new(&reference).exists() { stem } else { reference.clone() };
    let most = stored.iter().max_by_key(|stored| stored.bytes);
    ModelCard {
        name: args.served_model_name.clone().unwrap_or(own),
        reference,
        architecture: String::new(),
        quant: most.map_or(String::new(), |stored| stored.dtype.name().to_owned()),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    }
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
        bodies_bytes_max: defaults.bodies_bytes_max.max(body_bytes_max.saturating_mul(2)),
        per_key_max: limits.max_per_key,
        request_timeout: Some(limits.request_timeout),
        drain_timeout: limits.drain_timeout,
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
        Some(file) => output::text_of(file)?.trim().as_bytes().to_vec(),
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

/// Standard error, whose reader may be gone. Lines that cannot be written are lost; a logger that is told so panics, and
/// takes the request along.
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
fn log(format: LogFormat) {
    let lines = tracing_subscriber::fmt().with_writer(|| Lines).with_target(false).with_ansi(false);
    match format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
}
