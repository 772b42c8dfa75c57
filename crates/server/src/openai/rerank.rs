//! `POST /v1/rerank` and `POST /rerank`, with the fields of Cohere's and Jina's API.
//!
//! A model that reads query and document together (a cross-encoder) says of each pair how well they fit. Others embed
//! texts one by one: documents are then ordered by how alike their embeddings are to the query's (the cosine). The
//! answer says which.

use std::sync::Arc;

use axum::{Extension, Json, extract::State};
use fornax_chat::Ask;
use fornax_engine::Refusal;
use fornax_text::Special;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::embeddings::{embedding_of, made, vectors};
use crate::{
    app::{App, random_id},
    ask::prepare::{Preparing, admit, check_length},
    error::{ApiError, Code, Fault},
    front::{body::RawBody, keys::Caller},
    served::Served,
    shape::{Unknown, Unsupported, body},
};

/// A query, and documents to order by it.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct RerankBody {
    /// The served model's name; without it, that model.
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    #[schema(required = true, min_length = 1)]
    query: String,
    /// Strings, or objects with a text.
    #[schema(required = true, min_items = 1, max_items = 2047)]
    documents: Vec<Document>,
    /// How many are told, the best ones; all by default.
    #[schema(minimum = 1)]
    top_n: Option<usize>,
    /// Whether results carry their documents.
    return_documents: Option<bool>,
}

// Nothing is cut off a document: what does not fit is an error.
body!(
    RerankBody,
    Unknown::IgnoreBut(&[
        Unsupported { field: "max_chunks_per_doc", neutral: &[] },
        Unsupported { field: "max_tokens_per_doc", neutral: &[] },
        Unsupported { field: "rank_fields", neutral: &["[\"text\"]"] },
        Unsupported { field: "truncate_prompt_tokens", neutral: &[] },
    ])
);

/// A string, or an object with a text.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[serde(untagged)]
enum Document {
    Text(String),
    Object(TextDocument),
}

#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
struct TextDocument {
    text: String,
}

impl Document {
    fn text(&self) -> &str {
        match self {
            Document::Text(text) | Document::Object(TextDocument { text }) => text,
        }
    }
}

/// Documents in order, the best first.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Ranking {
    id: String,
    model: String,
    /// How scores are made: by a `cross-encoder`, which reads query and document together, or as the `cosine` of embeddings of
    /// a model that reads texts one by one.
    method: Method,
    results: Vec<Ranked>,
    usage: RerankUsage,
}

/// How scores are made.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Method {
    CrossEncoder,
    Cosine,
}

impl Method {
    pub(crate) fn of(served: &Served) -> Method {
        if served.engine.capacity().pairs { Method::CrossEncoder } else { Method::Cosine }
    }
}

