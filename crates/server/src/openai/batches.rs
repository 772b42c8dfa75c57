//! `/v1/batches`: files of requests, worked on as durable jobs.

use std::{collections::HashSet, sync::Arc};

use axum::{
    Extension, Json,
    extract::{Path, Query, State, rejection::QueryRejection},
    http::HeaderMap,
};
use fornax_jobs::{
    BATCH_REQUESTS_MAX, Batch, BatchAnswer, BatchRequest, BatchState, NewBatch, State as JobState,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::files::{Listed, listed, which};
use crate::{
    app::App,
    ask::prepare::{Patience, blocking, read},
    error::{ApiError, Code, Fault},
    front::{body::RawBody, keys::Caller},
    jobs::{route::Route, run::idempotency_key},
    json,
    models::Models,
    shape::{Unknown, body},
};

/// Batches of one page, as many as OpenAI tells.
const PAGE_MAX: i64 = 100;

/// Wrong lines that are told of one file.
const ERRORS_MAX: usize = 100;

/// Characters of a request's name.
const CUSTOM_ID_CHARS_MAX: usize = 512;

/// Hours that a batch may ask for.
const HOURS_MAX: i64 = 168;

/// A file of requests to work on.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct BatchBody {
    /// Lines {custom_id, method, url, body}.
    #[schema(required = true, max_length = 128)]
    input_file_id: String,
    /// The route of all its requests: /v1/chat/completions, /v1/completions, /v1/embeddings or /v1/responses.
    #[schema(required = true, max_length = 128)]
    endpoint: String,
    /// How long requests may wait, as 24h; from 1h to 168h.
    #[schema(required = true, max_length = 8)]
    completion_window: String,
    /// Up to 16 notes of the client's own.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Map<String, Value>>,
}

body!(
    BatchBody,
    Unknown::IgnoreBut(&[crate::shape::Unsupported { field: "output_expires_after", neutral: &[] }])
);

/// A batch, and how far it is.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BatchObject {
    id: String,
    object: &'static str,
    endpoint: String,
    /// What is wrong with the file, of one that failed.
    #[schema(value_type = Option<Object>)]
    errors: Option<Value>,
    input_file_id: String,
    completion_window: String,
    /// in_progress, cancelling, completed, failed, expired or cancelled.
    status: &'static str,
    output_file_id: Option<String>,
    error_file_id: Option<String>,
    created_at: i64,
    in_progress_at: Option<i64>,
    expires_at: i64,
    finalizing_at: Option<i64>,
    completed_at: Option<i64>,
    failed_at: Option<i64>,
    expired_at: Option<i64>,
    cancelling_at: Option<i64>,
    cancelled_at: Option<i64>,
    /// {total, completed, failed}.
    #[schema(value_type = Object)]
    request_counts: Value,
    #[schema(value_type = Object)]
    metadata: Value,
}

impl From<Batch> for BatchObject {
    fn from(batch: Batch) -> BatchObject {
        let seconds = |us: i64| us / 1_000_000;
        let ended = |state| batch.ended_us.filter(|_| batch.state == state).map(seconds);
        let was_begun = batch.state != BatchState::Failed;
        BatchObject {
            object: "batch",
            errors: (!was_begun).then(|| json!({"object": "list", "data": batch.errors})),
            status: batch.state.name(),
            created_at: seconds(batch.created_us),
            in_progress_at: was_begun.then(|| seconds(batch.created_us)),
            expires_at: seconds(batch.expires_us),
            finalizing_at: ended(BatchState::Completed),
            completed_at: ended(BatchState::Completed),
            failed_at: ended(BatchState::Failed),
            expired_at: ended(BatchState::Expired),
            cancelling_at: batch.cancelling_us.map(seconds),
            cancelled_at: ended(BatchState::Cancelled),
            request_counts: json!({"total": batch.requests, "completed": batch.completed, "failed": batch.failed}),
            id: batch.id,
            endpoint: batch.route,
            input_file_id: batch.input_file,
            completion_window: batch.completion_window,
            output_file_id: batch.output_file,
            error_file_id: batch.error_file,
            metadata: batch.metadata,
        }
    }
}

