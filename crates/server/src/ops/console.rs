//! `GET /console/jobs`: a page for people, made of the routes that programs use.

use axum::{
    http::header,
    response::{IntoResponse, Response},
};

/// The page needs nothing from elsewhere and may reach nothing but this server.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
    form-action 'none'; base-uri 'none'; frame-ancestors 'none'";

/// The queue, its jobs and what became of each, for people
///
/// The page itself needs no key; what it shows does.
#[utoipa::path(get, path = "/console/jobs", tag = "operations", responses(
    (status = 200, content_type = "text/html", body = String, description = "The page"),
    (status = 403, body = crate::openapi::ErrorBody, description = "A page of another site")
))]
pub(crate) async fn jobs() -> Response {
    let headers =
        [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, POLICY)];
    (headers, include_str!("../../page/jobs.html")).into_response()
}
