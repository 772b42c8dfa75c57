//! Answers under way: tokens from the engine become text, watched for stop strings.

use std::{
    collections::VecDeque,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use fornax_engine::{EndReason, Event, Failure, Grammar, Handle, Miss, Refusal, Reply, TimedOut};
use fornax_text::{Delta, Detokenizer, Reader, Special, StopStrings, Tokenizer};

use crate::{Ask, Reading, onward::Onward};

/// A part of one answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// It has a seat; the prompt is being computed.
    Started {
        /// Tokens of the prompt that were found computed.
        cached_tokens: usize,
        /// Why no more were.
        miss: Option<Miss>,
        /// Fixes its random numbers.
        seed: u64,
    },
    /// How likely the next token of the prompt was, from its second on.
    Scored(TokenScore),
    /// A token of the answer, the one that ends it included, where [`Ask::tells_tokens`]. What it says follows.
    Token(TokenScore),
    /// More text. It may be empty where log-probabilities are asked for.
    Text {
        /// What it says.
        text: String,
        /// The tokens that made it.
        tokens: Vec<TokenScore>,
    },
    /// The same of an answer whose parts are told apart.
    Said {
        /// Its parts.
        deltas: Vec<Delta>,
        /// The tokens that made them.
        tokens: Vec<TokenScore>,
    },
    /// What the model makes of the prompt.
    Embedding(Vec<f32>),
    /// It is whole.
    End {
        /// Why it ended.
        finish: Finish,
        /// Its tokens.
        usage: Counts,
    },
}

/// Why there will be no more of an answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Failed {
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] Failure),
    /// It refused to go on with an answer in its middle.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// A chosen token and how likely it was.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScore {
    /// Its id.
    pub token: u32,
    /// `None` for a token that the form forced.
    pub logprob: Option<f32>,
    /// The most likely tokens there, the most likely first.
    pub top: Vec<(u32, f32)>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model or the form ended it.
    End,
    /// A stop string, by its index.
    Stop(usize),
    /// The same, before a form or a call was complete.
    Cut(usize),
    /// The limit of tokens.
    Length,
    /// The limit of tokens, before the form was complete.
    Truncated,
    /// Somebody cancelled it.
    Cancelled,
}

/// Tokens of one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Of the prompt.
    pub prompt: usize,
    /// Of these, how many were found computed.
    pub cached: usize,
    /// Of those, brought back from a disk.
    pub restored: usize,
    /// Why no more were; `None` where all were that can be.
    pub miss: Option<Miss>,
    /// Of the answer.
    pub generated: usize,
    /// Of these, how many were thought.
    pub thought: usize,
}

/// All answers that were asked for together, as one sequence of pieces. Dropping it cancels what is not done.
pub struct Answers {
    answers: Vec<Answer>,
    /// Who is asked first, so that a talkative answer does not silence the others.
    turn: usize,
}

impl Answers {
    /// Hands the questions over. Choices are numbered through, prompt by prompt. All are accepted or none is.
    pub fn submit(engine: &Handle, tokenizer: &Arc<Tokenizer>, asks: Vec<Ask>) -> Result<Answers, Refusal> {
        let mut answers = Vec::new();
        for ask in asks {
            // An early return drops the answers before, which cancels them.
            answers.extend(Answer::submit(engine, Some(tokenizer), ask)?);
        }
        Ok(Answers { answers, turn: 0 })
    }

    /// Lets go of all that is not done.
    pub fn cancel(&mut self) {
        self.answers.clear();
    }

