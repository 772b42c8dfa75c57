//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response, sse::Event},
};
use fornax_chat::{
    Ask, Call, Choice, Content as Said, Definition, Message as Spoken, Outcome, Piece, Question,
    Role as Speaker, Thinking, TokenScore, Tools, call_id,
};
use fornax_form::Form;
use fornax_text::{Delta, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{
    reply::{FINGERPRINT, Head, Parts, Usage, add_scored, finish_reason, logprob, spelled},
    tools::{ToolBody, ToolChoiceBody},
};
use crate::{
    app::{Admission, App},
    ask::{
        chat::{ChatAsk, Names},
        image::{self, Blind},
        params::{Params, ResponseFormat, UNSUPPORTED},
        prepare::{Preparing, admit},
    },
    error::{ApiError, Fault},
    front::{body::RawBody, keys::Caller},
    shape::{Unknown, body},
    sse::{self, Transcript},
    work::Work,
};

/// A conversation to go on with.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ChatBody {
    /// The name of a served model; without it, the first of them.
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    #[schema(required = true, min_items = 1, max_items = 16384)]
    messages: Vec<Message>,
    /// At most this many tokens follow; by default what is left of the context.
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    max_tokens: Option<u32>,
    /// The newer name of max_tokens.
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    max_completion_tokens: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// Whether tokens come with their log-probabilities.
    logprobs: Option<bool>,
    /// How many of the most likely tokens come with theirs, too.
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<u32>,
    response_format: Option<ResponseFormat>,
    /// Functions that the model may call.
    #[schema(max_items = 1024)]
    tools: Option<Vec<ToolBody>>,
    /// `none`, `auto` (by default), `required`, {type: function, function: {name}}, or {type: allowed_tools, allowed_tools:
    /// {mode, tools}}.
    tool_choice: Option<ToolChoiceBody>,
    /// Whether one answer may have several calls; it may by default, but for calls that are strict or demanded, behind which
    /// others follow only where this is true (and where the model's format has JSON for arguments).
    parallel_tool_calls: Option<bool>,
    /// How hard to think: a wish, where the model's chat template knows no degrees of it; `none` for not at all.
    reasoning_effort: Option<Effort>,
    /// The same, and how much.
    reasoning: Option<Reasoning>,
    /// At most this many tokens are thought; then the answer begins.
    #[schema(minimum = 0, maximum = 1_000_000_000)]
    thinking_budget: Option<u32>,
    /// Whether the answer goes on behind the last message, the assistant's, instead of beginning anew.
    continue_final_message: Option<bool>,
    /// Whether the prompt ends where the assistant begins to speak; it does, unless continue_final_message says otherwise.
    add_generation_prompt: Option<bool>,
    /// How much to say. A wish that no model here is told of.
    #[expect(dead_code, reason = "it asks for nothing that can be had")]
    verbosity: Option<Verbosity>,
    /// Variables for the chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// A label of the client's; it changes nothing.
    #[schema(max_length = 1024)]
    #[expect(dead_code, reason = "it asks for nothing")]
    user: Option<String>,
    #[serde(flatten)]
    params: Params,
}

body!(ChatBody, Unknown::IgnoreBut(UNSUPPORTED));

/// What OpenAI calls the parts of a question.
pub(crate) const NAMES: Names = Names {
    tool: ".function",
    parameters: "parameters",
    choice: "tool_choice",
    choice_name: "tool_choice.function.name",
    effort: "reasoning_effort",
    budget: "thinking_budget",
    messages: "messages",
};

/// How much to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verbosity {
    Low,
    Medium,
    High,
}

/// How hard to think.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

impl From<Effort> for fornax_chat::Effort {
    fn from(effort: Effort) -> fornax_chat::Effort {
        match effort {
            Effort::None => fornax_chat::Effort::None,
            Effort::Minimal => fornax_chat::Effort::Minimal,
            Effort::Low => fornax_chat::Effort::Low,
            Effort::Medium => fornax_chat::Effort::Medium,
            Effort::High | Effort::Xhigh | Effort::Max => fornax_chat::Effort::High,
        }
    }
}

