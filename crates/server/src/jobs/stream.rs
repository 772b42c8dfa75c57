//! `GET /v2/{endpoint}/stream/{id}`: parts of a result as they come.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Extension,
    body::Body,
    extract::{Path, State},
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};
use fornax_jobs::Store;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::{broadcast, watch};

use crate::{
    app::App,
    error::ApiError,
    front::{keys::Caller, told::Told},
};

/// How often a job is looked at that another process may work on.
const POLL: Duration = Duration::from_millis(500);

/// Parts of a result as they come
///
/// As RunPod's clients ask for them: what is new since the last call, {status, stream: [{output}]}. With
/// `Accept: application/x-ndjson` all parts from the first, a line each, and at the end a line with the job's status.
/// Parts are texts, or the results of a batch's items in their order.
#[utoipa::path(get, path = "/v2/{endpoint}/stream/{id}", tag = "jobs",
    params(("endpoint" = String, Path, description = "`default` or a model's name"), ("id" = String, Path)),
    responses(
        (status = 200, description = "What is new, or a line for each part"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn stream(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path((endpoint, id)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let (durable, model) = app.jobs_of(&endpoint)?;
    let room = app.room(caller.tenant(), durable.store.output_bytes(&id).await?).await?;
    // The state first: what was written before it ended is then among the parts.
    let job = app.job(durable, &model, &id, &caller).await?;
    let wants_lines = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    if wants_lines.is_some_and(|accept| accept.contains("application/x-ndjson")) {
        let store = durable.store.clone();
        let changes = store.changes();
        return Ok(lines(Lines { store, changes, id, next: 0, draining: app.watch_draining() }));
    }
    let parts = durable.store.take_chunks(&id).await?;
    let parts: Vec<Value> = parts.into_iter().map(|chunk| json!({"output": chunk.body})).collect();
    let mut said = job.status();
    said["stream"] = json!(parts);
    Ok(Told::new(said, room).into_response())
}

/// A reader of all parts.
struct Lines {
    store: Store,
    changes: broadcast::Receiver<Arc<str>>,
    id: String,
    next: i64,
    draining: watch::Receiver<bool>,
}

fn lines(lines: Lines) -> Response {
    let body = stream::unfold(Some(lines), |lines| async move {
        let mut lines = lines?;
        let (text, goes_on) = lines.next().await;
        Some((Ok::<_, Infallible>(text), goes_on.then_some(lines)))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(body)).into_response()
}

impl Lines {
    /// The next lines, and whether more follow.
    async fn next(&mut self) -> (String, bool) {
        loop {
            let job = self.store.get(&self.id).await.ok().flatten();
            let parts = self.store.chunks(&self.id, self.next).await.unwrap_or_default();
            if !parts.is_empty() {
                self.next += i64::try_from(parts.len()).unwrap_or(0);
                return (parts.iter().map(|chunk| format!("{}\n", chunk.body)).collect(), true);
            }
            // The last word is how it stands: what ends without one was broken off.
            match job {
                None => return (String::new(), false),
                Some(job) if job.state.is_final() || *self.draining.borrow() => {
                    return (format!("{}\n", job.status()), false);
                }
                Some(_) => {}
            }
            let id = self.id.clone();
            let changed = async { while self.changes.recv().await.is_ok_and(|changed| *changed != *id) {} };
            tokio::select! {
                () = changed => {}
                _ = self.draining.changed() => {}
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }
}
