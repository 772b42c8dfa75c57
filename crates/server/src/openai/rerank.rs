//! `POST /v1/rerank` and `POST /rerank`, with the fields of Cohere's and Jina's API, or those of Hugging Face's inference
//! server (TEI), which calls documents `texts` and gets a bare list.
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
    #[schema(min_items = 1, max_items = 2047)]
    documents: Option<Vec<Document>>,
    /// The documents as TEI's clients name them; the answer is then a list of `{index, score, text?}`.
    #[schema(min_items = 1, max_items = 2047)]
    texts: Option<Vec<String>>,
    /// How many are told, the best ones; all by default.
    #[schema(minimum = 1)]
    top_n: Option<usize>,
    /// Whether results carry their documents.
    return_documents: Option<bool>,
    /// The same, with `texts`.
    return_text: Option<bool>,
    /// With `texts`: what a cross-encoder says as it is, not its sigmoid.
    raw_scores: Option<bool>,
}

// Nothing is cut off a document: what does not fit is an error.
body!(
    RerankBody,
    Unknown::IgnoreBut(&[
        Unsupported { field: "max_chunks_per_doc", neutral: &[] },
        Unsupported { field: "max_tokens_per_doc", neutral: &[] },
        Unsupported { field: "rank_fields", neutral: &["[\"text\"]"] },
        Unsupported { field: "truncate", neutral: &["false"] },
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

/// Documents in order, as they were asked for.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Order {
    Ranking(Ranking),
    Texts(Vec<RankedText>),
}

/// A text with its score, as TEI tells it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RankedText {
    /// Of the text, as it was sent.
    index: usize,
    score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
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
    (status = 200, body = Order, description = "The documents in order"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn rerank(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Order>, ApiError> {
    let prepared = admit(&app, &caller, body, |body: &RerankBody, served| {
        Ok((
            body.ask(served)?,
            Told {
                documents: body.kept(),
                top_n: body.top_n,
                as_texts: body.texts.is_some(),
                raw: body.raw_scores == Some(true),
            },
        ))
    });
    let (admission, (asks, told)) = prepared.await?;
    let model = admission.served.name().to_owned();
    let method = Method::of(&admission.served);
    let (scores, usage) = match method {
        Method::CrossEncoder => {
            let (rows, usage) = made(admission, asks).await?;
            let score = |row: &Vec<f32>| if told.raw { row[0] } else { sigmoid(row[0]) };
            (rows.iter().map(score).collect(), usage)
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
            document: told.documents.get(index).cloned(),
        })
        .collect();
    // Of documents that are as good, the earlier one first: the order of a stable sort.
    results.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
    results.truncate(told.top_n.unwrap_or(usize::MAX));
    if told.as_texts {
        let text = |ranked: Ranked| RankedText {
            index: ranked.index,
            score: ranked.relevance_score,
            text: ranked.document.map(|document| document.text),
        };
        return Ok(Json(Order::Texts(results.into_iter().map(text).collect())));
    }
    let usage = RerankUsage::of(usage.prompt_tokens());
    let id = format!("rerank-{}", random_id());
    Ok(Json(Order::Ranking(Ranking { id, model, method, results, usage })))
}

/// How the order is told.
struct Told {
    /// Where they are wanted back.
    documents: Vec<TextDocument>,
    top_n: Option<usize>,
    /// In TEI's form.
    as_texts: bool,
    /// Without the sigmoid.
    raw: bool,
}

/// Order documents by a query, under the path that others have
#[utoipa::path(post, path = "/rerank", tag = "openai", request_body = RerankBody, responses(
    (status = 200, body = Order, description = "The documents in order"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn rerank_short(
    app: State<Arc<App>>,
    caller: Extension<Caller>,
    body: RawBody,
) -> Result<Json<Order>, ApiError> {
    rerank(app, caller, body).await
}

impl RerankBody {
    /// The documents by either name, each with how faults call it.
    fn texts(&self) -> Result<Vec<(String, &str)>, ApiError> {
        if self.texts.is_none() {
            let own = [("return_text", self.return_text), ("raw_scores", self.raw_scores)];
            if let Some((field, _)) = own.iter().find(|(_, wanted)| *wanted == Some(true)) {
                return Err(ApiError::fault(Fault::rule(*field, "belongs to texts")));
            }
        }
        match (&self.documents, &self.texts) {
            (Some(documents), None) => {
                let documents = documents.iter().enumerate();
                Ok(documents
                    .map(|(index, document)| (format!("documents[{index}]"), document.text()))
                    .collect())
            }
            (None, Some(texts)) => {
                let texts = texts.iter().enumerate();
                Ok(texts.map(|(index, text)| (format!("texts[{index}]"), text.as_str())).collect())
            }
            (None, None) => Err(ApiError::fault(Fault::rule("documents", "is required"))),
            (Some(_), Some(_)) => {
                Err(ApiError::fault(Fault::rule("texts", "cannot be combined with documents")))
            }
        }
    }

    /// Pairs of the query and each document, or the query first, then the documents.
    fn ask(&self, served: &Preparing<'_>) -> Result<Vec<Ask>, ApiError> {
        let texts = self.texts()?;
        if !served.engine.capacity().encodes {
            let message =
                format!("{:?} answers; documents are ordered by models that embed", served.card.name);
            return Err(ApiError::new(Code::ModelUnsupported, message));
        }
        let pairs = served.engine.capacity().pairs;
        let query = encoded(served, "query", &self.query, false)?;
        let documents = texts.into_iter().map(|(field, text)| encoded(served, &field, text, pairs));
        if !pairs {
            return [Ok(query)].into_iter().chain(documents).map(|text| Ok(embedding_of(text?))).collect();
        }
        documents.map(|document| Ok(pair(&query, &document?))).collect()
    }

    /// The documents, where they are wanted back.
    fn kept(&self) -> Vec<TextDocument> {
        if self.return_documents != Some(true) && self.return_text != Some(true) {
            return Vec::new();
        }
        let texts = self.texts().unwrap_or_default();
        texts.into_iter().map(|(_, text)| TextDocument { text: text.to_owned() }).collect()
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