/// How much to think.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
pub(crate) struct Reasoning {
    effort: Option<Effort>,
    /// As thinking_budget.
    #[schema(minimum = 0, maximum = 1_000_000_000)]
    max_tokens: Option<u32>,
}

/// What a stream tells besides the answer.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
pub(crate) struct StreamOptions {
    /// A last part with the counts of tokens.
    include_usage: Option<bool>,
}

impl StreamOptions {
    /// What is streamed of a response, whose choices are counted by prompts of this many.
    pub(crate) fn parts(self, head: Head, object: &'static str, per_prompt: usize) -> Parts {
        let include_usage = self.include_usage.unwrap_or(false);
        Parts { head, object, include_usage, per_prompt, usage: Usage::default() }
    }
}

/// One message.
#[derive(Debug, Deserialize, ToSchema)]
struct Message {
    role: Role,
    /// A string, or parts of type text; null only beside tool_calls.
    content: Option<Content>,
    #[schema(max_length = 256)]
    name: Option<String>,
    /// Calls that an assistant made before.
    #[schema(max_items = 1024)]
    tool_calls: Option<Vec<ToolCall>>,
    #[schema(max_length = 256)]
    tool_call_id: Option<String>,
    /// What an assistant thought before.
    reasoning_content: Option<String>,
}

/// A call that was made.
#[derive(Debug, Deserialize, ToSchema)]
struct ToolCall {
    #[schema(max_length = 256)]
    id: Option<String>,
    function: CalledFunction,
}

#[derive(Debug, Deserialize, ToSchema)]
struct CalledFunction {
    #[schema(min_length = 1, max_length = 256)]
    name: String,
    /// A JSON object, or the text of one.
    arguments: Option<Arguments>,
}

/// A JSON object, or the text of one.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Arguments {
    Text(String),
    #[schema(value_type = Object)]
    Object(Map<String, Value>),
}

impl Arguments {
    /// By name; `None` where the text is no JSON object.
    pub(crate) fn fields(&self) -> Option<Map<String, Value>> {
        match self {
            Arguments::Object(fields) => Some(fields.clone()),
            Arguments::Text(text) => Call::arguments_of(text),
        }
    }

    /// The same, or what is wrong with `field`.
    pub(crate) fn checked(
        arguments: Option<&Arguments>,
        field: String,
        faults: &mut Vec<Fault>,
    ) -> Map<String, Value> {
        let Some(arguments) = arguments else { return Map::new() };
        arguments.fields().unwrap_or_else(|| {
            let Arguments::Text(text) = arguments else { return Map::new() };
            faults.push(Fault::value(field, "the text of a JSON object", &json!(text)));
            Map::new()
        })
    }
}

