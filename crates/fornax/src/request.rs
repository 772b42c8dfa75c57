//! What is asked of a model and what comes back.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks, in the template's words: `system`, `user`, `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A turn of anyone.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into() }
    }

    /// A turn of the user.
    pub fn user(content: impl Into<String>) -> Message {
        Message::new("user", content)
    }

    /// A turn of the model.
    pub fn assistant(content: impl Into<String>) -> Message {
        Message::new("assistant", content)
    }

    /// What the model is told beforehand.
    pub fn system(content: impl Into<String>) -> Message {
        Message::new("system", content)
    }
}

/// What to continue.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// A text as it is, with the tokenizer's BOS token in front where the model wants one.
    Text {
        /// The text.
        text: String,
        /// Whether control tokens written in the text count as such. Never set this for text from outside.
        special: bool,
    },
    /// Token ids as they are: nothing is added.
    Tokens(Vec<u32>),
    /// A conversation, rendered with the chat template. Its content never becomes control tokens.
    Chat(Vec<Message>),
}

/// How tokens are chosen and when to stop. The default is greedy, to the end of the context.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Most tokens to generate; `None` is what is left of the context.
    pub max_tokens: Option<usize>,
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop what is less likely than this share of the most likely; 0 keeps all.
    pub min_p: f32,
    /// Fixes the random numbers; drawn where absent.
    pub seed: Option<u64>,
    /// Generation stops before any of these texts.
    pub stop: Vec<String>,
    /// Goes on past end tokens.
    pub ignore_eos: bool,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            max_tokens: None,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: None,
            stop: Vec::new(),
            ignore_eos: false,
        }
    }
}

/// A seed that nobody chose. It has 53 bits, so that it survives JSON readers that know only doubles.
pub(crate) fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 11
}

/// What a request yields.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The generated text, without control tokens and without the stop string that ended it.
    pub text: String,
    /// The generated ids, an end token that stopped the generation included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// How many of them were still in the cache from an earlier request.
    pub cached_tokens: usize,
    /// The seed that was used.
    pub seed: u64,
    /// How long it took.
    pub timings: Timings,
}

impl Completion {
    /// Tokens of the prompt that were computed per second, up to the first token of the answer.
    pub fn prompt_tokens_per_second(&self) -> f64 {
        let computed = self.prompt_tokens - self.cached_tokens;
        computed as f64 / self.timings.first_token.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// Tokens per second after the first; `None` where there was only one.
    pub fn decode_tokens_per_second(&self) -> Option<f64> {
        let more = self.tokens.len().checked_sub(1).filter(|&more| more > 0)?;
        Some(more as f64 / self.timings.decode.as_secs_f64().max(f64::MIN_POSITIVE))
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end token or a stop string.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
}

impl Finish {
    /// The name that programs know it by.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
        }
    }
}

/// Where the time of a request went.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timings {
    /// From the request to its first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// What is reported while a request runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// So many tokens of the prompt are computed.
    Prompt {
        /// So far.
        computed: usize,
        /// In all.
        total: usize,
    },
    /// More text. Concatenated, these are [`Completion::text`].
    Text(&'a str),
}
