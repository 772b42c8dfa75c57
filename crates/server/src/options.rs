//! How a server is set up.

use std::{path::PathBuf, time::Duration};

use crate::{ceiling::Ceiling, jobs::durable::JobsOptions};

/// What an operator decides. `Default` is a local server for its own user.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Keys, one a line; without it Host and Origin are checked instead.
    pub api_key_file: Option<PathBuf>,
    /// Whether `/metrics` needs no key.
    pub metrics_open: bool,
    /// Whether `/health` is 503 until the models of the start are loaded.
    pub health_when_ready: bool,
    /// Web pages of these origins may call.
    pub cors_origins: Vec<String>,
    /// Names that Host may carry, besides those of the loopback; only looked at without keys.
    pub hosts: Vec<String>,
    /// Certificate chain and key, in PEM.
    pub tls: Option<TlsFiles>,
    /// Bytes of a body.
    pub body_bytes_max: usize,
    /// Bytes of a file that is sent.
    pub file_bytes_max: usize,
    /// Bytes of all bodies that are being read or understood at a time.
    pub bodies_bytes_max: usize,
    /// Bytes of what pictures became, of all requests that wait or are computed.
    pub rows_bytes_max: usize,
    /// How long a client may take to send its headers, or its body.
    pub read_timeout: Duration,
    /// How long a stream may wait for a client that does not read, before it is cancelled, and then its connection, before it
    /// is closed.
    pub write_timeout: Duration,
    /// Connections at a time; further ones wait to be accepted.
    pub connections_max: usize,
    /// Requests at a time for one key, to the last byte of their answers; without keys, for everybody together.
    pub per_key_max: usize,
    /// Whether every key may let its requests go before others; keys may be given that one by one, too.
    pub priority_open: bool,
    /// Whether keys find each other's cached prefixes: how many tokens were found says then what others have sent.
    pub shared_prefixes: bool,
    /// How long a request may be read, rendered, encoded and compiled.
    pub prepare_timeout: Duration,
    /// How much memory is left for requests.
    pub ceiling: Option<Ceiling>,
    /// How long an answer may be computed, counted from when it starts; `None` for ever.
    pub request_timeout: Option<Duration>,
    /// How long requests under way may take to finish when the server is told to stop.
    pub drain_timeout: Duration,
    /// After how long without a request a model is unloaded; `None` never.
    pub idle_unload: Option<Duration>,
    /// How long a stream may be silent before a comment says that it lives.
    pub keep_alive: Duration,
    /// Who is told when the server is ready.
    pub callback: Option<Callback>,
    /// Where durable jobs are kept, if they are.
    pub jobs: Option<JobsOptions>,
    /// Where an OpenTelemetry collector takes traces, as `http://127.0.0.1:4318`.
    pub otlp: Option<String>,
}

/// Where a TLS identity is read.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The certificate and those that signed it.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// A scheduler that waits for this worker.
#[derive(Clone, Debug)]
pub struct Callback {
    /// Where it listens.
    pub url: String,
    /// What it calls this worker.
    pub worker_id: String,
    /// Where it can reach this worker; by default the address listened on.
    pub uri: Option<String>,
    /// How often it is tried, with twice the time between each two tries.
    pub attempts: u32,
    /// The time after the first try.
    pub pause: Duration,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            api_key_file: None,
            metrics_open: false,
            health_when_ready: false,
            cors_origins: Vec::new(),
            hosts: Vec::new(),
            tls: None,
            // A context of a million tokens, written as text, with room for a schema.
            body_bytes_max: 8 << 20,
            // Some ten thousand requests of a batch.
            file_bytes_max: 64 << 20,
            bodies_bytes_max: 256 << 20,
            // Some thirty pictures of a megapixel, of a model of 2B.
            rows_bytes_max: 1 << 30,
            read_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(60),
            connections_max: 4096,
            per_key_max: 1024,
            priority_open: false,
            shared_prefixes: false,
            // A megabyte of text takes some two seconds to cut into tokens.
            prepare_timeout: Duration::from_secs(30),
            ceiling: None,
            request_timeout: Some(Duration::from_secs(3600)),
            drain_timeout: Duration::from_secs(30),
            idle_unload: None,
            keep_alive: Duration::from_secs(10),
            callback: None,
            jobs: None,
            otlp: None,
        }
    }
}
