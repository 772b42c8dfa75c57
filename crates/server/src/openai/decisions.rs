//! `POST /v1/systemone`, as vLLM and others have it: typed questions about a state, each answered with the
//! probabilities of all its answers.
//!
//! Nothing is generated: a question is a chat whose reply would be one label, and what is told is how likely each label
//! is as the reply's first token, by the model's own distribution. The same request gives the same bits, whoever else
//! asks.

use std::{collections::BTreeMap, sync::Arc};

use axum::{Extension, Json, extract::State};
use fornax_chat::{Ask, Message, Piece, Question, TokenScore};
use fornax_compute::TOP_LOGPROBS_MAX;
use fornax_text::{Special, is_template_name};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::chat::NAMES;
use crate::{
    app::{Admission, App, random_id, unix_seconds},
    ask::{
        chat::ChatAsk,
        params::Params,
        prepare::{Preparing, admit},
    },
    error::{ApiError, Code, Fault},
    front::{body::RawBody, keys::Caller},
    shape::{self, Unknown, body},
    work::Work,
};

/// Questions of one request, options of a choice and levels of a score, as many as vLLM takes.
const QUESTIONS_MAX: usize = 64;
const OPTIONS_MAX: usize = 26;
const LEVELS_MAX: usize = 10;

/// Characters of a question's name and of an option's.
const NAME_CHARS_MAX: usize = 256;

/// Questions handed to the engine at once, so that a large request leaves room in the queue for others.
const AT_ONCE: usize = 16;

/// A state, and questions about it.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct DecisionBody {
    /// The served model's name; without it, that model.
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the request was let in to it already")]
    model: Option<String>,
    /// What the questions are about: a string, or JSON that is asked about as its text.
    #[schema(required = true)]
    state: Value,
    /// By name {type: choice, noul or score, instructions, criteria}, up to 64.
    #[schema(required = true, value_type = Object)]
    questions: Map<String, Value>,
    /// Stands before the questions.
    instructions: Option<String>,
    /// Variables of the chat template; `enable_thinking` is false unless it is said here.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Computed prefixes are shared only under the same salt.
    #[schema(min_length = 1, max_length = 256)]
    cache_salt: Option<String>,
}

body!(DecisionBody, Unknown::IgnoreBut(&[]));

/// One of the questions.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct QuestionBody {
    r#type: Kind,
    /// A string, or JSON that is asked as its text.
    instructions: Value,
    /// Of a choice: what its options are, by name, each a description or null. Of a noul: {true, false}, what each
    /// means, or null. Of a score: its levels, the lowest first.
    criteria: Option<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Choice,
    Noul,
    Score,
}

/// The answers, by the names of their questions.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Decisions {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    /// {type, choice, noul or score, probabilities, confidence}.
    #[schema(value_type = Object)]
    answers: Map<String, Value>,
    #[schema(value_type = Object)]
    usage: Value,
    /// {label_mass, argmax_is_label}: how likely any of the labels was, and whether one was the likeliest of all
    /// tokens.
    #[schema(value_type = Object)]
    diagnostics: Map<String, Value>,
}

