//! `GET /v2/{endpoint}/status/{id}`, `jobs`, `timeline/{id}` and `health`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, Query, State, rejection::QueryRejection},
};
use fornax_jobs::State as JobState;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{IntoParams, ToSchema};

use crate::{
    app::App,
    error::{ApiError, Fault},
    front::{keys::Caller, told::Told},
};

/// How a job stands.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct JobStatus {
    id: String,
    /// IN_QUEUE, IN_PROGRESS, COMPLETED, FAILED, CANCELLED or TIMED_OUT.
    status: String,
    /// Milliseconds that it waited.
    delay_time: Option<u64>,
    /// Milliseconds that its last attempt was computed.
    execution_time: Option<u64>,
    /// {success: true, output, metadata} or {success: false, error, code, retryable, stage, attempt, diagnostics}.
    #[schema(value_type = Option<Object>)]
    output: Option<Value>,
    /// What failed, in a line.
    error: Option<String>,
    /// How far a batch is: {done, total}.
    #[schema(value_type = Option<Object>)]
    items: Option<Value>,
}

/// How a job stands
#[utoipa::path(get, path = "/v2/{endpoint}/status/{id}", tag = "jobs",
    params(("endpoint" = String, Path, description = "`default` or a model's name"), ("id" = String, Path)),
    responses(
        (status = 200, body = JobStatus, description = "How it stands"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn status(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path((endpoint, id)): Path<(String, String)>,
) -> Result<Told, ApiError> {
    let (durable, model) = app.jobs_of(&endpoint)?;
    let room = app.room(caller.tenant(), durable.store.output_bytes(&id).await?).await?;
    let job = app.job(durable, &model, &id, &caller).await?;
    let mut said = job.status();
    if let Some(total) = job.items {
        said["items"] = json!({"done": durable.store.items_done(&id).await?, "total": total});
    }
    Ok(Told::new(said, room))
}

/// What became of a job, step by step
#[utoipa::path(get, path = "/v2/{endpoint}/timeline/{id}", tag = "jobs",
    params(("endpoint" = String, Path, description = "`default` or a model's name"), ("id" = String, Path)),
    responses(
        (status = 200, description = "{events: [{at, event, attempt, detail}]}, `at` in milliseconds since 1970"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn timeline(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path((endpoint, id)): Path<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    let (durable, model) = app.jobs_of(&endpoint)?;
    app.job(durable, &model, &id, &caller).await?;
    let events = durable.store.timeline(&id).await?.into_iter().map(|event| {
        json!({"at": event.at_us / 1000, "event": event.event, "attempt": event.attempt, "detail": event.detail})
    });
    Ok(Json(json!({"events": events.collect::<Vec<_>>()})))
}

/// Which jobs.
#[derive(Debug, Deserialize, IntoParams)]
pub(crate) struct Which {
    /// Only those in this state.
    status: Option<String>,
    /// At most so many; 100 by default.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<i64>,
}

/// The newest jobs of the caller's key, without their outputs
#[utoipa::path(get, path = "/v2/{endpoint}/jobs", tag = "jobs",
    params(("endpoint" = String, Path, description = "`default` or a model's name"), Which),
    responses(
        (status = 200, description = "{jobs: [{id, status, created, attempts, delayTime, executionTime, error}]}"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(endpoint): Path<String>,
    which: Result<Query<Which>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let (durable, model) = app.jobs_of(&endpoint)?;
    let Query(which) = which.map_err(|_| ApiError::fault(Fault::rule("limit", "must be one integer")))?;
    let limit = which.limit.unwrap_or(100);
    if !(1..=1000).contains(&limit) {
        return Err(ApiError::fault(Fault::value("limit", "an integer from 1 to 1000", &limit.into())));
    }
    let state = match which.status.as_deref() {
        None => None,
        Some(name) => {
            let known = JobState::ALL.into_iter().find(|state| state.name() == name);
            Some(known.ok_or_else(|| ApiError::fault(Fault::rule("status", "is no state of a job")))?)
        }
    };
    let jobs = durable.store.list(app.name_of(&model), Some(&caller.key.owner), state, limit).await?;
    let jobs = jobs.iter().map(|job| {
        let mut status = job.status();
        if let Some(fields) = status.as_object_mut() {
            fields.shift_remove("output");
        }
        status["created"] = json!(job.created_us / 1000);
        status["attempts"] = json!(job.attempts);
        status
    });
    Ok(Json(json!({"jobs": jobs.collect::<Vec<_>>()})))
}

/// How the queue and its workers stand
#[utoipa::path(get, path = "/v2/{endpoint}/health", tag = "jobs",
    params(("endpoint" = String, Path, description = "`default` or a model's name")),
    responses(
        (status = 200, description = "{jobs: {completed, failed, inProgress, inQueue, retried}, workers: {idle, running}}"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn health(
    State(app): State<Arc<App>>,
    Path(endpoint): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let (durable, model) = app.jobs_of(&endpoint)?;
    let counts = durable.store.counts(app.name_of(&model)).await?;
    let running = durable.store.busy_workers(app.name_of(&model)).await?;
    Ok(Json(json!({
        "jobs": {
            "completed": counts.of(JobState::Completed),
            "failed": counts.of(JobState::Failed) + counts.of(JobState::TimedOut),
            "inProgress": counts.of(JobState::Running),
            "inQueue": counts.of(JobState::Queued),
            "retried": counts.retried,
        },
        // This server is a worker; others show themselves by what they work on.
        "workers": {"idle": i64::from(running == 0), "initializing": 0, "ready": running.max(1), "running": running,
            "throttled": 0, "unhealthy": 0},
    })))
}
