//! `POST /api/embed`.

use std::{sync::Arc, time::Instant};

use axum::{Extension, Json, extract::State};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::request::untagged;
use crate::{
    app::App,
    ask::prepare::admit,
    error::ApiError,
    front::{body::RawBody, keys::Caller},
    openai::embeddings::{EmbeddingBody, vectors},
    shape::{self, Unknown, Unsupported, body},
};

/// Texts to embed.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct EmbedBody {
    /// The served model's name, with or without `:latest`.
    #[schema(required = true, min_length = 1, max_length = 512)]
    model: String,
    /// A string, or up to 2048 strings.
    #[schema(required = true)]
    input: Texts,
    /// As many numbers as the model makes; no other count is possible.
    #[schema(minimum = 1)]
    dimensions: Option<u32>,
}

// Texts are never cut: asking for that is refused, leaving it open is not.
body!(EmbedBody, Unknown::IgnoreBut(&[Unsupported { field: "truncate", neutral: &["false"] }]));

/// A string, or several.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(untagged)]
enum Texts {
    One(String),
    Many(Vec<String>),
}

/// Embeddings, in the order of the texts.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Embedded {
    model: String,
    embeddings: Vec<Vec<f32>>,
    /// Nanoseconds.
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

/// Embed texts, as Ollama's clients ask
#[utoipa::path(post, path = "/api/embed", tag = "ollama", request_body = EmbedBody, responses(
    (status = 200, body = Embedded, description = "An embedding of each text, of length one"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn embed(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Embedded>, ApiError> {
    let began = Instant::now();
    let prepared = admit(&app, &caller, body, |body: &EmbedBody, served| {
        let mut fields = Map::new();
        fields.insert("model".to_owned(), json!(untagged(&body.model)));
        fields.insert("input".to_owned(), json!(body.input));
        if let Some(dimensions) = body.dimensions {
            fields.insert("dimensions".to_owned(), json!(dimensions));
        }
        shape::understand::<EmbeddingBody>(Value::Object(fields), Unknown::Refuse)?.ask(served)
    });
    let (admission, (asks, shape)) = prepared.await?;
    let model = admission.served.name().to_owned();
    let (embeddings, usage) = vectors(admission, asks).await?;
    if let Some(first) = embeddings.first() {
        shape.check(first.len())?;
    }
    let total_duration = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let prompt_eval_count = usage.prompt_tokens();
    Ok(Json(Embedded { model, embeddings, total_duration, load_duration: 0, prompt_eval_count }))
}
