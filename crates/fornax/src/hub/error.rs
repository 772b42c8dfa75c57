use std::io;
use std::path::PathBuf;
use std::time::Duration;

use fornax_code::Code;

use crate::units;

/// Why a model of the hub could not be had. Each message is one line and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The text names no repository.
    #[error(
        "{text:?} is no reference to the hub: {reason}; write owner/name, owner/name:Q4_K_M or owner/name:file.gguf"
    )]
    Reference {
        /// What was given.
        text: String,
        /// The rule that it breaks.
        reason: &'static str,
    },
    /// No variable says where models are kept.
    #[error("no folder for models of the hub: set HF_HOME or HOME")]
    NoCacheDir,
    /// The endpoint is no address.
    #[error("HF_ENDPOINT is {endpoint:?}; it begins with https:// (or http:// for a server of your own)")]
    Endpoint {
        /// What was given.
        endpoint: String,
    },
    /// The token cannot be sent.
    #[error("the token of {source_name} holds characters that no token has; set HF_TOKEN to the token alone")]
    Token {
        /// Where it was found.
        source_name: String,
    },
    /// The hub wants to know who asks, or does not let this one in.
    #[error(
        "{repo} is gated or private, and {}; ask for access at {endpoint}/{repo}, and set HF_TOKEN to a token that has it",
        if *.has_token { "the token given has no access to it" } else { "no token was given" }
    )]
    Unauthorized {
        /// The repository.
        repo: String,
        /// Where it is.
        endpoint: String,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// There is no such repository, or none that this caller may see.
    #[error(
        "{endpoint} has no repository {repo}{}; check its spelling",
        if *.has_token { "" } else { ", or it is private and HF_TOKEN is not set" }
    )]
    NoRepository {
        /// The repository.
        repo: String,
        /// Where it was looked for.
        endpoint: String,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// The repository has no such branch, tag or commit.
    #[error("{repo} has no revision {revision:?}; leave it out, or name a branch, a tag or a commit")]
    NoRevision {
        /// The repository.
        repo: String,
        /// What was asked for.
        revision: String,
    },
    /// The repository has no such file.
    #[error("{repo} has no file {file:?}; its model files are: {}", list(.there))]
    NoFile {
        /// The repository.
        repo: String,
        /// What was asked for.
        file: String,
        /// Some of those that there are.
        there: Vec<String>,
    },
    /// The repository has no such quantisation.
    #[error("{repo} has no GGUF file in {quant}; it has: {}", list(.there))]
    NoQuant {
        /// The repository.
        repo: String,
        /// What was asked for.
        quant: String,
        /// Those that there are.
        there: Vec<String>,
    },
    /// Which model is meant cannot be told.
    #[error("{repo} holds several models; name one of its files as {repo}/FILE: {}", list(.there))]
    Several {
        /// The repository.
        repo: String,
        /// Their files.
        there: Vec<String>,
    },
    /// A split model lacks shards.
    #[error(
        "{repo} has {there} of the {wanted} shards of {first}; use another model, or another version of this one"
    )]
    Shards {
        /// The repository.
        repo: String,
        /// The first shard that is there.
        first: String,
        /// Shards that there are.
        there: usize,
        /// Shards that their names promise.
        wanted: usize,
    },
    /// Nothing in the repository can be loaded.
    #[error(
        "{repo} cannot be loaded: it has no {lacks}; use a repository with GGUF files, or with safetensors and tokenizer.json"
    )]
    NothingToLoad {
        /// The repository.
        repo: String,
        /// What is missing.
        lacks: &'static str,
    },
    /// The hub asks for patience.
    #[error("{host} answers too many requests (429) and asks to wait {} s; try again then, or set HF_TOKEN", .wait.as_secs())]
    RateLimited {
        /// Who.
        host: String,
        /// How long it asks for.
        wait: Duration,
    },
    /// No connection, or one that broke again and again.
    #[error(
        "cannot fetch from {host}: {reason}; check the network, then try again: what is there already is kept"
    )]
    Unreachable {
        /// Who.
        host: String,
        /// The last reason.
        reason: String,
    },
    /// An answer that says no in a way that nothing else covers.
    #[error("{host} answers {status} for {what}; try again later")]
    Status {
        /// Who.
        host: String,
        /// The HTTP status.
        status: u16,
        /// What was asked for.
        what: String,
    },
    /// An answer that is not what the hub's API promises.
    #[error("the answer of {host} is not the hub's: {reason}; check HF_ENDPOINT")]
    Protocol {
        /// Who.
        host: String,
        /// What is wrong.
        reason: String,
    },
    /// A repository lists a file that would lie outside of it.
    #[error(
        "{repo} lists a file {name:?}, which would be written outside of its folder; nothing was fetched"
    )]
    UnsafeName {
        /// The repository.
        repo: String,
        /// The name.
        name: String,
    },
    /// The bytes are not those that the hub promised.
    #[error(
        "{file} has checksum {got}, expected {wanted}; it was not kept, try again and report it if it persists"
    )]
    WrongChecksum {
        /// The file.
        file: String,
        /// Found.
        got: String,
        /// Promised.
        wanted: String,
    },
    /// The number of bytes is not the one that the hub promised.
    #[error("{file} has more than the {wanted} bytes that were promised; it was not kept, try again")]
    TooLong {
        /// The file.
        file: String,
        /// Promised.
        wanted: u64,
    },
    /// HF_HUB_OFFLINE is set and the model is not on disk.
    #[error("{reference} is not complete in {}, and HF_HUB_OFFLINE forbids fetching it; unset it, or pull the model where there is a network", .cache.display())]
    Offline {
        /// What was asked for.
        reference: String,
        /// Where it was looked for.
        cache: PathBuf,
    },
    /// Whoever asked for it does not want it any more.
    #[error(
        "stopped: {} of {} are kept; the same command goes on from there",
        units::bytes(*.kept),
        units::bytes(*.total)
    )]
    Stopped {
        /// Bytes of the file under way that are on disk.
        kept: u64,
        /// Its size.
        total: u64,
    },
    /// The file system has no room.
    #[error("no space left for {}: {} are needed{}; free some, or set HF_HOME to a larger disk", .path.display(), units::bytes(*.needed), room(.free))]
    DiskFull {
        /// Where.
        path: PathBuf,
        /// Bytes still to be fetched.
        needed: u64,
        /// Bytes that there are, where the system says so.
        free: Option<u64>,
    },
    /// The folder cannot be written.
    #[error("cannot write {}: {reason}; set HF_HOME to a folder that you can write to", .path.display())]
    Unwritable {
        /// The path.
        path: PathBuf,
        /// Why.
        reason: io::Error,
    },
    /// A file cannot be read back.
    #[error("cannot read {}: {reason}; check the disk, then try again", .path.display())]
    Unreadable {
        /// The path.
        path: PathBuf,
        /// Why.
        reason: io::Error,
    },
}

