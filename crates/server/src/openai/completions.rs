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
    echo::Echo,
    reply::{FINGERPRINT, Head, Parts, Usage, add_scored, finish_reason, logprob},
};
use crate::{
    app::{Admission, App},
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
    /// What stands behind the gap that is to be filled; the prompt stands before it. For models that were trained to
    /// fill gaps.
    suffix: Option<String>,
    /// At most this many tokens follow; 16 by default. 0 only where something about the prompt is asked for.
    #[schema(minimum = 0, maximum = 1_000_000_000)]
    max_tokens: Option<u32>,
    /// Tell the prompt again before what follows, with `logprobs` also how likely its tokens are.
    echo: Option<bool>,
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
    let (admission, mut asked) = admit(&app, &caller, body, CompletionBody::asked).await?;
    match asked.stream.take() {
        Some(options) => {
            let Asked { asks, per_prompt, scored, echoes, .. } = asked;
            let work = Work::submit(admission, asks)?;
            let head = Head::new("cmpl", work.model());
            let parts = options.parts(head, OBJECT, per_prompt);
            let transcript = CompletionTranscript { parts, scored, choices: Vec::new(), echoes };
            Ok(sse::stream(work, transcript, &app.options))
        }
        None => Ok(Json(answer(admission, asked).await?).into_response()),
    }
}

/// What a body asks for.
pub(crate) struct Asked {
    asks: Vec<Ask>,
    /// What to stream, if it is to be streamed.
    stream: Option<StreamOptions>,
    /// Choices of each prompt.
    per_prompt: usize,
    /// Whether log-probabilities are told.
    scored: bool,
    echoes: Vec<Echo>,
}

/// The whole answer.
pub(crate) async fn answer(admission: Admission, asked: Asked) -> Result<Completion, ApiError> {
    let work = Work::submit(admission, asked.asks)?;
    let head = Head::new("cmpl", work.model());
    whole(work, head, asked.scored, asked.per_prompt, asked.echoes).await
}

impl CompletionBody {
    pub(crate) fn asked(&self, served: &Preparing<'_>) -> Result<Asked, ApiError> {
        let (asks, stream) = self.ask_with(served, None)?;
        let per_prompt = asks.first().map_or(1, |ask| ask.request.choices as usize);
        let scored = asks.first().is_some_and(|ask| ask.request.sampling.top_logprobs.is_some());
        let echoes = self.echoes(served, &asks);
        Ok(Asked { asks, stream, per_prompt, scored, echoes })
    }