impl ToolCall {
    fn call(&self, path: &str, faults: &mut Vec<Fault>) -> Call {
        let field = format!("{path}.function.arguments");
        let arguments = Arguments::checked(self.function.arguments.as_ref(), field, faults);
        Call { id: self.id.clone(), name: self.function.name.clone(), arguments }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

/// A string, or parts of type text and image_url.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Debug, Deserialize, ToSchema)]
struct ContentPart {
    /// text, image_url, or refusal.
    r#type: String,
    text: Option<String>,
    /// Of a part of that type: a picture.
    image_url: Option<ImageUrl>,
    /// Of a part of that type, which the assistant said instead of an answer.
    refusal: Option<String>,
}

/// A picture as a data URL, alone or in an object.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
enum ImageUrl {
    Url(String),
    Object {
        /// `data:image/png;base64,...`
        url: String,
    },
}

impl Content {
    fn said(&self, path: &str, blind: Blind, faults: &mut Vec<Fault>) -> Vec<Said> {
        let parts = match self {
            Content::Text(text) => return vec![Said::Text(text.clone())],
            Content::Parts(parts) => parts.iter().enumerate(),
        };
        parts.filter_map(|(index, part)| part.said(&format!("{path}[{index}]"), blind, faults)).collect()
    }
}

impl ContentPart {
    /// What it says or shows, unless something is wrong with it.
    fn said(&self, path: &str, blind: Blind, faults: &mut Vec<Fault>) -> Option<Said> {
        let (name, text) = match self.r#type.as_str() {
            "image_url" if blind.is_none() => {
                return match &self.image_url {
                    Some(ImageUrl::Url(url)) => {
                        image::of_url(url, &format!("{path}.image_url"), blind, faults)
                    }
                    Some(ImageUrl::Object { url }) => {
                        image::of_url(url, &format!("{path}.image_url.url"), blind, faults)
                    }
                    None => {
                        faults.push(Fault::rule(format!("{path}.image_url"), "is required"));
                        None
                    }
                }
                .map(Said::Image);
            }
            "text" => ("text", &self.text),
            "refusal" => ("refusal", &self.refusal),
            other => {
                faults.push(unreadable(format!("{path}.type"), other, blind, "text or image_url"));
                return None;
            }
        };
        if text.is_none() {
            faults.push(Fault::rule(format!("{path}.{name}"), "is required"));
        }
        text.clone().map(Said::Text)
    }
}

impl Message {
    /// What it says, unless something is wrong with it.
    fn spoken(&self, index: usize, blind: Blind, faults: &mut Vec<Fault>) -> Option<Spoken> {
        let path = format!("messages[{index}].content");
        let said = match &self.content {
            Some(content) => content.said(&path, blind, faults),
            None if self.role == Role::Assistant && self.tool_calls.is_some() => Vec::new(),
            None => {
                faults.push(Fault::rule(format!("messages[{index}].content"), "is required"));
                return None;
            }
        };
        let role = match self.role {
            // Templates know only the older name.
            Role::System | Role::Developer => Speaker::System,
            Role::Assistant => Speaker::Assistant,
            Role::User => Speaker::User,
            Role::Tool => {
                let (call, name) = (self.tool_call_id.clone(), self.name.clone());
                let text = |said: &Said| match said {
                    Said::Text(text) => Some(text.clone()),
                    _ => None,
                };
                let texts: Vec<String> = said.iter().filter_map(text).collect();
                if texts.len() < said.len() {
                    faults.push(Fault::rule(
                        path,
                        "shows an image in the result of a tool; show it in a user's message",
                    ));
                }
                let outcome = Outcome { call, name, text: texts.join("\n") };
                return Some(Spoken::of(Speaker::User, vec![Said::Result(outcome)]));
            }
        };
        let mut content: Vec<Said> = self.reasoning_content.iter().cloned().map(Said::Thought).collect();
        content.extend(said);
        for (at, call) in self.tool_calls.iter().flatten().enumerate() {
            content.push(Said::Call(call.call(&format!("messages[{index}].tool_calls[{at}]"), faults)));
        }
        Some(Spoken { role, name: self.name.clone(), content })
    }
}

/// Go on with a conversation
///
/// With `stream`, server-sent events; an error in the middle is an event with `error` and ends the stream without
/// `[DONE]`. Closing the connection cancels, streaming or not.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "openai", request_body = ChatBody, responses(
    (status = 200, body = ChatCompletion, description = "The answer, or a stream of its parts"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    let (admission, (ask, stream)) = admit(&app, &caller, body, ChatBody::ask).await?;
    let (scored, choices) = (ask.request.sampling.top_logprobs.is_some(), ask.request.choices as usize);
    let work = Work::submit(admission, vec![ask])?;
    let head = Head::new("chatcmpl", work.model());
    match stream {
        Some(options) => {
            let parts = options.parts(head, "chat.completion.chunk", choices);
            Ok(sse::stream(
                work,
                ChatTranscript { parts, scored, called: vec![false; choices] },
                &app.options,
            ))
        }
        None => Ok(Json(whole(work, head, scored).await?).into_response()),
    }
}

/// The whole answer to a question.
pub(crate) async fn answer(admission: Admission, ask: Ask) -> Result<ChatCompletion, ApiError> {
    let scored = ask.request.sampling.top_logprobs.is_some();
    let work = Work::submit(admission, vec![ask])?;
    let head = Head::new("chatcmpl", work.model());
    whole(work, head, scored).await
}

impl ChatBody {
    /// The question, and what to stream if it is to be streamed.
    pub(crate) fn ask(&self, served: &Preparing<'_>) -> Result<(Ask, Option<StreamOptions>), ApiError> {
        self.ask_with(served, None)
    }

