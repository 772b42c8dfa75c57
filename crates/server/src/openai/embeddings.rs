//! `POST /v1/embeddings`.

use std::sync::Arc;

use axum::extract::State;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::prepare::{check_model, prepare};
use crate::{
    app::App,
    error::{ApiError, Code},
    front::body::RawBody,
    shape::{Unknown, body},
};

/// Texts to embed.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct EmbeddingBody {
    /// The served model's name; without it, that model.
    #[schema(min_length = 1, max_length = 512)]
    model: Option<String>,
    /// A string, an array of strings, an array of token ids, or an array of such arrays.
    #[schema(required = true)]
    #[expect(dead_code, reason = "no model that can be loaded yet embeds texts")]
    input: Value,
}

body!(EmbeddingBody, Unknown::IgnoreBut(&[]));

/// Embed texts
///
/// Models that answer have no embeddings; they are refused by name.
#[utoipa::path(post, path = "/v1/embeddings", tag = "openai", request_body = EmbeddingBody,
    responses(crate::openapi::Refusals,
    crate::openapi::DoorRefusals))]
pub(crate) async fn embeddings(State(app): State<Arc<App>>, body: RawBody) -> Result<(), ApiError> {
    let served = app.model()?;
    prepare(&app, &served, body, |body: &EmbeddingBody, served| {
        check_model(served, body.model.as_deref())?;
        let message = format!(
            "{:?} is a model of architecture {}, which has no embeddings",
            served.card.name, served.card.architecture
        );
        Err(ApiError::new(Code::ModelUnsupported, message))
    })
    .await
}
