//! The command line as types: what parses here is complete and in range, so commands need not look again.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::sampling::SamplingArgs;

/// What `--version` says; `-V` has the number alone.
static LONG_VERSION: LazyLock<String> = LazyLock::new(|| {
    let commit = option_env!("FORNAX_COMMIT").filter(|commit| !commit.is_empty());
    let commit = commit.unwrap_or("unknown; `cargo xtask dist` builds a binary that knows it");
    let (version, arch, os) = (env!("CARGO_PKG_VERSION"), std::env::consts::ARCH, std::env::consts::OS);
    format!("{version}\ncommit: {commit}\nbuilt for: {arch} {os}\ndevices: cpu, cuda (opened at run time)")
});

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "fornax",
    version,
    long_version = LONG_VERSION.as_str(),
    about = "Runs open-weight language models",
    after_help = "Examples:
  fornax run \"Why is the sky blue?\"           answer once with the default model
  fornax run ./model.gguf                     chat with a model of your own
  fornax serve                                answer OpenAI's clients over HTTP
  fornax generate --prompt \"Once upon\" --json  a completion, with its tokens and timings
  fornax plan ./model.gguf                    what a model will take in memory
  fornax inspect ./model.gguf                 what is in a model file
  fornax private info                         how two servers compute without learning what
  fornax doctor                               what this machine has and what is missing

MODEL is a path (a .gguf file, the first shard of a split GGUF, a Hugging Face directory) or a name that
`fornax list` shows. No MODEL means smollm2, which is fetched on first use.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 does not fit, 4 model unreadable, 5 device unavailable."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Serve(Serve),
    Generate(Generate),
    Embed(Embed),
    #[command(subcommand)]
    Jobs(Jobs),
    #[command(subcommand)]
    Private(Private),
    Plan(Plan),
    Inspect(Inspect),
    Tokenize(Tokenize),
    Logits(Logits),
    Perplexity(Perplexity),
    Bench(Bench),
    Pull(Pull),
    List(List),
    Rm(Rm),
    Doctor(Doctor),
    Completions(Completions),
}

/// Chat in the terminal, or answer one PROMPT
///
/// With PROMPT the answer is printed as it is made and the command ends. Without it every line read from standard
/// input is a message; an empty line is skipped and the end of input ends the chat. The model's own chat template is
/// used. Text typed by a user never becomes a control token.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  fornax run                                   chat with the default model
  fornax run \"Why is the sky blue?\"            answer once
  fornax run ./model.gguf \"Translate: chat\"    answer once with a model of your own
  echo \"Name a colour\" | fornax run smollm2    a chat read from a pipe, a message a line
  fornax run \"Summarise this:\" < report.txt    what a pipe carries is added to the prompt

In the chat /help lists commands; \"\"\" begins and ends several lines, Alt-Enter begins another.
One positional is a MODEL if it is an existing path, a catalog name, hf:... or word/word; otherwise it is the PROMPT.
Sampling defaults to temperature 0.7 and top-p 0.95.")]
pub(crate) struct Run {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    pub(crate) model: Option<String>,
    /// What to answer; without it, chat
    pub(crate) prompt: Option<String>,
    /// Use this Jinja file as the chat template instead of the model's own
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub(crate) chat_template_file: Option<PathBuf>,
    /// What the model is told beforehand
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) system: Option<String>,
    /// Tell the model of the functions in this file, a JSON list as OpenAI's clients write it; its calls are shown, and in a
    /// chat /result answers them
    #[arg(long, value_name = "FILE")]
    pub(crate) tools: Option<PathBuf>,
    /// Let the model think for at most so many tokens; then it answers. Thoughts are shown on a terminal only
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) thinking_budget: Option<usize>,
    /// Keep nothing of what is typed; otherwise it is in the file `history` of the cache folder
    #[arg(long)]
    pub(crate) no_history: bool,
    #[command(flatten)]
    pub(crate) capacity: CapacityArgs,
    /// Print the memory that was planned and allocated
    #[arg(long, help_heading = "Model")]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

/// Serve models over HTTP, for OpenAI's clients, for a scheduler, for operators
///
/// The server answers /health and /loading while the first model loads, and requests once that has answered a question
/// of the server's own; other models are loaded when a request names them, and idle ones make way for them. SIGTERM (and Ctrl-C) lets requests under way finish; SIGHUP reads keys and certificate again.
/// docs/api.md describes every route.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax serve                                     the default model on 127.0.0.1:8080
  fornax serve ./model.gguf --port 9000 --parallel 8 --context 4096
  fornax serve smollm2 big=./model.gguf --idle-unload 600
  fornax serve --host 0.0.0.0 --api-key-file keys --tls-cert cert.pem --tls-key key.pem
  fornax serve --config serve.toml