    /// The questions, and what to stream if they are to be streamed. A form of the caller's takes the place of
    /// `response_format`, and with it as many alternatives of each token are told as it says.
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
        if self.is_echoed() {
            let (scored, choices) = (self.logprobs.is_some(), self.params.n.unwrap_or(1));
            let wants = self.params.prompt_logprobs.is_some();
            faults.extend(Echo::check(wants, scored, stream.is_some(), choices));
        }
        let suffix = self.suffix.as_deref().filter(|suffix| !suffix.is_empty());
        if suffix.is_some() && self.is_echoed() {
            faults.push(Fault::rule("suffix", "cannot be combined with echo"));
        }
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        let prompts = match suffix {
            None => self.prompt.tokens(served)?,
            Some(suffix) => self.prompt.around(suffix, served)?,
        };
        let asked = self.max_tokens.unwrap_or(MAX_TOKENS) as usize;
        let response_format = self.response_format.as_ref();
        let top_logprobs = form.as_ref().and_then(|(_, alternatives)| *alternatives).or(self.logprobs);
        let asks = prompts.into_iter().map(|prompt| {
            let given = form.as_ref().map(|(form, _)| form.clone());
            let form = self.params.form(response_format, given)?;
            let max_tokens = Some(if self.hides(prompt.len()) { 1 } else { asked });
            let wanted = Wanted { prompt, max_tokens, form, top_logprobs, starts_text: false, reading: None };
            let mut ask = self.params.ask(served, wanted)?;
            if self.is_echoed() {
                ask.request.prompt_logprobs = self.logprobs;
                // The token that ends an answer makes no text, and counts.
                ask.tells_tokens = self.logprobs.is_some();
            }
            Ok(ask)
        });
        Ok((asks.collect::<Result<_, ApiError>>()?, stream))
    }

    fn is_echoed(&self) -> bool {
        self.echo == Some(true)
    }

    /// Whether a token is chosen that nobody asked for: the engine tells nothing of a prompt of which it is asked nothing.
    fn hides(&self, prompt_tokens: usize) -> bool {
        self.is_echoed() && self.max_tokens == Some(0) && (self.logprobs.is_none() || prompt_tokens < 2)
    }

    /// What is told again, for each prompt; nothing unless it is asked for.
    fn echoes(&self, served: &Preparing<'_>, asks: &[Ask]) -> Vec<Echo> {
        let echo = |(index, ask): (usize, &Ask)| {
            let tokens = &ask.request.prompt;
            Echo::new(&self.prompt, index, tokens, self.hides(tokens.len()), &served.tokenizer)
        };
        asks.iter().enumerate().filter(|_| self.is_echoed()).map(echo).collect()
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
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    /// Null for the first token of an echoed prompt.
    token_logprobs: Vec<Option<f64>>,
    /// The most likely tokens and the token itself.
    #[schema(value_type = Vec<Object>)]
    top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Where each token begins, in characters of the text.
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    /// Begins with a token that follows nothing; where the next one begins.
    pub(crate) fn begin(&mut self, tokenizer: &Tokenizer, token: u32) -> usize {
        let token = tokenizer.piece(token);
        let offset = token.chars().count();
        self.tokens.push(token);
        self.token_logprobs.push(None);
        self.top_logprobs.push(None);
        self.text_offset.push(0);
        offset
    }

    /// Adds tokens that begin at `offset`; where the next one begins.
    pub(crate) fn extend(
        &mut self,
        tokenizer: &Tokenizer,
        scores: &[TokenScore],
        mut offset: usize,
    ) -> usize {
        for score in scores {
            let token = tokenizer.piece(score.token);
            // Of tokens that look alike, the likelier one stands for both.
            let mut top = Map::new();
            for &(token, logprob) in &score.top {
                top.entry(tokenizer.piece(token)).or_insert_with(|| json!(logprob));
            }
            top.entry(token.clone()).or_insert_with(|| json!(logprob(score)));
            self.text_offset.push(offset);
            offset += token.chars().count();
            self.tokens.push(token);
            self.token_logprobs.push(Some(logprob(score)));
            self.top_logprobs.push(Some(top));
        }
        offset
    }

    /// Adds tokens behind these, whose places were counted from where these end.
    fn append(&mut self, others: CompletionLogprobs, end: usize) {
        self.tokens.extend(others.tokens);
        self.token_logprobs.extend(others.token_logprobs);
        self.top_logprobs.extend(others.top_logprobs);
        self.text_offset.extend(others.text_offset.into_iter().map(|offset| offset + end));
    }

    /// Where a token behind these begins.
    fn end(&self) -> usize {
        self.tokens.iter().map(|token| token.chars().count()).sum()
    }
}

