//! OpenAI's routes without their `/v1`, as llama.cpp has them, too.

use std::sync::Arc;

use axum::{Extension, Json, extract::State, response::Response};

use crate::{
    app::App,
    error::ApiError,
    front::{body::RawBody, keys::Caller},
    openai::{
        chat::{self, ChatBody, ChatCompletion},
        embeddings::{self, EmbeddingBody, Embeddings},
        models::{self, ModelList},
    },
};

/// Go on with a conversation, under llama.cpp's path
#[utoipa::path(post, path = "/chat/completions", tag = "llama.cpp", request_body = ChatBody, responses(
    (status = 200, body = ChatCompletion, description = "The answer, or a stream of its parts"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn chat(
    app: State<Arc<App>>,
    caller: Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    chat::chat(app, caller, body).await
}

/// Embed texts, under llama.cpp's path
#[utoipa::path(post, path = "/embeddings", tag = "llama.cpp", request_body = EmbeddingBody, responses(
    (status = 200, body = Embeddings, description = "An embedding of each text"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn embeddings(
    app: State<Arc<App>>,
    caller: Extension<Caller>,
    body: RawBody,
) -> Result<Json<Embeddings>, ApiError> {
    embeddings::embeddings(app, caller, body).await
}

/// What can be asked for, under llama.cpp's path
#[utoipa::path(get, path = "/models", tag = "llama.cpp", responses(
    (status = 200, body = ModelList, description = "The served models"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn models(app: State<Arc<App>>) -> Result<Json<ModelList>, ApiError> {
    models::list(app).await
}
