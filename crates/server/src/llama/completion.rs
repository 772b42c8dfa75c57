//! `POST /completion` and `POST /completions`: a text continued as llama.cpp answers it.

use std::{sync::Arc, time::Instant};

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response, sse::Event},
};
use fornax_chat::{Ask, Counts, Finish, Piece, TokenScore};
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

/// Prompts of one request.
const PROMPTS_MAX: usize = 128;

/// A text to continue.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct LlamaBody {
    /// The name of a served model; without it, the first of them.
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    /// A string, an array of strings, an array of token ids, or an array of such arrays.
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

async fn answer(app: &App, (admission, prepared): (Admission, Prepared)) -> Result<Response, ApiError> {
    let Prepared { asks, mut tellers, streamed } = prepared;
    let mut work = Work::submit(admission, asks)?;
    for teller in &mut tellers.0 {
        work.model().clone_into(&mut teller.model);
    }
    if streamed {
        return Ok(sse::stream(work, tellers, &app.options));
    }
    while let Some((index, piece)) = work.next().await {
        tellers.0[index].take(&work.served().tokenizer, piece?);
    }
    let wholes: Vec<Value> = tellers.0.iter().map(Teller::whole).collect();
    Ok(match &wholes[..] {
        [whole] => Json(whole).into_response(),
        wholes => Json(wholes).into_response(),
    })
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

/// What is asked of the model, and how its answers are told.
struct Prepared {
    asks: Vec<Ask>,
    tellers: Tellers,
    streamed: bool,
}

impl LlamaBody {
    fn ask(&self, served: &Preparing<'_>) -> Result<Prepared, ApiError> {
        let count = self.prompt.count();
        if !(1..=PROMPTS_MAX).contains(&count) {
            let rule = format!("must be 1 to {PROMPTS_MAX} prompts; got {count}");
            return Err(ApiError::fault(Fault::rule("prompt", rule)));
        }
        let prompts = self.prompt.tokens(served)?;
        let shown = match &self.prompt {
            Prompt::Text(text) => vec![text.clone()],
            Prompt::Texts(texts) => texts.clone(),
            _ => prompts.iter().map(|prompt| served.tokenizer.decode(prompt)).collect(),
        };
        self.more.ask(served, prompts, shown)
    }
}

impl InfillBody {
    fn ask(&self, served: &Preparing<'_>) -> Result<Prepared, ApiError> {
        let snippet = |extra: &Extra| Snippet {
            name: extra.filename.clone().unwrap_or_else(|| "tmp".to_owned()),
            text: extra.text.clone(),
        };
        let others: Vec<Snippet> = self.input_extra.iter().flatten().map(snippet).collect();
        let begun = self.prompt.as_deref().unwrap_or_default();
        let before = self.input_prefix.clone() + begun;
        let prompt = gap(served, &before, &self.input_suffix, &others)?;
        let shown = served.tokenizer.decode(&prompt);
        self.more.ask(served, vec![prompt], vec![shown])
    }
}

impl LlamaFields {
    /// Asks with each prompt, which is shown as it was given.
    fn ask(
        &self,
        served: &Preparing<'_>,
        prompts: Vec<Vec<u32>>,
        shown: Vec<String>,
    ) -> Result<Prepared, ApiError> {
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
        let form = params.form(None, None)?;
        let top_logprobs = self.n_probs.filter(|count| *count > 0);
        let mut prepared =
            Prepared { asks: Vec::new(), tellers: Tellers(Vec::new()), streamed: self.stream == Some(true) };
        for (index, (prompt, shown)) in prompts.into_iter().zip(shown).enumerate() {
            let form = form.clone();
            let wanted = Wanted { prompt, max_tokens, form, top_logprobs, starts_text: false, reading: None };
            let mut ask = params.ask(served, wanted)?;
            ask.tells_tokens = self.return_tokens == Some(true);
            let teller = Teller {
                index,
                settings: self.settings(served, &params, ask.request.seed),
                prompt: shown,
                stops: params.stop_words(),
                scored: top_logprobs.is_some(),
                ..Teller::new()
            };
            prepared.asks.push(ask);
            prepared.tellers.0.push(teller);
        }
        Ok(prepared)
    }

    /// What the answer tells of how it was made.
    fn settings(&self, served: &Preparing<'_>, params: &Params, seed: u64) -> Value {
        // As they were written: made directly, an f32 would have the longer digits of an f64.
        let digits = |value: Option<f32>| value.and_then(|value| value.to_string().parse::<f64>().ok());
        json!({"n_ctx": served.engine.capacity().context, "seed": seed,
            "n_predict": self.n_predict.unwrap_or(-1), "temperature": digits(params.temperature),
            "top_k": params.top_k, "top_p": digits(params.top_p), "min_p": digits(params.min_p),
            "n_probs": self.n_probs.unwrap_or(0)})
    }

    /// The parameters, with llama.cpp's defaults for what was not said.
    fn params(&self) -> Params {
        let mut params = self.params.clone();
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
    /// Which of the prompts it answers.
    index: usize,
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
            index: 0,
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
        json!({"index": self.index, "content": content, "tokens": [], "id_slot": -1, "stop": true, "model": self.model,
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

/// One for each prompt.
struct Tellers(Vec<Teller>);

impl Transcript for Tellers {
    fn say(&mut self, work: &Work, index: usize, piece: Piece) -> Vec<Event> {
        let teller = &mut self.0[index];
        let before = teller.tokens.len();
        let ends = matches!(piece, Piece::End { .. });
        let said = teller.take(&work.served().tokenizer, piece);
        // Each ends by itself.
        if ends {
            return vec![sse::event(&teller.end(""))];
        }
        let Some((text, scores)) = said else { return Vec::new() };
        let mut part = json!({"index": index, "content": text, "tokens": [], "stop": false, "id_slot": -1});
        part["tokens"] = json!(teller.tokens[before.min(teller.tokens.len())..]);
        if teller.scored {
            part["completion_probabilities"] = json!(scores);
        }
        vec![sse::event(&part)]
    }

    fn close(&mut self) -> Vec<Event> {
        Vec::new()
    }

    fn fail(&mut self, error: &ApiError) -> Event {
        sse::event(&error.to_json())
    }
}
