//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response, sse::Event},
};
use fornax_text::{Chat, ChatPrompt, ChatTemplate, Delta, Reader, Special, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{
    params::{Params, ResponseFormat, UNSUPPORTED, Wanted},
    prepare::{admit, check_length},
    reply::{FINGERPRINT, Head, Parts, Usage, add_scored, finish_reason, logprob, spelled},
    thinking::{self, Effort, Reasoning},
    tools::{ToolBody, ToolChoiceBody, Tools, call_id},
};
use crate::{
    answer::{Ask, Piece, Reading, TokenScore},
    app::App,
    error::{ApiError, Code, Fault},
    front::{body::RawBody, keys::Caller},
    served::Served,
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
    /// At most so many tokens follow; by default what is left of the context.
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
    /// `none`, `auto` (by default), `required`, or {type: function, function: {name}}.
    tool_choice: Option<ToolChoiceBody>,
    /// Whether one answer may have several calls; it may by default, but for calls that are strict or demanded, behind which
    /// others follow only where this is true (and where the model's format has JSON for arguments).
    parallel_tool_calls: Option<bool>,
    /// How hard to think, where the model's chat template knows degrees of it; `none` for not at all.
    reasoning_effort: Option<Effort>,
    /// The same, and how much.
    reasoning: Option<Reasoning>,
    /// At most so many tokens are thought; then the answer begins.
    #[schema(minimum = 0, maximum = 1_000_000_000)]
    thinking_budget: Option<u32>,
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

/// What a stream tells besides the answer.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
pub(crate) struct StreamOptions {
    /// A last part with the counts of tokens.
    include_usage: Option<bool>,
}

impl StreamOptions {
    /// What is streamed of a response, whose choices are counted by prompts of so many.
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
enum Arguments {
    Text(String),
    #[schema(value_type = Object)]
    Object(Map<String, Value>),
}

impl ToolCall {
    /// As templates know it: they write the arguments as JSON themselves.
    fn to_json(&self, path: &str, faults: &mut Vec<Fault>) -> Value {
        let arguments = match &self.function.arguments {
            None => Map::new(),
            Some(Arguments::Object(fields)) => fields.clone(),
            Some(Arguments::Text(text)) if text.is_empty() => Map::new(),
            Some(Arguments::Text(text)) => serde_json::from_str(text).unwrap_or_else(|_| {
                let field = format!("{path}.function.arguments");
                faults.push(Fault::value(field, "the text of a JSON object", &json!(text)));
                Map::new()
            }),
        };
        let function = json!({"name": self.function.name, "arguments": arguments});
        match &self.id {
            Some(id) => json!({"id": id, "type": "function", "function": function}),
            None => json!({"type": "function", "function": function}),
        }
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

/// A string, or parts of type text.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Debug, Deserialize, ToSchema)]
struct ContentPart {
    #[expect(dead_code, reason = "there is only one type")]
    r#type: PartType,
    text: String,
}

#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum PartType {
    Text,
}

impl Message {
    /// Bytes of its text.
    fn len(&self) -> usize {
        match &self.content {
            Some(Content::Text(text)) => text.len(),
            Some(Content::Parts(parts)) => parts.iter().map(|part| part.text.len()).sum(),
            None => 0,
        }
    }

    /// As templates know it, unless something is wrong with it.
    fn to_json(&self, index: usize, faults: &mut Vec<Fault>) -> Option<Value> {
        let role = match self.role {
            // Templates know only the older name.
            Role::System | Role::Developer => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        };
        let content = match &self.content {
            Some(Content::Text(text)) => json!(text),
            Some(Content::Parts(parts)) => {
                let texts: Vec<&str> = parts.iter().map(|part| part.text.as_str()).collect();
                json!(texts.join("\n"))
            }
            None if self.role == Role::Assistant && self.tool_calls.is_some() => Value::Null,
            None => {
                faults.push(Fault::rule(format!("messages[{index}].content"), "is required"));
                return None;
            }
        };
        let calls = self.tool_calls.as_ref().filter(|calls| !calls.is_empty()).map(|calls| {
            let calls = calls.iter().enumerate();
            let path = |at: usize| format!("messages[{index}].tool_calls[{at}]");
            calls.map(|(at, call)| call.to_json(&path(at), faults)).collect::<Vec<Value>>()
        });
        let mut message = json!({"role": role, "content": content});
        let more = [
            ("name", json!(self.name)),
            ("tool_calls", json!(calls)),
            ("tool_call_id", json!(self.tool_call_id)),
            ("reasoning_content", json!(self.reasoning_content)),
        ];
        for (name, value) in more.into_iter().filter(|(_, value)| !value.is_null()) {
            message[name] = value;
        }
        Some(message)
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
    let (scored, choices) = (ask.sampling.top_logprobs.is_some(), ask.choices as usize);
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

impl ChatBody {
    /// The question, and what to stream if it is to be streamed.
    pub(crate) fn ask(&self, served: &Served) -> Result<(Ask, Option<StreamOptions>), ApiError> {
        let mut faults = Vec::new();
        if let (Some(older), Some(newer)) = (self.max_tokens, self.max_completion_tokens)
            && older != newer
        {
            faults.push(Fault::rule("max_tokens", "differs from max_completion_tokens"));
        }
        if self.top_logprobs.is_some() && self.logprobs != Some(true) {
            faults.push(Fault::rule("top_logprobs", "needs logprobs"));
        }
        let messages = self.messages.iter().enumerate();
        let mut messages: Vec<Value> =
            messages.filter_map(|(index, message)| message.to_json(index, &mut faults)).collect();
        let tools = Tools::new(self.tools.as_deref(), self.tool_choice.as_ref(), &mut faults);
        let stream = stream_options(self.stream, self.stream_options, &self.params, &mut faults);
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        let unusable = |error: &fornax_text::Error| ApiError::new(Code::ModelUnsupported, error.to_string());
        let template = served.template.as_ref().as_ref().map_err(unusable)?;
        let dialect = template.dialect(tools.is_some());
        name_results(&mut messages);
        name_thoughts(&mut messages, template.source());
        let mut chat = Chat::new(messages);
        chat.variables = self.chat_template_kwargs.clone().unwrap_or_default();
        let effort = self.reasoning_effort.or(self.reasoning.and_then(|reasoning| reasoning.effort));
        thinking::apply(effort, template, dialect, &mut chat.variables, &mut faults);
        let budget = self.thinking_budget.or(self.reasoning.and_then(|reasoning| reasoning.max_tokens));
        if budget.is_some() && !dialect.thinks() {
            faults.push(Fault::rule("thinking_budget", "this model does not think apart from its answer"));
        }
        let mut form = self.params.form(self.response_format.as_ref())?;
        if let (Some((field, _)), Some(_)) = (&form, &tools) {
            faults.push(Fault::rule("tools", format!("cannot be had with {field}")));
        }
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        check_length(served, self.messages.iter().map(Message::len).sum())?;
        let mut prompt = match &tools {
            Some(tools) => with_tools(template, &mut chat, tools, served)?,
            None => render(template, &mut chat, served)?,
        };
        let demanded = tools.as_ref().and_then(|tools| tools.form(dialect));
        // An answer of a form has no room for thoughts.
        let at_once = form.is_some() || demanded.is_some() || budget == Some(0);
        if at_once
            && dialect.is_thinking_after(prompt.text())
            && let Some(stop) = dialect.stop_thinking()
        {
            prompt.push(&stop);
        } else if form.is_some()
            && let Some(opening) = dialect.answer_opening()
        {
            prompt.push(opening);
        }
        let several = self.parallel_tool_calls == Some(true)
            && dialect.call_rest().is_some()
            && self.params.stop.is_none();
        let is_demanded = demanded.is_some();
        let reader = match (&tools, &demanded) {
            (Some(tools), Some(_)) => {
                let tool = tools.demanded();
                prompt.push(&dialect.call_opening(tool).unwrap_or_default());
                let list = if several { Arc::clone(&tools.list) } else { Arc::default() };
                match tool {
                    Some(tool) => Reader::arguments_of(dialect, list, &tool.name),
                    None => Reader::call_of_any(dialect, list),
                }
            }
            _ if form.is_some() => Reader::plain(),
            (tools, _) => {
                let list = tools.as_ref().map_or_else(Arc::default, |tools| Arc::clone(&tools.list));
                Reader::new(dialect, list, prompt.text())
            }
        };
        if let Some(demanded) = demanded {
            form = Some(("tools", demanded));
        }
        let mut strict = Vec::new();
        for (tool, form) in tools.iter().flat_map(|tools| tools.held_forms(several)) {
            if self.params.stop.is_some() {
                return Err(ApiError::fault(Fault::rule("stop", "cannot be had with strict tools")));
            }
            let grammar = served.grammars.compile(&form).map_err(|error| ApiError::form("tools", &error))?;
            strict.push((tool.name.clone(), grammar));
        }
        let stop = dialect.stop_thinking().filter(|_| budget.is_some());
        let stop = stop.map(|stop| served.tokenizer.encode(&stop, Special::Parse)).transpose()?;
        let reading = Reading {
            reader,
            shown: served.tokenizer.controls_in(&dialect.marks()).into(),
            one_call: self.parallel_tool_calls == Some(false),
            budget: budget.map(|most| most as usize).zip(stop),
            strict: strict.into(),
            held: is_demanded,
            several,
            only_calls: is_demanded && several,
        };
        let prompt = served.tokenizer.encode_chat(&prompt)?;
        let max_tokens = self.max_completion_tokens.or(self.max_tokens).map(|count| count as usize);
        let top_logprobs = (self.logprobs == Some(true)).then(|| self.top_logprobs.unwrap_or(0));
        let wanted =
            Wanted { prompt, max_tokens, form, top_logprobs, starts_text: true, reading: Some(reading) };
        Ok((self.params.ask(served, wanted)?, stream))
    }
}

/// The prompt. Some templates want the arguments of earlier calls as text.
fn render(template: &ChatTemplate, chat: &mut Chat, served: &Served) -> Result<ChatPrompt, ApiError> {
    let failed = match template.render(chat, &served.tokenizer) {
        Ok(prompt) => return Ok(prompt),
        Err(failed) => failed,
    };
    let mut calls =
        chat.messages.iter_mut().filter_map(|message| message["tool_calls"].as_array_mut()).flatten();
    let mut changed = false;
    calls.by_ref().for_each(|call| {
        call["function"]["arguments"] = json!(call["function"]["arguments"].to_string());
        changed = true;
    });
    match (changed, &failed) {
        (true, fornax_text::Error::TemplateFailed { .. }) => Ok(template.render(chat, &served.tokenizer)?),
        _ => Err(failed.into()),
    }
}

/// The prompt of a model that is told of tools. A template that cannot tell it, or calls that cannot be read, are an
/// error: nothing is guessed.
fn with_tools(
    template: &ChatTemplate,
    chat: &mut Chat,
    tools: &Tools,
    served: &Served,
) -> Result<ChatPrompt, ApiError> {
    let unsupported = |reason: String| {
        let message = format!("the chat template of {:?} {reason}", served.card.name);
        ApiError {
            faults: vec![Fault::rule("tools", reason)],
            ..ApiError::new(Code::ModelUnsupported, message)
        }
    };
    let without = render(template, chat, served)?;
    chat.tools.clone_from(&tools.described);
    let prompt = render(template, chat, served)
        .map_err(|error| unsupported(format!("fails where there are tools: {}", error.message)))?;
    if prompt.text() == without.text() {
        return Err(unsupported("does not tell the model of tools".to_owned()));
    }
    if template.dialect(true).family().is_none() {
        let reason = "tells the model of tools in a way whose calls this server cannot read";
        return Err(unsupported(reason.to_owned()));
    }
    Ok(prompt)
}

/// Gives results of calls the name of the tool, which some templates want, by the id of the call.
fn name_results(messages: &mut [Value]) {
    let mut names: Map<String, Value> = Map::new();
    for message in messages {
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            if let Some(id) = call["id"].as_str() {
                names.insert(id.to_owned(), call["function"]["name"].clone());
            }
        }
        let known = message["tool_call_id"].as_str().and_then(|id| names.get(id)).cloned();
        if let Some(name) = known.filter(|_| message["role"] == "tool" && message["name"].is_null()) {
            message["name"] = name;
        }
    }
}

/// What was thought has several names among templates.
fn name_thoughts(messages: &mut [Value], template: &str) {
    let names = ["thinking", "reasoning"].map(|name| (name, [format!(".{name}"), format!("['{name}']")]));
    for message in messages {
        let thought = message["reasoning_content"].clone();
        for (name, uses) in names.iter().filter(|_| thought.is_string()) {
            if uses.iter().any(|text| template.contains(text)) {
                message[*name] = thought.clone();
            }
        }
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
        faults.push(Fault::rule("prompt_logprobs", "cannot be had with stream"));
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
        match piece {
            Piece::Started { .. } | Piece::Text { .. } | Piece::Embedding(_) => {}
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
            Piece::Failed(error) => return Err(error),
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
            Piece::Text { .. } | Piece::Scored(_) | Piece::Embedding(_) => Vec::new(),
            Piece::Failed(error) => vec![self.fail(&error)],
        }
    }

    fn fail(&mut self, error: &ApiError) -> Event {
        sse::event(&error.to_json())
    }

    fn close(&mut self) -> Vec<Event> {
        self.parts.close()
    }
}
