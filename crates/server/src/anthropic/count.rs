//! `POST /v1/messages/count_tokens`.

use std::sync::Arc;

use axum::{Extension, Json, extract::State};
use serde::Serialize;
use utoipa::ToSchema;

use super::request::CountBody;
use crate::{
    app::App,
    ask::prepare::prepare,
    error::ApiError,
    front::{body::RawBody, keys::Caller},
};

/// How long a prompt is.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TokenCount {
    input_tokens: usize,
}

/// Count the tokens of a conversation
///
/// Exactly those that the same request to `/v1/messages` would have computed, template and tools included.
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "anthropic", request_body = CountBody, responses(
    (status = 200, body = TokenCount, description = "Its tokens"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn count(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<TokenCount>, ApiError> {
    let counted = prepare(&app, &caller, body, |body: &CountBody, served| {
        let ask = body.ask(served)?;
        Ok(TokenCount { input_tokens: ask.request.prompt.len() })
    });
    Ok(Json(counted.await?.1))
}
