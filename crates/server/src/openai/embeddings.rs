//! `POST /v1/embeddings`.
//!
//! A decoder's embedding of a text is what its head would read after the last token, at length one: the last position
//! is the only one that has seen the whole text.

use std::sync::Arc;

use axum::{Extension, Json, extract::State};
use base64::{Engine, prelude::BASE64_STANDARD};
use fornax_chat::{Ask, Piece};
use fornax_compute::Sampling;
use fornax_engine::{Request, of_length_one};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::reply::Usage;
use crate::{
    app::{Admission, App},
    ask::{
        prepare::{Preparing, admit},
        prompt::Prompt,
    },
    error::{ApiError, Code, Fault},
    front::{body::RawBody, keys::Caller},
    served::Served,
    shape::{Unknown, body},
    work::Work,
};

/// Texts of one request, as many as OpenAI takes.
const INPUTS_MAX: usize = 2048;

/// Texts handed to the engine at once, so that a large request leaves room in the queue for others.
const AT_ONCE: usize = 32;

/// Texts to embed.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct EmbeddingBody {
    /// The name of a served model; without it, the first of them.
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    /// A string, an array of strings, an array of token ids, or an array of such arrays; up to 2048 texts.
    #[schema(required = true)]
    input: Prompt,
    /// Numbers in JSON, or their 32-bit floats, little-endian, in base64; `float` by default.
    encoding_format: Option<EncodingFormat>,
    /// How many numbers, at most as many as the model makes: the first of them, at length one again. Models that were trained
    /// for it lose little by it.
    #[schema(minimum = 1)]
    dimensions: Option<usize>,
    /// A label of the client's; it changes nothing.
    #[schema(max_length = 1024)]
    #[expect(dead_code, reason = "it asks for nothing")]
    user: Option<String>,
}

body!(EmbeddingBody, Unknown::IgnoreBut(&[]));

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum EncodingFormat {
    #[default]
    Float,
    Base64,
}

/// Embeddings, in the order of the texts.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Embeddings {
    object: &'static str,
    data: Vec<Embedding>,
    model: String,
    usage: Usage,
}

#[derive(Debug, Serialize, ToSchema)]
struct Embedding {
    object: &'static str,
    index: usize,
    embedding: Values,
}

/// Of length one.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum Values {
    Float(Vec<f32>),
    Base64(String),
}

/// Embed texts
///
/// What the model makes of each text, scaled to length one: encoders pool as their files say; of a decoder it is what its
/// head would read after the last token. Closing the connection cancels.
#[utoipa::path(post, path = "/v1/embeddings", tag = "openai", request_body = EmbeddingBody, responses(
    (status = 200, body = Embeddings, description = "An embedding of each text"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn embeddings(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Embeddings>, ApiError> {
    let (admission, asked) = admit(&app, &caller, body, EmbeddingBody::ask).await?;
    Ok(Json(answer(admission, asked).await?))
}

/// The embeddings that were asked for.
pub(crate) async fn answer(
    admission: Admission,
    (asks, shape): (Vec<Ask>, Shape),
) -> Result<Embeddings, ApiError> {
    let model = admission.served.name().to_owned();
    let (vectors, usage) = vectors(admission, asks, shape.dimensions).await?;
    let data = vectors.into_iter().enumerate().map(|(index, values)| Embedding {
        object: "embedding",
        index,
        embedding: shape.format.write(values),
    });
    Ok(Embeddings { object: "list", data: data.collect(), model, usage })
}

/// What the model makes of each text, or so many numbers of it, of length one.
pub(crate) async fn vectors(
    admission: Admission,
    asks: Vec<Ask>,
    dimensions: Option<usize>,
) -> Result<(Vec<Vec<f32>>, Usage), ApiError> {
    let (mut vectors, usage) = made(admission, asks).await?;
    if let Some(asked) = dimensions {
        let most = vectors.first().map_or(asked, Vec::len);
        if asked > most {
            let rule = format!("must be at most {most}, what this model makes");
            return Err(ApiError::fault(Fault::rule("dimensions", rule)));
        }
        vectors.iter_mut().for_each(|vector| vector.truncate(asked));
    }
    Ok((vectors.into_iter().map(of_length_one).collect(), usage))
}

/// What the model makes of each text, in the order of the texts. Dropped, it cancels.
pub(crate) async fn made(
    admission: Admission,
    mut asks: Vec<Ask>,
) -> Result<(Vec<Vec<f32>>, Usage), ApiError> {
    let mut later = asks.split_off(asks.len().min(AT_ONCE));
    let mut work = Work::submit(admission, asks)?;
    let mut vectors = Vec::new();
    let mut usage = Usage::default();
    loop {
        let mut made = Vec::new();
        while let Some((index, piece)) = work.next().await {
            match piece? {
                Piece::Embedding(values) => made.push((index, values)),
                Piece::End { usage: counts, .. } => usage.add(counts, true),
                Piece::Started { .. }
                | Piece::Scored(_)
                | Piece::Token(_)
                | Piece::Text { .. }
                | Piece::Said { .. } => {}
            }
        }
        // Short texts overtake long ones.
        made.sort_by_key(|&(index, _)| index);
        vectors.extend(made.into_iter().map(|(_, values)| values));
        if later.is_empty() {
            return Ok((vectors, usage));
        }
        let next = later.split_off(later.len().min(AT_ONCE));
        work.submit_more(std::mem::replace(&mut later, next))?;
    }
}

impl EmbeddingBody {
    pub(crate) fn ask(&self, served: &Preparing<'_>) -> Result<(Vec<Ask>, Shape), ApiError> {
        check_embeds(served)?;
        check_count("input", self.input.count())?; // before any of them is cut into tokens
        let asks = embeddings_of("input", self.input.tokens(served)?)?;
        let shape = Shape { format: self.encoding_format.unwrap_or_default(), dimensions: self.dimensions };
        Ok((asks, shape))
    }
}

/// Refuses a model that embeds nothing.
pub(crate) fn check_embeds(served: &Served) -> Result<(), ApiError> {
    if served.engine.capacity().pairs {
        let message =
            format!("{:?} reads two texts together and embeds none; ask /v1/rerank", served.card.name);
        return Err(ApiError::new(Code::ModelUnsupported, message));
    }
    Ok(())
}

/// Refuses no texts, and too many.
pub(crate) fn check_count(field: &str, count: usize) -> Result<(), ApiError> {
    if (1..=INPUTS_MAX).contains(&count) {
        return Ok(());
    }
    let rule = format!("must hold 1 to {INPUTS_MAX} texts");
    Err(ApiError::fault(Fault::rule(field, rule)))
}

/// The question what the model makes of each of these texts, which stand in `field`.
pub(crate) fn embeddings_of(field: &str, prompts: Vec<Vec<u32>>) -> Result<Vec<Ask>, ApiError> {
    check_count(field, prompts.len())?;
    if prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::fault(Fault::rule(field, "must hold texts of at least one token")));
    }
    Ok(prompts.into_iter().map(embedding_of).collect())
}

/// The question what the model makes of a text.
pub(crate) fn embedding_of(prompt: Vec<u32>) -> Ask {
    let request = Request { embeds: true, ..Request::new(prompt, 0, Sampling::greedy()) };
    Ask::new(request)
}

/// What embeddings are to look like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    format: EncodingFormat,
    dimensions: Option<usize>,
}

impl EncodingFormat {
    fn write(self, values: Vec<f32>) -> Values {
        match self {
            EncodingFormat::Float => Values::Float(values),
            EncodingFormat::Base64 => {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                Values::Base64(BASE64_STANDARD.encode(bytes))
            }
        }
    }
}
