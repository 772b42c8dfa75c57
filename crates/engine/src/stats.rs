//! A snapshot of how the engine stands.

use std::time::Duration;

use crate::{pages::PageCounts, tier::TierStats};

/// Counts since the start, and the state after the last step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Sequences with a seat.
    pub running: usize,
    /// Seats that there are.
    pub slots: usize,
    /// Sequences without one that have had one before: preempted.
    pub preempted: usize,
    /// Choices that wait for their first seat.
    pub requests_waiting: usize,
    /// Their prompt tokens.
    pub tokens_waiting: usize,
    /// By KV group.
    pub pages: Vec<PageCounts>,
    /// Steps collected.
    pub steps: u64,
    /// What the engine's thread spent on steps beside waiting for them: putting together, launching, choosing, telling.
    /// Where launching is computing, that too.
    pub busy: Duration,
    /// What it waited for steps that were under way. None of it means that the device waits for the engine.
    pub waited: Duration,
    /// Prompt tokens computed.
    pub prompt_tokens: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Of those, the ones whose pages were kept elsewhere and brought back for the request.
    pub prefix_restored: u64,
    /// What keeps pages beyond the device's memory, if anything does.
    pub tier: Option<TierStats>,
    /// Tokens chosen.
    pub generated_tokens: u64,
    /// Tokens that were guessed and computed ahead.
    pub drafted_tokens: u64,
    /// Of those, the ones that were right: tokens that cost no step.
    pub accepted_tokens: u64,
    /// What the model that drafts did, if there is one.
    pub draft_model: Option<DraftStats>,
    /// Sequences that lost their seat to somebody before them in line.
    pub preemptions: u64,
    /// Choices that ended by an end token, by length, by cancelling, by a failure.
    pub ended: Ended,
    /// How long the step now running has been running.
    pub step_running_for: Option<Duration>,
    /// That is longer than any step should take: the device or its driver hangs.
    pub stuck: bool,
    /// What the driver said when the device was lost; everything has failed and nothing is taken any more.
    pub device_lost: Option<String>,
}

/// What a model that drafts did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DraftStats {
    /// Of all drafted tokens, those that it guessed.
    pub drafted_tokens: u64,
    /// Of those, the ones that were right.
    pub accepted_tokens: u64,
    /// What it took to guess them.
    pub busy: Duration,
    /// Why it guesses nothing any more, if it failed.
    pub failed: Option<String>,
}

/// How choices ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// By an end token.
    pub end_token: u64,
    /// By completing their form.
    pub form_complete: u64,
    /// By `max_tokens`.
    pub length: u64,
    /// By a caller who went away.
    pub cancelled: u64,
    /// By a failure.
    pub failed: u64,
}
