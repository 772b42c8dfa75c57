//! The commands and flags of `fornax private`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::cli::args::{JsonArg, ModelArg, positive, seconds, several};
use crate::cli::device::DeviceArgs;
use crate::cli::generate::Generate;
use crate::cli::run::Run;

/// Have two servers compute, neither of which learns what
///
/// Weights are public; prompt, activations and answer stay on this machine or leave it blinded. `private info` says
/// what is protected, from whom, under which assumptions, and what is not. docs/private.md has the proof and the
/// figures.
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
    /// Write what each party sees to FILE.party0 and FILE.party1; both together are the conversation in clear
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
    /// Allow strict tools, several demanded calls and thinking budgets; leaks where in the answer they act
    #[arg(long)]
    pub(crate) ask_anew: bool,
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
    /// Certificate chain (PEM) to show to servers that want one; tells them who asks
    #[arg(long, value_name = "FILE", requires = "client_key")]
    pub(crate) client_cert: Option<PathBuf>,
    /// Its private key (PEM)
    #[arg(long, value_name = "FILE", requires = "client_cert")]
    pub(crate) client_key: Option<PathBuf>,
    /// Seconds that an answer may take
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(crate) timeout: Duration,
}

/// Serve one party's share of a model's products
///
/// The server multiplies what it is sent (party 0) or draws (party 1) by the model's public weights, for many sessions
/// at once. It learns how many rows each round has, when, and which model. It logs nothing of any session.
#[derive(Debug, Args)]
pub(crate) struct PrivateServe {
    #[command(flatten)]
    pub(crate) model: ModelArg,
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
    /// Serve only clients with a certificate of this authority (PEM); without it, the service is open to all who reach
    /// it
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) client_ca: Option<PathBuf>,
    /// Where to multiply: cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: String,
    /// CPU threads [default: one per core]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) threads: Option<usize>,
    /// Sessions at once; more are turned away
    #[arg(long, value_name = "N", default_value = "64", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) max_sessions: usize,
    /// Connections of one address at once; more are closed
    #[arg(long, value_name = "N", default_value = "16", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) max_per_address: usize,
    /// Seconds until a connection has to have opened a session
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub(crate) arrival_timeout: Duration,
    /// Positions that one session may have
    #[arg(long, value_name = "N", default_value = "1048576", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_positions: u32,
    /// Seconds after which a silent session is ended
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub(crate) idle_timeout: Duration,
    /// Write everything that this party sees to a file; with the other party's, it is the conversations in clear
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
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value = "64", allow_negative_numbers = true, value_parser = positive)]
    pub(crate) prompt_tokens: usize,
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value = "64", allow_negative_numbers = true, value_parser = several)]
    pub(crate) tokens: usize,
    #[command(flatten)]
    pub(crate) output: JsonArg,
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
    #[command(flatten)]
    pub(crate) model: ModelArg,
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
