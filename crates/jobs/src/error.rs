//! The ways in which the store refuses or fails.

use std::path::PathBuf;

use crate::State;

/// Why the store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The database cannot be opened. Its address may hold a password and is not repeated.
    #[error("cannot open the jobs database: {0}")]
    Open(String),
    /// Another process has the file.
    #[error("{} is in use by another process; several workers share one queue through PostgreSQL", path.display())]
    InUse {
        /// The file that marks it.
        path: PathBuf,
    },
    /// Nothing more can be written; nothing of this was.
    #[error("the disk or the database file is full: nothing was written")]
    DiskFull,
    /// The database failed.
    #[error("the jobs database failed: {0}")]
    Database(String),
    /// As many jobs wait as may.
    #[error("{waiting} jobs are waiting; at most {max} may wait")]
    QueueFull {
        /// Jobs in the queue.
        waiting: u64,
        /// The bound.
        max: u64,
    },
    /// As many jobs of one owner wait as may, while there are others.
    #[error("{waiting} of your jobs are waiting, the most that one key may have waiting")]
    ShareFull {
        /// Jobs of the owner in the queue.
        waiting: u64,
    },
    /// The jobs of one owner hold as many bytes as they may, while there are others.
    #[error("your jobs hold {bytes} bytes, those that have ended among them; {max} may be kept for one key")]
    BytesFull {
        /// Bytes of what the owner's jobs ask.
        bytes: u64,
        /// The bound.
        max: u64,
    },
    /// An Idempotency-Key that came with another request before.
    #[error("this Idempotency-Key came with another request before")]
    KeyReused,
    /// No such job, or not any more.
    #[error("there is no such job; results are kept for a limited time")]
    NotFound,
    /// The job is in no state for this.
    #[error("the job is {}: {wanted}", state.name())]
    WrongState {
        /// Where it is.
        state: State,
        /// Where it would have to be.
        wanted: &'static str,
    },
    /// As many files are kept as may be.
    #[error("an owner may keep {files} files of {bytes} bytes in all; delete some")]
    FilesFull {
        /// How many files.
        files: u64,
        /// Bytes of all of them.
        bytes: u64,
    },
    /// As many batches are kept as may be.
    #[error("{max} batches are kept, the most allowed; ended batches are removed after a while")]
    BatchesFull {
        /// The bound.
        max: u64,
    },
    /// As many schemas are registered as may be.
    #[error("{max} schemas are registered, the most allowed")]
    SchemasFull {
        /// The bound.
        max: u64,
    },
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Error {
        match &error {
            // SQLite's SQLITE_FULL and SQLITE_IOERR_WRITE; PostgreSQL's disk_full.
            sqlx::Error::Database(failed)
                if failed.code().is_some_and(|code| matches!(&*code, "13" | "778" | "53100")) =>
            {
                Error::DiskFull
            }
            _ => Error::Database(error.to_string()),
        }
    }
}
