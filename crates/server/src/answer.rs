//! Answers under way: tokens from the engine become text, watched for stop strings.

use std::{
    collections::VecDeque,
    sync::Arc,
    task::{Context, Poll, ready},
};

use fornax_compute::Sampling;
use fornax_engine::{EndReason, Event, Grammar, Reply, Request};
use fornax_text::{Detokenizer, StopStrings, Tokenizer};

use crate::{error::ApiError, served::Served};

/// A prompt and everything asked about its continuation: checked, encoded and compiled.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_tokens: usize,
    /// Nothing follows the prompt: what the model makes of it is asked for.
    pub(crate) embeds: bool,
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
}

impl Ask {
    /// As the engine takes it.
    pub(crate) fn request(&self) -> Request {
        let mut request = Request::new(self.prompt.clone(), self.max_tokens, self.sampling.clone());
        request.embeds = self.embeds;
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
}

/// All answers that were asked for together, as one sequence of pieces. Dropping it cancels what is not done.
pub(crate) struct Answers {
    answers: Vec<Answer>,
    /// Who is asked first, so that a talkative answer does not silence the others.
    turn: usize,
}

impl Answers {
    /// Hands the questions over. Choices are numbered through, prompt by prompt. All are accepted or none is.
    pub(crate) fn submit(served: &Served, asks: Vec<Ask>) -> Result<Answers, ApiError> {
        let mut answers = Vec::new();
        for ask in asks {
            let Ask { stops, starts_text, .. } = &ask;
            let make = |reply| Answer::new(reply, &served.tokenizer, stops.clone(), *starts_text, &ask);
            // An early return drops the answers before, which cancels them.
            answers.extend(served.engine.submit(ask.request())?.into_iter().map(make));
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
    /// Made, but not asked for yet: the end comes after the text that it released.
    ready: VecDeque<Piece>,
}

impl Answer {
    fn new(
        reply: Reply,
        tokenizer: &Arc<Tokenizer>,
        stops: StopStrings,
        starts_text: bool,
        ask: &Ask,
    ) -> Answer {
        let tokenizer = Arc::clone(tokenizer);
        let detokenizer =
            if starts_text { Detokenizer::new(tokenizer) } else { Detokenizer::continuing(tokenizer) };
        Answer {
            reply: Some(reply),
            detokenizer: Some(detokenizer),
            stops: Some(stops),
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
            Event::Started { cached_tokens, seed } => {
                self.counts.cached = cached_tokens;
                self.ready.push_back(Piece::Started { cached_tokens, seed });
            }
            Event::Scored { token, logprob, top } => {
                self.ready.push_back(Piece::Scored(TokenScore { token, logprob: Some(logprob), top }));
            }
            Event::Token { token, logprob, top } => self.take_token(TokenScore { token, logprob, top }),
            Event::Embedding(values) => self.ready.push_back(Piece::Embedding(values)),
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
        let (Some(detokenizer), Some(stops)) = (&mut self.detokenizer, &mut self.stops) else { return };
        // An end token is no text, whatever its bytes are.
        if self.end_tokens.contains(&score.token) {
            return;
        }
        let mut text = detokenizer.push(score.token);
        self.scores.push(score);
        let mut stop = None;
        // Before `min_tokens` nothing may end the answer, stop strings included.
        if self.counts.generated >= self.min_tokens {
            let released = stops.push(&text);
            (text, stop) = (released.text, released.stop);
        }
        self.give(text);
        if let Some(index) = stop {
            // Dropping the reply tells the engine.
            self.reply = None;
            self.ready.push_back(Piece::End { finish: Finish::Stop(index), usage: self.counts });
        }
    }

    fn take_end(&mut self, finish: Finish) {
        self.reply = None;
        let (Some(detokenizer), Some(mut stops)) = (self.detokenizer.take(), self.stops.take()) else {
            return;
        };
        let released = stops.push(&detokenizer.finish());
        let finish = released.stop.map_or(finish, Finish::Stop);
        let held = if released.stop.is_none() { stops.finish() } else { String::new() };
        self.give(released.text + &held);
        self.ready.push_back(Piece::End { finish, usage: self.counts });
    }

    fn give(&mut self, text: String) {
        if !text.is_empty() || (self.wants_scores && !self.scores.is_empty()) {
            let tokens = std::mem::take(&mut self.scores);
            self.ready.push_back(Piece::Text { text, tokens });
        }
    }
}