    /// The same; a form of the caller's takes the place of `response_format`, and with it as many alternatives of each token
    /// are told as it says.
    pub(crate) fn ask_with(
        &self,
        served: &Preparing<'_>,
        form: Option<(Form, Option<u32>)>,
    ) -> Result<(Ask, Option<StreamOptions>), ApiError> {
        let mut faults = Vec::new();
        let max_tokens = self.limit(&mut faults);
        if self.top_logprobs.is_some() && self.logprobs != Some(true) {
            faults.push(Fault::rule("top_logprobs", "needs logprobs"));
        }
        match (self.add_generation_prompt, self.continue_final_message) {
            (Some(false), Some(true)) | (None | Some(true), None | Some(false)) | (None, Some(true)) => {}
            (Some(true), Some(true)) => {
                faults.push(Fault::rule(
                    "add_generation_prompt",
                    "cannot be combined with continue_final_message",
                ));
            }
            (Some(false), _) => {
                faults
                    .push(Fault::rule("add_generation_prompt", "is false only with continue_final_message"));
            }
        }
        let messages = self.messages.iter().enumerate();
        let messages: Vec<Spoken> = messages
            .filter_map(|(index, message)| message.spoken(index, served.blind(), &mut faults))
            .collect();
        let tools = self.tools(&mut faults);
        for name in self.chat_template_kwargs.iter().flat_map(Map::keys) {
            if fornax_text::is_template_name(name) {
                let rule = "is the server's own: what is sent there would stand for what was checked";
                faults.push(Fault::rule(format!("chat_template_kwargs.{name}"), rule));
            }
        }
        let stream = stream_options(self.stream, self.stream_options, &self.params, &mut faults);
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        let reasoning = self.reasoning.as_ref();
        let effort = self.reasoning_effort.or(reasoning.and_then(|reasoning| reasoning.effort));
        let budget = self.thinking_budget.or(reasoning.and_then(|reasoning| reasoning.max_tokens));
        let asked = (self.logprobs == Some(true)).then(|| self.top_logprobs.unwrap_or(0));
        let (form, alternatives) = match form {
            Some((form, alternatives)) => (Some(form), alternatives),
            None => (None, None),
        };
        let question = Question {
            conversation: messages.into(),
            tools,
            thinking: Thinking { effort: effort.map(Into::into), budget: budget.map(|most| most as usize) },
            variables: self.chat_template_kwargs.clone().unwrap_or_default(),
            form: self.params.form(self.response_format.as_ref(), form)?,
            continues: self.continue_final_message == Some(true),
        };
        let chat = ChatAsk {
            question,
            params: &self.params,
            max_tokens,
            top_logprobs: alternatives.or(asked),
            counts: false,
            names: &NAMES,
        };
        Ok((chat.ask(served)?, stream))
    }

    fn limit(&self, faults: &mut Vec<Fault>) -> Option<usize> {
        if let (Some(older), Some(newer)) = (self.max_tokens, self.max_completion_tokens)
            && older != newer
        {
            faults.push(Fault::rule("max_tokens", "differs from max_completion_tokens"));
        }
        self.max_completion_tokens.or(self.max_tokens).map(|count| count as usize)
    }

