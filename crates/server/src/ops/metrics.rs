//! `GET /metrics`.

use std::sync::Arc;

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};

use crate::app::App;

/// Counts and times for Prometheus
#[utoipa::path(get, path = "/metrics", tag = "operations", responses(
    (status = 200, content_type = "text/plain", body = String, description = "Prometheus' text format"),
    crate::openapi::DoorRefusals
))]
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let page = app.metrics.page(app.served().as_deref(), app.traces.as_deref());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}
