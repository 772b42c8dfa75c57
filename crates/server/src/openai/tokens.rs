//! `POST /tokenize` and `POST /detokenize`, with the fields of llama.cpp's server and of vLLM's.

use std::sync::Arc;

use axum::{Json, extract::State};
use fornax_text::Special;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::{
    app::App,
    ask::prepare::prepare,
    error::{ApiError, Fault},
    front::body::RawBody,
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
#[derive(Debug, Serialize, ToSchema)]
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
    body: RawBody,
) -> Result<Json<Tokenized>, ApiError> {
    let tokenized = prepare(&app, body, |body: &TokenizeBody, served| {
        let text = match (&body.content, &body.prompt) {
            (Some(text), None) | (None, Some(text)) => text,
            (None, None) => return Err(ApiError::fault(Fault::rule("content", "is required"))),
            (Some(_), Some(_)) => {
                return Err(ApiError::fault(Fault::rule("prompt", "cannot be had with content")));
            }
        };
        let special = if body.parse_special == Some(true) { Special::Parse } else { Special::AsText };
        // Each as its own server does by default.
        let around = body.add_special.or(body.add_special_tokens).unwrap_or(body.prompt.is_some());
        let tokenizer = &served.tokenizer;
        let ids =
            if around { tokenizer.encode_prompt(text, special)? } else { tokenizer.encode(text, special)? };
        let piece = |id: u32| match std::str::from_utf8(tokenizer.token_bytes(id)) {
            Ok(text) => json!(text),
            Err(_) => json!(tokenizer.token_bytes(id)),
        };
        let pieces = body.with_pieces == Some(true);
        let token = |&id: &u32| if pieces { json!({"id": id, "piece": piece(id)}) } else { json!(id) };
        let max_model_len = served.engine.capacity().context;
        Ok(Tokenized { count: ids.len(), tokens: ids.iter().map(token).collect(), max_model_len })
    });
    Ok(Json(tokenized.await?))
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
    body: RawBody,
) -> Result<Json<Detokenized>, ApiError> {
    let text = prepare(&app, body, |body: &DetokenizeBody, served| {
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
    let content = text.await?;
    Ok(Json(Detokenized { prompt: content.clone(), content }))
}
