//! `POST /v1/completions`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response, sse::Event},
};
use fornax_chat::{Ask, Piece, TokenScore};
use fornax_engine::CHOICES_MAX;
use fornax_form::Form;
use fornax_text::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{
    chat::{StreamOptions, stream_options},
    reply::{FINGERPRINT, Head, Parts, Usage, add_scored, finish_reason, logprob},
};
use crate::{
    app::App,
    ask::{
        params::{Params, ResponseFormat, UNSUPPORTED, Wanted},
        prepare::{Preparing, admit},
        prompt::Prompt,
    },
    error::{ApiError, Fault},
    front::{body::RawBody, keys::Caller},
    shape::{Unknown, body},
    sse::{self, Transcript},
    work::Work,
};

/// OpenAI's default.
const MAX_TOKENS: u32 = 16;

/// What this API calls its answers, whole or in parts.
const OBJECT: &str = "text_completion";

/// Texts to continue.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CompletionBody {
    /// The name of a served model; without it, the first of them.
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    /// A string, an array of strings, an array of token ids, or an array of such arrays.
    #[schema(required = true)]
    prompt: Prompt,
    /// At most so many tokens follow; 16 by default.
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    max_tokens: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// How many of the most likely tokens come with their log-probabilities, besides the chosen one.
    #[schema(minimum = 0, maximum = 20)]
    logprobs: Option<u32>,
    response_format: Option<ResponseFormat>,
    /// A label of the client's; it changes nothing.
    #[schema(max_length = 1024)]
    #[expect(dead_code, reason = "it asks for nothing")]
    user: Option<String>,
    #[serde(flatten)]
    params: Params,
}

body!(CompletionBody, Unknown::IgnoreBut(UNSUPPORTED));

/// Continue texts
///
/// With `stream`, server-sent events; an error in the middle is an event with `error` and ends the stream without
/// `[DONE]`. Closing the connection cancels, streaming or not.
#[utoipa::path(post, path = "/v1/completions", tag = "openai", request_body = CompletionBody, responses(
    (status = 200, body = Completion, description = "The continuations, or a stream of their parts"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    let (admission, (asks, stream)) = admit(&app, &caller, body, CompletionBody::ask).await?;
    let per_prompt = asks.first().map_or(1, |ask| ask.request.choices as usize);
    let scored = asks.first().is_some_and(|ask| ask.request.sampling.top_logprobs.is_some());
    let work = Work::submit(admission, asks)?;
    let head = Head::new("cmpl", work.model());
    match stream {
        Some(options) => {
            let parts = options.parts(head, OBJECT, per_prompt);
            let transcript = CompletionTranscript { parts, scored, offsets: Vec::new() };
            Ok(sse::stream(work, transcript, &app.options))
        }
        None => Ok(Json(whole(work, head, scored, per_prompt).await?).into_response()),
    }
}

impl CompletionBody {
    pub(crate) fn ask(&self, served: &Preparing<'_>) -> Result<(Vec<Ask>, Option<StreamOptions>), ApiError> {
        self.ask_with(served, None)
    }

    /// The same; a form of the caller's takes the place of `response_format`, and with it as many alternatives of each token
    /// are told as it says.
    pub(crate) fn ask_with(
        &self,
        served: &Preparing<'_>,
        form: Option<(Form, Option<u32>)>,
    ) -> Result<(Vec<Ask>, Option<StreamOptions>), ApiError> {
        let mut faults = Vec::new();
        let stream = stream_options(self.stream, self.stream_options, &self.params, &mut faults);
        // Before any of them is cut into tokens.
        let count = self.prompt.count();
        if count == 0 {
            faults.push(Fault::rule("prompt", "must hold at least one prompt"));
        }
        if count.saturating_mul(self.params.n.unwrap_or(1) as usize) > CHOICES_MAX as usize {
            faults.push(Fault::rule("n", "with all prompts makes more than 128 choices"));
        }
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        let prompts = self.prompt.tokens(served)?;
        let max_tokens = Some(self.max_tokens.unwrap_or(MAX_TOKENS) as usize);
        let response_format = self.response_format.as_ref();
        let top_logprobs = form.as_ref().and_then(|(_, alternatives)| *alternatives).or(self.logprobs);
        let asks = prompts.into_iter().map(|prompt| {
            let given = form.as_ref().map(|(form, _)| form.clone());
            let form = self.params.form(response_format, given)?;
            let wanted = Wanted { prompt, max_tokens, form, top_logprobs, starts_text: false, reading: None };
            self.params.ask(served, wanted)
        });
        Ok((asks.collect::<Result<_, _>>()?, stream))
    }
}

