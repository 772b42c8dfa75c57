//! What the engine holds at one moment, for people who look: every page and every request.
//!
//! It is made when somebody has asked since the last one, and whenever the engine comes to rest: so it costs a step
//! nothing while nobody looks, and what is seen of an engine at rest is true.

use std::sync::Arc;

/// Requests in a picture: more are counted in [`Stats`](crate::Stats) and not listed.
pub const REQUESTS_MAX: usize = 256;

/// Pages of a group in a picture: those beyond are not shown.
pub const PAGES_MAX: usize = 1 << 16;

/// One moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Picture {
    /// By KV group, the trash page excluded.
    pub pages: Vec<Vec<PageUse>>,
    /// Those that are computed, then those that wait, each in their line.
    pub requests: Vec<Progress>,
}

/// Who has a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageUse {
    /// Nobody.
    Free,
    /// Nobody, but prompts that begin alike find it until the room is needed.
    Cached,
    /// One sequence.
    Held,
    /// Several sequences.
    Shared,
}

/// How far a choice of a request is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The same from picture to picture, and never another's.
    pub id: u64,
    /// Whose it is, if its request says so.
    pub owner: Option<Arc<str>>,
    /// Whether it has a seat.
    pub running: bool,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Of those, how many were found in the cache; 0 before its first seat.
    pub cached_tokens: usize,
    /// Positions whose keys and values are there.
    pub computed_tokens: usize,
    /// Tokens chosen.
    pub tokens: usize,
    /// Most that will be chosen.
    pub tokens_max: usize,
}
