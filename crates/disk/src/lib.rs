//! Copies of cached pages on a disk, for prompts that begin as others did before a restart.
//!
//! A [`Store`] is a folder of one model: a log in segments, each record with its name and a checksum, or sealed with a
//! key. One process writes it. Whatever is torn, foreign or damaged is never read as a page: it is ignored and counted.
//! [`Disk`] is a store behind two threads, as the engine's [`Tier`](fornax_engine::Tier): no step waits for the disk,
//! and a disk that fails turns the tier off and nothing else.
//!
//! This crate knows names and bytes. It must never know a token, a model's weights or a request.

mod disk;
mod record;
mod seal;
mod store;

pub use disk::{Disk, DiskOptions};
pub use seal::{KEY_BYTES_MIN, Key};
pub use store::{Found, Kept, Store, clear, list};

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process writes it.
    #[error("{} is in use by another process: one at a time keeps pages there", .0.display())]
    InUse(std::path::PathBuf),
    /// The system refuses something.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file or folder.
        path: std::path::PathBuf,
        /// What it says.
        error: std::io::Error,
    },
    /// Too little to be a key.
    #[error("{} has {bytes} bytes, too few for a key: wanted at least {KEY_BYTES_MIN}", path.display())]
    ShortKey {
        /// The key's file.
        path: std::path::PathBuf,
        /// Its length.
        bytes: usize,
    },
}

impl Error {
    pub(crate) fn io(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_owned();
        move |error| Error::Io { path, error }
    }
}