The configuration file is TOML and holds the long names of these flags, as in `parallel = 8`,
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
    /// Load the low-rank adapter in this folder (PEFT's layout) beside a model (the first where none is named), under a name
    /// that requests choose it by; may be repeated
    #[arg(long, value_name = "NAME[@MODEL]=FOLDER", help_heading = "Model")]
    pub(crate) adapter: Vec<String>,
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
    pub(crate) access: AccessArgs,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    #[command(flatten)]
    pub(crate) jobs: JobArgs,
    /// How log lines look
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log: LogFormat,
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

/// Who may come in.
#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
pub(crate) struct AccessArgs {
    /// Keys, one a line; every route but /ready then needs one
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
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
    /// Requests that may wait; further ones get 429
    #[arg(long, value_name = "N", default_value = "256", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) max_queue: usize,
    /// Requests that one key may have under way
    #[arg(long, value_name = "N", default_value = "1024", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) max_per_key: usize,
    /// Bytes of a request's body, or with KiB, MiB
    #[arg(long, value_name = "BYTES", default_value = "8MiB", value_parser = byte_size)]
    pub(crate) max_body: u64,
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

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// An object a line
    Json,
}

/// Submit durable jobs to a server, and see what became of them
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  fornax jobs submit --input job.json --wait            one job, and its result
  fornax jobs submit --schema kinds.json --prefix-file task.txt invoices/*.txt --wait
  fornax jobs schema kinds kinds.json                   register a schema; jobs say --schema kinds
  fornax jobs list --status FAILED
  fornax jobs export > results.ndjson

The server is at http://127.0.0.1:8080 unless --server says otherwise.")]
pub(crate) enum Jobs {
    /// Submit a job: an input as JSON, or a batch of documents; prints its id, or with --wait its result
    Submit(JobsSubmit),
    /// Print how jobs stand, as JSON
    Status(JobsIds),
    /// Wait for jobs, showing progress, and print their results; fails if one of them did
    Wait(JobsIds),
    /// Cancel jobs
    Cancel(JobsIds),
    /// List the newest jobs
    List(JobsList),
    /// Print the newest jobs with their results, a line of JSON each
    Export(JobsList),
    /// Register a schema under a name
    Schema(JobsSchema),
}

/// Which server.
#[derive(Debug, Args)]
pub(crate) struct JobsServer {
    /// Where the server listens
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub(crate) server: String,
    /// The server's keys; the first one is used
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Whose queue: `default` or the model's name
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(crate) endpoint: String,
}

/// What to submit.
#[derive(Debug, Args)]
pub(crate) struct JobsSubmit {
    /// Documents: each is an item of one batch, called by its file's name
    #[arg(value_name = "FILE", required_unless_present = "input", conflicts_with = "input")]
    pub(crate) documents: Vec<PathBuf>,
    /// A job's input, or the whole body {input, webhook, policy}, as JSON; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) input: Option<PathBuf>,
    /// What all documents share: the task
    #[arg(long, value_name = "FILE", conflicts_with = "input")]
    pub(crate) prefix_file: Option<PathBuf>,
    /// A schema: a file, or the name of a registered one
    #[arg(long, value_name = "SCHEMA", conflicts_with = "input")]
    pub(crate) schema: Option<String>,
    /// Further parameters as JSON, as in '{\"temperature\": 0, \"max_tokens\": 200}'
    #[arg(long, value_name = "JSON", conflicts_with = "input")]
    pub(crate) params: Option<String>,
    /// Submitting again under the same key is the same job
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
    /// Wait for the result
    #[arg(long)]
    pub(crate) wait: bool,
    #[command(flatten)]
    pub(crate) server: JobsServer,
}

/// Some jobs.
#[derive(Debug, Args)]
pub(crate) struct JobsIds {
    /// Their ids
    #[arg(value_name = "ID", required = true)]
    pub(crate) ids: Vec<String>,
    #[command(flatten)]
    pub(crate) server: JobsServer,
}

/// The newest jobs.
#[derive(Debug, Args)]
pub(crate) struct JobsList {
    /// Only those in this state, as COMPLETED
    #[arg(long, value_name = "STATE")]
    pub(crate) status: Option<String>,
    /// At most so many
    #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) limit: u32,
    #[command(flatten)]
    pub(crate) server: JobsServer,
}

/// A schema and its name.
#[derive(Debug, Args)]
pub(crate) struct JobsSchema {
    /// What jobs call it by
    pub(crate) name: String,
    /// The schema
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) server: JobsServer,
}

/// Continue a text, without a chat template
///
/// Greedy unless --temperature says otherwise. Text is printed as it is made; --json prints one object at the end:
/// {text, tokens, finish_reason, usage, timings, seed}, with logprobs where they are asked for, and with choices in
/// place of text, tokens, finish_reason and seed where --n asks for several. `tokens` are the generated ids, an end
/// token that stopped the generation included; `text` holds neither control tokens nor a stop string. finish_reason is
/// "stop" (an end token, a stop string, or a form that is complete) or "length" (--max-tokens or the context is used
/// up). An answer that is cut before its form is complete is the error OUTPUT_TRUNCATED.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  fornax generate --prompt \"The sky is blue because\" --max-tokens 32
  fornax generate ./model.gguf --prompt-file story.txt --temperature 0.8 --seed 7
  fornax generate --tokens 504,6376,314 --max-tokens 8 --json
  fornax generate --prompt \"1, 2, 3,\" --stop 10 --json
  fornax generate --prompt \"A person as JSON: \" --schema person.json --max-tokens 200
  fornax generate --prompt \"Once\" --temperature 1 --n 4 --parallel 4 --max-tokens 20 --json

The tokenizer's BOS token is added once in front of a text where the model wants one, and never to --tokens.")]
pub(crate) struct Generate {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Print one JSON object at the end instead of streaming text
    #[arg(long)]
    pub(crate) json: bool,
    /// How many answers, each with its own random numbers; more than one needs --json
    #[arg(long, value_name = "N", default_value = "1", allow_negative_numbers = true)]
    pub(crate) n: u32,
    /// Print the log-probability of each generated token; needs --json
    #[arg(long, requires = "json")]
    pub(crate) logprobs: bool,
    /// Print those of the N most likely tokens too
    #[arg(long, value_name = "N", allow_negative_numbers = true, requires = "json")]
    pub(crate) top_logprobs: Option<u32>,
    /// Print the log-probability of every prompt token after the first, each with the N most likely tokens
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0", allow_negative_numbers = true, requires = "json")]
    pub(crate) prompt_logprobs: Option<u32>,
    #[command(flatten)]
    pub(crate) capacity: CapacityArgs,
    /// Print the memory that was planned and allocated
    #[arg(long, help_heading = "Model")]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
}

/// Have two servers compute, neither of which learns what
///
/// Weights are public; prompt, activations and answer stay on this machine or leave it blinded. `private info` says what
/// is protected, from whom, under which assumptions, and what is not. docs/private.md has the proof and the figures.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  fornax private serve smollm2 --party 0 --port 9000 --tls-cert cert.pem --tls-key key.pem --host 0.0.0.0
  fornax private chat smollm2 --party0 tls://a.example:9000 --party1 tls://b.example:9001
  fornax private proxy smollm2 --party0 tls://a.example:9000 --party1 tls://b.example:9001 --port 8081
  fornax private info

On one machine, to try it out (this protects nothing):
  fornax private serve --party 0 --port 9000 --demo-single-host
  fornax private serve --party 1 --port 9001 --demo-single-host
  fornax private chat --party0 tcp://127.0.0.1:9000 --party1 tcp://127.0.0.1:9001 --demo-single-host")]
pub(crate) enum Private {
    /// Serve one party's share of a model's products
    Serve(PrivateServe),
    /// Chat like `fornax run`
    Chat(PrivateChat),
    /// Continue a text like `fornax generate`
    Generate(PrivateGenerate),
    /// Measure speed, rounds and bytes beside plaintext
    Bench(PrivateBench),
    /// Serve OpenAI's API on this machine, for any client
    Proxy(PrivateProxy),
    /// Say what is protected and what is not; with parties, what they say of themselves
    Info(PrivateInfo),
    /// Judge recorded transcripts
    Audit(PrivateAudit),
}

/// The two servers.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Parties")]
pub(crate) struct PartyArgs {
    /// The server that gets blinded words: tls://HOST:PORT, or tcp:// on this machine
    #[arg(long, value_name = "URL")]
    pub(crate) party0: String,
    /// The server that gets the masks' seed; not the same one
    #[arg(long, value_name = "URL")]
    pub(crate) party1: String,
    #[command(flatten)]
    pub(crate) how: PartyHow,
    /// Write what each party sees to FILE.party0 and FILE.party1
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Use cached prefixes again; leaks which prompts begin alike
    #[arg(long)]
    pub(crate) prefix_reuse: bool,
    /// Draft tokens from repetitions; leaks how repetitive an answer is
    #[arg(long)]
    pub(crate) drafts: bool,
    /// Compute a form's forced tokens together; leaks the shape of the answer
    #[arg(long)]
    pub(crate) fast_forward: bool,
}

/// How servers are spoken to.
#[derive(Clone, Debug, Args)]
pub(crate) struct PartyHow {
    /// Both parties are on one host: there is no privacy, and that is known
    #[arg(long)]
    pub(crate) demo_single_host: bool,
    /// Believe this certificate authority (PEM) in place of the usual ones
    #[arg(long, value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// Seconds that an answer may take
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(crate) timeout: Duration,
}

/// Serve one party's share of a model's products
///
/// The server multiplies what it is sent (party 0) or draws (party 1) by the model's public weights, for many sessions at
/// once. It learns how many rows each round has, when, and which model. It logs nothing of any session.
#[derive(Debug, Args)]
pub(crate) struct PrivateServe {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    pub(crate) model: Option<String>,
    /// Which of the two servers this is
    #[arg(long, value_name = "0|1", value_parser = clap::value_parser!(u8).range(0..=1))]
    pub(crate) party: u8,
    /// Address to listen on; beyond the loopback a certificate is needed
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port to listen on; 0 lets the system choose
    #[arg(long, value_name = "PORT", default_value = "9000")]
    pub(crate) port: u16,
    /// The other party is on this host too: there is no privacy, and clients are told so
    #[arg(long)]
    pub(crate) demo_single_host: bool,
    /// Certificate chain (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Where to multiply: cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: String,
    /// CPU threads [default: one per core]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) threads: Option<usize>,
    /// Sessions at once; more are turned away
    #[arg(long, value_name = "N", default_value = "64", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) max_sessions: usize,
    /// Positions that one session may have
    #[arg(long, value_name = "N", default_value = "1048576", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_positions: u32,
    /// Seconds after which a silent session is ended
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub(crate) idle_timeout: Duration,
    /// Write everything that this party sees to a file
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
}

/// Chat in the terminal, or answer one PROMPT, with products done by the two parties
#[derive(Debug, Args)]
pub(crate) struct PrivateChat {
    #[command(flatten)]
    pub(crate) run: Run,
    #[command(flatten)]
    pub(crate) parties: PartyArgs,
}

/// Continue a text, with products done by the two parties
#[derive(Debug, Args)]
pub(crate) struct PrivateGenerate {
    #[command(flatten)]
    pub(crate) generate: Generate,
    #[command(flatten)]
    pub(crate) parties: PartyArgs,
}

/// Measure private inference beside plaintext
///
/// A prompt, then tokens one at a time, first with all of the model on this machine, then with products done by the two
/// parties. --json prints {model, plaintext, private}.
#[derive(Debug, Args)]
pub(crate) struct PrivateBench {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    pub(crate) model: Option<String>,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value = "64", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) prompt_tokens: usize,
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value = "64", allow_negative_numbers = true, value_parser = several)]
    pub(crate) tokens: usize,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) parties: PartyArgs,
}

/// Serve OpenAI's API on this machine, with products done by the two parties
///
/// Any client of that API is then private: what it sends never leaves this machine in the open. Routes are those of
/// `fornax serve` (docs/api.md), without durable jobs.
#[derive(Debug, Args)]
pub(crate) struct PrivateProxy {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    pub(crate) model: Option<String>,
    /// Address to listen on: one of this machine's own
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port to listen on; 0 lets the system choose
    #[arg(long, value_name = "PORT", default_value = "8081")]
    pub(crate) port: u16,
    /// What clients call the model [default: its catalog name, or its file's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,
    /// Requests computed at once; the cache holds a whole context for each
    #[arg(long, value_name = "N", default_value = "1", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) parallel: usize,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) parties: PartyArgs,
}

/// Say what private inference protects, from whom, under which assumptions, and what it does not
#[derive(Debug, Args)]
pub(crate) struct PrivateInfo {
    /// Ask this server what it is
    #[arg(long, value_name = "URL", requires = "party1")]
    pub(crate) party0: Option<String>,
    /// And this one
    #[arg(long, value_name = "URL", requires = "party0")]
    pub(crate) party1: Option<String>,
    #[command(flatten)]
    pub(crate) how: PartyHow,
}

/// Judge what parties saw: whether masks were used once, words are uniform, seeds cannot be guessed
///
/// Prints every check with its figures; exit code 1 where one fails.
#[derive(Debug, Args)]
pub(crate) struct PrivateAudit {
    /// Files that --record wrote; with both parties' of one conversation more is checked
    #[arg(value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// Print JSON: [{check, passed, detail}]
    #[arg(long)]
    pub(crate) json: bool,
}

/// Say what a model will take in memory, and whether it fits
///
/// From headers and flags alone: nothing is loaded. `run` and `generate` make the same plan first and refuse what does
/// not fit. Where it does not fit, the plan says what would: a shorter context, fewer requests, or other types of the
/// same matrices. Exit code 0 fits, 3 does not fit, 4 cannot be computed by this build.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax plan ./model.gguf
  fornax plan ./model.gguf --context 8192 --parallel 4
  fornax plan ./Mixtral-8x7B --memory-limit 24GiB --json")]
pub(crate) struct Plan {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    pub(crate) model: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) capacity: CapacityArgs,
}

/// Show what is in a model: metadata, architecture facts, tensors, tokenizer, chat template
///
/// Nothing is loaded: vocabulary-only files and architectures that cannot be computed yet are shown too.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax inspect
  fornax inspect ./model.gguf --json
  fornax inspect ./Qwen2.5-0.5B-Instruct")]
pub(crate) struct Inspect {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    pub(crate) model: Option<String>,
    /// Print JSON, with every array in full
    #[arg(long)]
    pub(crate) json: bool,
}

/// Turn texts into vectors that tell how alike they are
///
/// A vector for each text, in their order, at length one unless --raw: encoders pool as their files say; of a decoder it
/// is what its head would read after the last token. Without --json or --out each vector is a line, a JSON array.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax embed --text \"A cat sleeps.\" --text \"A kitten naps.\" --json
  fornax embed ./model.gguf --lines questions.txt --parallel 8 > vectors.ndjson
  fornax embed ./model.gguf --file a.txt --file b.txt --out vectors.f32")]
pub(crate) struct Embed {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) source: EmbedSource,
    /// Leave the vectors as long as the model makes them
    #[arg(long)]
    pub(crate) raw: bool,
    /// Write rows of little-endian f32 to a file
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    pub(crate) out: Option<PathBuf>,
    /// Print JSON: {dimensions, embeddings, usage: {prompt_tokens}}
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) capacity: CapacityArgs,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub(crate) struct EmbedSource {
    /// A text; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) text: Vec<String>,
    /// A file that is one text; - is standard input; may be given several times
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Vec<PathBuf>,
    /// A file of which every line is a text; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) lines: Option<PathBuf>,
}

/// Turn text into token ids and pieces
///
/// No BOS is added unless --bos; control tokens written in the text stay text unless --special. No weights are
/// loaded, so vocabulary-only files work. --json prints {tokens: [{id, piece}]}.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax tokenize --text \"Hello world\"
  fornax tokenize ./model.gguf --file chapter.txt --json
  fornax tokenize --special --text \"<|im_start|>user\"")]
pub(crate) struct Tokenize {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) source: TextSource,
    /// Put the tokenizer's BOS token in front
    #[arg(long)]
    pub(crate) bos: bool,
    /// Parse control tokens written in the text
    #[arg(long)]
    pub(crate) special: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct TextSource {
    /// The text
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) text: Option<String>,
    /// Read the text from a file; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
}

/// Show the logits after a prompt
///
/// --json prints {top: [{token, piece, logit, logprob}]}, most likely first. With --all --out the logits after every
/// token are written as rows of little-endian f32, one row per token, as wide as the vocabulary.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax logits --prompt \"The sky is\" --top 5
  fornax logits --tokens 504,6376,314 --json
  fornax logits --prompt \"The sky is\" --all --out logits.f32")]
pub(crate) struct Logits {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// How many of the most likely tokens to show
    #[arg(long, value_name = "K", default_value = "10", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) top: u32,
    /// Write the logits after every token to --out
    #[arg(long, requires = "out")]
    pub(crate) all: bool,
    /// Where --all writes; the file appears only when it is complete
    #[arg(long, value_name = "FILE", requires = "all")]
    pub(crate) out: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

/// Measure how well a model predicts a text
///
/// The text is tokenized as a whole and cut into consecutive windows of --context tokens (with a BOS token in front
/// of each, inside that length, where the tokenizer adds one). Within a window every token is predicted from those
/// before it; a window's first token is predicted only from a BOS token and is not counted where there is none. The
/// perplexity is exp of the mean negative log-likelihood of the counted tokens.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax perplexity --file wiki.test.raw --context 512
  fornax perplexity ./model.gguf --file book.txt --kv-dtype f32 --activations float --json")]
pub(crate) struct Perplexity {
    /// Path, catalog name or hub reference of the model [default: smollm2]
    pub(crate) model: Option<String>,
    /// The text; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Compute it as private inference does: weights of 8 bits, exact products of whole numbers, all on this machine
    #[arg(long, conflicts_with = "activations")]
    pub(crate) w8: bool,
    /// Print JSON: {perplexity, nll, tokens, windows, context}
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

/// Measure how fast a model runs here
///
/// Through the engine, as requests run: prefill of prompts of several lengths; decode of several streams together, and of
/// one behind 8000 tokens where the context has room (on a GPU it is made to); a mixed load of requests that come by
/// themselves, at random times and so many a second, with the times to the first token and between tokens; the same prompt
/// of 1024 tokens twice (the second time it is found in the cache); and loading. Beside them: the bytes and operations that
/// they take, and their shares of what this machine does at most, measured in the same run: memory that is read (a GPU's:
/// copied), and a GPU's matrix units, multiplying f16 without loading anything. On a GPU also the time of a step, and
/// what the engine's own thread takes for one: it is hidden where it is less.
///
/// With --http a server is started beside it, on this machine and in this process, and decode and mixed load are measured
/// again by clients that stream over its sockets; with --http=URL such a server, one without keys, is measured instead.
///
/// --json prints {model, device, threads, activations, kv_dtype, memory_bytes_per_second, upload_bytes_per_second and
/// matrix_operations_per_second (of a GPU), load, prefill, decode, mixed, prefix, http, skipped}.
///
/// With --make-random it writes a model of random weights in the shape of a real one instead, without a tokenizer, and
/// prints its path.
///
/// With --shapes it makes such models itself, one after the other in the types of --types, measures them and removes them.
/// The largest of the usual shapes takes 15 GB. --json prints the same with {models} in place of one model's figures.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax bench
  fornax bench --shapes --device cuda:0
  fornax bench --shapes=qwen2.5-7b --types bf16,q4_k_m --only decode --streams 1,64 --device cuda:0
  fornax bench ./model.gguf --threads 4 --json
  fornax bench ./model.gguf --http
  fornax bench --http=http://127.0.0.1:8080 --streams 1,16 --rate 2
  fornax bench --make-random qwen2.5-0.5b --quant q8_0
  fornax bench ./random.gguf --make-random tiny --quant f16

Shapes: tiny, smollm2-135m, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b. Types: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1,
q4_k, q5_k, q6_k, q4_k_m; rows that do not fill a block of the type fall back to another, as in llama.cpp.")]
pub(crate) struct Bench {
    /// Path, catalog name or hub reference of the model [default: smollm2]; with --make-random the file to write [default:
    /// SHAPE-QUANT.gguf in this folder]
    pub(crate) model: Option<String>,
    /// Measure these and nothing else
    #[arg(long, value_name = "PART,...", value_delimiter = ',', value_enum)]
    pub(crate) only: Vec<Part>,
    /// Streams that are decoded together [default: 1,4,16; on a GPU 1,8,32,64,128,256]
    #[arg(long, value_name = "N,...", value_delimiter = ',', allow_negative_numbers = true, value_parser = positive)]
    pub(crate) streams: Vec<usize>,
    /// Tokens before each of them; the mixed load has half to 15 halves of it [default: 16; on a GPU 128]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) prompt: Option<usize>,
    /// Tokens that each of them generates; the mixed load half to three halves of it [default: 32; on a GPU 128]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = several)]
    pub(crate) tokens: Option<usize>,
    /// Lengths of prompts [default: 128,512; on a GPU 128,512,2048,8192]
    #[arg(long, value_name = "N,...", value_delimiter = ',', allow_negative_numbers = true, value_parser = positive)]
    pub(crate) prefill: Vec<usize>,
    /// Requests a second of the mixed load [default: half of what prefill and decode promise; with --http=URL
    /// there is none without it]
    #[arg(long, value_name = "R", allow_negative_numbers = true, value_parser = per_second)]
    pub(crate) rate: Option<f64>,
    /// Requests of the mixed load [default: 16; on a GPU 128]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) requests: Option<usize>,
    /// Measure through a server, too: one of its own, or the one at URL
    #[arg(long, value_name = "URL", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub(crate) http: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a model of random weights in this shape, its matrices in the type of --quant
    #[arg(long, value_name = "SHAPE", requires = "quant", conflicts_with = "json")]
    pub(crate) make_random: Option<String>,
    /// Measure random models of these shapes; MODEL is a folder for them [default: in memory]
    #[arg(
        long,
        value_name = "SHAPE,...",
        num_args = 0..=1,
        require_equals = true,
        value_delimiter = ',',
        default_missing_value = "qwen2.5-0.5b,qwen2.5-7b",
        conflicts_with_all = ["make_random", "quant"]
    )]
    pub(crate) shapes: Option<Vec<String>>,
    /// Types of --shapes
    #[arg(long, value_name = "TYPE,...", value_delimiter = ',', default_value = "bf16,q8_0,q4_k_m,q6_k")]
    pub(crate) types: Vec<String>,
    /// Fixes the weights of --make-random, and the times and lengths of the mixed load
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
}

/// What `bench` measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Prompts
    Prefill,
    /// Streams together
    Decode,
    /// Requests that come by themselves
    Mixed,
    /// A prompt that is found in the cache
    Prefix,
}

impl Part {
    pub(crate) const ALL: [Part; 4] = [Part::Prefill, Part::Decode, Part::Mixed, Part::Prefix];
}

/// Fetch a model of the catalog or of the Hugging Face hub
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax pull smollm2
  fornax pull Qwen/Qwen2.5-0.5B-Instruct-GGUF           its Q4_K_M file, or what comes nearest
  fornax pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0      a quantisation
  fornax pull hf:owner/name@v1.0:folder/file.gguf       a file of a revision
  fornax pull https://huggingface.co/owner/name         an address

The path of the model is printed. A fetch that was stopped goes on where it was; files are checked against the hub's
checksums. Models of the catalog lie in $FORNAX_CACHE, else $XDG_CACHE_HOME/fornax, else ~/.cache/fornax; those of the
hub where its Python library keeps them ($HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub). HF_ENDPOINT,
HF_TOKEN (or the token that `hf auth login` kept) and HF_HUB_OFFLINE are honoured.")]
pub(crate) struct Pull {
    /// A name that `fornax list` shows, or a hub reference
    #[arg(value_name = "REF")]
    pub(crate) reference: String,
}

/// List the models that can be named and those on disk
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax list
  fornax list --json")]
pub(crate) struct List {
    /// Print JSON: {cache, models: [{name, file, path, bytes, on_disk, description, licence}]}
    #[arg(long)]
    pub(crate) json: bool,
}

/// Remove a model from disk
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax rm smollm2
  fornax rm owner/name      all of a hub repository that is on disk")]
pub(crate) struct Rm {
    /// A name, a file or a repository that `fornax list` shows
    pub(crate) name: String,
}

/// Say what this machine has and what is missing
///
/// Nothing is downloaded and the network is not tried.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax doctor
  fornax doctor --report         a block to paste into a bug report
  fornax doctor --conformance    check every operation of the device against the reference
  fornax doctor --conformance --only \"matmul Q4_K,sample,!many tokens\"")]
pub(crate) struct Doctor {
    /// Run the conformance suite on the device and print the counts of each operation
    #[arg(long)]
    pub(crate) conformance: bool,
    /// Only cases whose operation and words hold one of these, with commas between; ! in front leaves cases out
    #[arg(long, value_name = "WORDS", requires = "conformance")]
    pub(crate) only: Option<String>,
    /// Print a block to paste into a report
    #[arg(long)]
    pub(crate) report: bool,
    /// Which device to look at: auto, cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: String,
}

/// Print a completion script for a shell
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fornax completions bash > ~/.local/share/bash-completion/completions/fornax
  fornax completions zsh > ~/.zfunc/_fornax
  fornax completions fish > ~/.config/fish/completions/fornax.fish")]
pub(crate) struct Completions {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

/// A prompt: a text or token ids.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub(crate) struct PromptArgs {
    /// The text to continue
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        required_unless_present_any = ["prompt_file", "tokens"],
        conflicts_with_all = ["prompt_file", "tokens"]
    )]
    pub(crate) prompt: Option<String>,
    /// Read the text from a file; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "tokens")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Token ids instead of text, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token_id)]
    pub(crate) tokens: Option<Vec<u32>>,
    /// Parse control tokens written in the text
    #[arg(long, conflicts_with = "tokens")]
    pub(crate) special: bool,
}

/// Where a model is computed, and how many requests at once.
#[derive(Clone, Debug, Args)]
pub(crate) struct CapacityArgs {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// Requests computed at once; the cache holds a whole context for each
    #[arg(long, value_name = "N", default_value = "1", allow_negative_numbers = true, value_parser = positive, help_heading = "Model")]
    pub(crate) parallel: usize,
}

/// Where and how the model is computed.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct DeviceArgs {
    /// Where to compute: auto (the first GPU that can be used, else the CPU), cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: String,
    /// Most tokens of one request, prompt and answer together [default: what the model was trained for]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// CPU threads [default: one per core]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) threads: Option<usize>,
    /// Bring the matrices of a safetensors model into this type while loading: q8_0, fp8 or q4_k [default: as stored]
    #[arg(long, value_name = "QUANT")]
    pub(crate) quant: Option<String>,
    /// How keys and values are stored: f32, f16, bf16, q8_0 or fp8 [default: f16; f32 with --activations float]
    #[arg(long, value_name = "DTYPE")]
    pub(crate) kv_dtype: Option<String>,
    /// How activations enter matrix products with quantised weights [default: int8 on the CPU, float on a GPU]
    #[arg(long, value_enum)]
    pub(crate) activations: Option<Activations>,
    /// Refuse to use more memory than this: bytes, or with KiB, MiB, GiB [default: what the machine has]
    #[arg(long, value_name = "BYTES", value_parser = byte_size)]
    pub(crate) memory_limit: Option<u64>,
    /// Same tokens whatever else runs; always so, on the CPU and on GPUs
    #[arg(long)]
    pub(crate) deterministic: bool,
}

impl DeviceArgs {
    /// How activations are computed on a device: as asked for, or its default.
    pub(crate) fn activations_on(&self, device: fornax::Device) -> Activations {
        match device {
            fornax::Device::Cpu => self.activations.unwrap_or(Activations::Int8),
            fornax::Device::Cuda(_) => Activations::Float,
        }
    }
}

/// How activations meet quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Activations {
    /// Full precision
    Float,
    /// Rounded to integers, 32 to a scale; faster
    Int8,
}

impl Activations {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Activations::Float => "float",
            Activations::Int8 => "int8",
        }
    }
}

pub(crate) fn token_id(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "a token id is a whole number, as in 504,6376".to_owned())
}

pub(crate) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("it must be a whole number, at least 1".to_owned()),
    }
}

fn several(text: &str) -> Result<usize, String> {
    match positive(text)? {
        1 => Err("it must be at least 2".to_owned()),
        number => Ok(number),
    }
}

fn per_second(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("it must be more than 0 requests a second, as in 2.5".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || "it must be a number of seconds, as in 30 or 0.5".to_owned();
    Duration::try_from_secs_f64(text.parse().map_err(|_| wrong())?).map_err(|_| wrong())
}

fn byte_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("unknown unit {unit:?}; use bytes, KiB, MiB or GiB")),
    };
    let wrong = || "it must be a number of bytes, as in 2000000000 or 2GiB".to_owned();
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).filter(|&bytes| bytes > 0).ok_or_else(wrong);
    }
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * scale as f64;
    // Fractions come with a unit; beyond 2^53 nobody has that memory.
    if bytes >= 1.0 && bytes < (1u64 << 53) as f64 {
        #[expect(clippy::cast_sign_loss, reason = "just checked to be positive")]
        return Ok(bytes as u64);
    }
    Err(wrong())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn byte_sizes_take_units() {
        let check = |text: &str, bytes: Option<u64>| assert_eq!(byte_size(text).ok(), bytes, "{text}");
        check("1000", Some(1000));
        check("2GiB", Some(2 << 30));
        check("2g", Some(2 << 30));
        check("1.5MiB", Some(3 << 19));
        check("3 MB", Some(3_000_000));
        check("0", None);
        check("", None);
        check("-1", None);
        check("lots", None);
        check("99999999999GiB", None);
    }
}
