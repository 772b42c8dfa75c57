//! `POST /api/generate`.

use std::sync::Arc;

use axum::{Extension, extract::State, response::Response};
use fornax_chat::{Ask, Content, Message, Question, Role};
use fornax_text::Special;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::{
    lines::{Kind, LineEnd, respond},
    request::{KeepAlive, NAMES, OllamaOptions, Think, form, images, scored},
};
use crate::{
    app::App,
    ask::{
        chat::ChatAsk,
        params::Wanted,
        prepare::{Preparing, admit, check_length},
        prompt::infill,
    },
    error::{ApiError, Fault},
    front::{body::RawBody, keys::Caller},
    shape::{Unknown, Unsupported, body},
};

/// Fields of Ollama's API that would change the answer and are not honoured.
const UNSUPPORTED: &[Unsupported] = &[
    Unsupported { field: "context", neutral: &["[]"] },
    Unsupported { field: "template", neutral: &["\"\""] },
];

/// A prompt to answer.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct GenerateBody {
    /// The served model's name, with or without `:latest`.
    #[schema(required = true, min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: String,
    /// What the user says, or with `raw` the text to go on with; without it, nothing is answered.
    prompt: Option<String>,
    /// Pictures in base64, which stand before the prompt.
    #[schema(max_items = 1024)]
    images: Option<Vec<String>>,
    /// What stands behind the gap that is to be filled; the prompt stands before it.
    suffix: Option<String>,
    system: Option<String>,
    /// `json`, or a JSON Schema.
    format: Option<Value>,
    options: Option<OllamaOptions>,
    /// Whether the prompt is the whole text, without a chat template.
    raw: Option<bool>,
    /// Lines as they come, unless this is false.
    stream: Option<bool>,
    think: Option<Think>,
    /// Whether tokens come with their log-probabilities.
    logprobs: Option<bool>,
    /// How many of the most likely tokens come with theirs, too.
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<u32>,
    keep_alive: Option<KeepAlive>,
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
        let keep = KeepAlive::stays(body.keep_alive.as_ref())?;
        Ok((body.ask(served)?, keep, body.stream.unwrap_or(true)))
    });
    let (admission, (ask, keep, is_streamed)) = prepared.await?;
    respond(Kind::Generate, admission, (ask, keep), is_streamed).await
}

impl GenerateBody {
    fn scored(&self) -> Result<Option<u32>, ApiError> {
        scored(self.logprobs, self.top_logprobs)
    }

    fn ask(&self, served: &Preparing<'_>) -> Result<Option<Ask>, ApiError> {
        let Some(prompt) = self.prompt.as_ref().filter(|prompt| !prompt.is_empty()) else {
            return Ok(None);
        };
        let form = form(self.format.as_ref())?;
        let (params, max_tokens) = self.options.clone().unwrap_or_default().params()?;
        let suffix = self.suffix.as_deref().filter(|suffix| !suffix.is_empty());
        let mut faults = Vec::new();
        let mut content = images(self.images.as_deref(), "images", served.blind(), &mut faults);
        if (self.raw == Some(true) || suffix.is_some()) && !content.is_empty() {
            let rule = "cannot be combined with raw or suffix: the chat template shows them";
            faults.push(Fault::rule("images", rule));
        }
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        content.push(Content::Text(prompt.clone()));
        if self.raw == Some(true) || suffix.is_some() {
            let with = if suffix.is_some() { "suffix" } else { "raw" };
            for (field, given) in [("system", self.system.is_some()), ("think", self.think.is_some())] {
                if given {
                    let rule = format!("cannot be combined with {with}");
                    return Err(ApiError::fault(Fault::rule(field, rule)));
                }
            }
            let prompt = match suffix {
                Some(suffix) => infill(served, prompt, suffix, &[])?,
                None => {
                    check_length(served, prompt.len())?;
                    served.tokenizer.encode_prompt(prompt, Special::AsText)?
                }
            };
            let wanted = Wanted {
                prompt,
                max_tokens,
                form,
                top_logprobs: self.scored()?,
                starts_text: false,
                reading: None,
            };
            return params.ask(served, wanted).map(Some);
        }
        let messages: Vec<Message> =
            self.system.iter().map(Message::system).chain([Message::of(Role::User, content)]).collect();
        let (thinking, variables) = Think::apply(self.think.as_ref());
        let question =
            Question { conversation: messages.into(), thinking, variables, form, ..Question::default() };
        let chat = ChatAsk {
            question,
            params: &params,
            max_tokens,
            top_logprobs: self.scored()?,
            counts: false,
            names: &NAMES,
        };
        chat.ask(served).map(Some)
    }
}
