//! `POST /api/embed` and its predecessor, `POST /api/embeddings`.

use std::{sync::Arc, time::Instant};

use axum::{Extension, Json, extract::State};
use fornax_text::Special;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    app::App,
    ask::prepare::{Preparing, admit, check_length},
    error::ApiError,
    front::{body::RawBody, keys::Caller},
    openai::embeddings::{check_count, check_embeds, embeddings_of, made, vectors},
    shape::{Unknown, body},
};

/// Texts to embed.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct EmbedBody {
    /// The served model's name, with or without `:latest`.
    #[schema(required = true, min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: String,
    /// A string, or up to 2048 strings.
    #[schema(required = true)]
    input: Texts,
    /// Whether a text that is too long for the model is cut at its end; without it, it is refused.
    truncate: Option<bool>,
    /// How many numbers, at most as many as the model makes: the first of them, at length one again.
    #[schema(minimum = 1)]
    dimensions: Option<usize>,
}

body!(EmbedBody, Unknown::IgnoreBut(&[]));

/// A string, or several.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(untagged)]
enum Texts {
    One(String),
    Many(Vec<String>),
}

impl Texts {
    fn all(&self) -> &[String] {
        match self {
            Texts::One(text) => std::slice::from_ref(text),
            Texts::Many(texts) => texts,
        }
    }
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
        check_embeds(served)?;
        check_count("input", body.input.all().len())?;
        let texts = body.input.all().iter();
        let prompts = texts.map(|text| tokens(text, body.truncate == Some(true), served));
        let asks = embeddings_of("input", prompts.collect::<Result<_, _>>()?)?;
        Ok((asks, body.dimensions))
    });
    let (admission, (asks, dimensions)) = prepared.await?;
    let model = admission.served.name().to_owned();
    let (embeddings, usage) = vectors(admission, asks, dimensions).await?;
    let total_duration = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let prompt_eval_count = usage.prompt_tokens();
    Ok(Json(Embedded { model, embeddings, total_duration, load_duration: 0, prompt_eval_count }))
}

/// The tokens of a text, cut to what the model takes if that is wanted.
fn tokens(text: &str, cut: bool, served: &Preparing<'_>) -> Result<Vec<u32>, ApiError> {
    if cut {
        let most = served.engine.capacity().context;
        return Ok(served.tokenizer.encode_prompt_within(text, Special::AsText, most)?);
    }
    check_length(served, text.len())?;
    Ok(served.tokenizer.encode_prompt(text, Special::AsText)?)
}

/// A text to embed.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct EmbeddingsBody {
    /// The served model's name, with or without `:latest`.
    #[schema(required = true, min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: String,
    /// Without it, nothing is embedded.
    prompt: Option<String>,
}

body!(EmbeddingsBody, Unknown::IgnoreBut(&[]));

/// What the model makes of a text.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OneEmbedding {
    embedding: Vec<f32>,
}

/// Embed a text, as Ollama's older clients ask
///
/// As long as the model makes it: `/api/embed` scales to length one.
#[utoipa::path(post, path = "/api/embeddings", tag = "ollama", request_body = EmbeddingsBody, responses(
    (status = 200, body = OneEmbedding, description = "The embedding of the text"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn embeddings(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<OneEmbedding>, ApiError> {
    let prepared = admit(&app, &caller, body, |body: &EmbeddingsBody, served| {
        check_embeds(served)?;
        let Some(text) = body.prompt.as_deref().filter(|text| !text.is_empty()) else {
            return Ok(Vec::new());
        };
        embeddings_of("prompt", vec![tokens(text, false, served)?])
    });
    let (admission, asks) = prepared.await?;
    let (embeddings, _) = made(admission, asks).await?;
    Ok(Json(OneEmbedding { embedding: embeddings.into_iter().next().unwrap_or_default() }))
}
