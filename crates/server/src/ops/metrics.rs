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
    let served = app.served();
    let jobs = match (app.durable.get(), &served) {
        // A database that does not answer takes its own figures along, and no others.
        (Some(durable), Some(served)) => durable.store.counts(&served.card.name).await.ok(),
        _ => None,
    };
    let page = app.metrics.page(served.as_deref(), app.traces.as_deref(), jobs);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}
