//! `POST /api/chat`.

use std::sync::Arc;

use axum::{Extension, extract::State, response::Response};
use fornax_chat::{Ask, Call, Choice, Content, Definition, Message, Outcome, Question, Role};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{
    lines::{Kind, LineEnd, respond},
    request::{KeepAlive, NAMES, OllamaOptions, Think, form, images, scored},
};
use crate::{
    app::App,
    ask::{
        chat::ChatAsk,
        image::Blind,
        prepare::{Preparing, admit},
    },
    error::{ApiError, Fault},
    front::{body::RawBody, keys::Caller},
    openai::{chat::Arguments, tools::ToolBody},
    shape::{Unknown, body},
};

/// A conversation to go on with.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OllamaChatBody {
    /// The served model's name, with or without `:latest`.
    #[schema(required = true, min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: String,
    /// Without messages, nothing is answered.
    #[schema(max_items = 16384)]
    messages: Option<Vec<OllamaMessage>>,
    /// As OpenAI writes them.
    #[schema(max_items = 1024)]
    tools: Option<Vec<ToolBody>>,
    /// `json`, or a JSON Schema.
    format: Option<Value>,
    options: Option<OllamaOptions>,
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

body!(OllamaChatBody, Unknown::IgnoreBut(&[]));

/// One message.
#[derive(Debug, Deserialize, ToSchema)]
struct OllamaMessage {
    /// system, user, assistant or tool.
    role: String,
    content: Option<String>,
    thinking: Option<String>,
    /// Pictures in base64, which stand before what the message says.
    #[schema(max_items = 1024)]
    images: Option<Vec<String>>,
    #[schema(max_items = 1024)]
    tool_calls: Option<Vec<OllamaCall>>,
    #[schema(max_length = 256)]
    tool_name: Option<String>,
}

/// A call that was made.
#[derive(Debug, Deserialize, ToSchema)]
struct OllamaCall {
    #[schema(max_length = 256)]
    id: Option<String>,
    function: OllamaCalled,
}

#[derive(Debug, Deserialize, ToSchema)]
struct OllamaCalled {
    #[schema(min_length = 1, max_length = 256)]
    name: String,
    /// A JSON object, or the text of one.
    arguments: Option<Arguments>,
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
        let keep = KeepAlive::stays(body.keep_alive.as_ref())?;
        Ok((body.ask(served)?, keep, body.stream.unwrap_or(true)))
    });
    let (admission, (ask, keep, is_streamed)) = prepared.await?;
    respond(Kind::Chat, admission, (ask, keep), is_streamed).await
}

impl OllamaChatBody {
    fn scored(&self) -> Result<Option<u32>, ApiError> {
        scored(self.logprobs, self.top_logprobs)
    }

    fn ask(&self, served: &Preparing<'_>) -> Result<Option<Ask>, ApiError> {
        let Some(messages) = self.messages.as_ref().filter(|messages| !messages.is_empty()) else {
            return Ok(None);
        };
        let mut faults = Vec::new();
        let messages = messages.iter().enumerate();
        let messages: Vec<Message> = messages
            .filter_map(|(index, message)| message.message(index, served.blind(), &mut faults))
            .collect();
        let tools = self.tools.iter().flatten();
        let definitions: Vec<Definition> = tools.map(|tool| tool.function.definition()).collect();
        let tools = NAMES.tools(&definitions, &Choice::Auto, None, &mut faults);
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        let (thinking, variables) = Think::apply(self.think.as_ref());
        let form = form(self.format.as_ref())?;
        let (params, max_tokens) = self.options.clone().unwrap_or_default().params()?;
        let question =
            Question { conversation: messages.into(), tools, thinking, variables, form, continues: false };
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

impl OllamaMessage {
    /// What it says, unless something is wrong with it.
    fn message(&self, index: usize, blind: Blind, faults: &mut Vec<Fault>) -> Option<Message> {
        let images = images(self.images.as_deref(), &format!("messages[{index}].images"), blind, faults);
        let text = self.content.clone().unwrap_or_default();
        let role = match self.role.as_str() {
            "system" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" => {
                let outcome = Outcome { call: None, name: self.tool_name.clone(), text };
                return Some(Message::of(Role::User, vec![Content::Result(outcome)]));
            }
            other => {
                let rule = "one of system, user, assistant and tool";
                faults.push(Fault::value(format!("messages[{index}].role"), rule, &json!(other)));
                return None;
            }
        };
        let mut content: Vec<Content> = self.thinking.iter().cloned().map(Content::Thought).collect();
        content.extend(images);
        content.push(Content::Text(text));
        for (at, call) in self.tool_calls.iter().flatten().enumerate() {
            let field = format!("messages[{index}].tool_calls[{at}].function.arguments");
            let arguments = Arguments::checked(call.function.arguments.as_ref(), field, faults);
            let (id, name) = (call.id.clone(), call.function.name.clone());
            content.push(Content::Call(Call { id, name, arguments }));
        }
        Some(Message { role, name: self.tool_name.clone(), content })
    }
}