    /// The next piece of any answer and whose it is; `None` when all have ended.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Result<Piece, Failed>)>> {
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

/// One answer. Dropping it cancels it.
pub struct Answer {
    /// `None` once nothing more is wanted of the engine.
    reply: Option<Reply>,
    detokenizer: Option<Detokenizer<Arc<Tokenizer>>>,
    stops: Option<StopStrings>,
    end_tokens: Vec<u32>,
    min_tokens: usize,
    wants_scores: bool,
    counts: Counts,
    /// It was said that it has.
    started: bool,
    /// What comes now is held to a form.
    formed: bool,
    /// Bytes of text that came, whether they were released or not.
    written: usize,
    /// Where the last decided part of the text ends, as long as what is said may have to be of a form.
    settled: Option<usize>,
    /// Tokens whose text has not been given out.
    scores: Vec<TokenScore>,
    reading: Option<Reading>,
    /// Where it may have to be asked for anew in its middle.
    onward: Option<Box<Onward>>,
    tells_tokens: bool,
    /// Made, but not asked for yet: the end comes after the text that it released.
    ready: VecDeque<Result<Piece, Failed>>,
}

impl Answer {
    /// Hands a question over: one answer for each choice, in the order of their numbers. A model without a tokenizer
    /// says nothing, but tells its tokens.
    pub fn submit(
        engine: &Handle,
        tokenizer: Option<&Arc<Tokenizer>>,
        ask: Ask,
    ) -> Result<Vec<Answer>, Refusal> {
        let replies = engine.submit(ask.request.clone())?;
        Ok(replies.into_iter().map(|reply| Answer::new(reply, engine, tokenizer, &ask)).collect())
    }

    fn new(reply: Reply, engine: &Handle, tokenizer: Option<&Arc<Tokenizer>>, ask: &Ask) -> Answer {
        let Ask { request, stops, starts_text, reading, tells_tokens, held: _ } = ask;
        let shown = reading.as_ref().map_or_else(Arc::default, |reading| Arc::clone(&reading.shown));
        let may_go_on = reading.as_ref().is_some_and(Reading::may_go_on);
        let onward = tokenizer
            .filter(|_| may_go_on)
            .map(|tokenizer| Box::new(Onward::new(engine, tokenizer, request, stops)));
        let detokenizer = tokenizer.map(|tokenizer| match starts_text {
            true => Detokenizer::new(Arc::clone(tokenizer)),
            false => Detokenizer::continuing(Arc::clone(tokenizer)),
        });
        Answer {
            reply: Some(reply),
            detokenizer: detokenizer.map(|detokenizer| detokenizer.showing(shown)),
            stops: Some(stops.clone()),
            reading: reading.clone(),
            onward,
            end_tokens: request.sampling.end_tokens.clone(),
            min_tokens: request.sampling.min_tokens as usize,
            wants_scores: request.sampling.top_logprobs.is_some(),
            counts: Counts { prompt: request.prompt.len(), ..Counts::default() },
            started: false,
            formed: request.grammar.is_some(),
            written: 0,
            settled: None,
            scores: Vec::new(),
            tells_tokens: *tells_tokens,
            ready: VecDeque::new(),
        }
    }

    /// The next piece; `None` when it has ended.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Piece, Failed>>> {
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

