//! An answer as lines, and its timings.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use fornax_chat::{Ask, Counts, Finish, Piece, TokenScore};
use fornax_text::{Delta, Tokenizer};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::{
    app::Admission,
    error::ApiError,
    openai::reply::{logprob, spelled},
    sse::{self, Transcript},
    work::Work,
};

/// What every line ends with; the last one also has its timings.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LineEnd {
    done: bool,
    done_reason: Option<String>,
    /// Nanoseconds, as all durations.
    total_duration: Option<u64>,
    load_duration: Option<u64>,
    prompt_eval_count: Option<u64>,
    prompt_eval_duration: Option<u64>,
    eval_count: Option<u64>,
    eval_duration: Option<u64>,
}

/// The answer to a request, in lines as they come or whole.
pub(crate) async fn respond(
    kind: Kind,
    admission: Admission,
    (ask, keep): (Option<Ask>, Option<Duration>),
    is_streamed: bool,
) -> Result<Response, ApiError> {
    let scored = ask.as_ref().is_some_and(|ask| ask.request.sampling.top_logprobs.is_some());
    let lines = Lines { scored, ..Lines::new(kind, admission.served.name()) };
    // Where owners share a server, how long a model stays is the operator's to say: it is everybody's.
    let keep = keep.filter(|_| admission.tenant().is_none());
    if let Some(stays) = keep {
        // The request is a use of the model: it goes when that is over, at the earliest.
        admission.app.models.keep(admission.served.chosen().index, stays);
    }
    let Some(ask) = ask else {
        // What clients send to have a model loaded.
        let mut line = lines.line(Part::default());
        line["done"] = json!(true);
        line["done_reason"] = json!(if keep == Some(Duration::ZERO) { "unload" } else { "load" });
        return Ok(Json(line).into_response());
    };
    let app = Arc::clone(&admission.app);
    let work = Work::submit(admission, vec![ask])?;
    match is_streamed {
        true => Ok(sse::lines(work, lines, &app.options)),
        false => Ok(Json(lines.whole(work).await?).into_response()),
    }
}

/// Whether an answer belongs to a chat or to a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Chat,
    Generate,
}

/// An answer under way.
pub(crate) struct Lines {
    kind: Kind,
    model: String,
    /// Tokens come with their log-probabilities.
    scored: bool,
    began: Instant,
    started: Option<Instant>,
    first: Option<Instant>,
    /// Calls are told whole: the one that is not, as its name and arguments.
    call: Option<(String, String)>,
    /// The last line.
    done: Option<Value>,
}

/// What of an answer one line tells.
#[derive(Debug, Default)]
pub(crate) struct Part {
    pub(crate) text: String,
    pub(crate) thinking: String,
    pub(crate) calls: Vec<Value>,
    /// Log-probabilities of the tokens.
    pub(crate) scores: Vec<Value>,
}

impl Part {
    fn is_empty(&self) -> bool {
        self.text.is_empty() && self.thinking.is_empty() && self.calls.is_empty() && self.scores.is_empty()
    }

    pub(crate) fn join(&mut self, more: Part) {
        self.text.push_str(&more.text);
        self.thinking.push_str(&more.thinking);
        self.calls.extend(more.calls);
        self.scores.extend(more.scores);
    }
}

impl Lines {
    pub(crate) fn new(kind: Kind, model: &str) -> Lines {
        let model = model.to_owned();
        let began = Instant::now();
        Lines { kind, model, scored: false, began, started: None, first: None, call: None, done: None }
    }

    /// What a piece adds, and the last line's fields if it is the last.
    pub(crate) fn take(&mut self, piece: Piece, tokenizer: &Tokenizer) -> (Part, Option<(Finish, Counts)>) {
        let mut part = Part::default();
        if let (true, Piece::Text { tokens, .. } | Piece::Said { tokens, .. }) = (self.scored, &piece) {
            part.scores = tokens.iter().map(|score| scored(score, tokenizer)).collect();
        }
        match piece {
            Piece::Started { .. } => self.started = Some(Instant::now()),
            Piece::Text { text, .. } => {
                self.first.get_or_insert_with(Instant::now);
                part.text = text;
            }
            Piece::Said { deltas, .. } => {
                self.first.get_or_insert_with(Instant::now);
                for delta in deltas {
                    match delta {
                        Delta::Reasoning(text) => part.thinking.push_str(&text),
                        Delta::Content(text) => part.text.push_str(&text),
                        Delta::Call { name, .. } => {
                            part.calls.extend(self.whole_call());
                            self.call = Some((name, String::new()));
                        }
                        Delta::Arguments { text, .. } => {
                            if let Some((_, arguments)) = &mut self.call {
                                arguments.push_str(&text);
                            }
                        }
                    }
                }
            }
            Piece::End { finish, usage } => {
                part.calls.extend(self.whole_call());
                return (part, Some((finish, usage)));
            }
            Piece::Scored(_) | Piece::Token(_) | Piece::Embedding(_) => {}
        }
        (part, None)
    }