    fn tools(&self, faults: &mut Vec<Fault>) -> Option<Tools> {
        let tools = self.tools.iter().flatten();
        let definitions: Vec<Definition> = tools.map(|tool| tool.function.definition()).collect();
        let choice =
            self.tool_choice.as_ref().map_or(Choice::Auto, |choice| choice.choice("tool_choice", faults));
        NAMES.tools(&definitions, &choice, self.parallel_tool_calls, faults)
    }
}

/// What is no text and cannot be read.
pub(crate) fn unreadable(field: String, kind: &str, blind: Blind, wanted: &str) -> Fault {
    let shows = |words: &[&str]| words.iter().any(|word| kind.contains(word));
    let reads = if blind.is_none() { "text and images" } else { "text" };
    if shows(&["image", "video"])
        && let Some(reason) = blind
    {
        Fault::rule(field, reason)
    } else if shows(&["video"]) {
        Fault::rule(field, format!("this model reads no films; it reads {reads}"))
    } else if shows(&["audio", "file", "document"]) {
        Fault::rule(field, format!("this model reads no sound and no files; it reads {reads}"))
    } else {
        Fault::value(field, wanted, &json!(kind))
    }
}

/// What to stream, if anything. Options without a stream are a mistake of the client's.
pub(crate) fn stream_options(
    stream: Option<bool>,
    options: Option<StreamOptions>,
    params: &Params,
    faults: &mut Vec<Fault>,
) -> Option<StreamOptions> {
    let stream = stream.unwrap_or(false);
    if options.is_some() && !stream {
        faults.push(Fault::rule("stream_options", "needs stream"));
    }
    if params.prompt_logprobs.is_some() && stream {
        faults.push(Fault::rule("prompt_logprobs", "cannot be combined with stream"));
    }
    stream.then(|| options.unwrap_or(StreamOptions { include_usage: None }))
}

/// A whole answer.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatCompletion {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<ChatChoice>,
    usage: Usage,
    system_fingerprint: &'static str,
    /// By position, null for the first: token ids with their log-probabilities.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    prompt_logprobs: Vec<Value>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ChatChoice {
    index: usize,
    message: ChatMessage,
    logprobs: Option<ChatLogprobs>,
    finish_reason: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
struct ChatMessage {
    role: &'static str,
    /// Null where there are only calls.
    content: Option<String>,
    refusal: Option<String>,
    /// What the model thought before.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<MadeCall>,
}

/// A call that the model makes.
#[derive(Debug, Serialize, ToSchema)]
struct MadeCall {
    id: String,
    r#type: &'static str,
    function: MadeFunction,
}

#[derive(Debug, Serialize, ToSchema)]
struct MadeFunction {
    /// As the model wrote it.
    name: String,
    /// The text of a JSON object, unless the answer was cut.
    arguments: String,
}

impl ChatMessage {
    fn take(&mut self, deltas: Vec<Delta>) {
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => self.reasoning_content.get_or_insert_default().push_str(&text),
                Delta::Content(text) => self.content.get_or_insert_default().push_str(&text),
                Delta::Call { name, .. } => {
                    let function = MadeFunction { name, arguments: String::new() };
                    self.tool_calls.push(MadeCall { id: call_id(), r#type: "function", function });
                }
                Delta::Arguments { index, text } => {
                    self.tool_calls[index].function.arguments.push_str(&text);
                }
            }
        }
    }
}

/// Log-probabilities of the tokens of a text.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct ChatLogprobs {
    content: Vec<TokenLogprob>,
}

#[derive(Debug, Serialize, ToSchema)]
struct TokenLogprob {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
    top_logprobs: Vec<TopLogprob>,
}

#[derive(Debug, Serialize, ToSchema)]
struct TopLogprob {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    fn extend(&mut self, tokenizer: &Tokenizer, scores: &[TokenScore]) {
        self.content.extend(scores.iter().map(|score| {
            let (token, bytes) = spelled(tokenizer, score.token);
            let top = score.top.iter().map(|&(token, logprob)| {
                let (token, bytes) = spelled(tokenizer, token);
                TopLogprob { token, logprob: f64::from(logprob), bytes }
            });
            TokenLogprob { token, logprob: logprob(score), bytes, top_logprobs: top.collect() }
        }));
    }
}

