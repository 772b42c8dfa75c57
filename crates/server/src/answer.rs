//! Answers under way: tokens from the engine become text, watched for stop strings.

use std::{
    collections::VecDeque,
    sync::Arc,
    task::{Context, Poll, ready},
};

use fornax_compute::Sampling;
use fornax_engine::{EndReason, Event, Grammar, Handle, Reply, Request};
use fornax_text::{Delta, Detokenizer, Reader, Special, StopStrings, Tokenizer};

use crate::{error::ApiError, served::Served};

/// A prompt and everything asked about its continuation: checked, encoded and compiled.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_tokens: usize,
    /// Nothing follows the prompt: what the model makes of it is asked for.
    pub(crate) embeds: bool,
    /// Where the second of two texts begins, for a model that reads them together.
    pub(crate) second: Option<usize>,
    pub(crate) sampling: Sampling,
    pub(crate) seed: u64,
    pub(crate) grammar: Option<Grammar>,
    pub(crate) prompt_logprobs: Option<u32>,
    pub(crate) choices: u32,
    pub(crate) priority: i8,
    pub(crate) salt: String,
    pub(crate) stops: StopStrings,
    /// The answer is a text of its own, not the end of the prompt's last word.
    pub(crate) starts_text: bool,
    /// How the parts of the answer are told apart; without it, it is text.
    pub(crate) reading: Option<Reading>,
}

/// How an answer is read.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub(crate) reader: Reader,
    /// Control tokens that the reader looks for, ascending.
    pub(crate) shown: Arc<[u32]>,
    /// The answer ends with its first call.
    pub(crate) one_call: bool,
    /// How many tokens may be thought, and what then follows.
    pub(crate) budget: Option<(usize, Vec<u32>)>,
    /// By tool, what the arguments of a call must look like once the model makes one.
    pub(crate) strict: Arc<[(String, Grammar)]>,
    /// A call whose arguments are a form is being made.
    pub(crate) held: bool,
    /// Another call may follow one whose arguments were a form; otherwise that ends the answer.
    pub(crate) several: bool,
    /// The answer is calls of those tools and nothing else: it ends before whatever else would follow.
    pub(crate) only_calls: bool,
}

impl Reading {
    /// How many of these parts belong to the answer.
    fn wanted(&self, deltas: &[Delta]) -> usize {
        let stranger = |delta: &Delta| match delta {
            Delta::Reasoning(_) | Delta::Content(_) => true,
            Delta::Call { name, .. } => !self.strict.iter().any(|(tool, _)| tool == name),
            Delta::Arguments { .. } => false,
        };
        let end = if self.only_calls && !self.held { deltas.iter().position(stranger) } else { None };
        end.unwrap_or(deltas.len())
    }
}

impl Ask {
    /// As the engine takes it.
    pub(crate) fn request(&self) -> Request {
        let mut request = Request::new(self.prompt.clone(), self.max_tokens, self.sampling.clone());
        request.embeds = self.embeds;
        request.second = self.second;
        request.seed = self.seed;
        request.grammar = self.grammar.clone();
        request.prompt_logprobs = self.prompt_logprobs;
        request.choices = self.choices;
        request.priority = self.priority;
        request.salt = self.salt.as_str().into();
        request
    }
}

/// A part of one answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Piece {
    /// It has a seat; the prompt is being computed.
    Started { cached_tokens: usize, seed: u64 },
    /// How likely the next token of the prompt was, from its second on.
    Scored(TokenScore),
    /// More text, and the tokens that made it. The text may be empty where log-probabilities are asked for.
    Text { text: String, tokens: Vec<TokenScore> },
    /// The same of an answer whose parts are told apart.
    Said { deltas: Vec<Delta>, tokens: Vec<TokenScore> },
    /// What the model makes of the prompt.
    Embedding(Vec<f32>),
    /// It is whole.
    End { finish: Finish, usage: Counts },
    /// There will be no more.
    Failed(ApiError),
}

/// A chosen token and how likely it was.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenScore {
    pub(crate) token: u32,
    /// `None` for a token that the form forced.
    pub(crate) logprob: Option<f32>,
    pub(crate) top: Vec<(u32, f32)>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The model or the form ended it.
    End,
    /// A stop string, by its index.
    Stop(usize),
    /// The limit of tokens.
    Length,
    /// The limit of tokens, before the form was complete.
    Truncated,
    /// Somebody cancelled it.
    Cancelled,
}

/// Tokens of one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) prompt: usize,
    pub(crate) cached: usize,
    pub(crate) generated: usize,
    /// Of these, how many were thought.
    pub(crate) thought: usize,
}