/// Whole continuations.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Completion {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<CompletionChoice>,
    usage: Usage,
    system_fingerprint: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
struct CompletionChoice {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: &'static str,
    /// By position, null for the first: token ids with their log-probabilities.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    prompt_logprobs: Vec<Value>,
}

/// Log-probabilities in parallel lists, as this older API has them.
#[derive(Debug, Default, Serialize, ToSchema)]
struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f64>,
    #[schema(value_type = Vec<Object>)]
    top_logprobs: Vec<Map<String, Value>>,
    /// Where each token begins, in characters of the text.
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    /// Adds tokens that begin at `offset`; where the next one begins.
    fn extend(&mut self, tokenizer: &Tokenizer, scores: &[TokenScore], mut offset: usize) -> usize {
        for score in scores {
            let token = tokenizer.piece(score.token);
            self.text_offset.push(offset);
            offset += token.chars().count();
            self.tokens.push(token);
            self.token_logprobs.push(logprob(score));
            let top = score.top.iter().map(|&(token, logprob)| (tokenizer.piece(token), json!(logprob)));
            self.top_logprobs.push(top.collect());
        }
        offset
    }
}

async fn whole(mut work: Work, head: Head, scored: bool, per_prompt: usize) -> Result<Completion, ApiError> {
    let mut choices: Vec<CompletionChoice> = Vec::new();
    let mut usage = Usage::default();
    while let Some((index, piece)) = work.next().await {
        while choices.len() <= index {
            choices.push(CompletionChoice {
                index: choices.len(),
                text: String::new(),
                logprobs: scored.then(CompletionLogprobs::default),
                finish_reason: "",
                prompt_logprobs: Vec::new(),
            });
        }
        let choice = &mut choices[index];
        match piece? {
            Piece::Started { .. } | Piece::Token(_) | Piece::Said { .. } | Piece::Embedding(_) => {}
            Piece::Scored(score) => {
                add_scored(&mut choice.prompt_logprobs, &work.served().tokenizer, &score);
            }
            Piece::Text { text, tokens } => {
                choice.text.push_str(&text);
                if let Some(logprobs) = &mut choice.logprobs {
                    let offset = logprobs.tokens.iter().map(|token| token.chars().count()).sum();
                    logprobs.extend(&work.served().tokenizer, &tokens, offset);
                }
            }
            Piece::End { finish, usage: counts } => {
                choice.finish_reason = finish_reason(finish, false);
                usage.add(counts, index.is_multiple_of(per_prompt));
            }
        }
    }
    let Head { id, created, model } = head;
    let system_fingerprint = FINGERPRINT;
    Ok(Completion { id, object: OBJECT, created, model, choices, usage, system_fingerprint })
}

/// The events of streamed continuations.
struct CompletionTranscript {
    parts: Parts,
    scored: bool,
    /// By choice: characters of the tokens so far.
    offsets: Vec<usize>,
}

impl CompletionTranscript {
    fn text(
        &self,
        index: usize,
        text: &str,
        logprobs: Option<CompletionLogprobs>,
        finish: Option<&str>,
    ) -> Event {
        let choice = json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish});
        self.parts.choice(choice)
    }
}

impl Transcript for CompletionTranscript {
    fn say(&mut self, work: &Work, index: usize, piece: Piece) -> Vec<Event> {
        match piece {
            Piece::Started { .. }
            | Piece::Token(_)
            | Piece::Said { .. }
            | Piece::Scored(_)
            | Piece::Embedding(_) => Vec::new(),
            Piece::Text { text, tokens } => {
                let logprobs = self.scored.then(|| {
                    self.offsets.resize(self.offsets.len().max(index + 1), 0);
                    let mut logprobs = CompletionLogprobs::default();
                    let offset = self.offsets[index];
                    self.offsets[index] = logprobs.extend(&work.served().tokenizer, &tokens, offset);
                    logprobs
                });
                vec![self.text(index, &text, logprobs, None)]
            }
            Piece::End { finish, usage } => {
                self.parts.count(index, usage);
                vec![self.text(index, "", None, Some(finish_reason(finish, false)))]
            }
        }
    }

    fn fail(&mut self, error: &ApiError) -> Event {
        sse::event(&error.to_json())
    }

    fn close(&mut self) -> Vec<Event> {
        self.parts.close()
    }
}
