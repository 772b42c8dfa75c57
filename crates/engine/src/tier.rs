//! Where pages go that the device has no room for, and come back from.
//!
//! The engine names a page by everything that was read up to its end and sees bytes; what keeps them (a disk) knows
//! nothing else. Nothing here ever waits for it: copies are handed over, what is wanted is asked for, and whoever
//! wants it waits in line meanwhile. A copy that is lost, broken or late costs the time to compute it again.

use std::{fmt, time::Duration};

use fornax_compute::{PAGE_TOKENS, PageCopy};
use sha2::{Digest, Sha256};

use crate::prefix::Unit;

/// Names everything that was read up to the end of a page, the salt included: SHA-256, so that nobody can make two
/// texts of one name. The same in every process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathName(pub [u8; 32]);

impl fmt::Debug for PathName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl PathName {
    /// Before the first page.
    pub(crate) fn root(salt: &str) -> PathName {
        PathName(Sha256::new().chain_update(b"fornax pages, 1:").chain_update(salt).finalize().into())
    }

    /// Behind one more page.
    pub(crate) fn and(&self, units: &[Unit]) -> PathName {
        let mut hash = Sha256::new().chain_update(self.0);
        for unit in units {
            match unit {
                Unit::Token(token) => {
                    hash.update([0]);
                    hash.update(token.to_le_bytes());
                }
                Unit::Given { hash: content, index } => {
                    hash.update([1]);
                    hash.update(content.0);
                    hash.update(index.to_le_bytes());
                }
            }
        }
        PathName(hash.finalize().into())
    }
}

/// A page's name: where its path ends, and whose layers' keys and values it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageName {
    /// What was read up to its end.
    pub path: PathName,
    /// The KV group.
    pub group: u32,
}

/// Pages that were asked for.
#[derive(Debug)]
pub struct Fetched {
    /// What [`Tier::fetch`] answered.
    pub ticket: u64,
    /// As many as were asked for, in their order; `None` where a copy is gone or broken.
    pub pages: Vec<Option<PageCopy>>,
}

/// Keeps copies of pages beyond the device's memory, for one model on one backend. Calls return at once.
pub trait Tier: Send {
    /// Whether there is a copy.
    fn holds(&self, name: &PageName) -> bool;
    /// Takes a copy to keep. It may be let go of, where more come than can be written.
    fn keep(&mut self, name: PageName, copy: PageCopy);
    /// Whether it takes copies now: a page may stay where it is for a while.
    fn takes(&self) -> bool;
    /// Begins to read pages; the answer comes by [`arrived`](Tier::arrived).
    fn fetch(&mut self, names: Vec<PageName>) -> u64;
    /// What has been read, waiting for it at most so long.
    fn arrived(&mut self, wait: Duration) -> Option<Fetched>;
    /// Seconds that reading so many pages takes, once that is known.
    fn seconds(&self, pages: usize) -> Option<f64>;
    /// How it stands.
    fn stats(&self) -> TierStats;
}

/// How a tier stands, and what it did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TierStats {
    /// What keeps the copies, in a word.
    pub name: &'static str,
    /// Copies that there are.
    pub pages: u64,
    /// Bytes that they take.
    pub bytes: u64,
    /// Bytes that they may take.
    pub bytes_max: u64,
    /// Copies that wait to be written.
    pub pages_waiting: u64,
    /// Copies written since the start.
    pub pages_written: u64,
    /// Bytes of them.
    pub bytes_written: u64,
    /// Copies read since the start.
    pub pages_read: u64,
    /// Bytes of them.
    pub bytes_read: u64,
    /// Copies that were let go of because more came than could be written.
    pub pages_dropped: u64,
    /// Copies that were not what was written: ignored.
    pub pages_broken: u64,
    /// Why it keeps nothing any more.
    pub off: Option<String>,
}

/// A page that is to be copied before it is written over, or because nothing else is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unkept {
    pub(crate) name: PageName,
    pub(crate) group: usize,
    pub(crate) page: fornax_compute::PageId,
}

/// Pages that a sequence could go on from if they were here.
#[derive(Debug)]
pub(crate) struct Missing {
    /// Tokens found without them.
    pub(crate) before: usize,
    /// Tokens found with them.
    pub(crate) after: usize,
    /// Their places in the sequence, ascending within a group.
    pub(crate) pages: Vec<(usize, PageName)>,
}

impl Missing {
    /// Tokens that need not be computed.
    pub(crate) fn tokens(&self) -> usize {
        self.after - self.before
    }
}

/// The names of the leading full pages of what a sequence reads.
pub(crate) fn names(salt: &str, pages: impl Iterator<Item = [Unit; PAGE_TOKENS]>) -> Vec<PathName> {
    let next = |name: &mut PathName, units: [Unit; PAGE_TOKENS]| {
        *name = name.and(&units);
        Some(*name)
    };
    pages.scan(PathName::root(salt), next).collect()
}
