//! `POST /api/chat`.

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
    error::ApiError,
    front::{body::RawBody, keys::Caller},
    openai::{chat::ChatBody, prepare::admit},
    served::Served,
    shape::{self, Unknown, Unsupported, body},
};

/// A conversation to go on with.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OllamaChatBody {
    /// The served model's name, with or without `:latest`.
    #[schema(required = true, min_length = 1, max_length = 512)]
    model: String,
    /// Without messages, nothing is answered.
    #[schema(max_items = 16384)]
    messages: Option<Vec<OllamaMessage>>,
    /// As OpenAI writes them.
    #[schema(value_type = Option<Vec<Object>>, max_items = 1024)]
    tools: Option<Vec<Value>>,
    /// `json`, or a JSON Schema.
    format: Option<Value>,
    options: Option<OllamaOptions>,
    /// Lines as they come, unless this is false.
    stream: Option<bool>,
    think: Option<Think>,
}

body!(OllamaChatBody, Unknown::IgnoreBut(&[Unsupported { field: "logprobs", neutral: &["false"] }]));

/// One message.
#[derive(Debug, Deserialize, ToSchema)]
struct OllamaMessage {
    /// system, user, assistant or tool.
    role: String,
    content: Option<String>,
    thinking: Option<String>,
    /// Not read here: a message with images is refused.
    #[schema(value_type = Option<Vec<String>>, max_items = 0)]
    #[expect(dead_code, reason = "there are none")]
    images: Option<Vec<String>>,
    #[schema(value_type = Option<Vec<Object>>, max_items = 1024)]
    tool_calls: Option<Vec<Value>>,
    #[schema(max_length = 256)]
    tool_name: Option<String>,
}

/// A line of an answer; the last one also has its timings.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatLine {
    model: String,
    created_at: String,
    #[schema(value_type = Object)]
    message: Value,
    #[serde(flatten)]
    end: LineEnd,
}

/// Go on with a conversation, as Ollama's clients ask
///
/// Lines of JSON unless `stream` is false. Closing the connection cancels.
#[utoipa::path(post, path = "/api/chat", tag = "ollama", request_body = OllamaChatBody, responses(
    (status = 200, description = "The answer, or lines with its parts",
        content((ChatLine = "application/json"), (ChatLine = "application/x-ndjson"))),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    let prepared = admit(&app, &caller, body, |body: &OllamaChatBody, served| {
        Ok((body.ask(served)?, body.stream.unwrap_or(true)))
    });
    let (admission, (ask, is_streamed)) = prepared.await?;
    respond(Kind::Chat, admission, ask, is_streamed).await
}

impl OllamaChatBody {
    fn ask(&self, served: &Served) -> Result<Option<Ask>, ApiError> {
        let mut body = Map::new();
        body.insert("model".to_owned(), json!(untagged(&self.model)));
        let Some(messages) = self.messages.as_ref().filter(|messages| !messages.is_empty()) else {
            return Ok(None);
        };
        let messages: Vec<Value> = messages.iter().map(OllamaMessage::to_json).collect();
        body.insert("messages".to_owned(), json!(messages));
        if let Some(tools) = self.tools.as_ref().filter(|tools| !tools.is_empty()) {
            body.insert("tools".to_owned(), json!(tools));
        }
        if let Some(format) = response_format(self.format.as_ref())? {
            body.insert("response_format".to_owned(), format);
        }
        Think::write(self.think.as_ref(), &mut body);
        self.options.clone().unwrap_or_default().write(served, &mut body)?;
        let (ask, _) = shape::understand::<ChatBody>(Value::Object(body), Unknown::Refuse)?.ask(served)?;
        Ok(Some(ask))
    }
}

impl OllamaMessage {
    fn to_json(&self) -> Value {
        let mut message = json!({"role": self.role, "content": self.content.clone().unwrap_or_default()});
        let calls = self.tool_calls.as_ref().filter(|calls| !calls.is_empty());
        let more = [
            ("reasoning_content", json!(self.thinking)),
            ("tool_calls", json!(calls)),
            ("name", json!(self.tool_name)),
        ];
        for (name, value) in more.into_iter().filter(|(_, value)| !value.is_null()) {
            message[name] = value;
        }
        message
    }
}