async fn whole(
    mut work: Work,
    head: Head,
    scored: bool,
    per_prompt: usize,
    mut echoes: Vec<Echo>,
) -> Result<Completion, ApiError> {
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
        let echo = echoes.get_mut(index / per_prompt);
        match piece? {
            Piece::Started { .. } | Piece::Said { .. } | Piece::Embedding(_) => {}
            Piece::Token(score) => {
                if let Some(echo) = echo {
                    echo.chosen(index, score);
                }
            }
            Piece::Scored(score) => match echo {
                Some(echo) => echo.hear(score),
                None => add_scored(&mut choice.prompt_logprobs, &work.served().tokenizer, &score),
            },
            Piece::Text { text, tokens } => {
                if echo.is_some_and(|echo| !echo.said(index)) {
                    continue;
                }
                choice.text.push_str(&text);
                if let Some(logprobs) = &mut choice.logprobs {
                    let offset = logprobs.end();
                    logprobs.extend(&work.served().tokenizer, &tokens, offset);
                }
            }
            Piece::End { finish, usage: mut counts } => {
                choice.finish_reason = finish_reason(finish, false);
                if let Some(echo) = echo {
                    if let (Some(score), Some(logprobs)) = (echo.ending(index), &mut choice.logprobs) {
                        let offset = logprobs.end();
                        logprobs.extend(&work.served().tokenizer, &[score], offset);
                    }
                    if echo.hides {
                        (counts.generated, choice.finish_reason) = (0, "length");
                    }
                }
                usage.add(counts, index.is_multiple_of(per_prompt));
            }
        }
    }
    for choice in choices.iter_mut().filter(|_| !echoes.is_empty()) {
        let echo = &echoes[choice.index / per_prompt];
        choice.text.insert_str(0, &echo.text);
        if let Some(own) = choice.logprobs.take() {
            let (mut logprobs, end) = echo.logprobs(&work.served().tokenizer);
            logprobs.append(own, end);
            choice.logprobs = Some(logprobs);
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
    choices: Vec<Streamed>,
    /// By prompt, where prompts are told again.
    echoes: Vec<Echo>,
}

/// What was streamed of a choice.
#[derive(Clone, Copy, Default)]
struct Streamed {
    /// Characters of its tokens.
    offset: usize,
    /// Its prompt was told.
    echoed: bool,
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

    /// Tokens of a choice in the lists of this API, where they are asked for.
    fn logprobs(&mut self, work: &Work, index: usize, tokens: &[TokenScore]) -> Option<CompletionLogprobs> {
        self.scored.then(|| {
            let mut logprobs = CompletionLogprobs::default();
            let offset = self.choices[index].offset;
            self.choices[index].offset = logprobs.extend(&work.served().tokenizer, tokens, offset);
            logprobs
        })
    }

    /// The choice's prompt, if it is to be told and was not.
    fn echo(&mut self, work: &Work, index: usize) -> Option<Event> {
        let echo = self.echoes.get(index / self.parts.per_prompt)?;
        if std::mem::replace(&mut self.choices[index].echoed, true) {
            return None;
        }
        let (logprobs, end) = echo.logprobs(&work.served().tokenizer);
        self.choices[index].offset = end;
        let logprobs = self.scored.then_some(logprobs);
        Some(self.text(index, &echo.text, logprobs, None))
    }
}

impl Transcript for CompletionTranscript {
    fn say(&mut self, work: &Work, index: usize, piece: Piece) -> Vec<Event> {
        let prompt = index / self.parts.per_prompt;
        if self.choices.len() <= index {
            self.choices.resize(index + 1, Streamed::default());
        }
        match piece {
            Piece::Started { .. } | Piece::Said { .. } | Piece::Embedding(_) => Vec::new(),
            Piece::Token(score) => {
                if let Some(echo) = self.echoes.get_mut(prompt) {
                    echo.chosen(index, score);
                }
                Vec::new()
            }
            Piece::Scored(score) => {
                if let Some(echo) = self.echoes.get_mut(prompt) {
                    echo.hear(score);
                }
                Vec::new()
            }
            Piece::Text { text, tokens } => {
                let mut events: Vec<Event> = self.echo(work, index).into_iter().collect();
                if self.echoes.get_mut(prompt).is_some_and(|echo| !echo.said(index)) {
                    return events;
                }
                let logprobs = self.logprobs(work, index, &tokens);
                events.push(self.text(index, &text, logprobs, None));
                events
            }
            Piece::End { finish, usage: mut counts } => {
                let mut events: Vec<Event> = self.echo(work, index).into_iter().collect();
                let mut reason = finish_reason(finish, false);
                let echo = self.echoes.get_mut(prompt);
                let hides = echo.as_ref().is_some_and(|echo| echo.hides);
                let ending = echo.and_then(|echo| echo.ending(index));
                if hides {
                    (counts.generated, reason) = (0, "length");
                }
                let logprobs = ending.and_then(|score| self.logprobs(work, index, &[score]));
                self.parts.count(index, counts);
                events.push(self.text(index, "", logprobs, Some(reason)));
                events
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
