//! `POST /execute`: one job, streamed.

use std::{sync::Arc, time::Instant};

use axum::{
    Extension,
    extract::State,
    http::StatusCode,
    response::{Response, sse::Event},
};
use fornax_chat::{Ask, Finish, Piece};
use fornax_compute::Sampling;
use fornax_engine::Request;
use fornax_text::{Special, StopStrings};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::jobs::Entry;
use crate::{
    app::{App, random_seed},
    ask::{
        params::Word,
        prepare::{Preparing, admit},
    },
    error::{ApiError, Fault, meaning},
    front::{body::RawBody, keys::Caller},
    shape::{Unknown, body},
    sse::{self, Transcript, event},
    work::Work,
};

/// A job.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ExecuteBody {
    #[schema(required = true, min_length = 1, max_length = 256)]
    job_id: String,
    /// The name of a served model; without it, the first of them.
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    /// Continued as it is, without a chat template.
    #[schema(required = true, min_length = 1, max_length = 32768)]
    prompt: String,
    /// By default what is left of the context.
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    max_tokens: Option<u32>,
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f32>,
    /// An integer of 64 bits with a sign; it fixes all random numbers.
    seed: Option<i64>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f32>,
    /// 0 keeps all.
    #[schema(minimum = 0, maximum = 1_000_000)]
    top_k: Option<u32>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f32>,
    #[schema(exclusive_minimum = 0, maximum = 100)]
    repetition_penalty: Option<f32>,
    #[schema(max_items = 4)]
    stop: Option<Vec<Word>>,
}

body!(ExecuteBody, Unknown::Refuse);

