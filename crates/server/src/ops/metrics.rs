//! `GET /metrics`.

use std::sync::Arc;

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};

use crate::app::{App, Phase};

/// Counts and times for Prometheus
#[utoipa::path(get, path = "/metrics", tag = "operations", responses(
    (status = 200, content_type = "text/plain", body = String, description = "Prometheus' text format"),
    crate::openapi::DoorRefusals
))]
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let is_ready = matches!(app.phase(), Phase::Ready);
    let mut jobs = Vec::new();
    if let Some(durable) = app.durable.get().filter(|_| is_ready) {
        for chosen in app.models.lasting_choices() {
            let name = app.models.name(&chosen).to_owned();
            // A database that does not answer takes its own figures along, and no others.
            jobs.extend(durable.store.counts(&name).await.ok().map(|counts| (name, counts)));
        }
    }
    let page = app.metrics.page(app.models.all(), is_ready, app.traces.as_deref(), &jobs);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}
