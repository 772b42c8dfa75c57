//! `POST /v2/{endpoint}/run` and `runsync`.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    extract::{Path, Query, State, rejection::QueryRejection},
    http::HeaderMap,
};
use fornax_jobs::{Input, NewJob, Policy, Submitted, schema_name, set_schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::model::ask;
use crate::{
    app::App,
    ask::prepare::{Read, on_a_thread, read},
    error::{ApiError, Code, Fault},
    front::{body::RawBody, keys::Caller, told::Told},
    shape::{Unknown, body},
    work::check_priority,
};

/// How long `runsync` waits if nothing else is said, in milliseconds.
const WAIT_MS: u64 = 90_000;

/// How often a job is looked at that another process may end.
const POLL: Duration = Duration::from_millis(500);

/// A job to be done.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct RunBody {
    /// {messages|prompt, schema, parameters}, a batch {shared_prefix, items: [{id, text}], schema, parameters}, or the
    /// older {endpoint, data}.
    #[schema(required = true, value_type = Object)]
    input: Value,
    /// Who is told of its end: an address at a host that this server may call.
    #[schema(max_length = 2048)]
    webhook: Option<String>,
    policy: Option<PolicyBody>,
}

body!(RunBody, Unknown::Refuse);

/// How a job may be treated.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PolicyBody {
    /// Milliseconds that one attempt may be computed.
    #[schema(minimum = 1, maximum = 604_800_000)]
    execution_timeout: Option<i64>,
    /// Milliseconds that it may wait.
    #[schema(minimum = 1, maximum = 604_800_000)]
    ttl: Option<i64>,
    /// Whether it goes behind all others.
    low_priority: Option<bool>,
}

/// An accepted job.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Accepted {
    id: String,
    /// IN_QUEUE, unless its Idempotency-Key was known.
    status: &'static str,
}

