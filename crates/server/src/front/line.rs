//! A request's line in the log. It is written when the request is over: an answer that streams ends long after its
//! status was sent.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::http::{HeaderValue, Method};
use fornax_chat::{Counts, Finish};

use crate::{error::Code, openai::reply::finish_reason, ops::console};

/// What is known of a request from its start. The line is written when the last holder lets go of it, and holds nothing
/// that the user said.
pub(crate) struct Line {
    began: Instant,
    request_id: HeaderValue,
    correlation_id: HeaderValue,
    method: Method,
    path: String,
    /// The key's, or `none`.
    key: String,
    /// Locked for as long as it takes to note one thing.
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    status: Option<u16>,
    code: Option<Code>,
    model: Option<String>,
    first_token: Option<Duration>,
    /// Of all its answers.
    counts: Counts,
    /// How the last of its answers ended.
    finish: Option<&'static str>,
}

/// What names a request.
pub(crate) struct Names {
    pub(crate) request_id: HeaderValue,
    pub(crate) correlation_id: HeaderValue,
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) key: String,
}

impl Line {
    pub(crate) fn begin(names: Names) -> Line {
        let Names { request_id, correlation_id, method, path, key } = names;
        let (began, notes) = (Instant::now(), Mutex::default());
        Line { began, request_id, correlation_id, method, path, key, notes }
    }

    /// The status that the client was told, and what went wrong if something did.
    pub(crate) fn response(&self, status: u16, code: Option<Code>) {
        self.note(|notes| {
            notes.status = Some(status);
            notes.code = notes.code.or(code);
        });
    }

    /// It failed after its status was sent.
    pub(crate) fn failed(&self, code: Code) {
        self.note(|notes| notes.code = Some(code));
    }

    /// Who answers.
    pub(crate) fn model(&self, name: &str) {
        self.note(|notes| notes.model = Some(name.to_owned()));
    }

    /// The first text of the first answer is there.
    pub(crate) fn first_token(&self) {
        let taken = self.began.elapsed();
        self.note(|notes| {
            notes.first_token.get_or_insert(taken);
        });
    }

    /// One answer ended.
    pub(crate) fn ended(&self, finish: Finish, counts: Counts) {
        self.note(|notes| {
            // Answers to one prompt share it.
            notes.counts.prompt = notes.counts.prompt.max(counts.prompt);
            notes.counts.cached = notes.counts.cached.max(counts.cached);
            notes.counts.generated += counts.generated;
            notes.finish = Some(finish_reason(finish, false));
        });
    }

    fn note(&self, note: impl FnOnce(&mut Notes)) {
        note(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Whether a request is one of those that probes, collectors and open consoles send all the time.
pub(super) fn is_polling(method: &Method, path: &str) -> bool {
    method == Method::GET
        && (matches!(path, "/health" | "/ready" | "/ping" | "/metrics" | "/console/live")
            || console::is_page(path))
}

impl Drop for Line {
    fn drop(&mut self) {
        let notes = std::mem::take(self.notes.get_mut().unwrap_or_else(PoisonError::into_inner));
        // A probe that is told to wait has been answered as it should be.
        let is_fine = notes.status.is_some_and(|status| status < 400 || status == 503);
        let answered = notes.finish.is_some();
        let counted = |tokens: usize| answered.then_some(tokens);
        macro_rules! written {
            ($level:ident) => {
                tracing::$level!(
                    request_id = self.request_id.to_str().unwrap_or_default(),
                    correlation_id = self.correlation_id.to_str().unwrap_or_default(),
                    method = self.method.as_str(),
                    path = shown(&self.path),
                    status = notes.status,
                    code = notes.code.map(Code::name),
                    key = self.key,
                    model = notes.model,
                    prompt_tokens = counted(notes.counts.prompt),
                    cached_tokens = counted(notes.counts.cached),
                    completion_tokens = counted(notes.counts.generated),
                    finish = notes.finish,
                    first_token_ms = notes.first_token.map(milliseconds),
                    total_ms = milliseconds(self.began.elapsed()),
                    "request"
                )
            };
        }
        if is_fine && is_polling(&self.method, &self.path) { written!(debug) } else { written!(info) }
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A path of bounded length for the log: whatever clients put there beyond our routes is theirs.
fn shown(path: &str) -> &str {
    path.char_indices().nth(64).map_or(path, |(end, _)| &path[..end])
}
