//! What the engine says about a choice.

use fornax_code::Code;

/// One event of a choice: `Started`, the prompt's log-probabilities if asked for, tokens or an embedding, then exactly
/// one `End` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It has a seat for the first time.
    Started {
        /// Prompt tokens that came from the prefix cache.
        cached_tokens: usize,
        /// Of those, the ones whose pages were kept elsewhere and brought back.
        restored_tokens: usize,
        /// Why no more of them did; `None` where every full page was found.
        miss: Option<Miss>,
        /// The seed that fixes this choice's random numbers.
        seed: u64,
    },
    /// A token of the prompt, the second and on, if asked for; the first choice of a request tells them.
    Scored {
        /// Its id.
        token: u32,
        /// Its log-probability after the tokens before it.
        logprob: f32,
        /// The most likely tokens there with their log-probabilities.
        top: Vec<(u32, f32)>,
    },
    /// A token was chosen.
    Token {
        /// Its id.
        token: u32,
        /// Its log-probability under the model, if asked for; `None` also for a token that the form forced.
        logprob: Option<f32>,
        /// The most likely tokens with their log-probabilities, if asked for.
        top: Vec<(u32, f32)>,
    },
    /// What the model makes of the whole prompt, if that is all that was asked for: what its head reads after the last
    /// token.
    Embedding(Vec<f32>),
    /// The answer is whole.
    End {
        /// Why nothing follows.
        reason: EndReason,
        /// What it took.
        usage: Usage,
    },
    /// There is no answer.
    Failed(Failure),
}

/// Why the prefix cache had no more of a prompt. Only prompts of the same salt and adapter are looked at: a tenant
/// learns nothing of another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// No earlier prompt went on behind what was found.
    New,
    /// The nearest earlier prompt has another token at this position.
    Differs {
        /// The position, from 0 on.
        at: usize,
    },
    /// An earlier prompt had the same tokens this far, and their pages were needed for others since.
    Evicted {
        /// So many tokens were known.
        known: usize,
    },
    /// The prompt's own log-probabilities were asked for: it is computed whole.
    Whole,
}

/// An embedding's direction: the same at length one. One of nothing but zeros has none and stays.
pub fn of_length_one(values: Vec<f32>) -> Vec<f32> {
    let length = values.iter().map(|&value| f64::from(value) * f64::from(value)).sum::<f64>().sqrt();
    if length == 0.0 {
        return values;
    }
    values.into_iter().map(|value| (f64::from(value) / length) as f32).collect()
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The model chose an end token.
    EndToken,
    /// The form is complete.
    FormComplete,
    /// `max_tokens` were chosen, or no token was asked for.
    Length,
    /// `max_tokens` were chosen before the form was complete: what there is does not have it.
    FormTruncated,
    /// The caller went away; nobody sees this but the stats.
    Cancelled,
}

/// Tokens of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of those, found in the prefix cache.
    pub cached_tokens: usize,
    /// Of those, brought back from where pages are kept beyond the device's memory.
    pub restored_tokens: usize,
    /// Tokens chosen, the end token included.
    pub generated_tokens: usize,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Failure {
    /// NaN or infinity in the logits.
    #[error("the logits after position {position} are not finite")]
    NumericFault {
        /// The position whose logits they were.
        position: usize,
    },
    /// Form, allowed and banned tokens together leave no token to choose.
    #[error("nothing may be chosen at position {position}")]
    NothingAllowed {
        /// The position that no token may take.
        position: usize,
    },
    /// The form's own limits were exceeded.
    #[error("the form could not be followed: {0}")]
    Form(String),
    /// The backend refused or failed the step.
    #[error("{0}")]
    Backend(String),
    /// Somebody who computes for the backend answered what cannot be right.
    #[error("{0}")]
    Integrity(String),
    /// The step panicked.
    #[error("the step panicked: {0}")]
    Panicked(String),
    /// The device is gone, and with it every request.
    #[error("{0}")]
    DeviceLost(String),
    /// The engine stopped before the answer was whole.
    #[error("the engine stopped")]
    EngineGone,
}

impl Failure {
    /// What programs know it by.
    pub fn code(&self) -> Code {
        match self {
            Failure::NumericFault { .. } => Code::NumericFault,
            Failure::NothingAllowed { .. } => Code::InvalidInput,
            // The form compiled, and following it took more than forms may take.
            Failure::Form(_) => Code::SchemaUnsupported,
            Failure::Backend(_) | Failure::Panicked(_) => Code::Internal,
            Failure::Integrity(_) => Code::IntegrityFailure,
            Failure::DeviceLost(_) => Code::DeviceLost,
            Failure::EngineGone => Code::Cancelled,
        }
    }
}

impl Event {
    /// Whether nothing may follow.
    pub fn is_last(&self) -> bool {
        matches!(self, Event::End { .. } | Event::Failed(_))
    }

    pub(crate) fn gone() -> Event {
        Event::Failed(Failure::EngineGone)
    }
}
