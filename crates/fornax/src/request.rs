//! What is asked of a model and what comes back.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use fornax_chat::{Call, Content, Message, Question, Role, Thinking, Tools};
use fornax_compute::Sampling;
use fornax_form::Form;

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

/// A prompt, how its tokens are chosen and when to stop.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to continue.
    pub prompt: Prompt,
    /// How tokens are chosen. The model's end tokens are added to its own unless [`Request::ignore_eos`].
    pub sampling: Sampling,
    /// Most tokens to generate; `None` is what is left of the context.
    pub max_tokens: Option<usize>,
    /// Generation stops before any of these texts.
    pub stop: Vec<String>,
    /// Goes on past the model's end tokens.
    pub ignore_eos: bool,
    /// Fixes the random numbers; drawn where absent.
    pub seed: Option<u64>,
    /// What the answer must look like.
    pub form: Option<Form>,
    /// How many answers, each with its own random numbers.
    pub choices: u32,
    /// Tell how likely every prompt token after the first was, each with so many of the most likely tokens. The prompt
    /// is then computed whole, and `max_tokens` may be 0.
    pub prompt_logprobs: Option<u32>,
    /// What the model may call in a chat. Calls are then told apart from what it says.
    pub tools: Option<Tools>,
    /// How much to think in a chat. With a budget thoughts are told apart from what it says.
    pub thinking: Thinking,
    /// Tell thoughts apart from what is said in a chat also where nothing else asks for it. Otherwise the text is all
    /// that the model wrote.
    pub parts: bool,
}

/// Stop strings of one request.
pub const STOPS_MAX: usize = 64;
/// Bytes of one stop string: what is held back of a stream while it may be one.
pub const STOP_BYTES_MAX: usize = 4096;

impl Request {
    /// One greedy answer to the end of the context.
    pub fn new(prompt: Prompt) -> Request {
        Request {
            prompt,
            sampling: Sampling::greedy(),
            max_tokens: None,
            stop: Vec::new(),
            ignore_eos: false,
            seed: None,
            form: None,
            choices: 1,
            prompt_logprobs: None,
            tools: None,
            thinking: Thinking::default(),
            parts: false,
        }
    }

    /// To continue a text.
    pub fn text(text: impl Into<String>) -> Request {
        Request::new(Prompt::Text { text: text.into(), special: false })
    }

    /// To answer a conversation.
    pub fn chat(messages: Vec<Message>) -> Request {
        Request::new(Prompt::Chat(messages))
    }

    /// What a chat asks; `None` where there is no conversation.
    pub(crate) fn question(&self) -> Option<Question> {
        let Prompt::Chat(messages) = &self.prompt else { return None };
        Some(Question {
            conversation: messages.clone().into(),
            tools: self.tools.clone(),
            thinking: self.thinking,
            form: self.form.clone().map(|form| ("a form", form)),
            ..Question::default()
        })
    }

    /// Whether the parts of a chat's answer are told apart.
    pub(crate) fn has_parts(&self) -> bool {
        self.parts || self.tools.is_some() || self.thinking.budget.is_some()
    }

    /// To continue token ids.
    pub fn tokens(tokens: Vec<u32>) -> Request {
        Request::new(Prompt::Tokens(tokens))
    }
}

/// A seed that nobody chose. It has 53 bits, so that it survives JSON readers that know only doubles.
pub(crate) fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 11
}

/// What a request yields.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The generated text, without control tokens and without the stop string that ended it. Where parts are told
    /// apart, what was said.
    pub text: String,
    /// What was thought before, where parts are told apart.
    pub thought: String,
    /// The tools that are called, in order. A call that was cut in its middle is none.
    pub calls: Vec<Call>,
    /// The generated ids, an end token that stopped the generation included.
    pub tokens: Vec<u32>,
    /// What the model thought of each of them, if [`Sampling::top_logprobs`] asks for it.
    pub logprobs: Vec<Opinion>,
    /// The same of the prompt's tokens from the second on, if [`Request::prompt_logprobs`] asks for it. The first
    /// choice has them.
    pub prompt_logprobs: Vec<(u32, Opinion)>,
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
    /// The answer as a message to go on with: results of its calls follow it ([`Message::result`]).
    pub fn message(&self) -> Message {
        let mut content = Vec::new();
        if !self.thought.is_empty() {
            content.push(Content::Thought(self.thought.clone()));
        }
        content.push(Content::Text(self.text.clone()));
        content.extend(self.calls.iter().cloned().map(Content::Call));
        Message::of(Role::Assistant, content)
    }

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

/// The log-probability of a token under the model, and those of the most likely ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Opinion {
    /// `None` for a token that the form forced: the model was not asked.
    pub logprob: Option<f32>,
    /// The most likely tokens, the most likely first.
    pub top: Vec<(u32, f32)>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end token, a stop string, or a form that is complete.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// The same, before the form was complete: what there is does not have it.
    Truncated,
}

impl Finish {
    /// The name that programs know it by.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length | Finish::Truncated => "length",
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