/// Run a job
///
/// Events carry JSON with `type`: started, token, metrics, and then exactly one of end and error.
#[utoipa::path(post, path = "/execute", tag = "worker", request_body = ExecuteBody, responses(
    (status = 200, content_type = "text/event-stream", body = String, description = "Its events"),
    (status = 400, description = "Every wrong field: {errors: [{field, constraint, message, value?}]}"),
    (status = 404, description = "No model of that name is served"),
    (status = 409, description = "A job of that name is under way"),
    crate::openapi::DoorRefusals
))]
pub(crate) async fn execute(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Response {
    match begin(&app, &caller, body).await {
        Ok(response) => response,
        Err(error) if error.faults.is_empty() => error.respond(failure(&error)),
        Err(error) => {
            let errors: Vec<Value> = error.faults.iter().map(Fault::to_json).collect();
            error.respond(json!({"errors": errors}))
        }
    }
}

/// An error as schedulers read it.
fn failure(error: &ApiError) -> Value {
    json!({"code": error.code.name(), "message": error.message, "retriable": meaning(error.code).retryable})
}

async fn begin(app: &Arc<App>, caller: &Caller, body: RawBody) -> Result<Response, ApiError> {
    let (admission, (job_id, ask, stops)) = admit(app, caller, body, ExecuteBody::ask).await?;
    let Some((entry, cancelled)) = app.jobs.enter(caller.tenant(), &job_id) else {
        let taken = ApiError::fault(Fault::rule("job_id", "is the name of a job under way"));
        return Err(ApiError { status: Some(StatusCode::CONFLICT), ..taken });
    };
    let mut work = Work::submit(admission, vec![ask])?;
    work.cancelled_by(cancelled);
    let transcript = JobTranscript { _entry: entry, job_id, stops, tokens: 0, pieces: 0, first: None };
    Ok(sse::stream(work, transcript, &app.options))
}

impl ExecuteBody {
    /// The job's name, the question, and the stop strings by index.
    fn ask(&self, served: &Preparing<'_>) -> Result<(String, Ask, Vec<String>), ApiError> {
        let context = served.engine.capacity().context;
        let prompt = served.tokenizer.encode_prompt(&self.prompt, Special::AsText)?;
        let max_tokens = self.max_tokens.map(|count| count as usize);
        if let Some(asked) = max_tokens.filter(|count| *count > context) {
            let rule = format!("an integer from 1 to {context}");
            return Err(ApiError::fault(Fault::value("max_tokens", rule, &json!(asked))));
        }
        let neutral = Sampling::default();
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(1.0),
            top_p: self.top_p.unwrap_or(neutral.top_p),
            top_k: self.top_k.unwrap_or(neutral.top_k),
            min_p: self.min_p.unwrap_or(neutral.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(neutral.repetition_penalty),
            end_tokens: served.tokenizer.end_tokens().to_vec(),
            ..neutral
        };
        let stops: Vec<String> = self.stop.iter().flatten().map(|word| word.0.clone()).collect();
        let max_tokens = max_tokens.unwrap_or(context.saturating_sub(prompt.len()).max(1));
        let request = Request {
            seed: self.seed.map_or_else(random_seed, i64::cast_unsigned),
            ..Request::new(prompt, max_tokens, sampling)
        };
        let ask = Ask { stops: StopStrings::new(stops.iter().map(String::as_str))?, ..Ask::new(request) };
        Ok((self.job_id.clone(), ask, stops))
    }
}

/// The events of a job.
struct JobTranscript {
    /// The job's name is free again when its events are all said.
    _entry: Entry,
    job_id: String,
    stops: Vec<String>,
    tokens: usize,
    pieces: usize,
    first: Option<Instant>,
}

impl Transcript for JobTranscript {
    fn say(&mut self, work: &Work, _index: usize, piece: Piece) -> Vec<Event> {
        match piece {
            Piece::Started { seed, .. } => vec![event(&json!({
                "type": "started",
                "job_id": self.job_id,
                "model": work.model(),
                "started_at": jiff::Timestamp::now().to_string(),
                "seed": seed,
            }))],
            Piece::Text { text, tokens } => {
                self.tokens += tokens.len();
                self.first.get_or_insert_with(Instant::now);
                let token = json!({"type": "token", "t": text, "i": self.pieces});
                self.pieces += 1;
                vec![event(&token)]
            }
            Piece::End { finish, usage } => self.end(work, finish, usage.generated),
            Piece::Scored(_) | Piece::Token(_) | Piece::Said { .. } | Piece::Embedding(_) => Vec::new(),
        }
    }

    fn close(&mut self) -> Vec<Event> {
        Vec::new()
    }

    fn fail(&mut self, error: &ApiError) -> Event {
        let mut failure = failure(error);
        failure["type"] = json!("error");
        event(&failure)
    }
}

impl JobTranscript {
    fn end(&self, work: &Work, finish: Finish, generated: usize) -> Vec<Event> {
        let decode = self.first.map(|first| first.elapsed()).unwrap_or_default();
        let seconds = decode.as_secs_f64();
        // The first token is the prompt's; decoding makes those after it.
        let decoded = generated.saturating_sub(1) as f64;
        let tokens_per_sec = if seconds > 0.0 { decoded / seconds } else { 0.0 };
        let device_bytes = work.served().device_bytes();
        let metrics =
            json!({"type": "metrics", "tokens_per_sec": tokens_per_sec, "device_bytes": device_bytes});
        let stop_reason = match finish {
            Finish::End => "EOS",
            Finish::Stop(_) | Finish::Cut(_) => "STOP_SEQUENCE",
            Finish::Length | Finish::Truncated => "MAX_TOKENS",
            Finish::Cancelled => "CANCELLED",
        };
        let tokens_out = if finish == Finish::Cancelled { self.tokens } else { generated };
        let decode_time_ms = u64::try_from(decode.as_millis()).unwrap_or(u64::MAX);
        let mut end = json!({"type": "end", "tokens_out": tokens_out, "decode_time_ms": decode_time_ms,
            "stop_reason": stop_reason});
        if let Finish::Stop(index) | Finish::Cut(index) = finish {
            end["stop_sequence_matched"] = json!(self.stops[index]);
        }
        vec![event(&metrics), event(&end)]
    }
}
