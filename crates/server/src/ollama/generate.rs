//! `POST /api/generate`.

use std::sync::Arc;

use axum::{Extension, extract::State, response::Response};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{
    lines::{Kind, LineEnd, respond},
    request::{OllamaOptions, Think, response_format, untagged},
};
use crate::{
    answer::Ask,
    app::App,
    error::{ApiError, Fault},
    front::{body::RawBody, keys::Caller},
    openai::{chat::ChatBody, completions::CompletionBody, prepare::admit},
    served::Served,
    shape::{self, Unknown, Unsupported, body},
};

/// Fields of Ollama's API that would change the answer and are not honoured.
const UNSUPPORTED: &[Unsupported] = &[
    Unsupported { field: "context", neutral: &["[]"] },
    Unsupported { field: "images", neutral: &["[]"] },
    Unsupported { field: "logprobs", neutral: &["false"] },
    Unsupported { field: "suffix", neutral: &["\"\""] },
    Unsupported { field: "template", neutral: &["\"\""] },
];

/// A prompt to answer.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct GenerateBody {
    /// The served model's name, with or without `:latest`.
    #[schema(required = true, min_length = 1, max_length = 512)]
    model: String,
    /// What the user says, or with `raw` the text to go on with; without it, nothing is answered.
    prompt: Option<String>,
    system: Option<String>,
    /// `json`, or a JSON Schema.
    format: Option<Value>,
    options: Option<OllamaOptions>,
    /// Whether the prompt is the whole text, without a chat template.
    raw: Option<bool>,
    /// Lines as they come, unless this is false.
    stream: Option<bool>,
    think: Option<Think>,
}

body!(GenerateBody, Unknown::IgnoreBut(UNSUPPORTED));

/// A line of an answer; the last one also has its timings.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GenerateLine {
    model: String,
    created_at: String,
    response: String,
    thinking: Option<String>,
    #[serde(flatten)]
    end: LineEnd,
}

/// Answer a prompt, as Ollama's clients ask
///
/// Lines of JSON unless `stream` is false. Closing the connection cancels.
#[utoipa::path(post, path = "/api/generate", tag = "ollama", request_body = GenerateBody, responses(
    (status = 200, description = "The answer, or lines with its parts",
        content((GenerateLine = "application/json"), (GenerateLine = "application/x-ndjson"))),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn generate(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    let prepared = admit(&app, &caller, body, |body: &GenerateBody, served| {
        Ok((body.ask(served)?, body.stream.unwrap_or(true)))
    });
    let (admission, (ask, is_streamed)) = prepared.await?;
    respond(Kind::Generate, admission, ask, is_streamed).await
}

impl GenerateBody {
    fn ask(&self, served: &Served) -> Result<Option<Ask>, ApiError> {
        let model = untagged(&self.model);
        let Some(prompt) = self.prompt.as_ref().filter(|prompt| !prompt.is_empty()) else {
            return Ok(None);
        };
        let mut body = Map::new();
        body.insert("model".to_owned(), json!(model));
        if let Some(format) = response_format(self.format.as_ref())? {
            body.insert("response_format".to_owned(), format);
        }
        self.options.clone().unwrap_or_default().write(served, &mut body)?;
        if self.raw == Some(true) {
            for (field, given) in [("system", self.system.is_some()), ("think", self.think.is_some())] {
                if given {
                    return Err(ApiError::fault(Fault::rule(field, "cannot be had with raw")));
                }
            }
            body.insert("prompt".to_owned(), json!(prompt));
            // Ollama goes on until the model ends; completions stop at 16 tokens.
            let left = served.engine.capacity().context;
            let encoded = served.tokenizer.encode_prompt(prompt, fornax_text::Special::AsText)?;
            let left = left.saturating_sub(encoded.len()).max(1);
            body.entry("max_tokens").or_insert(json!(left));
            let completion = shape::understand::<CompletionBody>(Value::Object(body), Unknown::Refuse)?;
            return Ok(completion.ask(served)?.0.pop());
        }
        let system = self.system.as_ref().map(|text| json!({"role": "system", "content": text}));
        let user = json!({"role": "user", "content": prompt});
        let messages: Vec<Value> = system.into_iter().chain([user]).collect();
        body.insert("messages".to_owned(), json!(messages));
        Think::write(self.think.as_ref(), &mut body);
        let (ask, _) = shape::understand::<ChatBody>(Value::Object(body), Unknown::Refuse)?.ask(served)?;
        Ok(Some(ask))
    }
}
