//! A job as it is stored and shown.

use serde_json::{Value, json};
use sqlx::{Row, any::AnyRow};

/// Where a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// It waits.
    Queued,
    /// Somebody works on it.
    Running,
    /// Its output is valid and whole.
    Completed,
    /// It will not be tried again by itself.
    Failed,
    /// Somebody did not want it any more.
    Cancelled,
    /// It waited or ran too long.
    TimedOut,
}

impl State {
    /// All of them, in the order of their numbers in the database.
    pub const ALL: [State; 6] =
        [State::Queued, State::Running, State::Completed, State::Failed, State::Cancelled, State::TimedOut];

    /// As it is written on the wire.
    pub fn name(self) -> &'static str {
        match self {
            State::Queued => "IN_QUEUE",
            State::Running => "IN_PROGRESS",
            State::Completed => "COMPLETED",
            State::Failed => "FAILED",
            State::Cancelled => "CANCELLED",
            State::TimedOut => "TIMED_OUT",
        }
    }

    /// Whether nothing more happens to it by itself.
    pub fn is_final(self) -> bool {
        !matches!(self, State::Queued | State::Running)
    }

    /// Its number in the database.
    pub(crate) fn number(self) -> i64 {
        match self {
            State::Queued => 0,
            State::Running => 1,
            State::Completed => 2,
            State::Failed => 3,
            State::Cancelled => 4,
            State::TimedOut => 5,
        }
    }

    pub(crate) fn numbered(number: i64) -> State {
        State::ALL.into_iter().find(|state| state.number() == number).unwrap_or(State::Failed)
    }
}

/// How a job may be treated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// How long one attempt may be computed.
    pub execution_timeout_ms: Option<i64>,
    /// How long it may wait.
    pub ttl_ms: Option<i64>,
    /// Whether it goes behind all others.
    pub low_priority: bool,
}

/// A job to be accepted.
#[derive(Clone, Debug)]
pub struct NewJob {
    /// Whose queue it joins.
    pub model: String,
    /// Who submits it: keys are theirs.
    pub owner: String,
    /// Checked already.
    pub input: Value,
    /// Who is told of its end.
    pub webhook: Option<String>,
    /// How it may be treated.
    pub policy: Policy,
    /// Submitting again under the same key is the same job.
    pub idempotency_key: Option<String>,
}

/// A stored job.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Unguessable.
    pub id: String,
    /// Whose queue it is in.
    pub model: String,
    /// Where it is.
    pub state: State,
    /// What is asked for.
    pub input: String,
    /// Who is told of its end.
    pub webhook: Option<String>,
    /// How it may be treated.
    pub policy: Policy,
    /// Attempts begun since it was submitted or retried.
    pub attempts: i64,
    /// How often somebody asked for it to be tried again.
    pub retries: i64,
    /// When it was submitted or retried, in microseconds.
    pub created_us: i64,
    /// When its last attempt began.
    pub started_us: Option<i64>,
    /// When it ended.
    pub finished_us: Option<i64>,
    /// How long its last attempt was computed, by the worker's own clock.
    pub execution_us: i64,
    /// The envelope of its result or failure.
    pub output: Option<String>,
    /// How many items a batch has.
    pub items: Option<i64>,
    /// Which of the server's routes answers it, if it is a request of one; the input is then the request's body.
    pub route: Option<String>,
}

/// All columns that a [`Job`] is made of; a macro, so that every statement is one literal.
macro_rules! columns {
    () => {
        "id, model, state, priority, input, webhook, ttl_ms, execution_timeout_ms, created_us, started_us, \
         finished_us, execution_us, attempts, retries, output, items, route"
    };
}
pub(crate) use columns;

impl Job {
    pub(crate) fn read(row: &AnyRow) -> Result<Job, sqlx::Error> {
        Ok(Job {
            id: row.try_get("id")?,
            model: row.try_get("model")?,
            state: State::numbered(row.try_get("state")?),
            input: row.try_get("input")?,
            webhook: row.try_get("webhook")?,
            policy: Policy {
                execution_timeout_ms: row.try_get("execution_timeout_ms")?,
                ttl_ms: row.try_get("ttl_ms")?,
                low_priority: row.try_get::<i64, _>("priority")? > 0,
            },
            attempts: row.try_get("attempts")?,
            retries: row.try_get("retries")?,
            created_us: row.try_get("created_us")?,
            started_us: row.try_get("started_us")?,
            finished_us: row.try_get("finished_us")?,
            execution_us: row.try_get("execution_us")?,
            output: row.try_get("output")?,
            items: row.try_get("items")?,
            route: row.try_get("route")?,
        })
    }

    /// As RunPod's clients read it. Durations are never negative, whatever clocks did.
    pub fn status(&self) -> Value {
        let mut status = json!({"id": self.id, "status": self.state.name()});
        if let Some(started) = self.started_us.or(self.finished_us) {
            status["delayTime"] = json!(started.saturating_sub(self.created_us).max(0) / 1000);
            status["executionTime"] = json!(self.execution_us.max(0) / 1000);
        }
        let output = self.output.as_deref().and_then(|text| serde_json::from_str::<Value>(text).ok());
        if let Some(output) = output {
            if let (Some(code), Some(error)) = (output["code"].as_str(), output["error"].as_str()) {
                status["error"] = json!(format!("{code}: {error}"));
            }
            status["output"] = output;
        }
        status
    }
}

/// A step in a job's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimelineEvent {
    /// When, in microseconds.
    pub at_us: i64,
    /// What, in a word.
    pub event: String,
    /// In which attempt.
    pub attempt: i64,
    /// The code of a failure, or who took it.
    pub detail: Option<String>,
}

/// How a queue stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub(crate) by_state: [i64; 6],
    /// Jobs that needed more than one attempt.
    pub retried: i64,
}

impl Counts {
    /// Jobs in a state.
    pub fn of(&self, state: State) -> i64 {
        State::ALL
            .into_iter()
            .zip(self.by_state)
            .find(|(other, _)| *other == state)
            .map_or(0, |(_, count)| count)
    }
}
