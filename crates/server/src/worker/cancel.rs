//! `POST /cancel`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::json;
use utoipa::ToSchema;

use crate::{
    app::App,
    ask::prepare::{Read, read},
    error::{ApiError, Fault},
    front::{body::RawBody, keys::Caller},
    shape::{Unknown, body},
};

/// Whom to cancel.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CancelBody {
    #[schema(required = true, min_length = 1, max_length = 256)]
    job_id: String,
}

body!(CancelBody, Unknown::Refuse);

/// Cancel a job
///
/// Always accepted, however often; a job that is not under way is left as it is.
#[utoipa::path(post, path = "/cancel", tag = "worker", request_body = CancelBody, responses(
    (status = 202, description = "The job, if it is under way, ends"),
    (status = 400, description = "Every wrong field: {errors: [{field, constraint, message, value?}]}"),
    crate::openapi::DoorRefusals
))]
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Response {
    match read::<CancelBody>(&app, caller.tenant(), body).await {
        Ok(Read { body, .. }) => {
            app.jobs.cancel(caller.tenant(), &body.job_id);
            (StatusCode::ACCEPTED, Json(json!({"job_id": body.job_id}))).into_response()
        }
        Err(error) => refuse(&error),
    }
}

fn refuse(error: &ApiError) -> Response {
    let errors: Vec<_> = error.faults.iter().map(Fault::to_json).collect();
    error.respond(json!({"errors": errors}))
}
