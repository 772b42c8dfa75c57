//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response, sse::Event},
};
use fornax_text::{Chat, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{
    params::{Params, ResponseFormat, UNSUPPORTED, Wanted},
    prepare::{check_length, check_model, prepare},
    reply::{FINGERPRINT, Head, Parts, Usage, add_scored, finish_reason, logprob, spelled},
};
use crate::{
    answer::{Ask, Piece, TokenScore},
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
    /// The served model's name; without it, that model.
    #[schema(min_length = 1, max_length = 512)]
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
    #[schema(value_type = Option<Vec<Object>>, max_items = 1024)]
    tool_calls: Option<Vec<Value>>,
    #[schema(max_length = 256)]
    tool_call_id: Option<String>,
    /// What an assistant thought before.
    reasoning_content: Option<String>,
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
        let mut message = json!({"role": role, "content": content});
        let more = [
            ("name", json!(self.name)),
            ("tool_calls", json!(self.tool_calls)),
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
    let admission = app.admit(&caller)?;
    let (ask, stream) = prepare(&app, &admission.served, body, ChatBody::ask).await?;
    let (scored, choices) = (ask.sampling.top_logprobs.is_some(), ask.choices as usize);
    let work = Work::submit(admission, vec![ask])?;
    let head = Head::new("chatcmpl", &work.served().card.name);
    match stream {
        Some(options) => {
            let parts = options.parts(head, "chat.completion.chunk", choices);
            Ok(sse::stream(work, ChatTranscript { parts, scored }, &app.options))
        }
        None => Ok(Json(whole(work, head, scored).await?).into_response()),
    }
}

impl ChatBody {
    /// The question, and what to stream if it is to be streamed.
    pub(crate) fn ask(&self, served: &Served) -> Result<(Ask, Option<StreamOptions>), ApiError> {
        check_model(served, self.model.as_deref())?;
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
        let messages: Vec<Value> =
            messages.filter_map(|(index, message)| message.to_json(index, &mut faults)).collect();
        let stream = stream_options(self.stream, self.stream_options, &self.params, &mut faults);
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        let unusable = |error: &fornax_text::Error| ApiError::new(Code::ModelUnsupported, error.to_string());
        let template = served.template.as_ref().as_ref().map_err(unusable)?;
        let mut chat = Chat::new(messages);
        chat.variables = self.chat_template_kwargs.clone().unwrap_or_default();
        check_length(served, self.messages.iter().map(Message::len).sum())?;
        let prompt = served.tokenizer.encode_chat(&template.render(&chat, &served.tokenizer)?)?;
        let max_tokens = self.max_completion_tokens.or(self.max_tokens).map(|count| count as usize);
        let top_logprobs = (self.logprobs == Some(true)).then(|| self.top_logprobs.unwrap_or(0));
        let response_format = self.response_format.as_ref();
        let wanted = Wanted { prompt, max_tokens, response_format, top_logprobs, starts_text: true };
        Ok((self.params.ask(served, wanted)?, stream))
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
    content: String,
    refusal: Option<String>,
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
                message: ChatMessage { role: "assistant", content: String::new(), refusal: None },
                logprobs: scored.then(ChatLogprobs::default),
                finish_reason: "",
            });
        }
        let choice = &mut choices[index];
        match piece {
            Piece::Started { .. } | Piece::Embedding(_) => {}
            Piece::Scored(score) => add_scored(&mut prompt_logprobs, &work.served().tokenizer, &score),
            Piece::Text { text, tokens } => {
                choice.message.content.push_str(&text);
                if let Some(logprobs) = &mut choice.logprobs {
                    logprobs.extend(&work.served().tokenizer, &tokens);
                }
            }
            Piece::End { finish, usage: counts } => {
                choice.finish_reason = finish_reason(finish);
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
}

impl Transcript for ChatTranscript {
    fn say(&mut self, work: &Work, index: usize, piece: Piece) -> Vec<Event> {
        match piece {
            Piece::Started { .. } => {
                vec![self.delta(index, json!({"role": "assistant", "content": ""}), None, None)]
            }
            Piece::Text { text, tokens } => {
                let logprobs = self.scored.then(|| {
                    let mut logprobs = ChatLogprobs::default();
                    logprobs.extend(&work.served().tokenizer, &tokens);
                    logprobs
                });
                vec![self.delta(index, json!({"content": text}), logprobs, None)]
            }
            Piece::End { finish, usage } => {
                self.parts.count(index, usage);
                vec![self.delta(index, json!({}), None, Some(finish_reason(finish)))]
            }
            Piece::Scored(_) | Piece::Embedding(_) => Vec::new(),
            Piece::Failed(error) => vec![self.fail(&error)],
        }
    }

    fn close(&mut self) -> Vec<Event> {
        self.parts.close()
    }
}