/// Answer typed questions with probabilities
///
/// `probabilities` are those of the labels among each other; `confidence` is the answer's own among all tokens. Nothing
/// is generated.
#[utoipa::path(post, path = "/v1/systemone", tag = "openai", request_body = DecisionBody, responses(
    (status = 200, body = Decisions, description = "An answer to each question"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn decide(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Decisions>, ApiError> {
    let (admission, reads) = admit(&app, &caller, body, DecisionBody::reads).await?;
    let model = admission.served.name().to_owned();
    let count = reads.len();
    let (scored, input_tokens) = scores(admission, &reads).await?;
    let (mut answers, mut diagnostics) = (Map::new(), Map::new());
    for (read, likely) in reads.into_iter().zip(scored) {
        diagnostics.insert(read.name.clone(), likely.diagnostics(&read));
        answers.insert(read.name.clone(), likely.answer(&read));
    }
    Ok(Json(Decisions {
        id: format!("decision-{}", random_id()),
        object: "structured_decision",
        created: unix_seconds(),
        model,
        answers,
        usage: json!({"input_tokens": input_tokens, "output_tokens": count}),
        diagnostics,
    }))
}

/// A question as it is asked: how likely each label's tokens are.
struct Read {
    name: String,
    kind: Kind,
    /// What each label stands for, with the tokens that say it.
    options: Vec<(String, Vec<u32>)>,
    ask: Ask,
}

impl DecisionBody {
    fn reads(&self, served: &Preparing<'_>) -> Result<Vec<Read>, ApiError> {
        let mut faults = Vec::new();
        if !(1..=QUESTIONS_MAX).contains(&self.questions.len()) {
            faults.push(Fault::rule("questions", format!("must have 1 to {QUESTIONS_MAX} questions")));
        }
        for name in self.chat_template_kwargs.iter().flat_map(Map::keys).filter(|name| is_template_name(name))
        {
            let rule = "is the server's own: what is sent there would stand for what was checked";
            faults.push(Fault::rule(format!("chat_template_kwargs.{name}"), rule));
        }
        let mut asked = Vec::new();
        for (index, (name, question)) in self.questions.iter().enumerate().take(QUESTIONS_MAX) {
            // Names are the client's: a fault tells the place.
            let path = format!("questions[{index}]");
            if !(1..=NAME_CHARS_MAX).contains(&name.chars().count()) {
                let rule = format!("must have a name of 1 to {NAME_CHARS_MAX} characters");
                faults.push(Fault::rule(path.clone(), rule));
            }
            let Some(body) = shape::part::<QuestionBody>(question, &path, &mut faults) else { continue };
            if let Some(options) = body.options(&path, &mut faults) {
                asked.push((name, body, options));
            }
        }
        if !faults.is_empty() {
            return Err(ApiError::faults(faults));
        }
        let mut variables = self.chat_template_kwargs.clone().unwrap_or_default();
        variables.entry("enable_thinking").or_insert(json!(false));
        let params =
            Params { temperature: Some(0.0), cache_salt: self.cache_salt.clone(), ..Params::default() };
        let token = |label: &str| -> Result<Option<u32>, ApiError> {
            let tokens = served.tokenizer.encode(label, Special::AsText)?;
            Ok(tokens.first().copied().filter(|_| tokens.len() == 1))
        };
        let mut reads = Vec::new();
        for (name, body, options) in asked {
            let question = Question {
                conversation: vec![Message::user(self.text(&body, &options))].into(),
                variables: variables.clone(),
                ..Question::default()
            };
            let chat = ChatAsk {
                question,
                params: &params,
                max_tokens: Some(1),
                top_logprobs: Some(
                    TOP_LOGPROBS_MAX.min(u32::try_from(served.tokenizer.vocab_len()).unwrap_or(1)),
                ),
                counts: false,
                names: &NAMES,
            };
            let mut ask = chat.ask(served)?;
            // What is asked about stands in each: where it does not fit, there need not be all of them first.
            ask.request.check(&served.engine.capacity())?;
            // What is read is a token, whatever it would say.
            (ask.reading, ask.tells_tokens) = (None, true);
            let mut told = Vec::new();
            for option in &options {
                let mut tokens = Vec::new();
                for label in &option.labels {
                    tokens.extend(token(label)?);
                }
                if tokens.is_empty() {
                    let message =
                        format!("{:?} has no token for the label {:?}", served.card.name, option.labels[0]);
                    return Err(ApiError::new(Code::ModelUnsupported, message));
                }
                told.push((option.name.clone(), tokens));
            }
            reads.push(Read { name: name.clone(), kind: body.r#type, options: told, ask });
        }
        Ok(reads)
    }

    /// What is asked, the same for all questions as far as it can be.
    fn text(&self, question: &QuestionBody, options: &[Choice]) -> String {
        let mut text = as_text(&self.state);
        if let Some(instructions) = &self.instructions {
            text += &format!("\n\n{instructions}");
        }
        text += &format!("\n\nQuestion: {}\n\nAnswers:\n", as_text(&question.instructions));
        for option in options {
            text += &match &option.meaning {
                Some(meaning) => format!("{}: {meaning}\n", option.labels[0]),
                None => format!("{}\n", option.labels[0]),
            };
        }
        let labels: Vec<&str> = options.iter().map(|option| option.labels[0].as_str()).collect();
        text + &format!("\nAnswer with one of {} and nothing else.", labels.join(", "))
    }
}

/// A string as it is, anything else as its JSON.
fn as_text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// One of the answers that a question may have.
struct Choice {
    name: String,
    /// What the model may say for it, the first of which it is told.
    labels: Vec<String>,
    meaning: Option<String>,
}

impl QuestionBody {
    fn options(&self, path: &str, faults: &mut Vec<Fault>) -> Option<Vec<Choice>> {
        let at = format!("{path}.criteria");
        let mut wrong = |rule: &str| {
            faults.push(Fault::rule(at.clone(), rule));
            None
        };
        let described = |value: &Value| (!value.is_null()).then(|| as_text(value));
        match (self.r#type, &self.criteria) {
            (Kind::Choice, Some(Value::Object(criteria))) => {
                let named = criteria.keys().all(|name| (1..=NAME_CHARS_MAX).contains(&name.chars().count()));
                if !(1..=OPTIONS_MAX).contains(&criteria.len()) || !named {
                    return wrong("must have 1 to 26 options, with names of 1 to 256 characters");
                }
                let letters = ('A'..='Z').map(String::from);
                let option = |(label, (name, meaning)): (String, (&String, &Value))| Choice {
                    name: name.clone(),
                    labels: vec![label],
                    meaning: Some(
                        described(meaning).map_or_else(|| name.clone(), |more| format!("{name}, {more}")),
                    ),
                };
                Some(letters.zip(criteria).map(option).collect())
            }
            (Kind::Choice, _) => wrong("must be an object: options by name, each with a description or null"),
            (Kind::Noul, None | Some(Value::Null)) => Some(noul(&Map::new())),
            (Kind::Noul, Some(Value::Object(criteria)))
                if criteria.keys().all(|name| matches!(name.as_str(), "true" | "false")) =>
            {
                Some(noul(criteria))
            }
            (Kind::Noul, Some(_)) => wrong("must be null, or an object with true and false"),
            (Kind::Score, Some(Value::Array(levels))) if (2..=LEVELS_MAX).contains(&levels.len()) => {
                let level = |(index, level): (usize, &Value)| Choice {
                    name: as_text(level),
                    labels: vec![index.to_string()],
                    meaning: Some(as_text(level)),
                };
                Some(levels.iter().enumerate().map(level).collect())
            }
            (Kind::Score, _) => wrong("must be a list of 2 to 10 levels, the lowest first"),
        }
    }
}

fn noul(criteria: &Map<String, Value>) -> Vec<Choice> {
    let option = |name: &str, other: &str, key: &str| Choice {
        name: name.to_owned(),
        labels: vec![name.to_owned(), other.to_owned()],
        meaning: criteria.get(key).filter(|meaning| !meaning.is_null()).map(as_text),
    };
    vec![option("yes", "Yes", "true"), option("no", "No", "false")]
}

/// How likely each label was.
#[derive(Clone, Debug, Default)]
struct Likely {
    /// The natural logarithms, by token.
    tokens: BTreeMap<u32, f32>,
    /// The likeliest token of all.
    first: Option<u32>,
}

impl Likely {
    /// What is told with the likeliest tokens.
    fn hear(&mut self, score: &TokenScore, read: &Read) {
        self.first = score.top.first().map(|(token, _)| *token);
        let asked = |token: &u32| read.options.iter().any(|(_, tokens)| tokens.contains(token));
        self.tokens.extend(score.top.iter().copied().filter(|(token, _)| asked(token)));
    }

    /// What is told of a label that was asked for by itself.
    fn hear_alone(&mut self, score: &TokenScore) {
        self.tokens.extend(score.logprob.map(|logprob| (score.token, logprob)));
    }

    /// Labels that were not among the likeliest tokens.
    fn missing(&self, read: &Read) -> Vec<u32> {
        let tokens = read.options.iter().flat_map(|(_, tokens)| tokens.iter().copied());
        tokens.filter(|token| !self.tokens.contains_key(token)).collect()
    }

    /// How likely each option was among all tokens.
    fn masses(&self, read: &Read) -> Vec<f64> {
        let mass = |token: &u32| self.tokens.get(token).map_or(0.0, |logprob| f64::from(*logprob).exp());
        read.options.iter().map(|(_, tokens)| tokens.iter().map(mass).sum()).collect()
    }

    fn diagnostics(&self, read: &Read) -> Value {
        let is_label = |token: u32| read.options.iter().any(|(_, tokens)| tokens.contains(&token));
        json!({"label_mass": self.masses(read).iter().sum::<f64>(), "argmax_is_label": self.first.is_some_and(is_label)})
    }

    fn answer(&self, read: &Read) -> Value {
        let masses = self.masses(read);
        let all = masses.iter().sum::<f64>();
        // All of them may be too unlikely to tell apart.
        let share = |mass: &f64| if all > 0.0 { mass / all } else { 1.0 / masses.len() as f64 };
        let shares: Vec<f64> = masses.iter().map(share).collect();
        // The first of those that are as likely.
        let best = (0..shares.len()).rev().max_by(|a, b| shares[*a].total_cmp(&shares[*b])).unwrap_or(0);
        let named = |name: &dyn Fn(usize) -> String| -> Map<String, Value> {
            shares.iter().enumerate().map(|(n, share)| (name(n), json!(share))).collect()
        };
        let by_name = |n: usize| read.options[n].0.clone();
        let confidence = masses[best];
        match read.kind {
            Kind::Choice => {
                json!({"type": "choice", "choice": by_name(best), "probabilities": named(&by_name),
                "confidence": confidence})
            }
            Kind::Noul => json!({"type": "noul", "noul": shares[0], "probabilities": named(&by_name),
                "confidence": confidence}),
            Kind::Score => {
                let score: f64 = shares.iter().enumerate().map(|(n, share)| n as f64 * share).sum();
                let legend: Map<String, Value> = read
                    .options
                    .iter()
                    .enumerate()
                    .map(|(n, (name, _))| (n.to_string(), json!(name)))
                    .collect();
                json!({"type": "score", "score": score, "legend": legend,
                    "probabilities": named(&|n| n.to_string()), "confidence": confidence})
            }
        }
    }
}

/// How likely the labels of each question are, and how many tokens were read. Dropped, it cancels.
async fn scores(admission: Admission, reads: &[Read]) -> Result<(Vec<Likely>, usize), ApiError> {
    let mut likely = vec![Likely::default(); reads.len()];
    let mut input_tokens = 0;
    // The first one computes what all begin with.
    let (first, others) = reads.split_at(1);
    let mut work = Work::submit(admission, first.iter().map(|read| read.ask.clone()).collect())?;
    input_tokens += heard(&mut work, &[0], |n, score| likely[n].hear(score, &reads[n])).await?;
    let numbers: Vec<usize> = (1..=others.len()).collect();
    for some in numbers.chunks(AT_ONCE) {
        work.submit_more(some.iter().map(|&n| reads[n].ask.clone()).collect())?;
        input_tokens += heard(&mut work, some, |n, score| likely[n].hear(score, &reads[n])).await?;
    }
    // A label beyond the likeliest tokens is asked for by itself: it is then the only one that may be chosen.
    let missing: Vec<(usize, u32)> = reads
        .iter()
        .enumerate()
        .flat_map(|(n, read)| likely[n].missing(read).into_iter().map(move |token| (n, token)))
        .collect();
    for some in missing.chunks(AT_ONCE) {
        let ask = |&(n, token): &(usize, u32)| {
            let mut ask = reads[n].ask.clone();
            ask.request.sampling.allowed_token_ids = Some(vec![token]);
            ask
        };
        work.submit_more(some.iter().map(ask).collect())?;
        let numbers: Vec<usize> = some.iter().map(|(n, _)| *n).collect();
        heard(&mut work, &numbers, |n, score| likely[n].hear_alone(score)).await?;
    }
    Ok((likely, input_tokens))
}

/// Hears what was asked, each by the number of its question. Returns how many tokens the prompts had.
async fn heard(
    work: &mut Work,
    numbers: &[usize],
    mut hear: impl FnMut(usize, &TokenScore),
) -> Result<usize, ApiError> {
    let mut tokens = 0;
    while let Some((index, piece)) = work.next().await {
        match piece? {
            Piece::Token(score) => hear(numbers[index], &score),
            Piece::End { usage, .. } => tokens += usage.prompt,
            Piece::Started { .. }
            | Piece::Scored(_)
            | Piece::Text { .. }
            | Piece::Said { .. }
            | Piece::Embedding(_) => {}
        }
    }
    Ok(tokens)
}
