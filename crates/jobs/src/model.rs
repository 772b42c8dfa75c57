//! What a runner needs of whoever answers.

use std::{future::Future, sync::Arc};

use fornax_form::Schema;
use serde_json::{Value, json};

use crate::Failure;

/// A question: the body of a chat or of a text to continue, as the server's own routes take them.
#[derive(Clone, Debug)]
pub struct Question {
    /// What is asked.
    pub body: Body,
    /// What the answer must look like.
    pub schema: Option<Arc<Schema>>,
}

/// What is asked.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// `messages` and parameters.
    Chat(Value),
    /// `prompt` and parameters.
    Completion(Value),
}

/// A whole answer.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// What is said.
    pub text: String,
    /// What was thought before, where the model tells it apart.
    pub reasoning: String,
    /// The tools that it calls.
    pub calls: Vec<Call>,
    /// Why it ended.
    pub finish: Finish,
    /// Its tokens, with their log-probabilities where the schema has values to choose from.
    pub tokens: Vec<Token>,
    /// What it took.
    pub usage: Usage,
    /// How long it took.
    pub timings: Timings,
    /// Fixes its random numbers.
    pub seed: u64,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// What its result is given back under.
    pub id: String,
    /// The tool, as the model wrote it.
    pub name: String,
    /// The text of a JSON object, unless the answer was cut.
    pub arguments: String,
}

impl Call {
    /// As OpenAI's clients know it.
    pub(crate) fn to_json(&self) -> Value {
        let function = json!({"name": self.name, "arguments": self.arguments});
        json!({"id": self.id, "type": "function", "function": function})
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Finish {
    /// By itself.
    #[default]
    Stop,
    /// At the limit of tokens, and nothing was promised about its form.
    Length,
    /// At the limit of tokens, before its form was complete.
    Truncated,
}

/// A chosen token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Token {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Its log-probability; `None` where there was no choice.
    pub logprob: Option<f32>,
    /// The most likely tokens there.
    pub top: Vec<(Vec<u8>, f32)>,
}

/// Tokens of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt: usize,
    /// Of those, found computed.
    pub cached: usize,
    /// Chosen.
    pub completion: usize,
}

impl Usage {
    pub(crate) fn to_json(self) -> Value {
        json!({"prompt": self.prompt, "cached": self.cached, "completion": self.completion})
    }
}

/// Milliseconds of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// Until it was begun.
    pub queue: u64,
    /// Until its first token.
    pub prefill: u64,
    /// Until its last.
    pub decode: u64,
}

/// Answers questions: an engine, or a stand-in.
pub trait Model: Send + Sync + 'static {
    /// Its name and how its weights are stored.
    fn facts(&self) -> (String, String);

    /// Answers. Says text as it comes; dropping the future cancels.
    fn answer(
        &self,
        question: Question,
        hears: impl Fn(&str) + Send + Sync,
    ) -> impl Future<Output = Result<Answer, Failure>> + Send;

    /// The whole answer of one of the server's routes to a request's body; dropping the future cancels.
    fn respond(&self, route: &str, body: Value) -> impl Future<Output = Result<Value, Failure>> + Send;
}