/// Work on a file of requests
///
/// Every line becomes a durable job, on disk before the batch's id is returned; they go behind everything that somebody waits
/// for. Answers are written to a file once all have ended, in the order of the lines. Under the same `Idempotency-Key`
/// header it is the same batch.
#[utoipa::path(post, path = "/v1/batches", tag = "openai", request_body = BatchBody,
    params(("Idempotency-Key" = Option<String>, Header, description = "Makes a repeated request one batch")),
    responses(
        (status = 200, body = BatchObject, description = "It is kept; or its file was wrong, and it has failed"),
        (status = 409, body = crate::openapi::ErrorBody, description = "The key came with another batch before"),
        (status = 507, body = crate::openapi::ErrorBody, description = "The disk is full: nothing was kept"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: RawBody,
) -> Result<Json<BatchObject>, ApiError> {
    let store = app.store()?;
    app.check_ready()?;
    if app.is_draining() {
        return Err(ApiError::new(Code::ModelNotReady, "the server is shutting down"));
    }
    let _entry = app.enter(&caller)?;
    let idempotency_key = idempotency_key(&headers)?;
    let body = read::<BatchBody>(&app, caller.tenant(), body).await?.body;
    let BatchBody { input_file_id, endpoint, completion_window, metadata } = body;
    let mut faults = Vec::new();
    let route = Route::named(&endpoint);
    if route.is_none() {
        let names: Vec<&str> = Route::ALL.iter().map(|route| route.path()).collect();
        faults.push(Fault::rule("endpoint", format!("must be one of {}", names.join(", "))));
    }
    let window_us = window_us(&completion_window);
    if window_us.is_none() {
        faults.push(Fault::rule(
            "completion_window",
            format!("must be hours, as 24h, from 1h to {HOURS_MAX}h"),
        ));
    }
    let metadata = metadata.unwrap_or_default();
    check_metadata(&metadata, &mut faults);
    let (Some(route), Some(window_us), true) = (route, window_us, faults.is_empty()) else {
        return Err(ApiError::faults(faults));
    };
    let file = app.file(&caller, &input_file_id).await?;
    if file.purpose != "batch" {
        return Err(ApiError::fault(Fault::rule("input_file_id", "must be a file with the purpose batch")));
    }
    // A small request makes a large file be read: it takes the room that sending it took.
    let bytes = usize::try_from(file.bytes).unwrap_or(usize::MAX);
    if bytes > app.options.file_bytes_max {
        let rule = format!("must have at most {} bytes", app.options.file_bytes_max);
        return Err(ApiError::fault(Fault::rule("input_file_id", rule)));
    }
    let room = app.room(caller.tenant(), bytes).await?;
    let text = store.file_text(&file.id).await?;
    let (models, line_bytes_max) = (Arc::clone(&app.models), app.options.body_bytes_max);
    let lines = blocking(&app, caller.tenant(), move |patience| {
        Lines::read(&text, &Reading { route, models: &models, line_bytes_max, patience })
    });
    let lines = lines.await?;
    let batch = NewBatch {
        owner: caller.key.owner.to_string(),
        route: endpoint,
        input_file: file.id,
        completion_window,
        window_us,
        metadata: Value::Object(metadata),
        requests: lines.requests,
        errors: lines.errors,
        shares: caller.tenant().is_some(),
        idempotency_key,
    };
    let begun = store.begin_batch(batch).await?;
    drop(room);
    Ok(Json(begun.into()))
}

/// Adds what is wrong with a client's own notes.
pub(crate) fn check_metadata(metadata: &Map<String, Value>, faults: &mut Vec<Fault>) {
    let short = |(name, value): (&String, &Value)| {
        name.chars().count() <= 64 && value.as_str().is_some_and(|value| value.chars().count() <= 512)
    };
    if metadata.len() > 16 || !metadata.iter().all(short) {
        faults.push(Fault::rule("metadata", "must have at most 16 strings of 512 characters under 64"));
    }
}

/// Hours as microseconds.
fn window_us(text: &str) -> Option<i64> {
    let hours: i64 = text.strip_suffix('h')?.parse().ok()?;
    (1..=HOURS_MAX).contains(&hours).then_some(hours * 3_600_000_000)
}

/// The lines of a file.
#[derive(Default)]
struct Lines {
    requests: Vec<BatchRequest>,
    errors: Vec<Value>,
    known: HashSet<String>,
}

/// By what they are read.
struct Reading<'a> {
    route: Route,
    models: &'a Models,
    /// A line is asked later as the body that it could have been.
    line_bytes_max: usize,
    patience: &'a Patience,
}