    /// The same for a thread, which waits at most `patience`.
    pub fn next_within(&mut self, patience: Duration) -> Result<Option<Result<Piece, Failed>>, TimedOut> {
        let until = Instant::now() + patience;
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Ok(Some(piece));
            }
            let Some(reply) = &mut self.reply else { return Ok(None) };
            match reply.recv_timeout(until.saturating_duration_since(Instant::now()))? {
                Some(event) => self.take(event),
                None => self.reply = None,
            }
        }
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.counts.prompt
    }

    fn say(&mut self, piece: Piece) {
        self.ready.push_back(Ok(piece));
    }

    fn take(&mut self, event: Event) {
        match event {
            // An answer that goes on has started before.
            Event::Started { .. } if self.started => {}
            Event::Started { cached_tokens, restored_tokens, miss, seed } => {
                self.started = true;
                (self.counts.cached, self.counts.restored) = (cached_tokens, restored_tokens);
                self.counts.miss = miss;
                if let Some(onward) = &mut self.onward {
                    onward.seed(seed);
                }
                self.say(Piece::Started { cached_tokens, miss, seed });
            }
            Event::Scored { token, logprob, top } => {
                self.say(Piece::Scored(TokenScore { token, logprob: Some(logprob), top }));
            }
            Event::Token { token, logprob, top } => self.take_token(TokenScore { token, logprob, top }),
            Event::Embedding(values) => self.say(Piece::Embedding(values)),
            Event::End { reason: EndReason::FormComplete, .. } if self.call_again() => {}
            Event::End { reason: EndReason::EndToken, .. } if self.say_by_form() => {}
            Event::End { reason, .. } => self.take_end(match reason {
                EndReason::EndToken | EndReason::FormComplete => Finish::End,
                EndReason::Length => Finish::Length,
                EndReason::FormTruncated => Finish::Truncated,
                EndReason::Cancelled => Finish::Cancelled,
            }),
            Event::Failed(failure) => {
                self.reply = None;
                self.ready.push_back(Err(failure.into()));
            }
        }
    }

    fn take_token(&mut self, score: TokenScore) {
        self.counts.generated += 1;
        if self.tells_tokens {
            self.say(Piece::Token(score.clone()));
        }
        let Some(detokenizer) = &mut self.detokenizer else { return };
        // An end token is no text, whatever its bytes are.
        if self.end_tokens.contains(&score.token) {
            return;
        }
        let mut text = detokenizer.push(score.token);
        self.written += text.len();
        if let Some(onward) = &mut self.onward {
            onward.push(score.token, &text);
        }
        self.scores.push(score);
        let Some(stops) = &mut self.stops else { return };
        let mut stop = None;
        // Before `min_tokens` nothing may end the answer, stop strings included.
        if self.counts.generated >= self.min_tokens {
            let released = stops.push(&text);
            (text, stop) = (released.text, released.stop);
        }
        // What a stop string ends is not asked for anew.
        if stop.is_none() && (self.constrain(&text) || self.begins_to_say(&text)) {
            return;
        }
        let stopped = stop.map(|index| self.stopped(index));
        if !self.give(text) || stopped.is_some() {
            return self.end(stopped.unwrap_or(Finish::End));
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
        let Some(reading) = self.reading.as_ref().filter(|_| self.onward.is_some()) else { return false };
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
            let (mut reader, kept) = match c {
                '{' => (before, at),
                _ => (reader, at + c.len_utf8()),
            };
            deltas.extend(more.into_iter().filter(|delta| matches!(delta, Delta::Call { .. })));
            let grammar = grammar.clone();
            reader.expect_arguments();
            // A limit that is reached here cuts the call, as any answer.
            let held = self.stops.as_ref().map_or(0, StopStrings::held);
            if !self.ask_anew(text.len() - kept + held, &[], grammar) {
                return false;
            }
            if let Some(reading) = &mut self.reading {
                (reading.reader, reading.held) = (reader, true);
            }
            let tokens = std::mem::take(&mut self.scores);
            self.say(Piece::Said { deltas, tokens });
            return true;
        }
        false
    }

    /// Whether in this text the model begins to say something, rather than to call, where what it says has a form. It
    /// is then asked for anew as that. Behind a call it says nothing more: the answer ends.
    fn begins_to_say(&mut self, text: &str) -> bool {
        let Some(reading) = self.reading.as_ref().filter(|reading| reading.said.is_some()) else {
            return false;
        };
        let mut reader = reading.reader.clone();
        let start = self.written - self.stops.as_ref().map_or(0, StopStrings::held) - text.len();
        for (at, c) in text.char_indices() {
            if reader.is_settled() {
                self.settled = Some(start + at);
            }
            let deltas = reader.push(c.encode_utf8(&mut [0; 4]));
            if !deltas.iter().any(|delta| matches!(delta, Delta::Content(_))) {
                continue;
            }
            let has_called = reader.calls() > 0;
            let decided = match self.settled {
                Some(settled) if !has_called => settled.saturating_sub(start),
                _ => at,
            };
            self.give(text[..decided].to_owned());
            if has_called {
                self.end(Finish::End);
                return true;
            }
            return self.say_by_form();
        }
        if reader.is_settled() {
            self.settled = Some(start + text.len());
        }
        false
    }

    /// Asks for what is to be said as the form that it must have, behind all that was decided; whether it does.
    fn say_by_form(&mut self) -> bool {
        let Some(reading) = self.reading.as_mut().filter(|reading| reading.reader.calls() == 0) else {
            return false;
        };
        let Some((form, opening)) = reading.said.take() else { return false };
        // Where it never got to where words stand, it begins anew with what stands before them.
        let settled = self.settled.or((opening.is_empty()).then_some(self.written));
        let opening = if settled.is_some() { Vec::new() } else { opening };
        reading.reader = Reader::plain();
        self.ask_anew(self.written - settled.unwrap_or(0), &opening, form)
    }

    /// Takes back the last bytes of the text, whether they were released or not, and asks for them as a form, behind
    /// what opens it; whether it does.
    fn ask_anew(&mut self, bytes: usize, opening: &[u32], form: Grammar) -> bool {
        let Some(onward) = &mut self.onward else { return false };
        let Some(fewer) = onward.take_back(bytes) else { return false };
        let generated = self.counts.generated.saturating_sub(fewer) + opening.len();
        let Some(submitted) = onward.go_on(opening, generated, Some(form)) else { return false };
        self.counts.generated = generated;
        self.scores.truncate(self.scores.len().saturating_sub(fewer));
        self.written -= bytes;
        self.stops = Some(onward.stops());
        self.detokenizer = Some(Detokenizer::continuing(Arc::clone(&onward.tokenizer)));
        self.formed = true;
        self.continue_as(submitted);
        true
    }

    /// The arguments of a call are complete. Where others may follow, the call is closed as the model would, and the
    /// answer goes on behind it; whether it does.
    fn call_again(&mut self) -> bool {
        if !self.reading.as_ref().is_some_and(|reading| reading.held && reading.several) {
            return false;
        }
        let held = self.detokenizer.take().map_or_else(String::new, Detokenizer::finish);
        let (Some(stops), Some(onward)) = (&mut self.stops, &self.onward) else { return false };
        let released = stops.push(&held);
        if let Some(index) = released.stop {
            self.give(released.text);
            self.end(Finish::Cut(index));
            return true;
        }
        let text = released.text + &std::mem::replace(stops, onward.stops()).finish();
        self.give(text);
        let (Some(reading), Some(onward)) = (&mut self.reading, &mut self.onward) else { return false };
        let Some(rest) = reading.reader.call_ended() else { return false };
        let Ok(tokens) = onward.tokenizer.encode(rest, Special::AsText) else { return false };
        // What was demanded was this call.
        onward.forget_form();
        let generated = self.counts.generated + tokens.len();
        let Some(submitted) = onward.go_on(&tokens, generated, None) else { return false };
        for &token in &tokens {
            let text = onward.tokenizer.piece(token);
            self.written += text.len();
            onward.push(token, &text);
        }
        let detokenizer = Detokenizer::continuing(Arc::clone(&onward.tokenizer));
        self.detokenizer = Some(detokenizer.showing(Arc::clone(&reading.shown)));
        (reading.held, self.formed) = (false, false);
        self.counts.generated = generated;
        self.scores.extend(tokens.into_iter().map(|token| TokenScore {
            token,
            logprob: None,
            top: Vec::new(),
        }));
        self.continue_as(submitted);
        true
    }

    /// Goes on with another reply; whether there is one. Dropping the one before lets go of the answer so far, whose
    /// pages are found again as a prefix.
    fn continue_as(&mut self, submitted: Result<Reply, Refusal>) -> bool {
        match submitted {
            Ok(reply) => self.reply = Some(reply),
            Err(error) => {
                self.reply = None;
                self.ready.push_back(Err(error.into()));
            }
        }
        self.reply.is_some()
    }

    /// How an answer ends at the stop string of that index.
    fn stopped(&self, index: usize) -> Finish {
        let calls = self.reading.as_ref().is_some_and(|reading| reading.reader.called().is_some());
        if self.formed || calls { Finish::Cut(index) } else { Finish::Stop(index) }
    }

    /// Nothing more is wanted. Dropping the reply tells the engine.
    fn end(&mut self, finish: Finish) {
        self.reply = None;
        self.give_held();
        self.say(Piece::End { finish, usage: self.counts });
    }

    fn take_end(&mut self, finish: Finish) {
        self.reply = None;
        let Some(mut stops) = self.stops.take() else { return };
        let held = self.detokenizer.take().map_or_else(String::new, Detokenizer::finish);
        let released = stops.push(&held);
        let finish = released.stop.map_or(finish, |index| self.stopped(index));
        let held = if released.stop.is_none() { stops.finish() } else { String::new() };
        self.give(released.text + &held);
        self.give_held();
        self.say(Piece::End { finish, usage: self.counts });
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
        self.say(piece);
        goes_on
    }

    /// What the reader was not sure of.
    fn give_held(&mut self) {
        let mut deltas = self.reading.as_mut().map_or_else(Vec::new, |reading| reading.reader.finish());
        deltas.truncate(self.reading.as_ref().map_or(0, |reading| reading.wanted(&deltas)));
        if !deltas.is_empty() {
            self.say(Piece::Said { deltas, tokens: Vec::new() });
        }
    }
}
