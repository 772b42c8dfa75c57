//! `POST /cancel`.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::json;
use utoipa::ToSchema;

use crate::{
    app::App,
    error::{ApiError, Fault},
    front::body::RawBody,
    shape::{self, Unknown, body},
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
pub(crate) async fn cancel(State(app): State<Arc<App>>, body: RawBody) -> Response {
    match shape::read::<CancelBody>(&body.bytes) {
        Ok(body) => {
            app.jobs.cancel(&body.job_id);
            (StatusCode::ACCEPTED, Json(json!({"job_id": body.job_id}))).into_response()
        }
        Err(error) => refuse(&error),
    }
}

fn refuse(error: &ApiError) -> Response {
    let errors: Vec<_> = error.faults.iter().map(Fault::to_json).collect();
    error.respond(json!({"errors": errors}))
}