    /// The call that was being read. One that was cut is none: its arguments are no JSON.
    fn whole_call(&mut self) -> Option<Value> {
        let (name, arguments) = self.call.take()?;
        let arguments: Value = serde_json::from_str(&arguments).ok()?;
        Some(json!({"function": {"name": name, "arguments": arguments}}))
    }

    /// A line with a part of the answer.
    pub(crate) fn line(&self, part: Part) -> Value {
        let mut line = json!({"model": self.model, "created_at": Timestamp::now().to_string()});
        let into = match self.kind {
            Kind::Generate => {
                line["response"] = json!(part.text);
                &mut line
            }
            Kind::Chat => {
                line["message"] = json!({"role": "assistant", "content": part.text});
                &mut line["message"]
            }
        };
        if !part.thinking.is_empty() {
            into["thinking"] = json!(part.thinking);
        }
        if !part.calls.is_empty() {
            into["tool_calls"] = json!(part.calls);
        }
        if !part.scores.is_empty() {
            line["logprobs"] = json!(part.scores);
        }
        line["done"] = json!(false);
        line
    }

    /// The last line, with this part of the answer in it.
    pub(crate) fn last(&self, part: Part, finish: Finish, counts: Counts) -> Value {
        let now = Instant::now();
        let started = self.started.unwrap_or(now);
        let first = self.first.unwrap_or(now);
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let reason = match finish {
            Finish::End | Finish::Stop(_) | Finish::Cut(_) | Finish::Cancelled => "stop",
            Finish::Length | Finish::Truncated => "length",
        };
        let mut line = self.line(part);
        line["done"] = json!(true);
        line["done_reason"] = json!(reason);
        line["total_duration"] = json!(nanoseconds(now - self.began));
        // The model was loaded before; what is left is waiting for a seat.
        line["load_duration"] = json!(nanoseconds(started - self.began));
        line["prompt_eval_count"] = json!(counts.prompt);
        line["prompt_eval_duration"] = json!(nanoseconds(first.saturating_duration_since(started)));
        line["eval_count"] = json!(counts.generated);
        line["eval_duration"] = json!(nanoseconds(now - first));
        line
    }

    /// Waits for everything. Dropped with the connection, it cancels.
    pub(crate) async fn whole(mut self, mut work: Work) -> Result<Value, ApiError> {
        let mut whole = Part::default();
        let mut ended = (Finish::End, Counts::default());
        while let Some((_, piece)) = work.next().await {
            let (part, end) = self.take(piece?, &work.served().tokenizer);
            whole.join(part);
            ended = end.unwrap_or(ended);
        }
        Ok(self.last(whole, ended.0, ended.1))
    }
}

/// A token with its log-probability, and those of the most likely tokens there.
fn scored(score: &TokenScore, tokenizer: &Tokenizer) -> Value {
    let entry = |token: u32, logprob: f64| {
        let (text, bytes) = spelled(tokenizer, token);
        json!({"token": text, "logprob": logprob, "bytes": bytes})
    };
    let mut own = entry(score.token, logprob(score));
    let top: Vec<Value> =
        score.top.iter().map(|&(token, logprob)| entry(token, f64::from(logprob))).collect();
    if !top.is_empty() {
        own["top_logprobs"] = json!(top);
    }
    own
}

impl Transcript<String> for Lines {
    fn say(&mut self, work: &Work, _index: usize, piece: Piece) -> Vec<String> {
        let (part, ended) = self.take(piece, &work.served().tokenizer);
        let mut lines = Vec::new();
        if !part.is_empty() {
            lines.push(self.line(part).to_string());
        }
        if let Some((finish, counts)) = ended {
            self.done = Some(self.last(Part::default(), finish, counts));
        }
        lines
    }

    fn fail(&mut self, error: &ApiError) -> String {
        error.to_ollama().to_string()
    }

    fn close(&mut self) -> Vec<String> {
        self.done.take().map(|line| line.to_string()).into_iter().collect()
    }
}
