//! `GET /loading`: how far the model is, as it changes.

use std::{convert::Infallible, sync::Arc};

use axum::{
    extract::State,
    response::{IntoResponse, Response, Sse, sse::KeepAlive},
};
use futures_util::stream;
use serde_json::json;

use crate::{
    app::{App, Phase},
    sse::event,
};

/// Progress of loading
///
/// Events {status, stage?, bytes?, bytes_total?}; the last one has status ready or failed.
#[utoipa::path(get, path = "/loading", tag = "operations", responses(
    (status = 200, content_type = "text/event-stream", body = String, description = "Its events"),
    crate::openapi::DoorRefusals
))]
pub(crate) async fn loading(State(app): State<Arc<App>>) -> Response {
    let mut phases = app.watch_phase();
    phases.mark_changed();
    let model = app.models.default().offer.card.name.clone();
    let events = stream::unfold(Some((phases, model)), |waiting| async move {
        let (mut phases, model) = waiting?;
        // Whoever reads slowly sees the newest, not all.
        phases.changed().await.ok()?;
        let phase = phases.borrow_and_update().clone();
        let (message, is_last) = match phase {
            Phase::Starting => (json!({"status": "starting"}), false),
            Phase::Loading(progress) => {
                let mut message = json!(progress);
                message["status"] = json!("loading");
                (message, false)
            }
            Phase::Ready => (json!({"status": "ready", "model": model}), true),
            Phase::Failed(failed) => {
                (json!({"status": "failed", "code": failed.code.name(), "message": failed.message}), true)
            }
        };
        Some((Ok::<_, Infallible>(event(&message)), (!is_last).then_some((phases, model))))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(app.options.keep_alive)).into_response()
}
