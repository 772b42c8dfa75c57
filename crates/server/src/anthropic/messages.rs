//! `POST /v1/messages`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response, sse::Event},
};
use fornax_chat::{Counts, Piece};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{
    blocks::{Blocks, Head, usage},
    request::MessagesBody,
};
use crate::{
    app::{App, random_id},
    ask::prepare::admit,
    error::ApiError,
    front::{body::RawBody, keys::Caller},
    sse::{self, Transcript, named_event},
    work::Work,
};

/// A whole answer.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MessageAnswer {
    id: String,
    r#type: String,
    role: String,
    model: String,
    /// Blocks of type thinking, text and tool_use.
    #[schema(value_type = Vec<Object>)]
    content: Vec<Value>,
    /// end_turn, max_tokens, stop_sequence or tool_use.
    stop_reason: Option<String>,
    stop_sequence: Option<String>,
    #[schema(value_type = Object)]
    usage: Value,
}

/// Go on with a conversation, as Anthropic's clients ask
///
/// With `stream`, the events of that API; an error in the middle is an `error` event. Closing the connection cancels.
#[utoipa::path(post, path = "/v1/messages", tag = "anthropic", request_body = MessagesBody, responses(
    (status = 200, description = "The answer, or a stream of its parts",
        content((MessageAnswer = "application/json"), (String = "text/event-stream"))),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn messages(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    let prepared = admit(&app, &caller, body, |body: &MessagesBody, served| {
        Ok((body.ask(served)?, body.is_streamed(), body.stop_sequences()))
    });
    let (admission, (ask, is_streamed, stop_sequences)) = prepared.await?;
    let prompt = ask.request.prompt.len();
    let work = Work::submit(admission, vec![ask])?;
    let head = Head { id: format!("msg_{}", random_id()), model: work.model().to_owned(), stop_sequences };
    if is_streamed {
        let transcript = MessageTranscript { head, prompt, blocks: Blocks::default(), last: Vec::new() };
        return Ok(sse::stream(work, transcript, &app.options));
    }
    Ok(Json(whole(work, &head).await?).into_response())
}

/// Waits for everything. Dropped with the connection, it cancels.
async fn whole(mut work: Work, head: &Head) -> Result<Value, ApiError> {
    let mut blocks = Blocks::default();
    let mut ended = None;
    while let Some((_, piece)) = work.next().await {
        match piece? {
            Piece::Said { deltas, .. } => {
                for delta in deltas {
                    drop(blocks.take(delta));
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
    let called = blocks.have_calls();
    let counts = ended.map_or_else(Counts::default, |(_, counts)| counts);
    Ok(head.message(blocks.whole(), ended.map(|(finish, _)| (finish, called)), counts))
}

/// The events of a streamed answer.
struct MessageTranscript {
    head: Head,
    /// Tokens of the prompt.
    prompt: usize,
    blocks: Blocks,
    /// What follows the last block.
    last: Vec<Event>,
}

impl Transcript for MessageTranscript {
    fn say(&mut self, _work: &Work, _index: usize, piece: Piece) -> Vec<Event> {
        match piece {
            Piece::Started { cached_tokens, .. } => {
                let counts = Counts { prompt: self.prompt, cached: cached_tokens, ..Counts::default() };
                let message = self.head.message(Vec::new(), None, counts);
                vec![
                    named_event("message_start", &json!({"type": "message_start", "message": message})),
                    named_event("ping", &json!({"type": "ping"})),
                ]
            }
            Piece::Said { deltas, .. } => {
                deltas.into_iter().flat_map(|delta| self.blocks.take(delta)).collect()
            }
            Piece::End { finish, usage: counts } => {
                let (reason, sequence) = self.head.stopped(finish, self.blocks.have_calls());
                let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
                let delta = json!({"type": "message_delta", "delta": delta, "usage": usage(counts)});
                self.last = vec![
                    named_event("message_delta", &delta),
                    named_event("message_stop", &json!({"type": "message_stop"})),
                ];
                self.blocks.stop().into_iter().collect()
            }
            Piece::Text { .. } | Piece::Scored(_) | Piece::Token(_) | Piece::Embedding(_) => Vec::new(),
        }
    }

    fn fail(&mut self, error: &ApiError) -> Event {
        named_event("error", &error.to_anthropic())
    }

    fn close(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.last)
    }
}
