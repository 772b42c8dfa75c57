//! The flags of `fornax serve`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::cli::args::{byte_size, positive, seconds};
use crate::cli::device::{DeviceArgs, KvDiskArgs, Pooling};

/// Serve models over HTTP, for OpenAI's clients, for a scheduler, for operators
///
/// The server answers /health and /loading while the first model loads, and requests once that has answered a question
/// of the server's own; other models are loaded when a request names them, and idle ones make way for them. SIGTERM
/// (and Ctrl-C) lets requests under way finish; SIGHUP reads keys and certificate again. docs/api.md describes every
/// route.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax serve                                     the default model on 127.0.0.1:8080
  fornax serve ./model.gguf --port 9000 --parallel 8 --context 4096
  fornax serve smollm2 big=./model.gguf --idle-unload 600
  fornax serve --host 0.0.0.0 --api-key-file keys --tls-cert cert.pem --tls-key key.pem
  fornax serve --config serve.toml

The configuration file is TOML and holds the long names of these flags, as in `parallel = 8`, \
`cors-origin = [\"https://app.example\"]`, `model = [\"smollm2\", \"big=./model.gguf\"]`. What is given on the command line wins.")]
pub(crate) struct Serve {
    /// Path, catalog name or hub reference of a model, or NAME[,ALIAS]=MODEL to say what clients call it; the first is
    /// loaded at the start, others when they are asked for [default: smollm2]
    #[arg(value_name = "MODEL")]
    pub(crate) models: Vec<String>,
    /// Read further flags from this TOML file
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Address to listen on; beyond the loopback keys are needed
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port to listen on; 0 lets the system choose
    #[arg(long, value_name = "PORT", default_value = "8080")]
    pub(crate) port: u16,
    /// What clients call the first model [default: its catalog name, or its file's name]
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub(crate) served_model_name: Option<String>,
    /// Use this Jinja file as the chat template of the first model instead of its own
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub(crate) chat_template_file: Option<PathBuf>,
    /// How the first model, an encoder, makes one vector of a text [default: as its files say]
    #[arg(long, value_enum, help_heading = "Model")]
    pub(crate) pooling: Option<Pooling>,
    /// Load the low-rank adapter in this folder (PEFT's layout) beside a model (the first where none is named), under a name
    /// that requests choose it by; may be repeated
    #[arg(long, value_name = "NAME[@MODEL]=FOLDER", help_heading = "Model")]
    pub(crate) adapter: Vec<String>,
    /// Adapters in this folder may be loaded over HTTP while the server runs (/v1/load_lora_adapter); with keys, by those with
    /// `adapters` behind them in their file. May be repeated; relative paths are meant from the first
    #[arg(long, value_name = "FOLDER", help_heading = "Model")]
    pub(crate) adapter_root: Vec<PathBuf>,
    /// How many of them each model has room for at once; the memory is planned from the start
    #[arg(long, value_name = "N", default_value = "4", allow_negative_numbers = true, value_parser = positive, help_heading = "Model")]
    pub(crate) adapter_places: usize,
    /// The largest rank of one of them
    #[arg(long, value_name = "RANK", default_value = "64", allow_negative_numbers = true, value_parser = positive, help_heading = "Model")]
    pub(crate) adapter_rank: usize,
    /// Tokens of a request of this model, prompt and answer together; --context is for the others; may be repeated
    #[arg(long, value_name = "NAME=N", value_parser = model_context, help_heading = "Model")]
    pub(crate) model_context: Vec<(String, usize)>,
    /// A smaller model with the same tokens drafts for a model (the first where none is named): answers are the same,
    /// and often faster; may be repeated
    #[arg(long, value_name = "[NAME=]MODEL", help_heading = "Model")]
    pub(crate) draft: Vec<String>,
    /// Load all models at the start; it fails where they do not fit beside each other
    #[arg(long, help_heading = "Model")]
    pub(crate) preload: bool,
    /// Seconds without a request after which a model is unloaded [default: only to make room for another]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Model")]
    pub(crate) idle_unload: Option<Duration>,
    /// Requests of one model computed at once; its cache holds a whole context for each
    #[arg(long, value_name = "N", default_value = "4", allow_negative_numbers = true, value_parser = positive, help_heading = "Model")]
    pub(crate) parallel: usize,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) kv_disk: KvDiskArgs,
    #[command(flatten)]
    pub(crate) access: AccessArgs,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    #[command(flatten)]
    pub(crate) jobs: JobArgs,
    /// How log lines look
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log: LogFormat,
    /// What is logged; at `debug` also what probes, collectors and open consoles ask all the time
    #[arg(long, value_enum, default_value_t = LogLevel::Info)]
    pub(crate) log_level: LogLevel,
    /// Send a trace of every request to the OpenTelemetry collector at this address, as http://127.0.0.1:4318
    #[arg(long, value_name = "URL")]
    pub(crate) otlp: Option<String>,
    /// Tell a scheduler at this address when the server is ready
    #[arg(long, value_name = "URL", help_heading = "Worker")]
    pub(crate) callback_url: Option<String>,
    /// What the scheduler calls this worker [default: the address]
    #[arg(long, value_name = "ID", requires = "callback_url", help_heading = "Worker")]
    pub(crate) worker_id: Option<String>,
    /// Where the scheduler reaches this worker [default: the address listened on]
    #[arg(long, value_name = "URI", requires = "callback_url", help_heading = "Worker")]
    pub(crate) worker_uri: Option<String>,
}