impl Lines {
    fn read(text: &str, reading: &Reading<'_>) -> Result<Lines, ApiError> {
        let mut lines = Lines::default();
        let full = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        for (index, line) in full {
            if lines.errors.len() >= ERRORS_MAX || lines.requests.len() > BATCH_REQUESTS_MAX {
                break;
            }
            reading.patience.check()?;
            match lines.request(line, reading) {
                Ok(request) => lines.requests.push(request),
                Err((code, param, message)) => {
                    let error = json!({"code": code, "line": index + 1, "message": message, "param": param});
                    lines.errors.push(error);
                }
            }
        }
        let of_all = |code: &str, message: String| json!({"code": code, "line": null, "message": message, "param": null});
        if lines.requests.len() > BATCH_REQUESTS_MAX {
            let message = format!("a batch may have {BATCH_REQUESTS_MAX} requests");
            lines.errors.push(of_all("too_many_requests", message));
        }
        if lines.requests.is_empty() && lines.errors.is_empty() {
            lines.errors.push(of_all("empty_file", "the file has no requests".to_owned()));
        }
        if !lines.errors.is_empty() {
            lines.requests.clear();
        }
        Ok(lines)
    }

    /// What a line asks, or the code, the field and the words of what is wrong with it. Nothing of it is repeated.
    fn request(
        &mut self,
        line: &str,
        Reading { route, models, line_bytes_max, patience }: &Reading<'_>,
    ) -> Result<BatchRequest, (&'static str, Option<&'static str>, String)> {
        let wrong = |code, param, message: &str| Err((code, Some(param), message.to_owned()));
        if line.len() > *line_bytes_max {
            return Err(("invalid_json_line", None, format!("a line may have {line_bytes_max} bytes")));
        }
        // By the bounds of a body: a file has room for what would take many times its bytes.
        let Ok(Value::Object(mut line)) = json::read(line.as_bytes(), &|| !patience.is_over()) else {
            let message = "this line is no JSON object, or one of more values than a body may have";
            return Err(("invalid_json_line", None, message.to_owned()));
        };
        let mut field = |name: &str| line.swap_remove(name).filter(|value| !value.is_null());
        let custom_id = match field("custom_id") {
            Some(Value::String(id)) if (1..=CUSTOM_ID_CHARS_MAX).contains(&id.chars().count()) => id,
            None => return wrong("missing_required_parameter", "custom_id", "custom_id is required"),
            Some(_) => {
                let message = format!("custom_id must be a string of 1 to {CUSTOM_ID_CHARS_MAX} characters");
                return wrong("invalid_custom_id", "custom_id", &message);
            }
        };
        if custom_id.contains('\0') {
            return wrong("invalid_custom_id", "custom_id", "custom_id must have no zero character");
        }
        if !self.known.insert(custom_id.clone()) {
            return wrong("duplicate_custom_id", "custom_id", "another line has this custom_id");
        }
        if field("method") != Some(json!("POST")) {
            return wrong("invalid_method", "method", "method must be POST");
        }
        if field("url") != Some(json!(route.path())) {
            return wrong(
                "mismatched_url",
                "url",
                &format!("url must be {}, the batch's endpoint", route.path()),
            );
        }
        let Some(Value::Object(body)) = field("body") else {
            return wrong("invalid_body", "body", "body must be an object");
        };
        if body.get("stream").is_some_and(|stream| *stream == json!(true)) {
            return wrong("invalid_body", "body.stream", "a batch cannot be streamed");
        }
        let name = body.get("model").and_then(Value::as_str);
        let Ok(chosen) = models.lasting(name) else {
            return wrong("model_not_found", "body.model", "there is no such model here");
        };
        let model = models.name(&chosen).to_owned();
        // PostgreSQL's texts have no zero; in JSON it is always written as an escape.
        Ok(BatchRequest { model, custom_id, body: Value::Object(body).to_string() })
    }
}

