//! `POST /tokenize` and `POST /detokenize`, with the fields of llama.cpp's server and of vLLM's.

use std::{fmt::Write as _, sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    body::Body,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use fornax_text::{Special, Tokenizer};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use utoipa::ToSchema;

use crate::{
    app::{App, Entry},
    ask::prepare::prepare,
    error::{ApiError, Fault},
    front::{body::RawBody, keys::Caller},
    shape::{Unknown, body},
};

/// A text to cut into tokens.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct TokenizeBody {
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    /// The text, as llama.cpp calls it.
    content: Option<String>,
    /// The text, as vLLM calls it.
    prompt: Option<String>,
    /// Whether the tokens that the model wants around a text are added.
    add_special: Option<bool>,
    /// vLLM's name of add_special.
    add_special_tokens: Option<bool>,
    /// Whether control tokens written in the text are parsed; otherwise they are text.
    parse_special: Option<bool>,
    /// Whether each token comes with its piece of text.
    with_pieces: Option<bool>,
}

body!(TokenizeBody, Unknown::Refuse);

/// The tokens of a text.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "it is written piece by piece, and this says how")]
pub(crate) struct Tokenized {
    /// Ids, or with pieces {id, piece}, where a piece that is no text is an array of bytes.
    #[schema(value_type = Vec<Object>)]
    tokens: Vec<Value>,
    count: usize,
    max_model_len: usize,
}

/// Cut a text into tokens
#[utoipa::path(post, path = "/tokenize", tag = "tokens", request_body = TokenizeBody, responses(
    (status = 200, body = Tokenized, description = "Its tokens"), crate::openapi::Refusals,
    crate::openapi::DoorRefusals))]
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    let tokenized = prepare(&app, &caller, body, |body: &TokenizeBody, served| {
        let text = match (&body.content, &body.prompt) {
            (Some(text), None) | (None, Some(text)) => text,
            (None, None) => return Err(ApiError::fault(Fault::rule("content", "is required"))),
            (Some(_), Some(_)) => {
                return Err(ApiError::fault(Fault::rule("prompt", "cannot be combined with content")));
            }
        };
        let special = if body.parse_special == Some(true) { Special::Parse } else { Special::AsText };
        // Each as its own server does by default.
        let around = body.add_special.or(body.add_special_tokens).unwrap_or(body.prompt.is_some());
        let tokenizer = &served.tokenizer;
        let ids =
            if around { tokenizer.encode_prompt(text, special)? } else { tokenizer.encode(text, special)? };
        let pieces = (body.with_pieces == Some(true)).then(|| Arc::clone(tokenizer));
        Ok(Tokens { ids, pieces, max_model_len: served.engine.capacity().context, written: 0 })
    });
    let (entry, tokens) = tokenized.await?;
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(write(tokens, entry, sender, app.options.write_timeout));
    let parts = stream::unfold(receiver, |mut receiver: mpsc::Receiver<String>| async move {
        receiver.recv().await.map(|part| (Ok::<_, std::convert::Infallible>(part), receiver))
    });
    Ok(([(header::CONTENT_TYPE, "application/json")], Body::from_stream(parts)).into_response())
}

/// Hands a response over part by part, so that megabytes of text are never tens of megabytes of JSON at once. The
/// request counts as under way until its client has read it; one that does not read is waited for, but not for ever.
async fn write(mut tokens: Tokens, _entry: Entry, parts: mpsc::Sender<String>, patience: Duration) {
    while let Some(part) = tokens.part() {
        if parts.send_timeout(part, patience).await.is_err() {
            return;
        }
    }
}

/// Tokens of one part of a response.
const PART: usize = 4096;

/// A response on its way.
struct Tokens {
    ids: Vec<u32>,
    /// Says what each stands for, where that is wanted.
    pieces: Option<Arc<Tokenizer>>,
    max_model_len: usize,
    /// Those that are written; one more than there are when all is said.
    written: usize,
}

impl Tokens {
    /// The next part of the JSON.
    fn part(&mut self) -> Option<String> {
        if self.written > self.ids.len() {
            return None;
        }
        let mut text = String::new();
        let end = (self.written + PART).min(self.ids.len());
        for (index, &id) in self.ids.iter().enumerate().take(end).skip(self.written) {
            text.push_str(if index == 0 { "{\"tokens\":[" } else { "," });
            let token = match &self.pieces {
                None => json!(id),
                Some(tokenizer) => match std::str::from_utf8(tokenizer.token_bytes(id)) {
                    Ok(piece) => json!({"id": id, "piece": piece}),
                    Err(_) => json!({"id": id, "piece": tokenizer.token_bytes(id)}),
                },
            };
            // Writing to a string cannot fail.
            let _ = write!(text, "{token}");
        }
        self.written = end;
        if end == self.ids.len() {
            let (count, max_model_len) = (self.ids.len(), self.max_model_len);
            let start = if count == 0 { "{\"tokens\":[" } else { "" };
            let _ = write!(text, "{start}],\"count\":{count},\"max_model_len\":{max_model_len}}}");
            self.written += 1;
        }
        Some(text)
    }
}

/// Tokens to make a text of.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct DetokenizeBody {
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    #[schema(required = true)]
    tokens: Vec<u32>,
}

body!(DetokenizeBody, Unknown::Refuse);

/// The text of tokens, under both names.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Detokenized {
    content: String,
    prompt: String,
}

/// Make a text of tokens
#[utoipa::path(post, path = "/detokenize", tag = "tokens", request_body = DetokenizeBody, responses(
    (status = 200, body = Detokenized, description = "Their text"), crate::openapi::Refusals,
    crate::openapi::DoorRefusals))]
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Detokenized>, ApiError> {
    let text = prepare(&app, &caller, body, |body: &DetokenizeBody, served| {
        let vocab = served.tokenizer.vocab_len();
        if let Some(index) = body.tokens.iter().position(|&token| token as usize >= vocab) {
            let rule = format!("a token id below {vocab}");
            return Err(ApiError::fault(Fault::value(
                format!("tokens[{index}]"),
                rule,
                &json!(body.tokens[index]),
            )));
        }
        Ok(served.tokenizer.decode(&body.tokens))
    });
    let (_entry, content) = text.await?;
    Ok(Json(Detokenized { prompt: content.clone(), content }))
}
