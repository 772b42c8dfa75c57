//! An answer on its way out, piece by piece.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fornax::{Code, Completion, Finish, Part};
use pyo3::prelude::*;

use crate::fault;
use crate::process::{Home, Owned};

/// An answer as it is made. Dropping it cancels it.
#[pyclass(frozen, module = "fornax._fornax")]
pub(crate) struct Answer {
    /// `None` once it has ended or was cancelled. Locked while a thread waits for the next part, which is never longer
    /// than that thread's patience, and never while Python is held.
    inner: Mutex<Option<Owned<fornax::Answer>>>,
    /// Looked at before the lock: a child of `fork` may have been made while another thread held it, and there nobody
    /// ever lets go of it.
    home: Home,
}

/// A part as Python has it.
#[derive(IntoPyObject)]
pub(crate) struct Piece {
    kind: &'static str,
    text: String,
    end: Option<Ended>,
}

/// All that an answer came to.
#[derive(IntoPyObject)]
struct Ended {
    text: String,
    thought: String,
    calls: Vec<Called>,
    tokens: Vec<u32>,
    logprobs: Vec<Scored>,
    finish: &'static str,
    prompt_tokens: usize,
    cached_tokens: usize,
    seed: u64,
    first_token_seconds: f64,
    decode_seconds: f64,
}

#[derive(IntoPyObject)]
struct Called {
    id: Option<String>,
    name: String,
    /// JSON.
    arguments: String,
}

#[derive(IntoPyObject)]
struct Scored {
    token: u32,
    logprob: Option<f32>,
    top: Vec<Likely>,
}

#[derive(IntoPyObject)]
struct Likely {
    token: u32,
    logprob: f32,
}

/// What waiting came to.
enum Waited {
    /// Nothing yet.
    Late,
    /// There will be nothing more.
    Over,
    /// It is another process's.
    Elsewhere,
    Part(Box<Result<Part, fornax::Error>>),
}

impl Answer {
    pub(crate) fn new(answer: fornax::Answer) -> Answer {
        Answer { inner: Mutex::new(Some(Owned::new(answer))), home: Home::here() }
    }

    /// The next part that a caller is told of.
    fn wait(&self, patience: Duration) -> Waited {
        if !self.home.is_here() {
            return Waited::Elsewhere;
        }
        let until = Instant::now() + patience;
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let Some(answer) = inner.as_mut() else { return Waited::Over };
            let Some(answer) = answer.get_mut() else { return Waited::Elsewhere };
            return match answer.next_within(until.saturating_duration_since(Instant::now())) {
                Err(_) => Waited::Late,
                Ok(None) => {
                    *inner = None;
                    Waited::Over
                }
                Ok(Some(Ok(Part::Started { .. } | Part::Token(_)))) => continue,
                Ok(Some(part)) => {
                    if matches!(part, Ok(Part::End(_)) | Err(_)) {
                        *inner = None;
                    }
                    Waited::Part(Box::new(part))
                }
            };
        }
    }
}

#[pymethods]
impl Answer {
    /// The next part, or None where nothing came within so many seconds.
    fn next_within(&self, py: Python<'_>, seconds: f64) -> PyResult<Option<Piece>> {
        let patience = Duration::try_from_secs_f64(seconds)
            .map_err(|error| fault::invalid(py, format!("seconds is {seconds}: {error}")))?;
        let part = match py.detach(|| self.wait(patience)) {
            Waited::Late => return Ok(None),
            Waited::Elsewhere => return Err(fault::forked(py)),
            Waited::Over => {
                return Err(fault::raised(py, Code::Cancelled, "the answer was stopped".to_owned()));
            }
            Waited::Part(part) => (*part).map_err(|error| fault::of(py, &error))?,
        };
        let piece = |kind, text| Piece { kind, text, end: None };
        Ok(Some(match part {
            Part::Text(text) => piece("text", text),
            Part::Thought(text) => piece("thought", text),
            Part::Call { name } => piece("call", name),
            Part::Arguments(text) => piece("arguments", text),
            Part::End(completion) => {
                let end = ended(completion).map_err(|error| fault::of(py, &error))?;
                Piece { kind: "end", text: String::new(), end: Some(end) }
            }
            Part::Started { .. } | Part::Token(_) => unreachable!("not told of"),
        }))
    }

    /// Stops it, if it is not over. Whoever waits for it is told within its patience.
    fn cancel(&self, py: Python<'_>) {
        if !self.home.is_here() {
            return;
        }
        py.detach(|| drop(self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}

/// As Python has it; an answer that was cut before its form was complete is an error, as everywhere.
fn ended(completion: Completion) -> Result<Ended, fornax::Error> {
    if completion.finish == Finish::Truncated {
        return Err(fornax::Error::OutputTruncated { tokens: completion.tokens.len() });
    }
    let likely = |&(token, logprob): &(u32, f32)| Likely { token, logprob };
    let opinions = completion.tokens.iter().zip(&completion.logprobs);
    let logprobs = opinions.map(|(&token, opinion)| Scored {
        token,
        logprob: opinion.logprob,
        top: opinion.top.iter().map(likely).collect(),
    });
    Ok(Ended {
        logprobs: logprobs.collect(),
        finish: completion.finish.name(),
        prompt_tokens: completion.prompt_tokens,
        cached_tokens: completion.cached_tokens,
        seed: completion.seed,
        first_token_seconds: completion.timings.first_token.as_secs_f64(),
        decode_seconds: completion.timings.decode.as_secs_f64(),
        calls: completion
            .calls
            .into_iter()
            .map(|call| Called {
                id: call.id,
                name: call.name,
                arguments: serde_json::Value::Object(call.arguments).to_string(),
            })
            .collect(),
        text: completion.text,
        thought: completion.thought,
        tokens: completion.tokens,
    })
}
