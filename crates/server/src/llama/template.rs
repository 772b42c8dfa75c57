//! `POST /apply-template`: the prompt that a chat becomes, without asking the model.

use std::sync::Arc;

use axum::{Json, extract::State};
use serde_json::{Value, json};

use crate::{app::App, ask::prepare::prepare, error::ApiError, front::body::RawBody, openai::chat::ChatBody};

/// The prompt that a chat becomes
#[utoipa::path(post, path = "/apply-template", tag = "llama.cpp", request_body = ChatBody, responses(
    (status = 200, description = "{prompt}"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn apply(State(app): State<Arc<App>>, body: RawBody) -> Result<Json<Value>, ApiError> {
    let prompt = prepare(&app, body, |body: &ChatBody, served| {
        let (ask, _) = body.ask(served)?;
        let tokenizer = &served.tokenizer;
        let mut bytes = Vec::new();
        for &token in &ask.request.prompt {
            // Marks of the template have no bytes of a text; they are shown as they are written.
            match tokenizer.is_control(token) {
                true => bytes.extend(tokenizer.piece(token).bytes()),
                false => bytes.extend(tokenizer.token_bytes(token)),
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    });
    Ok(Json(json!({"prompt": prompt.await?})))
}
