//! `POST /v1/responses`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response, sse::Event},
};
use fornax_chat::{Ask, Counts, Finish, Piece};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{items::Items, request::ResponsesBody};
use crate::{
    app::{Admission, App},
    ask::prepare::admit,
    error::ApiError,
    front::{body::RawBody, keys::Caller},
    sse::{self, Transcript},
    work::Work,
};

/// A whole answer.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ResponseAnswer {
    id: String,
    object: String,
    created_at: u64,
    /// completed, or incomplete where the limit of tokens cut it.
    status: String,
    model: String,
    /// Items of type reasoning, message and function_call.
    #[schema(value_type = Vec<Object>)]
    output: Vec<Value>,
    #[schema(value_type = Object)]
    usage: Value,
    /// Always false: nothing is remembered.
    store: bool,
}

/// Go on with a conversation, as OpenAI's newer clients ask
///
/// Nothing is stored: `store` and `previous_response_id` are refused. With `stream`, the events of that API; an error in
/// the middle is an `error` event. Closing the connection cancels.
#[utoipa::path(post, path = "/v1/responses", tag = "openai", request_body = ResponsesBody, responses(
    (status = 200, description = "The answer, or a stream of its parts",
        content((ResponseAnswer = "application/json"), (String = "text/event-stream"))),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    let prepared = admit(&app, &caller, body, |body: &ResponsesBody, served| {
        Ok((body.ask(served)?, body.is_streamed(), body.repeated()))
    });
    let (admission, (ask, is_streamed, repeated)) = prepared.await?;
    let work = Work::submit(admission, vec![ask])?;
    let items = Items::new(work.model(), repeated);
    if is_streamed {
        return Ok(sse::stream(work, ResponseTranscript { items, ended: None }, &app.options));
    }
    Ok(Json(whole(work, items).await?).into_response())
}

/// The whole answer to a question, and what it repeats of it.
pub(crate) async fn answer(admission: Admission, (ask, repeated): (Ask, Value)) -> Result<Value, ApiError> {
    let work = Work::submit(admission, vec![ask])?;
    let items = Items::new(work.model(), repeated);
    whole(work, items).await
}

/// Waits for everything. Dropped with the connection, it cancels.
async fn whole(mut work: Work, mut items: Items) -> Result<Value, ApiError> {
    let mut ended = None;
    while let Some((_, piece)) = work.next().await {
        match piece? {
            Piece::Said { deltas, .. } => {
                for delta in deltas {
                    drop(items.take(delta));
                }
            }
            Piece::End { finish, usage } => ended = Some((finish, usage)),
            Piece::Started { .. }
            | Piece::Text { .. }
            | Piece::Scored(_)
            | Piece::Token(_)
            | Piece::Embedding(_) => {}
        }
    }
    Ok(items.response(ended))
}

/// The events of a streamed answer.
struct ResponseTranscript {
    items: Items,
    ended: Option<(Finish, Counts)>,
}

impl Transcript for ResponseTranscript {
    fn say(&mut self, _work: &Work, _index: usize, piece: Piece) -> Vec<Event> {
        match piece {
            Piece::Started { .. } => ["response.created", "response.in_progress"]
                .into_iter()
                .map(|name| {
                    let response = self.items.response(None);
                    self.items.event(name, json!({"response": response}))
                })
                .collect(),
            Piece::Said { deltas, .. } => {
                deltas.into_iter().flat_map(|delta| self.items.take(delta)).collect()
            }
            Piece::End { finish, usage } => {
                self.ended = Some((finish, usage));
                self.items.stop()
            }
            Piece::Text { .. } | Piece::Scored(_) | Piece::Token(_) | Piece::Embedding(_) => Vec::new(),
        }
    }

    fn fail(&mut self, error: &ApiError) -> Event {
        let error = json!({"code": error.code.name(), "message": error.message, "param": null});
        self.items.event("error", error)
    }

    fn close(&mut self) -> Vec<Event> {
        let response = self.items.response(self.ended);
        let name =
            if response["status"] == "incomplete" { "response.incomplete" } else { "response.completed" };
        vec![self.items.event(name, json!({"response": response}))]
    }
}
