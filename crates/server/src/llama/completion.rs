//! `POST /completion` and `POST /completions`: a text continued as llama.cpp answers it.

use std::{sync::Arc, time::Instant};

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response, sse::Event},
};
use fornax_chat::{Ask, Counts, Finish, Piece, TokenScore};
use fornax_form::Form;
use fornax_text::{Snippet, Tokenizer};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::{
    app::{Admission, App},
    ask::{
        params::{Params, Wanted},
        prepare::{Preparing, admit},
        prompt::{Prompt, infill as gap},
    },
    error::{ApiError, Fault},
    front::{body::RawBody, keys::Caller},
    openai::reply::logprob,
    shape::{Unknown, Unsupported, body},
    sse::{self, Transcript},
    work::Work,
};

/// Fields of llama.cpp's that would change the answer and are not honoured.
const UNSUPPORTED: &[Unsupported] = &[
    Unsupported { field: "cache_prompt", neutral: &["true"] },
    // In llama.cpp's own syntax; `guided_grammar` takes Lark's.
    Unsupported { field: "grammar", neutral: &["\"\""] },
    Unsupported { field: "grammar_lazy", neutral: &["false"] },
    Unsupported { field: "lora", neutral: &["[]"] },
    Unsupported { field: "min_keep", neutral: &["0"] },
    Unsupported { field: "multimodal_data", neutral: &["[]"] },
    Unsupported { field: "n_indent", neutral: &["0"] },
    Unsupported { field: "n_keep", neutral: &["0"] },
    Unsupported { field: "post_sampling_probs", neutral: &["false"] },
    Unsupported { field: "response_fields", neutral: &["[]"] },
    Unsupported { field: "samplers", neutral: &[] },
    Unsupported { field: "t_max_predict_ms", neutral: &["0"] },
];

/// A text to continue.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct LlamaBody {
    /// The name of a served model; without it, the first of them.
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    /// A string, or an array of token ids; one prompt.
    #[schema(required = true)]
    prompt: Prompt,
    #[serde(flatten)]
    more: LlamaFields,
}

/// What llama.cpp's routes have in common.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct LlamaFields {
    /// At most this many tokens follow; -1, the default, for what is left of the context.
    #[schema(minimum = -1, maximum = 1_000_000_000)]
    n_predict: Option<i64>,
    stream: Option<bool>,
    /// How many of the most likely tokens come with their log-probabilities; 0 for none.
    #[schema(minimum = 0, maximum = 20)]
    n_probs: Option<u32>,
    /// The answer is JSON that is valid against this JSON Schema.
    #[schema(value_type = Option<Object>)]
    json_schema: Option<Value>,
    /// As repetition_penalty.
    #[schema(exclusive_minimum = 0, maximum = 100)]
    repeat_penalty: Option<f32>,
    /// Whether the answer's tokens are told.
    return_tokens: Option<bool>,
    #[serde(flatten)]
    params: Params,
}

body!(LlamaBody, Unknown::IgnoreBut(UNSUPPORTED));

/// A gap to fill.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct InfillBody {
    /// The name of a served model; without it, the first of them.
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    /// What stands before the gap.
    #[schema(required = true)]
    input_prefix: String,
    /// What stands behind the gap.
    #[schema(required = true)]
    input_suffix: String,
    /// Texts of other files that may help.
    #[schema(max_items = 1024)]
    input_extra: Option<Vec<Extra>>,
    /// The beginning of what fills the gap.
    prompt: Option<String>,
    #[serde(flatten)]
    more: LlamaFields,
}

body!(InfillBody, Unknown::IgnoreBut(UNSUPPORTED));

/// A text of another file.
#[derive(Debug, Deserialize, ToSchema)]
struct Extra {
    text: String,
    #[schema(max_length = 4096)]
    filename: Option<String>,
}