/// All answers that were asked for together, as one sequence of pieces. Dropping it cancels what is not done.
pub(crate) struct Answers {
    answers: Vec<Answer>,
    /// Who is asked first, so that a talkative answer does not silence the others.
    turn: usize,
}

impl Answers {
    /// Hands the questions over. Choices are numbered through, prompt by prompt. All are accepted or none is.
    pub(crate) fn submit(served: &Served, adapter: Option<u32>, asks: Vec<Ask>) -> Result<Answers, ApiError> {
        let mut answers = Vec::new();
        for ask in asks {
            let make = |reply| Answer::new(reply, served, adapter, &ask);
            // An early return drops the answers before, which cancels them.
            let request = Request { adapter, ..ask.request() };
            answers.extend(served.engine.submit(request)?.into_iter().map(make));
        }
        Ok(Answers { answers, turn: 0 })
    }

    /// Lets go of all that is not done.
    pub(crate) fn cancel(&mut self) {
        self.answers.clear();
    }

    /// The next piece of any answer and whose it is; `None` when all have ended.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Piece)>> {
        let count = self.answers.len();
        let mut open = false;
        for offset in 0..count {
            let index = (self.turn + offset) % count;
            match self.answers[index].poll_next(context) {
                Poll::Ready(Some(piece)) => {
                    self.turn = index + 1;
                    return Poll::Ready(Some((index, piece)));
                }
                Poll::Ready(None) => {}
                Poll::Pending => open = true,
            }
        }
        if open { Poll::Pending } else { Poll::Ready(None) }
    }
}

/// One answer.
struct Answer {
    /// `None` once nothing more is wanted of the engine.
    reply: Option<Reply>,
    detokenizer: Option<Detokenizer<Arc<Tokenizer>>>,
    stops: Option<StopStrings>,
    end_tokens: Vec<u32>,
    min_tokens: usize,
    wants_scores: bool,
    counts: Counts,
    /// Tokens whose text has not been given out.
    scores: Vec<TokenScore>,
    reading: Option<Reading>,
    /// Where it may have to be asked for anew in its middle.
    onward: Option<Box<Onward>>,
    /// Made, but not asked for yet: the end comes after the text that it released.
    ready: VecDeque<Piece>,
}

/// An answer so far, and the way back into the engine.
struct Onward {
    engine: Handle,
    tokenizer: Arc<Tokenizer>,
    /// Its prompt grows by what is generated; its limit stays that of the whole answer.
    request: Request,
}

impl Onward {
    /// Asks for what follows the answer so far and these tokens, of which `generated` are the answer's.
    fn go_on(
        &self,
        tokens: &[u32],
        generated: usize,
        grammar: Option<Grammar>,
    ) -> Option<Result<Reply, ApiError>> {
        let mut request = self.request.clone();
        request.max_tokens = request.max_tokens.checked_sub(generated).filter(|&left| left > 0)?;
        request.prompt.extend(tokens);
        request.grammar = grammar.or(request.grammar);
        let submitted = self.engine.submit(request).map_err(ApiError::from);
        Some(submitted.map(|mut replies| replies.pop().expect("one answer was asked for")))
    }
}