/// Submit a job
///
/// It is on disk before the id is returned. Under the same `Idempotency-Key` header it is the same job.
#[utoipa::path(post, path = "/v2/{endpoint}/run", tag = "jobs", request_body = RunBody,
    params(("endpoint" = String, Path, description = "`default` or a model's name"),
        ("Idempotency-Key" = Option<String>, Header, description = "Makes a repeated submit one job")),
    responses(
        (status = 200, body = Accepted, description = "It is kept"),
        (status = 409, body = crate::openapi::ErrorBody, description = "The key came with another job before"),
        (status = 507, body = crate::openapi::ErrorBody, description = "The disk is full: nothing was kept"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn run(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(endpoint): Path<String>,
    headers: HeaderMap,
    body: RawBody,
) -> Result<Json<Accepted>, ApiError> {
    let submitted = submit(&app, &caller, &endpoint, &headers, body).await?;
    Ok(Json(Accepted { id: submitted.id, status: submitted.state.name() }))
}

/// How long to wait.
#[derive(Debug, Deserialize, IntoParams)]
pub(crate) struct Wait {
    /// Milliseconds, 1000 to 300000.
    #[param(minimum = 1000, maximum = 300_000)]
    wait: Option<u64>,
}

/// Submit a job and wait for its end
///
/// What has not ended in time is answered with its state; ask for its status later.
#[utoipa::path(post, path = "/v2/{endpoint}/runsync", tag = "jobs", request_body = RunBody,
    params(("endpoint" = String, Path, description = "`default` or a model's name"), Wait,
        ("Idempotency-Key" = Option<String>, Header, description = "Makes a repeated submit one job")),
    responses(
        (status = 200, body = super::status::JobStatus, description = "How it stands"),
        (status = 409, body = crate::openapi::ErrorBody, description = "The key came with another job before"),
        (status = 507, body = crate::openapi::ErrorBody, description = "The disk is full: nothing was kept"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn runsync(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(endpoint): Path<String>,
    wait: Result<Query<Wait>, QueryRejection>,
    headers: HeaderMap,
    body: RawBody,
) -> Result<Told, ApiError> {
    let Query(wait) = wait.map_err(|_| ApiError::fault(Fault::rule("wait", "must be one integer")))?;
    let wait = wait.wait.unwrap_or(WAIT_MS);
    if !(1000..=300_000).contains(&wait) {
        let fault = Fault::value("wait", "an integer from 1000 to 300000", &wait.into());
        return Err(ApiError::fault(fault));
    }
    // Before the submit, so that no change is missed.
    let mut changes = app.jobs_of(&endpoint)?.0.store.changes();
    let submitted = submit(&app, &caller, &endpoint, &headers, body).await?;
    let (durable, model) = app.jobs_of(&endpoint)?;
    let mut draining = app.watch_draining();
    let until = tokio::time::Instant::now() + Duration::from_millis(wait);
    loop {
        let room = app.room(caller.tenant(), durable.store.output_bytes(&submitted.id).await?).await?;
        let job = app.job(durable, &model, &submitted.id, &caller).await?;
        if job.state.is_final() || tokio::time::Instant::now() >= until || *draining.borrow() {
            return Ok(Told::new(job.status(), room));
        }
        drop((job, room));
        let changed = async { while changes.recv().await.is_ok_and(|id| *id != *submitted.id) {} };
        tokio::select! {
            () = changed => {}
            _ = draining.changed() => {}
            () = tokio::time::sleep(POLL) => {}
            () = tokio::time::sleep_until(until) => {}
        }
    }
}

async fn submit(
    app: &App,
    caller: &Caller,
    endpoint: &str,
    headers: &HeaderMap,
    body: RawBody,
) -> Result<Submitted, ApiError> {
    let (durable, model) = app.jobs_of(endpoint)?;
    if app.is_draining() {
        return Err(ApiError::new(Code::ModelNotReady, "the server is shutting down"));
    }
    let idempotency_key = idempotency_key(headers)?;
    let Read { body, share, .. } = read(app, caller.tenant(), body).await?;
    let RunBody { mut input, webhook, policy } = body;
    if let Some(webhook) = &webhook {
        durable.webhooks.check(webhook)?;
    }
    if let Some(name) = schema_name(&input).map(str::to_owned)
        && let Some(schema) = durable.store.schema(app.name_of(&model), &caller.key.owner, &name).await?
    {
        set_schema(&mut input, &name, schema);
    }
    // What could never be answered is refused now, not after it has waited.
    let lease = app.lease(model.clone()).await?;
    let (models, chosen, urgent) = (Arc::clone(&app.models), model.clone(), caller.key.urgent);
    let input = on_a_thread(app, caller.tenant(), &lease, move |served| {
        for question in Input::parse(&input)?.questions() {
            models.check_model(&question, &chosen).map_err(under_input)?;
            let asked = ask(&question, served).map_err(under_input)?;
            check_priority(asked.request.priority, urgent).map_err(under_input)?;
            asked.request.check(&served.engine.capacity())?;
            served.check()?;
        }
        Ok(input)
    })
    .await?;
    drop(lease);
    let policy = policy.map_or(Policy::default(), |policy| Policy {
        execution_timeout_ms: policy.execution_timeout,
        ttl_ms: policy.ttl,
        low_priority: policy.low_priority.unwrap_or(false),
    });
    let (model, owner) = (app.name_of(&model).to_owned(), caller.key.owner.to_string());
    let shares = caller.tenant().is_some();
    let job = NewJob { model, owner, shares, input, webhook, policy, idempotency_key };
    let submitted = durable.store.submit(job).await?;
    // Until now: what waits for the disk is as large as what was sent.
    drop(share);
    Ok(submitted)
}

/// Fields of the chat route, as a job's client knows them.
fn under_input(mut error: ApiError) -> ApiError {
    let renamed = |text: &str| match text.strip_prefix("response_format") {
        Some(rest) => format!("input.schema{rest}"),
        None => format!("input.{text}"),
    };
    for fault in &mut error.faults {
        fault.field = renamed(&fault.field);
        fault.message = renamed(&fault.message);
    }
    if !error.faults.is_empty() {
        let messages: Vec<&str> = error.faults.iter().map(|fault| fault.message.as_str()).collect();
        error.message = messages.join("; ");
    }
    error
}

pub(crate) fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let sane =
        |text: &&str| (1..=256).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
    match value.to_str().ok().filter(sane) {
        Some(key) => Ok(Some(key.to_owned())),
        None => {
            Err(ApiError::fault(Fault::rule("Idempotency-Key", "must have 1 to 256 printable characters")))
        }
    }
}
