//! `POST /v1/classify` and `POST /classify`, as vLLM names it: which class a text is of, by a model that has classes.
//! Those here have one (a cross-encoder's, which says how far a text is of it).

use std::sync::Arc;

use axum::{Extension, Json, extract::State};
use fornax_chat::Ask;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    embeddings::{check_count, made},
    rerank::{RerankUsage, pair, sigmoid},
};
use crate::{
    app::{App, random_id, unix_seconds},
    ask::{
        prepare::{Preparing, admit},
        prompt::Prompt,
    },
    error::{ApiError, Code, Fault},
    front::{body::RawBody, keys::Caller},
    shape::{Unknown, Unsupported, body},
};

/// What transformers calls the only class of a model that names none.
const LABEL: &str = "LABEL_0";

/// Texts to classify.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ClassifyBody {
    /// The served model's name; without it, that model.
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    /// A string, an array of up to 2048 strings, or token ids in either way.
    #[schema(required = true)]
    input: Prompt,
    /// False for what the model says as it is, not its sigmoid.
    use_activation: Option<bool>,
    /// The older name of use_activation.
    activation: Option<bool>,
}

// Nothing is cut off a text: what does not fit is an error.
body!(
    ClassifyBody,
    Unknown::IgnoreBut(&[
        Unsupported { field: "messages", neutral: &[] },
        Unsupported { field: "truncate_prompt_tokens", neutral: &[] },
    ])
);

/// The class of each text.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Classes {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    data: Vec<Class>,
    usage: RerankUsage,
}

#[derive(Debug, Serialize, ToSchema)]
struct Class {
    /// Of the text.
    index: usize,
    /// The likeliest class.
    label: &'static str,
    /// How far the text is of each class: with one class, the sigmoid of what the model says.
    probs: Vec<f32>,
    num_classes: usize,
}

/// Classify texts
///
/// By a model that has classes: of those here, what reads two texts together, and then reads one.
#[utoipa::path(post, path = "/v1/classify", tag = "openai", request_body = ClassifyBody, responses(
    (status = 200, body = Classes, description = "The class of each text"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn classify(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Classes>, ApiError> {
    let prepared =
        admit(&app, &caller, body, |body: &ClassifyBody, served| Ok((body.ask(served)?, body.squashes()?)));
    let (admission, (asks, squashes)) = prepared.await?;
    let model = admission.served.name().to_owned();
    let (rows, usage) = made(admission, asks).await?;
    let class = |(index, row): (usize, Vec<f32>)| {
        let probs: Vec<f32> =
            row.into_iter().map(|said| if squashes { sigmoid(said) } else { said }).collect();
        Class { index, label: LABEL, num_classes: probs.len(), probs }
    };
    Ok(Json(Classes {
        id: format!("classify-{}", random_id()),
        object: "list",
        created: unix_seconds(),
        model,
        data: rows.into_iter().enumerate().map(class).collect(),
        usage: RerankUsage::of(usage.prompt_tokens()),
    }))
}

/// Classify texts, under the path that vLLM has, too
#[utoipa::path(post, path = "/classify", tag = "openai", request_body = ClassifyBody, responses(
    (status = 200, body = Classes, description = "The class of each text"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn classify_short(
    app: State<Arc<App>>,
    caller: Extension<Caller>,
    body: RawBody,
) -> Result<Json<Classes>, ApiError> {
    classify(app, caller, body).await
}

impl ClassifyBody {
    fn squashes(&self) -> Result<bool, ApiError> {
        match (self.use_activation, self.activation) {
            (Some(one), Some(other)) if one != other => {
                Err(ApiError::fault(Fault::rule("activation", "differs from use_activation")))
            }
            (one, other) => Ok(one.or(other).unwrap_or(true)),
        }
    }

    fn ask(&self, served: &Preparing<'_>) -> Result<Vec<Ask>, ApiError> {
        if !served.engine.capacity().pairs {
            let message = format!(
                "{:?} has no classes; /v1/systemone asks a chat model for one of several answers",
                served.card.name
            );
            return Err(ApiError::new(Code::ModelUnsupported, message));
        }
        check_count("input", self.input.count())?;
        let texts = self.input.tokens(served)?;
        if texts.iter().any(Vec::is_empty) {
            return Err(ApiError::fault(Fault::rule("input", "must hold texts of at least one token")));
        }
        // Each without a second one.
        Ok(texts.iter().map(|text| pair(text, &[])).collect())
    }
}