/// `NAME=N`.
fn model_context(text: &str) -> Result<(String, usize), String> {
    let (name, tokens) = text.split_once('=').ok_or("one looks like NAME=N")?;
    match (name, positive(tokens)?) {
        ("", _) => Err("one looks like NAME=N".to_owned()),
        (name, tokens) => Ok((name.to_owned(), tokens)),
    }
}

/// Who may come in.
#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
pub(crate) struct AccessArgs {
    /// Keys, one a line; every route but /ready then needs one. Behind a key may stand owner=NAME (keys of one owner
    /// see each other's jobs), priority (its requests may go before others), adapters (it may load and unload adapters) and
    /// models (it may put models to sleep and wake them, make models of those that are served, and forget them)
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Keys find each other's cached prefixes: faster where they send the same, and each can find out what others sent
    #[arg(long)]
    pub(crate) share_prefixes: bool,
    /// Requests of every key may go before others (`priority` below 0)
    #[arg(long)]
    pub(crate) allow_priority: bool,
    /// /metrics needs no key
    #[arg(long)]
    pub(crate) metrics_open: bool,
    /// Speak TLS with this certificate chain (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Web pages of this origin may call, as https://app.example; may be repeated
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) cors_origin: Vec<String>,
}

/// How much and how long.
#[derive(Debug, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitArgs {
    /// Requests that may wait; further ones get 429. Of several keys one alone may take half of it
    #[arg(long, value_name = "N", default_value = "256", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) max_queue: usize,
    /// Requests that one key may have under way
    #[arg(long, value_name = "N", default_value = "1024", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) max_per_key: usize,
    /// Bytes of a request's body, or with KiB, MiB
    #[arg(long, value_name = "BYTES", default_value = "8MiB", value_parser = byte_size)]
    pub(crate) max_body: u64,
    /// Bytes of what images became, of all requests that wait or are computed, or with KiB, MiB; further images wait
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = byte_size)]
    pub(crate) max_image_rows: u64,
    /// Seconds that a request may take to be read, rendered, encoded and compiled
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub(crate) prepare_timeout: Duration,
    /// Seconds of processor time that compiling a form (schema, grammar, regular expression) may take
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub(crate) form_timeout: Duration,
    /// Bytes of memory that compiling a form may take, or with KiB, MiB
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = byte_size)]
    pub(crate) form_memory: u64,
    /// Bytes of memory of this process, mapped files not counted, near which requests are refused [default: what the
    /// machine or the container has]
    #[arg(long, value_name = "BYTES", value_parser = byte_size)]
    pub(crate) host_memory_limit: Option<u64>,
    /// /health is 503 until the first model is loaded, as launchers of llama.cpp's server expect
    #[arg(long)]
    pub(crate) health_when_ready: bool,
    /// Requests for a model that is not there are answered by the first one, as llama.cpp's server does
    #[arg(long)]
    pub(crate) any_model_name: bool,
    /// Bytes of a file of requests (/v1/files), or with KiB, MiB
    #[arg(long, value_name = "BYTES", default_value = "64MiB", value_parser = byte_size)]
    pub(crate) max_file: u64,
    /// Seconds that an answer may take, from when it starts
    #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds)]
    pub(crate) request_timeout: Duration,
    /// Seconds that requests under way may take when the server is told to stop
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub(crate) drain_timeout: Duration,
}

/// Durable jobs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Jobs")]
pub(crate) struct JobArgs {
    /// Where durable jobs are kept: a file of SQLite's, postgres://... for several workers on one queue, or `none`
    /// [default: jobs/PORT.db in the cache folder; none with --port 0]
    #[arg(long, value_name = "DATABASE")]
    pub(crate) jobs_db: Option<String>,
    /// Jobs worked on at once
    #[arg(long, value_name = "N", default_value = "4", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) jobs_parallel: usize,
    /// Jobs that may wait; further ones get 429
    #[arg(long, value_name = "N", default_value = "100000", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) jobs_queue: usize,
    /// Bytes of what the jobs of one key ask, for as long as they are kept, where there are several
    #[arg(long, value_name = "BYTES", default_value = "4GiB", value_parser = byte_size)]
    pub(crate) jobs_max_bytes: u64,
    /// Attempts before a job is given up
    #[arg(long, value_name = "N", default_value = "3", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) jobs_attempts: usize,
    /// Seconds that one attempt may be computed if the job says nothing
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub(crate) jobs_timeout: Duration,
    /// Seconds that results are kept
    #[arg(long, value_name = "SECONDS", default_value = "86400", value_parser = seconds)]
    pub(crate) jobs_retention: Duration,
    /// Seconds without a sign of life after which a worker's jobs are taken over
    #[arg(long, value_name = "SECONDS", default_value = "15", value_parser = seconds)]
    pub(crate) jobs_lease: Duration,
    /// A host that webhooks may be sent to; may be repeated
    #[arg(long, value_name = "HOST")]
    pub(crate) webhook_host: Vec<String>,
    /// The secret that webhooks are signed with
    #[arg(long, value_name = "FILE")]
    pub(crate) webhook_secret_file: Option<PathBuf>,
    /// Webhooks may go to this machine and to private networks
    #[arg(long)]
    pub(crate) webhook_allow_private: bool,
}

/// What is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    /// What went wrong
    Warn,
    /// Every request, when it is over
    Info,
    /// Polling, too
    Debug,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// An object a line
    Json,
}