/// The batches of the caller's key
#[utoipa::path(get, path = "/v1/batches", tag = "openai", params(Listed), responses(
    (status = 200, description = "{object: list, data: [batch], first_id, last_id, has_more}"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<Listed>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let asked = which(query)?;
    let page = asked.page(PAGE_MAX, 20)?;
    let batches = app.store()?.batches(&caller.key.owner, page).await?;
    let batches = batches.into_iter().map(|batch| json!(BatchObject::from(batch)));
    Ok(Json(listed(batches.collect(), page)))
}

/// A batch, and how far it is
#[utoipa::path(get, path = "/v1/batches/{batch_id}", tag = "openai", params(("batch_id" = String, Path)),
    responses(
        (status = 200, body = BatchObject, description = "How it stands"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<BatchObject>, ApiError> {
    let batch = app.store()?.batch(&caller.key.owner, &id).await?;
    Ok(Json(batch.ok_or_else(no_batch)?.into()))
}

/// Cancel a batch
///
/// What was answered is kept, and written to its file. However often; one that has ended stays as it is.
#[utoipa::path(post, path = "/v1/batches/{batch_id}/cancel", tag = "openai", params(("batch_id" = String, Path)),
    responses(
        (status = 200, body = BatchObject, description = "How it stands now"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<BatchObject>, ApiError> {
    let cancelled = app.store()?.cancel_batch(&caller.key.owner, &id).await;
    let cancelled = cancelled.map_err(|error| match error {
        fornax_jobs::Error::NotFound => no_batch(),
        other => other.into(),
    })?;
    Ok(Json(cancelled.into()))
}

fn no_batch() -> ApiError {
    ApiError::new(
        Code::BatchNotFound,
        "there is no such batch of this key; batches are kept for a limited time",
    )
}

/// A line of a batch's output, as OpenAI writes it.
pub(crate) fn line(answer: &BatchAnswer) -> String {
    let output = &answer.output;
    let response =
        |status: u16, body: Value| json!({"status_code": status, "request_id": answer.id, "body": body});
    let (response, error) = match (answer.state, output["code"].as_str()) {
        (JobState::Completed, _) => (response(200, output["response"].clone()), Value::Null),
        (JobState::Cancelled, _) => {
            (Value::Null, json!({"code": "batch_cancelled", "message": "This request was cancelled."}))
        }
        (_, Some("TTL_EXPIRED")) => {
            let message = "This request could not be executed before the completion window expired.";
            (Value::Null, json!({"code": "batch_expired", "message": message}))
        }
        (_, code) => {
            let known = code.and_then(Code::named);
            let error =
                ApiError::new(known.unwrap_or(Code::Internal), output["error"].as_str().unwrap_or_default());
            let mut body = error.to_json();
            if let (None, Some(code)) = (known, code) {
                body["error"]["code"] = json!(code);
            }
            if let Some(errors) = output["diagnostics"]["errors"].as_array() {
                body["error"]["param"] = errors.first().map_or(Value::Null, |error| error["field"].clone());
                body["error"]["errors"] = json!(errors);
            }
            (response(error.status().as_u16(), body), Value::Null)
        }
    };
    let id = format!("batch_req_{}", answer.id);
    json!({"id": id, "custom_id": answer.custom_id, "response": response, "error": error}).to_string()
}