/// Continue a text, as llama.cpp answers
///
/// What is not said has llama.cpp's defaults: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05. With `stream`,
/// server-sent events without a closing `[DONE]`. Closing the connection cancels.
#[utoipa::path(post, path = "/completion", tag = "llama.cpp", request_body = LlamaBody, responses(
    (status = 200, description = "{content, tokens, stop, stop_type, stopping_word, tokens_predicted, tokens_evaluated, tokens_cached, timings, …}, or a stream of its parts"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn completion(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    let prepared = admit(&app, &caller, body, LlamaBody::ask).await?;
    answer(&app, prepared).await
}

async fn answer(
    app: &App,
    (admission, (ask, teller, streamed)): (Admission, (Ask, Teller, bool)),
) -> Result<Response, ApiError> {
    let mut work = Work::submit(admission, vec![ask])?;
    let mut teller = Teller { model: work.model().to_owned(), ..teller };
    if streamed {
        return Ok(sse::stream(work, teller, &app.options));
    }
    while let Some((_, piece)) = work.next().await {
        teller.take(&work.served().tokenizer, piece?);
    }
    Ok(Json(teller.whole()).into_response())
}

/// Fill a gap between two texts, as llama.cpp answers
///
/// For models that were trained to. Nothing is cut off: what does not fit is refused. Defaults and answers are those of
/// /completion.
#[utoipa::path(post, path = "/infill", tag = "llama.cpp", request_body = InfillBody, responses(
    (status = 200, description = "As of /completion"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn infill(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    let prepared = admit(&app, &caller, body, InfillBody::ask).await?;
    answer(&app, prepared).await
}

/// The same under its other path
#[utoipa::path(post, path = "/completions", tag = "llama.cpp", request_body = LlamaBody, responses(
    (status = 200, description = "As of /completion"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn completions(
    app: State<Arc<App>>,
    caller: Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    completion(app, caller, body).await
}

impl LlamaBody {
    fn ask(&self, served: &Preparing<'_>) -> Result<(Ask, Teller, bool), ApiError> {
        let mut prompts = self.prompt.tokens(served)?;
        let prompt = prompts.pop().filter(|_| prompts.is_empty()).ok_or_else(|| {
            let rule = "must be one prompt; /v1/completions takes several";
            ApiError::fault(Fault::rule("prompt", rule))
        })?;
        let shown = match &self.prompt {
            Prompt::Text(text) => text.clone(),
            _ => served.tokenizer.decode(&prompt),
        };
        self.more.ask(served, prompt, shown)
    }
}

impl InfillBody {
    fn ask(&self, served: &Preparing<'_>) -> Result<(Ask, Teller, bool), ApiError> {
        let snippet = |extra: &Extra| Snippet {
            name: extra.filename.clone().unwrap_or_else(|| "tmp".to_owned()),
            text: extra.text.clone(),
        };
        let others: Vec<Snippet> = self.input_extra.iter().flatten().map(snippet).collect();
        let begun = self.prompt.as_deref().unwrap_or_default();
        let before = self.input_prefix.clone() + begun;
        let prompt = gap(served, &before, &self.input_suffix, &others)?;
        let shown = served.tokenizer.decode(&prompt);
        self.more.ask(served, prompt, shown)
    }
}

impl LlamaFields {
    fn ask(
        &self,
        served: &Preparing<'_>,
        prompt: Vec<u32>,
        shown: String,
    ) -> Result<(Ask, Teller, bool), ApiError> {
        let mut faults = Vec::new();
        if self.params.n.is_some_and(|n| n > 1) {
            faults.push(Fault::rule("n", "must be 1 here; /v1/completions takes more"));
        }
        if self.params.prompt_logprobs.is_some() {
            faults.push(Fault::rule("prompt_logprobs", "is given by /v1/completions"));
        }
        let max_tokens = match self.n_predict {
            None | Some(-1) => None,
            Some(most) => usize::try_from(most).ok().filter(|most| *most > 0).or_else(|| {
                faults.push(Fault::rule("n_predict", "must be -1 or at least 1"));
                None
            }),
        };
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        let params = self.params();
        let form = match (params.form(None, None)?, &self.json_schema) {
            (Some((field, _)), Some(_)) => {
                let rule = format!("cannot be combined with {field}");
                return Err(ApiError::fault(Fault::rule("json_schema", rule)));
            }
            (None, Some(schema)) => Some(("json_schema", Form::JsonSchema(schema.clone()))),
            (form, None) => form,
        };
        let top_logprobs = self.n_probs.filter(|count| *count > 0);
        let wanted = Wanted {
            prompt,
            pieces: Vec::new(),
            max_tokens,
            form,
            top_logprobs,
            starts_text: false,
            reading: None,
        };
        let mut ask = params.ask(served, wanted)?;
        let returns_tokens = self.return_tokens == Some(true);
        ask.tells_tokens = returns_tokens;
        // As they were written: made directly, an f32 would have the longer digits of an f64.
        let digits = |value: Option<f32>| value.and_then(|value| value.to_string().parse::<f64>().ok());
        let settings = json!({"n_ctx": served.engine.capacity().context, "seed": ask.request.seed,
            "n_predict": self.n_predict.unwrap_or(-1), "temperature": digits(params.temperature),
            "top_k": params.top_k, "top_p": digits(params.top_p), "min_p": digits(params.min_p),
            "n_probs": self.n_probs.unwrap_or(0)});
        let teller = Teller {
            settings,
            prompt: shown,
            stops: params.stop_words(),
            scored: top_logprobs.is_some(),
            ..Teller::new()
        };
        Ok((ask, teller, self.stream == Some(true)))
    }

    /// The parameters, with llama.cpp's defaults for what was not said.
    fn params(&self) -> Params {
        let mut params = self.params.clone();
        params.repetition_penalty = params.repetition_penalty.or(self.repeat_penalty);
        // There, it asks for a random one.
        params.seed = params.seed.filter(|seed| *seed != -1);
        params.temperature = params.temperature.or(Some(0.8));
        // Mirostat takes the place of these.
        if params.mirostat.unwrap_or(0) == 0 {
            params.top_k = params.top_k.or(Some(40));
            params.top_p = params.top_p.or(Some(0.95));
            params.min_p = params.min_p.or(Some(0.05));
        }
        params
    }
}

/// An answer as llama.cpp tells it.
struct Teller {
    model: String,
    settings: Value,
    prompt: String,
    stops: Vec<String>,
    scored: bool,
    text: String,
    tokens: Vec<u32>,
    scores: Vec<Value>,
    ended: Option<(Finish, Counts)>,
    submitted: Instant,
    first: Option<Instant>,
}

impl Teller {
    fn new() -> Teller {
        Teller {
            model: String::new(),
            settings: Value::Null,
            prompt: String::new(),
            stops: Vec::new(),
            scored: false,
            text: String::new(),
            tokens: Vec::new(),
            scores: Vec::new(),
            ended: None,
            submitted: Instant::now(),
            first: None,
        }
    }

    /// Takes a part of the answer; what it says, if it says something.
    fn take(&mut self, tokenizer: &Tokenizer, piece: Piece) -> Option<(String, Vec<Value>)> {
        match piece {
            Piece::Token(score) => self.tokens.push(score.token),
            Piece::Text { text, tokens } => {
                self.first.get_or_insert_with(Instant::now);
                self.text.push_str(&text);
                let scores: Vec<Value> = match self.scored {
                    true => tokens.iter().map(|score| scored(tokenizer, score)).collect(),
                    false => Vec::new(),
                };
                self.scores.extend(scores.iter().cloned());
                return Some((text, scores));
            }
            Piece::End { finish, usage } => self.ended = Some((finish, usage)),
            Piece::Started { .. } | Piece::Scored(_) | Piece::Said { .. } | Piece::Embedding(_) => {}
        }
        None
    }

    /// The whole answer.
    fn whole(&self) -> Value {
        let mut whole = self.end(&self.text);
        whole["tokens"] = json!(self.tokens);
        if self.scored {
            whole["completion_probabilities"] = json!(self.scores);
        }
        whole
    }

    /// What is told at the end.
    fn end(&self, content: &str) -> Value {
        let (finish, counts) = self.ended.unwrap_or((Finish::Cancelled, Counts::default()));
        let (stop_type, word) = match finish {
            Finish::End => ("eos", ""),
            Finish::Stop(index) | Finish::Cut(index) => {
                ("word", self.stops.get(index).map_or("", String::as_str))
            }
            Finish::Length | Finish::Truncated => ("limit", ""),
            Finish::Cancelled => ("none", ""),
        };
        let (first, now) = (self.first.unwrap_or_else(Instant::now), Instant::now());
        let milliseconds = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1000.0;
        let (prompt_ms, predicted_ms) = (milliseconds(self.submitted, first), milliseconds(first, now));
        let per_second = |count: usize, ms: f64| if ms > 0.0 { count as f64 * 1000.0 / ms } else { 0.0 };
        let computed = counts.prompt - counts.cached;
        json!({"index": 0, "content": content, "tokens": [], "id_slot": -1, "stop": true, "model": self.model,
            "tokens_predicted": counts.generated, "tokens_evaluated": counts.prompt,
            "generation_settings": self.settings, "prompt": self.prompt, "has_new_line": self.text.contains('\n'),
            "truncated": false, "stop_type": stop_type, "stopping_word": word, "tokens_cached": counts.cached,
            "timings": {"cache_n": counts.cached, "prompt_n": computed, "prompt_ms": prompt_ms,
                "prompt_per_second": per_second(computed, prompt_ms), "predicted_n": counts.generated,
                "predicted_ms": predicted_ms, "predicted_per_second": per_second(counts.generated, predicted_ms)}})
    }
}

/// A token with how likely it was, and the likeliest beside it.
fn scored(tokenizer: &Tokenizer, score: &TokenScore) -> Value {
    let told = |token: u32, logprob: f64| json!({"id": token, "token": tokenizer.piece(token), "bytes": tokenizer.token_bytes(token), "logprob": logprob});
    let mut own = told(score.token, logprob(score));
    own["top_logprobs"] = score.top.iter().map(|&(token, logprob)| told(token, f64::from(logprob))).collect();
    own
}

impl Transcript for Teller {
    fn say(&mut self, work: &Work, _: usize, piece: Piece) -> Vec<Event> {
        let before = self.tokens.len();
        let Some((text, scores)) = self.take(&work.served().tokenizer, piece) else { return Vec::new() };
        let mut part = json!({"index": 0, "content": text, "tokens": [], "stop": false, "id_slot": -1});
        part["tokens"] = json!(self.tokens[before.min(self.tokens.len())..]);
        if self.scored {
            part["completion_probabilities"] = json!(scores);
        }
        vec![sse::event(&part)]
    }

    fn close(&mut self) -> Vec<Event> {
        vec![sse::event(&self.end(""))]
    }

    fn fail(&mut self, error: &ApiError) -> Event {
        sse::event(&error.to_json())
    }
}
