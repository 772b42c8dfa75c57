//! What chat and completions have in common on the way out: names, usage, log-probabilities, the parts of a stream.

use axum::response::sse::Event;
use fornax_chat::{Counts, Finish, TokenScore};
use fornax_engine::Miss;
use fornax_text::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::{
    app::{random_id, unix_seconds},
    sse::event,
};

/// Tokens of a request, all its choices together.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(crate) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokensDetails,
    #[serde(skip_serializing_if = "CompletionTokensDetails::is_empty")]
    completion_tokens_details: CompletionTokensDetails,
}

#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(crate) struct PromptTokensDetails {
    /// Found computed already.
    cached_tokens: usize,
    /// Of those, brought back from a disk.
    #[serde(skip_serializing_if = "is_zero")]
    disk_tokens: usize,
    /// Why no more were, where an earlier prompt of the same salt tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_miss: Option<CacheMiss>,
}

/// Why the prefix cache had no more of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct CacheMiss {
    /// `differs`: the nearest earlier prompt has another token there. `evicted`: it was known so far, and its pages were
    /// needed for others. `whole`: the prompt's log-probabilities were asked for.
    pub(crate) reason: &'static str,
    /// The position of the first other token, or how many tokens were known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tokens: Option<usize>,
}

impl CacheMiss {
    /// What there is to tell of it: that a prompt is new is no news.
    pub(crate) fn of(miss: Option<Miss>) -> Option<CacheMiss> {
        match miss? {
            Miss::New => None,
            Miss::Differs { at } => Some(CacheMiss { reason: "differs", tokens: Some(at) }),
            Miss::Evicted { known } => Some(CacheMiss { reason: "evicted", tokens: Some(known) }),
            Miss::Whole => Some(CacheMiss { reason: "whole", tokens: None }),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(crate) struct CompletionTokensDetails {
    /// Thought, not said.
    reasoning_tokens: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands out references")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl CompletionTokensDetails {
    fn is_empty(&self) -> bool {
        self.reasoning_tokens == 0
    }
}

impl Usage {
    /// Tokens of the prompts.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Counts one choice. Each prompt counts once, by its first choice.
    pub(crate) fn add(&mut self, counts: Counts, is_first: bool) {
        if is_first {
            self.prompt_tokens += counts.prompt;
            self.prompt_tokens_details.cached_tokens += counts.cached;
            self.prompt_tokens_details.disk_tokens += counts.restored;
            // Of several prompts, the first that has something to tell.
            let details = &mut self.prompt_tokens_details;
            details.cache_miss = details.cache_miss.or(CacheMiss::of(counts.miss));
        }
        self.completion_tokens += counts.generated;
        self.completion_tokens_details.reasoning_tokens += counts.thought;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }
}

/// What all parts of one response say about it.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
}

impl Head {
    pub(crate) fn new(prefix: &str, model: &str) -> Head {
        Head { id: format!("{prefix}-{}", random_id()), created: unix_seconds(), model: model.to_owned() }
    }
}

/// The parts of a streamed response, but for what its choices say.
pub(crate) struct Parts {
    pub(crate) head: Head,
    pub(crate) object: &'static str,
    pub(crate) include_usage: bool,
    /// Choices of one prompt.
    pub(crate) per_prompt: usize,
    pub(crate) usage: Usage,
}

impl Parts {
    /// A part with one choice.
    pub(crate) fn choice(&self, choice: Value) -> Event {
        event(&self.part(json!([choice]), &Value::Null))
    }

    /// Counts the tokens of a choice that has ended.
    pub(crate) fn count(&mut self, index: usize, counts: Counts) {
        self.usage.add(counts, index.is_multiple_of(self.per_prompt));
    }

    /// What follows the last choice.
    pub(crate) fn close(&self) -> Vec<Event> {
        let usage = self.include_usage.then(|| event(&self.part(json!([]), &json!(self.usage))));
        usage.into_iter().chain([Event::default().data("[DONE]")]).collect()
    }

    fn part(&self, choices: Value, usage: &Value) -> Value {
        let Head { id, created, model } = &self.head;
        let mut part = json!({"id": id, "object": self.object, "created": created, "model": model,
            "system_fingerprint": FINGERPRINT, "choices": choices});
        if self.include_usage {
            part["usage"] = usage.clone();
        }
        part
    }
}

/// What served the request: seeds reproduce only under the same.
pub(crate) const FINGERPRINT: &str = concat!("fornax-", env!("CARGO_PKG_VERSION"));

/// OpenAI's word for how an answer ended that called tools or did not.
pub(crate) fn finish_reason(finish: Finish, called: bool) -> &'static str {
    match finish {
        Finish::End | Finish::Stop(_) if called => "tool_calls",
        Finish::End | Finish::Stop(_) | Finish::Cut(_) => "stop",
        Finish::Length | Finish::Truncated => "length",
        Finish::Cancelled => "abort",
    }
}

/// The log-probability of a token. One that the form leaves no choice about is certain. In f64, because JSON values hold
/// no other: streamed and whole answers write the same digits.
pub(crate) fn logprob(score: &TokenScore) -> f64 {
    score.logprob.map_or(0.0, f64::from)
}

/// A token as text, and as the bytes it really is.
pub(crate) fn spelled(tokenizer: &Tokenizer, token: u32) -> (String, Vec<u8>) {
    (tokenizer.piece(token), tokenizer.token_bytes(token).to_vec())
}

/// Adds a token of the prompt as vLLM tells it: by id the likeliest tokens and its own, each with rank where that is
/// known. The first token follows nothing and has none.
pub(crate) fn add_scored(scored: &mut Vec<Value>, tokenizer: &Tokenizer, score: &TokenScore) {
    if scored.is_empty() {
        scored.push(Value::Null);
    }
    let mut tokens = Map::new();
    let entry = |token, logprob: f64, rank: Option<usize>| json!({"logprob": logprob, "rank": rank, "decoded_token": tokenizer.piece(token)});
    for (index, &(token, logprob)) in score.top.iter().enumerate() {
        tokens.insert(token.to_string(), entry(token, f64::from(logprob), Some(index + 1)));
    }
    let own = entry(score.token, logprob(score), None);
    tokens.entry(score.token.to_string()).or_insert(own);
    scored.push(Value::Object(tokens));
}
