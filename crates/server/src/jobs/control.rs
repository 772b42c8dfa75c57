//! `POST /v2/{endpoint}/cancel/{id}`, `retry/{id}` and `purge-queue`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use serde_json::{Value, json};

use crate::{app::App, error::ApiError, front::keys::Caller};

/// Cancel a job
///
/// However often; one that has ended stays as it is.
#[utoipa::path(post, path = "/v2/{endpoint}/cancel/{id}", tag = "jobs",
    params(("endpoint" = String, Path, description = "`default` or a model's name"), ("id" = String, Path)),
    responses(
        (status = 200, body = super::status::JobStatus, description = "How it stands now"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path((endpoint, id)): Path<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    let (durable, model) = app.jobs_of(&endpoint)?;
    app.job(durable, &model, &id, &caller).await?;
    Ok(Json(durable.store.cancel(&id).await?.status()))
}

/// Queue a job again that failed or timed out
#[utoipa::path(post, path = "/v2/{endpoint}/retry/{id}", tag = "jobs",
    params(("endpoint" = String, Path, description = "`default` or a model's name"), ("id" = String, Path)),
    responses(
        (status = 200, body = super::status::JobStatus, description = "It waits again"),
        (status = 409, body = crate::openapi::ErrorBody, description = "It waits, runs, is completed or was cancelled"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn retry(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path((endpoint, id)): Path<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    let (durable, model) = app.jobs_of(&endpoint)?;
    app.job(durable, &model, &id, &caller).await?;
    Ok(Json(durable.store.retry(&id).await?.status()))
}

/// Cancel everything of the caller's that waits
#[utoipa::path(post, path = "/v2/{endpoint}/purge-queue", tag = "jobs",
    params(("endpoint" = String, Path, description = "`default` or a model's name")),
    responses(
        (status = 200, description = "{removed, status}"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn purge(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(endpoint): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let (durable, model) = app.jobs_of(&endpoint)?;
    let removed = durable.store.purge(app.name_of(&model), &caller.key.owner).await?;
    Ok(Json(json!({"removed": removed, "status": "completed"})))
}
