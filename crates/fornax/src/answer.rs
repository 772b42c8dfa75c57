//! One choice of a request on its way out, with all that it came to.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fornax_chat::{Call, Failed, Finish as Ended, Piece, TokenScore, call_id};
use fornax_engine::{Failure, TimedOut};
use fornax_text::Delta;

use crate::{Completion, Error, Finish, Fornax, Opinion, Timings};

/// One choice as it is made: an iterator over its parts, the last of which is [`Part::End`] or an error. Dropping it
/// cancels the choice.
pub struct Answer {
    /// Tokens become text and parts there.
    inner: fornax_chat::Answer,
    /// Parts that are known and not yet taken.
    ready: VecDeque<Result<Part, Error>>,
    wants_logprobs: bool,
    started: Instant,
    completion: Completion,
    /// The text of each call's arguments: JSON once it is whole.
    arguments: Vec<String>,
    /// Keeps the engine: it stops when nobody holds the model.
    _model: Fornax,
}

/// What an answer is made of.
#[derive(Clone, Debug)]
pub enum Part {
    /// It has its turn.
    Started {
        /// Tokens of the prompt that were found in the cache.
        cached_tokens: usize,
        /// The seed that fixes its random numbers.
        seed: u64,
    },
    /// A token was chosen; the text that it completes follows, if it completes any.
    Token(u32),
    /// More text. Concatenated, these are [`Completion::text`].
    Text(String),
    /// More of what is thought, where parts are told apart. Concatenated, these are [`Completion::thought`].
    Thought(String),
    /// A tool is called; more of [`Part::Arguments`] follows.
    Call {
        /// The tool, as the model wrote it: it may be none of those it was given.
        name: String,
    },
    /// More of the arguments of the last call, which together are JSON unless the answer is cut.
    Arguments(String),
    /// Everything together.
    End(Completion),
}

impl Answer {
    pub(crate) fn new(
        model: Fornax,
        inner: fornax_chat::Answer,
        wants_logprobs: bool,
        started: Instant,
    ) -> Answer {
        let completion = Completion {
            text: String::new(),
            thought: String::new(),
            calls: Vec::new(),
            tokens: Vec::new(),
            logprobs: Vec::new(),
            prompt_logprobs: Vec::new(),
            finish: Finish::Stop,
            prompt_tokens: inner.prompt_tokens(),
            cached_tokens: 0,
            seed: 0,
            timings: Timings::default(),
        };
        let (ready, arguments) = (VecDeque::new(), Vec::new());
        Answer { inner, ready, wants_logprobs, started, completion, arguments, _model: model }
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.completion.prompt_tokens
    }

    /// The next part, waiting at most `patience`: for callers that must look up now and then.
    pub fn next_within(&mut self, patience: Duration) -> Result<Option<Result<Part, Error>>, TimedOut> {
        let until = Instant::now() + patience;
        loop {
            if let Some(part) = self.ready.pop_front() {
                return Ok(Some(part));
            }
            match self.inner.next_within(until.saturating_duration_since(Instant::now()))? {
                None => return Ok(None),
                Some(Ok(piece)) => self.take(piece),
                Some(Err(Failed::Engine(failure))) => self.ready.push_back(Err(failed(failure))),
                Some(Err(Failed::Refused(refusal))) => self.ready.push_back(Err(refusal.into())),
            }
        }
    }

    fn take(&mut self, piece: Piece) {
        match piece {
            Piece::Started { cached_tokens, seed, .. } => {
                (self.completion.cached_tokens, self.completion.seed) = (cached_tokens, seed);
                self.say(Part::Started { cached_tokens, seed });
            }
            Piece::Scored(TokenScore { token, logprob, top }) => {
                self.completion.prompt_logprobs.push((token, Opinion { logprob, top }));
            }
            Piece::Token(score) => self.token(score),
            Piece::Text { text, .. } => self.text(text),
            Piece::Said { deltas, .. } => deltas.into_iter().for_each(|delta| self.delta(delta)),
            Piece::Embedding(_) => unreachable!("answers are made of tokens"),
            Piece::End { finish, .. } => self.end(finish),
        }
    }

    fn say(&mut self, part: Part) {
        self.ready.push_back(Ok(part));
    }

    fn token(&mut self, TokenScore { token, logprob, top }: TokenScore) {
        let Completion { tokens, timings, logprobs, .. } = &mut self.completion;
        if self.wants_logprobs {
            logprobs.push(Opinion { logprob, top });
        }
        tokens.push(token);
        let elapsed = self.started.elapsed();
        if tokens.len() == 1 {
            timings.first_token = elapsed;
        }
        timings.decode = elapsed.saturating_sub(timings.first_token);
        self.say(Part::Token(token));
    }

    fn text(&mut self, text: String) {
        if !text.is_empty() {
            self.completion.text.push_str(&text);
            self.say(Part::Text(text));
        }
    }

    fn delta(&mut self, delta: Delta) {
        match delta {
            Delta::Content(text) => self.text(text),
            Delta::Reasoning(text) => {
                self.completion.thought.push_str(&text);
                self.say(Part::Thought(text));
            }
            Delta::Call { name, .. } => {
                let call =
                    Call { id: Some(call_id()), name: name.clone(), arguments: serde_json::Map::new() };
                self.completion.calls.push(call);
                self.arguments.push(String::new());
                self.say(Part::Call { name });
            }
            Delta::Arguments { index, text } => {
                self.arguments[index].push_str(&text);
                self.say(Part::Arguments(text));
            }
        }
    }

    fn end(&mut self, finish: Ended) {
        self.completion.finish = match finish {
            Ended::End | Ended::Stop(_) => Finish::Stop,
            Ended::Length => Finish::Length,
            Ended::Truncated => Finish::Truncated,
            Ended::Cancelled => return self.ready.push_back(Err(Error::Cancelled)),
        };
        let calls = std::mem::take(&mut self.completion.calls).into_iter().zip(&self.arguments);
        self.completion.calls = calls
            .filter_map(|(call, text)| Some(Call { arguments: Call::arguments_of(text)?, ..call }))
            .collect();
        self.say(Part::End(self.completion.clone()));
    }
}

impl Iterator for Answer {
    type Item = Result<Part, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            // A wait for ever would do; this one is already there.
            if let Ok(part) = self.next_within(Duration::from_secs(3600)) {
                return part;
            }
        }
    }
}

/// A failure of the engine in the facade's words.
pub(crate) fn failed(failure: Failure) -> Error {
    match failure {
        Failure::NumericFault { position } => Error::NumericFault { position },
        Failure::NothingAllowed { position } => Error::NothingAllowed { position },
        other => Error::Engine(other),
    }
}