/// Waits for everything. Dropped with the connection, it cancels.
async fn whole(mut work: Work, head: Head, scored: bool) -> Result<ChatCompletion, ApiError> {
    let mut choices: Vec<ChatChoice> = Vec::new();
    let mut usage = Usage::default();
    let mut prompt_logprobs = Vec::new();
    while let Some((index, piece)) = work.next().await {
        while choices.len() <= index {
            choices.push(ChatChoice {
                index: choices.len(),
                message: ChatMessage {
                    role: "assistant",
                    content: None,
                    refusal: None,
                    reasoning_content: None,
                    tool_calls: Vec::new(),
                },
                logprobs: scored.then(ChatLogprobs::default),
                finish_reason: "",
            });
        }
        let choice = &mut choices[index];
        match piece? {
            Piece::Started { .. } | Piece::Token(_) | Piece::Text { .. } | Piece::Embedding(_) => {}
            Piece::Scored(score) => add_scored(&mut prompt_logprobs, &work.served().tokenizer, &score),
            Piece::Said { deltas, tokens } => {
                choice.message.take(deltas);
                if let Some(logprobs) = &mut choice.logprobs {
                    logprobs.extend(&work.served().tokenizer, &tokens);
                }
            }
            Piece::End { finish, usage: counts } => {
                let called = !choice.message.tool_calls.is_empty();
                if !called {
                    choice.message.content.get_or_insert_default();
                }
                choice.finish_reason = finish_reason(finish, called);
                usage.add(counts, index == 0);
            }
        }
    }
    let Head { id, created, model } = head;
    let object = "chat.completion";
    let system_fingerprint = FINGERPRINT;
    Ok(ChatCompletion { id, object, created, model, choices, usage, system_fingerprint, prompt_logprobs })
}

/// The events of a streamed answer.
struct ChatTranscript {
    parts: Parts,
    scored: bool,
    /// By choice: whether it called tools.
    called: Vec<bool>,
}

impl ChatTranscript {
    fn delta(
        &self,
        index: usize,
        delta: Value,
        logprobs: Option<ChatLogprobs>,
        finish: Option<&str>,
    ) -> Event {
        let choice = json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish});
        self.parts.choice(choice)
    }

    fn said(&mut self, index: usize, delta: Delta) -> Value {
        match delta {
            Delta::Reasoning(text) => json!({"reasoning_content": text}),
            Delta::Content(text) => json!({"content": text}),
            Delta::Call { index: call, name } => {
                self.called[index] = true;
                let function = json!({"name": name, "arguments": ""});
                json!({"tool_calls": [{"index": call, "id": call_id(), "type": "function", "function": function}]})
            }
            Delta::Arguments { index: call, text } => {
                json!({"tool_calls": [{"index": call, "function": {"arguments": text}}]})
            }
        }
    }
}

impl Transcript for ChatTranscript {
    fn say(&mut self, work: &Work, index: usize, piece: Piece) -> Vec<Event> {
        match piece {
            Piece::Started { .. } => {
                vec![self.delta(index, json!({"role": "assistant", "content": ""}), None, None)]
            }
            Piece::Said { deltas, tokens } => {
                let mut logprobs = self.scored.then(|| {
                    let mut logprobs = ChatLogprobs::default();
                    logprobs.extend(&work.served().tokenizer, &tokens);
                    logprobs
                });
                let mut said: Vec<Value> = deltas.into_iter().map(|delta| self.said(index, delta)).collect();
                if said.is_empty() {
                    said.push(json!({"content": ""}));
                }
                let none = || self.scored.then(ChatLogprobs::default);
                said.into_iter()
                    .map(|delta| self.delta(index, delta, logprobs.take().or_else(none), None))
                    .collect()
            }
            Piece::End { finish, usage } => {
                self.parts.count(index, usage);
                vec![self.delta(index, json!({}), None, Some(finish_reason(finish, self.called[index])))]
            }
            Piece::Text { .. } | Piece::Scored(_) | Piece::Token(_) | Piece::Embedding(_) => Vec::new(),
        }
    }

    fn fail(&mut self, error: &ApiError) -> Event {
        sse::event(&error.to_json())
    }

    fn close(&mut self) -> Vec<Event> {
        self.parts.close()
    }
}