impl Answer {
    fn new(reply: Reply, served: &Served, adapter: Option<u32>, ask: &Ask) -> Answer {
        let tokenizer = Arc::clone(&served.tokenizer);
        let shown = ask.reading.as_ref().map_or_else(Arc::default, |reading| Arc::clone(&reading.shown));
        let may_go_on =
            |reading: &Reading| reading.budget.is_some() || reading.several || !reading.strict.is_empty();
        let onward = ask.reading.as_ref().is_some_and(may_go_on).then(|| {
            let request = Request { choices: 1, prompt_logprobs: None, adapter, ..ask.request() };
            Box::new(Onward { engine: served.engine.clone(), tokenizer: Arc::clone(&tokenizer), request })
        });
        let detokenizer =
            if ask.starts_text { Detokenizer::new(tokenizer) } else { Detokenizer::continuing(tokenizer) };
        Answer {
            reply: Some(reply),
            detokenizer: Some(detokenizer.showing(shown)),
            stops: Some(ask.stops.clone()),
            reading: ask.reading.clone(),
            onward,
            end_tokens: ask.sampling.end_tokens.clone(),
            min_tokens: ask.sampling.min_tokens as usize,
            wants_scores: ask.sampling.top_logprobs.is_some(),
            counts: Counts { prompt: ask.prompt.len(), ..Counts::default() },
            scores: Vec::new(),
            ready: VecDeque::new(),
        }
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Piece>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Poll::Ready(Some(piece));
            }
            let Some(reply) = &mut self.reply else { return Poll::Ready(None) };
            match ready!(reply.poll_next(context)) {
                Some(event) => self.take(event),
                None => self.reply = None,
            }
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            // An answer that goes on has started before.
            Event::Started { .. } if self.counts.generated > 0 => {}
            Event::Started { cached_tokens, seed } => {
                self.counts.cached = cached_tokens;
                if let Some(onward) = &mut self.onward {
                    // Its own, whichever choice it is.
                    onward.request.seed = seed;
                }
                self.ready.push_back(Piece::Started { cached_tokens, seed });
            }
            Event::Scored { token, logprob, top } => {
                self.ready.push_back(Piece::Scored(TokenScore { token, logprob: Some(logprob), top }));
            }
            Event::Token { token, logprob, top } => self.take_token(TokenScore { token, logprob, top }),
            Event::Embedding(values) => self.ready.push_back(Piece::Embedding(values)),
            Event::End { reason: EndReason::FormComplete, .. } if self.call_again() => {}
            Event::End { reason, .. } => self.take_end(match reason {
                EndReason::EndToken | EndReason::FormComplete => Finish::End,
                EndReason::Length => Finish::Length,
                EndReason::FormTruncated => Finish::Truncated,
                EndReason::Cancelled => Finish::Cancelled,
            }),
            Event::Failed(failure) => {
                self.reply = None;
                self.ready.push_back(Piece::Failed(failure.into()));
            }
        }
    }

    fn take_token(&mut self, score: TokenScore) {
        self.counts.generated += 1;
        let Some(detokenizer) = &mut self.detokenizer else { return };
        // An end token is no text, whatever its bytes are.
        if self.end_tokens.contains(&score.token) {
            return;
        }
        let mut text = detokenizer.push(score.token);
        if self.constrain(&text) {
            return;
        }
        let Some(stops) = &mut self.stops else { return };
        if let Some(onward) = &mut self.onward {
            onward.request.prompt.push(score.token);
        }
        self.scores.push(score);
        let mut stop = None;
        // Before `min_tokens` nothing may end the answer, stop strings included.
        if self.counts.generated >= self.min_tokens {
            let released = stops.push(&text);
            (text, stop) = (released.text, released.stop);
        }
        if !self.give(text) {
            return self.end(Finish::End);
        }
        if let Some(index) = stop {
            return self.end(Finish::Stop(index));
        }
        let Some(reading) = &self.reading else { return };
        if reading.one_call && reading.reader.calls_complete() > 0 {
            return self.end(Finish::End);
        }
        if reading.reader.is_thinking() {
            self.counts.thought += 1;
            if reading.budget.as_ref().is_some_and(|(most, _)| self.counts.thought >= *most) {
                self.stop_thinking();
            }
        }
    }

    /// Has thought enough: what ends thinking is written for it, and it goes on behind that.
    fn stop_thinking(&mut self) {
        let stop = self.reading.as_mut().and_then(|reading| reading.budget.take());
        let (Some((_, stop)), Some(onward)) = (stop, &self.onward) else { return };
        let generated = self.counts.generated + stop.len();
        // Where the limit of tokens is as near, it ends there, in the middle of its thoughts.
        let Some(submitted) = onward.go_on(&stop, generated, None) else { return };
        if !self.continue_as(submitted) {
            return;
        }
        let thought = self.counts.thought;
        for token in stop {
            self.take_token(TokenScore { token, logprob: None, top: Vec::new() });
        }
        // What ends thinking was not thought.
        self.counts.thought = thought;
    }

    /// Whether the arguments of a strict call begin in this text of the last token. They are then asked for anew, as a
    /// form, behind what stands before them.
    fn constrain(&mut self, text: &str) -> bool {
        let (Some(reading), Some(onward)) = (&self.reading, &self.onward) else { return false };
        if reading.strict.is_empty() || reading.held || text.is_empty() {
            return false;
        }
        let mut probe = reading.reader.clone();
        let begins = |deltas: &[Delta]| {
            deltas.iter().any(|delta| matches!(delta, Delta::Arguments { text, .. } if text.starts_with('{')))
        };
        if !begins(&probe.push(text)) {
            return false;
        }
        let mut reader = reading.reader.clone();
        let mut deltas = Vec::new();
        for (at, c) in text.char_indices() {
            let before = reader.clone();
            let more = reader.push(c.encode_utf8(&mut [0; 4]));
            if !begins(&more) {
                deltas.extend(more);
                continue;
            }
            let strict = reading.strict.iter().find(|(name, _)| reader.called() == Some(name));
            let Some((_, grammar)) = strict else { return false };
            // In tags the brace is not the model's: what it wrote up to here stays.
            let (mut reader, front) = match c {
                '{' => (before, &text[..at]),
                _ => (reader, &text[..at + c.len_utf8()]),
            };
            deltas.extend(more.into_iter().filter(|delta| matches!(delta, Delta::Call { .. })));
            let Ok(front) = onward.tokenizer.encode(front, Special::AsText) else { return false };
            // A limit that is reached here cuts the call, as any answer.
            let Some(submitted) = onward.go_on(&front, self.counts.generated, Some(grammar.clone())) else {
                return false;
            };
            reader.expect_arguments();
            self.detokenizer = Some(Detokenizer::continuing(Arc::clone(&onward.tokenizer)));
            if let Some(reading) = &mut self.reading {
                (reading.reader, reading.held) = (reader, true);
            }
            self.continue_as(submitted);
            let tokens = std::mem::take(&mut self.scores);
            self.ready.push_back(Piece::Said { deltas, tokens });
            return true;
        }
        false
    }

    /// The arguments of a call are complete. Where others may follow, the call is closed as the model would, and the answer
    /// goes on behind it; whether it does.
    fn call_again(&mut self) -> bool {
        if !self.reading.as_ref().is_some_and(|reading| reading.held && reading.several) {
            return false;
        }
        let held = self.detokenizer.take().map_or_else(String::new, Detokenizer::finish);
        self.give(held);
        let (Some(reading), Some(onward)) = (&mut self.reading, &mut self.onward) else { return false };
        let Some(rest) = reading.reader.call_ended() else { return false };
        let Ok(rest) = onward.tokenizer.encode(rest, Special::AsText) else { return false };
        // What was demanded was this call.
        onward.request.grammar = None;
        let generated = self.counts.generated + rest.len();
        let Some(submitted) = onward.go_on(&rest, generated, None) else { return false };
        onward.request.prompt.extend(&rest);
        let detokenizer = Detokenizer::continuing(Arc::clone(&onward.tokenizer));
        self.detokenizer = Some(detokenizer.showing(Arc::clone(&reading.shown)));
        reading.held = false;
        self.counts.generated = generated;
        self.scores.extend(rest.into_iter().map(|token| TokenScore {
            token,
            logprob: None,
            top: Vec::new(),
        }));
        self.continue_as(submitted);
        true
    }

    /// Goes on with another reply; whether there is one. Dropping the one before lets go of the answer so far, whose pages
    /// are found again as a prefix.
    fn continue_as(&mut self, submitted: Result<Reply, ApiError>) -> bool {
        match submitted {
            Ok(reply) => self.reply = Some(reply),
            Err(error) => {
                self.reply = None;
                self.ready.push_back(Piece::Failed(error));
            }
        }
        self.reply.is_some()
    }

    /// Nothing more is wanted. Dropping the reply tells the engine.
    fn end(&mut self, finish: Finish) {
        self.reply = None;
        self.give_held();
        self.ready.push_back(Piece::End { finish, usage: self.counts });
    }

    fn take_end(&mut self, finish: Finish) {
        self.reply = None;
        let Some(mut stops) = self.stops.take() else { return };
        let held = self.detokenizer.take().map_or_else(String::new, Detokenizer::finish);
        let released = stops.push(&held);
        let finish = released.stop.map_or(finish, Finish::Stop);
        let held = if released.stop.is_none() { stops.finish() } else { String::new() };
        self.give(released.text + &held);
        self.give_held();
        self.ready.push_back(Piece::End { finish, usage: self.counts });
    }

    /// Gives text out; whether the answer goes on behind it.
    fn give(&mut self, text: String) -> bool {
        let scored = self.wants_scores && !self.scores.is_empty();
        let mut goes_on = true;
        let piece = match &mut self.reading {
            None if text.is_empty() && !scored => return true,
            None => Piece::Text { text, tokens: std::mem::take(&mut self.scores) },
            Some(reading) => {
                let mut deltas = reading.reader.push(&text);
                let wanted = reading.wanted(&deltas);
                goes_on = wanted == deltas.len();
                deltas.truncate(wanted);
                if !goes_on {
                    // What the reader holds belongs to what follows, too.
                    self.reading = None;
                }
                if deltas.is_empty() && !scored {
                    return goes_on;
                }
                Piece::Said { deltas, tokens: std::mem::take(&mut self.scores) }
            }
        };
        self.ready.push_back(piece);
        goes_on
    }

    /// What the reader was not sure of.
    fn give_held(&mut self) {
        let mut deltas = self.reading.as_mut().map_or_else(Vec::new, |reading| reading.reader.finish());
        deltas.truncate(self.reading.as_ref().map_or(0, |reading| reading.wanted(&deltas)));
        if !deltas.is_empty() {
            self.ready.push_back(Piece::Said { deltas, tokens: Vec::new() });
        }
    }
}
