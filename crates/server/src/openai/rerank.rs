//! `POST /v1/rerank` and `POST /rerank`, with the fields of Cohere's and Jina's API.
//!
//! The models here embed texts one by one; none reads query and document together, as cross-encoders do. So documents are
//! ordered by how alike their embeddings are to the query's (the cosine), and the answer says so.

use std::sync::Arc;

use axum::{Extension, Json, extract::State};
use fornax_text::Special;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    embeddings::{embedding_of, vectors},
    prepare::{admit, check_length},
};
use crate::{
    answer::Ask,
    app::{App, random_id},
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

/// Documents in order, the most alike first.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Ranking {
    id: String,
    model: String,
    /// How scores are made: `cosine` of embeddings, since the model reads texts one by one.
    method: &'static str,
    results: Vec<Ranked>,
    usage: RerankUsage,
}

#[derive(Debug, Serialize, ToSchema)]
struct Ranked {
    /// Of the document, as it was sent.
    index: usize,
    /// From -1 to 1.
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<TextDocument>,
}

#[derive(Debug, Serialize, ToSchema)]
struct RerankUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

/// Order documents by a query
///
/// By the cosine of embeddings: no model here reads query and document together.
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
    let (vectors, usage) = vectors(admission, asks).await?;
    let scores = scores(&vectors);
    let mut results: Vec<Ranked> = scores
        .into_iter()
        .enumerate()
        .map(|(index, relevance_score)| Ranked {
            index,
            relevance_score,
            document: documents.get(index).cloned(),
        })
        .collect();
    // Of documents that are as alike, the earlier one first: the order of a stable sort.
    results.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
    results.truncate(top_n.unwrap_or(usize::MAX));
    let tokens = usage.prompt_tokens();
    let usage = RerankUsage { prompt_tokens: tokens, total_tokens: tokens };
    Ok(Json(Ranking { id: format!("rerank-{}", random_id()), model, method: "cosine", results, usage }))
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
    /// The query first, then the documents.
    fn ask(&self, served: &Served) -> Result<Vec<Ask>, ApiError> {
        if !served.engine.capacity().encodes {
            let message =
                format!("{:?} answers; documents are ordered by models that embed", served.card.name);
            return Err(ApiError::new(Code::ModelUnsupported, message));
        }
        let documents = self.documents.iter().enumerate();
        let texts = documents.map(|(index, document)| (format!("documents[{index}]"), document.text()));
        [("query".to_owned(), self.query.as_str())]
            .into_iter()
            .chain(texts)
            .map(|(field, text)| {
                check_length(served, text.len())?;
                let prompt = served.tokenizer.encode_prompt(text, Special::AsText)?;
                if prompt.is_empty() {
                    return Err(ApiError::fault(Fault::rule(field, "must have at least one token")));
                }
                embedding_of(prompt)
            })
            .collect()
    }

    /// The documents, where they are wanted back.
    fn kept(&self) -> Vec<TextDocument> {
        let wanted = self.documents.iter().filter(|_| self.return_documents == Some(true));
        wanted.map(|document| TextDocument { text: document.text().to_owned() }).collect()
    }
}

/// How alike each vector is to the first; all have length one.
fn scores(vectors: &[Vec<f32>]) -> Vec<f32> {
    let Some((query, documents)) = vectors.split_first() else { return Vec::new() };
    let score = |document: &Vec<f32>| query.iter().zip(document).map(|(a, b)| a * b).sum();
    documents.iter().map(score).collect()
}