#[derive(Debug, Serialize, ToSchema)]
struct Ranked {
    /// Of the document, as it was sent.
    index: usize,
    /// Of a cross-encoder from 0 to 1 (the sigmoid of what it says), of a cosine from -1 to 1.
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<TextDocument>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RerankUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

impl RerankUsage {
    /// Nothing is written: all tokens are read.
    pub(crate) fn of(tokens: usize) -> RerankUsage {
        RerankUsage { prompt_tokens: tokens, total_tokens: tokens }
    }
}

/// Order documents by a query
///
/// By a model that reads query and document together, or by the cosine of embeddings.
#[utoipa::path(post, path = "/v1/rerank", tag = "openai", request_body = RerankBody, responses(
    (status = 200, body = Ranking, description = "The documents in order"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn rerank(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Ranking>, ApiError> {
    let prepared = admit(&app, &caller, body, |body: &RerankBody, served| {
        Ok((body.ask(served)?, body.kept(), body.top_n))
    });
    let (admission, (asks, documents, top_n)) = prepared.await?;
    let model = admission.served.name().to_owned();
    let method = Method::of(&admission.served);
    let (scores, usage) = match method {
        Method::CrossEncoder => {
            let (rows, usage) = made(admission, asks).await?;
            (rows.iter().map(|row| sigmoid(row[0])).collect(), usage)
        }
        Method::Cosine => {
            let (vectors, usage) = vectors(admission, asks, None).await?;
            (cosines(&vectors), usage)
        }
    };
    let mut results: Vec<Ranked> = scores
        .into_iter()
        .enumerate()
        .map(|(index, relevance_score)| Ranked {
            index,
            relevance_score,
            document: documents.get(index).cloned(),
        })
        .collect();
    // Of documents that are as good, the earlier one first: the order of a stable sort.
    results.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
    results.truncate(top_n.unwrap_or(usize::MAX));
    let usage = RerankUsage::of(usage.prompt_tokens());
    Ok(Json(Ranking { id: format!("rerank-{}", random_id()), model, method, results, usage }))
}

/// Order documents by a query, under the path that others have
#[utoipa::path(post, path = "/rerank", tag = "openai", request_body = RerankBody, responses(
    (status = 200, body = Ranking, description = "The documents in order"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn rerank_short(
    app: State<Arc<App>>,
    caller: Extension<Caller>,
    body: RawBody,
) -> Result<Json<Ranking>, ApiError> {
    rerank(app, caller, body).await
}

impl RerankBody {
    /// Pairs of the query and each document, or the query first, then the documents.
    fn ask(&self, served: &Preparing<'_>) -> Result<Vec<Ask>, ApiError> {
        if !served.engine.capacity().encodes {
            let message =
                format!("{:?} answers; documents are ordered by models that embed", served.card.name);
            return Err(ApiError::new(Code::ModelUnsupported, message));
        }
        let documents = self.documents.iter().enumerate();
        let texts = documents.map(|(index, document)| (format!("documents[{index}]"), document.text()));
        let pairs = served.engine.capacity().pairs;
        let query = encoded(served, "query", &self.query, false)?;
        let documents = texts.map(|(field, text)| encoded(served, &field, text, pairs));
        if !pairs {
            return [Ok(query)].into_iter().chain(documents).map(|text| Ok(embedding_of(text?))).collect();
        }
        documents.map(|document| Ok(pair(&query, &document?))).collect()
    }

    /// The documents, where they are wanted back.
    fn kept(&self) -> Vec<TextDocument> {
        let wanted = self.documents.iter().filter(|_| self.return_documents == Some(true));
        wanted.map(|document| TextDocument { text: document.text().to_owned() }).collect()
    }
}

/// The tokens of a text, as a model reads it alone or behind another one.
pub(crate) fn encoded(
    served: &Preparing<'_>,
    field: &str,
    text: &str,
    is_second: bool,
) -> Result<Vec<u32>, ApiError> {
    check_length(served, text.len())?;
    let prompt = match is_second {
        true => served.tokenizer.encode_second(text, Special::AsText)?,
        false => served.tokenizer.encode_prompt(text, Special::AsText)?,
    };
    let (length, context) = (prompt.len(), served.engine.capacity().context);
    match length {
        0 => Err(ApiError::fault(Fault::rule(field, "must have at least one token"))),
        // It may stand in a pair with each of many others: what does not fit alone is not multiplied.
        _ if length > context => Err(Refusal::PromptTooLong { prompt: length, context }.into()),
        _ => Ok(prompt),
    }
}

/// The question how well two texts fit together.
pub(crate) fn pair(first: &[u32], second: &[u32]) -> Ask {
    let mut ask = embedding_of([first, second].concat());
    ask.request.second = Some(first.len());
    ask
}

/// What a cross-encoder says, from 0 to 1.
pub(crate) fn sigmoid(value: f32) -> f32 {
    1.0 / (1.0 + (-value).exp())
}

/// How alike each vector is to the first; all have length one.
fn cosines(vectors: &[Vec<f32>]) -> Vec<f32> {
    let Some((query, documents)) = vectors.split_first() else { return Vec::new() };
    let score = |document: &Vec<f32>| query.iter().zip(document).map(|(a, b)| a * b).sum();
    documents.iter().map(score).collect()
}
