//! `POST /v1/score` and `POST /score`, as vLLM names it: how well two texts fit together, pair by pair.

use std::sync::Arc;

use axum::{Extension, Json, extract::State};
use fornax_chat::Ask;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    embeddings::{made, vectors},
    rerank::{Method, RerankUsage, encoded, pair, sigmoid},
};
use crate::{
    app::{App, random_id, unix_seconds},
    ask::prepare::{Preparing, admit},
    error::{ApiError, Code, Fault},
    front::{body::RawBody, keys::Caller},
    openai::embeddings::embedding_of,
    shape::{Unknown, Unsupported, body},
};

/// Pairs of one request.
const PAIRS_MAX: usize = 2048;

/// Texts to compare.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ScoreBody {
    /// The served model's name; without it, that model.
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    /// The first of each pair: a text, or as many as there are second ones.
    #[schema(required = true)]
    text_1: Texts,
    /// The second of each pair.
    #[schema(required = true)]
    text_2: Texts,
}

// Nothing is cut off a text: what does not fit is an error.
body!(
    ScoreBody,
    Unknown::IgnoreBut(&[
        Unsupported { field: "activation", neutral: &["true"] },
        Unsupported { field: "truncate_prompt_tokens", neutral: &[] },
        Unsupported { field: "use_activation", neutral: &["true"] },
    ])
);

/// A string, or an array of strings.
#[derive(Debug, Deserialize, ToSchema)]
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

/// How well the texts of each pair fit.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Scores {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    /// How scores are made: by a `cross-encoder`, or as the `cosine` of embeddings.
    method: Method,
    data: Vec<Score>,
    usage: RerankUsage,
}

#[derive(Debug, Serialize, ToSchema)]
struct Score {
    /// Of the pair.
    index: usize,
    object: &'static str,
    /// Of a cross-encoder from 0 to 1 (the sigmoid of what it says), of a cosine from -1 to 1.
    score: f32,
}

/// Compare texts
///
/// By a model that reads both of a pair together, or by the cosine of embeddings.
#[utoipa::path(post, path = "/v1/score", tag = "openai", request_body = ScoreBody, responses(
    (status = 200, body = Scores, description = "A score of each pair"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn score(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Scores>, ApiError> {
    let prepared = admit(&app, &caller, body, |body: &ScoreBody, served| {
        Ok((body.ask(served)?, body.text_1.all().len(), body.text_2.all().len()))
    });
    let (admission, (asks, firsts, seconds)) = prepared.await?;
    let model = admission.served.name().to_owned();
    let method = Method::of(&admission.served);
    let (scores, usage) = match method {
        Method::CrossEncoder => {
            let (rows, usage) = made(admission, asks).await?;
            (rows.iter().map(|row| sigmoid(row[0])).collect::<Vec<f32>>(), usage)
        }
        Method::Cosine => {
            let (vectors, usage) = vectors(admission, asks, None).await?;
            let (first, second) = vectors.split_at(firsts);
            let cosine = |n: usize| {
                let other = &first[if firsts == 1 { 0 } else { n }];
                other.iter().zip(&second[n]).map(|(a, b)| a * b).sum()
            };
            ((0..seconds).map(cosine).collect(), usage)
        }
    };
    let score = |(index, score)| Score { index, object: "score", score };
    Ok(Json(Scores {
        id: format!("score-{}", random_id()),
        object: "list",
        created: unix_seconds(),
        model,
        method,
        data: scores.into_iter().enumerate().map(score).collect(),
        usage: RerankUsage::of(usage.prompt_tokens()),
    }))
}

/// Compare texts, under the path that vLLM has, too
#[utoipa::path(post, path = "/score", tag = "openai", request_body = ScoreBody, responses(
    (status = 200, body = Scores, description = "A score of each pair"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn score_short(
    app: State<Arc<App>>,
    caller: Extension<Caller>,
    body: RawBody,
) -> Result<Json<Scores>, ApiError> {
    score(app, caller, body).await
}

impl ScoreBody {
    /// Pairs, or all first ones and then all second ones.
    fn ask(&self, served: &Preparing<'_>) -> Result<Vec<Ask>, ApiError> {
        if !served.engine.capacity().encodes {
            let message = format!("{:?} answers; texts are compared by models that embed", served.card.name);
            return Err(ApiError::new(Code::ModelUnsupported, message));
        }
        let (firsts, seconds) = (self.text_1.all(), self.text_2.all());
        if !(1..=PAIRS_MAX).contains(&seconds.len()) {
            let rule = format!("must hold 1 to {PAIRS_MAX} texts");
            return Err(ApiError::fault(Fault::rule("text_2", rule)));
        }
        if firsts.len() != 1 && firsts.len() != seconds.len() {
            let rule = "must be one text, or as many as text_2 has";
            return Err(ApiError::fault(Fault::rule("text_1", rule)));
        }
        let pairs = served.engine.capacity().pairs;
        let all = |name: &str, texts: &[String], is_second: bool| -> Result<Vec<Vec<u32>>, ApiError> {
            let texts = texts.iter().enumerate();
            texts.map(|(n, text)| encoded(served, &format!("{name}[{n}]"), text, is_second)).collect()
        };
        let firsts = all("text_1", firsts, false)?;
        let seconds = all("text_2", seconds, pairs)?;
        if !pairs {
            return Ok(firsts.into_iter().chain(seconds).map(embedding_of).collect());
        }
        let first = |n: usize| if firsts.len() == 1 { &firsts[0] } else { &firsts[n] };
        Ok(seconds.iter().enumerate().map(|(n, second)| pair(first(n), second)).collect())
    }
}
