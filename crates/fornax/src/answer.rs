//! One choice of a request on its way out: tokens become text on the caller's side.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fornax_engine::{EndReason, Event, Failure, Reply, TimedOut};
use fornax_text::{Detokenizer, StopStrings, Tokenizer};

use crate::{Completion, Error, Finish, Fornax, Opinion, Timings};

/// One choice as it is made: an iterator over its parts, the last of which is [`Part::End`] or an error. Dropping it
/// cancels the choice.
pub struct Answer {
    /// Gone once nothing more is wanted of the engine.
    reply: Option<Reply>,
    /// Parts that are known and not yet taken.
    ready: VecDeque<Result<Part, Error>>,
    detokenizer: Option<Detokenizer<Arc<Tokenizer>>>,
    stops: StopStrings,
    /// What ends the answer without being part of its text.
    end_tokens: Vec<u32>,
    wants_logprobs: bool,
    started: Instant,
    completion: Completion,
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
    /// Everything together.
    End(Completion),
}

/// What an answer is made with.
pub(crate) struct AnswerParts {
    pub(crate) model: Fornax,
    pub(crate) reply: Reply,
    pub(crate) detokenizer: Option<Detokenizer<Arc<Tokenizer>>>,
    pub(crate) stops: StopStrings,
    pub(crate) end_tokens: Vec<u32>,
    pub(crate) wants_logprobs: bool,
    pub(crate) prompt_tokens: usize,
    pub(crate) seed: u64,
    pub(crate) started: Instant,
}

impl Answer {
    pub(crate) fn new(parts: AnswerParts) -> Answer {
        Answer {
            reply: Some(parts.reply),
            ready: VecDeque::new(),
            detokenizer: parts.detokenizer,
            stops: parts.stops,
            end_tokens: parts.end_tokens,
            wants_logprobs: parts.wants_logprobs,
            started: parts.started,
            completion: Completion {
                text: String::new(),
                tokens: Vec::new(),
                logprobs: Vec::new(),
                prompt_logprobs: Vec::new(),
                finish: Finish::Stop,
                prompt_tokens: parts.prompt_tokens,
                cached_tokens: 0,
                seed: parts.seed,
                timings: Timings::default(),
            },
            _model: parts.model,
        }
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
            let Some(reply) = &mut self.reply else { return Ok(None) };
            match reply.recv_timeout(until.saturating_duration_since(Instant::now()))? {
                Some(event) => self.take(event),
                None => self.reply = None,
            }
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Started { cached_tokens, seed } => {
                (self.completion.cached_tokens, self.completion.seed) = (cached_tokens, seed);
                self.ready.push_back(Ok(Part::Started { cached_tokens, seed }));
            }
            Event::Scored { token, logprob, top } => {
                let opinion = Opinion { logprob: Some(logprob), top };
                self.completion.prompt_logprobs.push((token, opinion));
            }
            Event::Token { token, logprob, top } => {
                if self.wants_logprobs {
                    self.completion.logprobs.push(Opinion { logprob, top });
                }
                self.token(token);
            }
            Event::Embedding(_) => unreachable!("answers are made of tokens"),
            Event::End { reason: EndReason::Cancelled, .. } => self.fail(Error::Cancelled),
            Event::End { reason, .. } => self.end(match reason {
                EndReason::Length => Finish::Length,
                EndReason::FormTruncated => Finish::Truncated,
                _ => Finish::Stop,
            }),
            Event::Failed(failure) => self.fail(failed(failure)),
        }
    }

    fn token(&mut self, token: u32) {
        let Completion { tokens, timings, .. } = &mut self.completion;
        tokens.push(token);
        let elapsed = self.started.elapsed();
        if tokens.len() == 1 {
            timings.first_token = elapsed;
        }
        timings.decode = elapsed.saturating_sub(timings.first_token);
        self.ready.push_back(Ok(Part::Token(token)));
        if self.end_tokens.contains(&token) {
            return;
        }
        let piece = self.detokenizer.as_mut().map(|detokenizer| detokenizer.push(token)).unwrap_or_default();
        let released = self.stops.push(&piece);
        self.text(released.text);
        if released.stop.is_some() {
            // What was held of an unfinished character lies behind the stop.
            self.detokenizer = None;
            self.end(Finish::Stop);
        }
    }

    fn text(&mut self, text: String) {
        if !text.is_empty() {
            self.completion.text.push_str(&text);
            self.ready.push_back(Ok(Part::Text(text)));
        }
    }

    /// Releases what was held back; the engine need not go on.
    fn end(&mut self, finish: Finish) {
        self.reply = None;
        let held = self.detokenizer.take().map(Detokenizer::finish).unwrap_or_default();
        let mut rest = self.stops.push(&held).text;
        rest.push_str(&std::mem::replace(&mut self.stops, no_stops()).finish());
        self.text(rest);
        self.completion.finish = finish;
        self.ready.push_back(Ok(Part::End(self.completion.clone())));
    }

    fn fail(&mut self, error: Error) {
        self.reply = None;
        self.ready.push_back(Err(error));
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

fn no_stops() -> StopStrings {
    StopStrings::new(std::iter::empty::<String>()).expect("no stop string is empty where there is none")
}

/// A failure of the engine in the facade's words.
pub(crate) fn failed(failure: Failure) -> Error {
    match failure {
        Failure::NumericFault { position } => Error::NumericFault { position },
        Failure::NothingAllowed { position } => Error::NothingAllowed { position },
        other => Error::Engine(other),
    }
}