impl HubError {
    /// What programs know this error by.
    pub fn code(&self) -> Code {
        match self {
            HubError::Reference { .. } | HubError::Endpoint { .. } | HubError::Token { .. } => {
                Code::InvalidInput
            }
            HubError::NoRepository { .. }
            | HubError::NoRevision { .. }
            | HubError::NoFile { .. }
            | HubError::NoQuant { .. }
            | HubError::Several { .. }
            | HubError::Offline { .. } => Code::ModelNotFound,
            HubError::Shards { .. }
            | HubError::UnsafeName { .. }
            | HubError::WrongChecksum { .. }
            | HubError::TooLong { .. } => Code::ModelCorrupt,
            HubError::NothingToLoad { .. } => Code::ModelUnsupported,
            HubError::DiskFull { .. } => Code::DiskFull,
            HubError::Stopped { .. } => Code::Cancelled,
            // The model exists and could not be had now.
            HubError::NoCacheDir
            | HubError::Unauthorized { .. }
            | HubError::RateLimited { .. }
            | HubError::Unreachable { .. }
            | HubError::Status { .. }
            | HubError::Protocol { .. }
            | HubError::Unwritable { .. }
            | HubError::Unreadable { .. } => Code::ModelNotReady,
        }
    }
}

/// Enough to choose from; a repository may hold hundreds.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 24;
    match names {
        [] => "none".to_owned(),
        names if names.len() <= SHOWN => names.join(", "),
        names => format!("{} and {} more", names[..SHOWN].join(", "), names.len() - SHOWN),
    }
}

fn room(bytes: &Option<u64>) -> String {
    bytes.map_or(String::new(), |bytes| format!(", {} are free", units::bytes(bytes)))
}
