//! A request under way: its answers, its clock, its place among the others.

use std::{
    fmt::Debug,
    future::{pending, poll_fn},
    pin::Pin,
    sync::Arc,
    time::Instant,
};

use fornax_chat::{Answers, Ask, Counts, Finish, Piece, TokenScore};
use sha2::{Digest, Sha256};
use tokio::{
    sync::watch,
    time::{Sleep, sleep},
};

use crate::{
    app::Admission,
    error::{ApiError, Code, Fault},
    openai::reply::CacheMiss,
    served::Served,
};

/// Likelihoods of tokens that are told between two looks at the memory that is left: twenty alternatives of each of a hundred
/// answers' tokens are gigabytes, asked for in as many bytes.
const SCORES_LOOK: usize = 1 << 16;

/// Answers being made for a client. Dropping it cancels them and counts them as aborted.
pub(crate) struct Work {
    admission: Admission,
    answers: Answers,
    /// Answers that have not ended.
    open: usize,
    submitted: Instant,
    /// By answer: when its last text came.
    last_text: Vec<Option<Instant>>,
    /// Likelihoods that were told, alternatives included: an answer that comes whole holds them all.
    scores: usize,
    stops: Stops,
    /// What the questions are counted by.
    held: Vec<Arc<dyn Debug + Send + Sync>>,
}

/// What may end work from outside.
struct Stops {
    /// Runs from the first answer's start.
    deadline: Option<Pin<Box<Sleep>>>,
    /// The server's time is over.
    killed: watch::Receiver<bool>,
    /// Somebody named this work and cancelled it.
    cancelled: Option<watch::Receiver<bool>>,
}

/// What ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    Deadline,
    Killed,
    Cancelled,
}

impl Stops {
    async fn wait(&mut self) -> Stopped {
        let deadline = async {
            match &mut self.deadline {
                Some(sleep) => sleep.await,
                None => pending().await,
            }
        };
        let cancelled = async {
            // A sender that is gone cancels nobody any more.
            let heard = match &mut self.cancelled {
                Some(cancelled) => cancelled.wait_for(|cancelled| *cancelled).await.is_ok(),
                None => false,
            };
            if !heard {
                pending::<()>().await;
            }
        };
        tokio::select! {
            () = deadline => Stopped::Deadline,
            () = cancelled => Stopped::Cancelled,
            _ = self.killed.wait_for(|killed| *killed) => Stopped::Killed,
        }
    }
}

impl Work {
    /// Hands the questions to the engine.
    pub(crate) fn submit(admission: Admission, asks: Vec<Ask>) -> Result<Work, ApiError> {
        let open = asks.iter().map(|ask| ask.request.choices as usize).sum();
        let held = asks.iter().filter_map(|ask| ask.held.clone()).collect();
        let answers = submit(&admission, asks)?;
        let stops = Stops { deadline: None, killed: admission.app.watch_killed(), cancelled: None };
        let (submitted, last_text) = (Instant::now(), vec![None; open]);
        Ok(Work { answers, open, submitted, last_text, scores: 0, stops, held, admission })
    }

    /// Hands more questions to the engine, once the ones before are all answered. Numbers begin anew.
    pub(crate) fn submit_more(&mut self, asks: Vec<Ask>) -> Result<(), ApiError> {
        assert_eq!(self.open, 0, "the answers before have ended");
        let open = asks.iter().map(|ask| ask.request.choices as usize).sum();
        self.held = asks.iter().filter_map(|ask| ask.held.clone()).collect();
        self.answers = submit(&self.admission, asks)?;
        (self.open, self.submitted, self.last_text) = (open, Instant::now(), vec![None; open]);
        Ok(())
    }

    /// Lets somebody else cancel it.
    pub(crate) fn cancelled_by(&mut self, cancelled: watch::Receiver<bool>) {
        self.stops.cancelled = Some(cancelled);
    }

    /// What was asked for: a model, or one of its adapters.
    pub(crate) fn model(&self) -> &str {
        self.admission.served.name()
    }

    pub(crate) fn served(&self) -> &Served {
        &self.admission.served
    }

    /// Counts a failure that comes too late to be the response's status.
    pub(crate) fn failed_midway(&self, error: &ApiError) {
        self.admission.app.metrics.failed(error.code);
        if let Some(span) = &self.admission.span {
            span.failed(error.code, error.status().is_server_error());
        }
        if let Some(line) = &self.admission.line {
            line.failed(error.code);
        }
    }

    /// The next piece and whose it is; `None` when every answer has ended. A failure is the last piece there is.
    pub(crate) async fn next(&mut self) -> Option<(usize, Result<Piece, ApiError>)> {
        if self.open == 0 {
            return None;
        }
        let answers = &mut self.answers;
        let piece = tokio::select! {
            // What is there already is said first.
            biased;
            piece = poll_fn(|context| answers.poll_next(context)) => {
                piece.map(|(index, piece)| (index, piece.map_err(ApiError::from)))
            }
            stopped = self.stops.wait() => Some((0, self.stop(stopped))),
        };
        let Some((index, piece)) = piece else {
            self.open = 0;
            return None;
        };
        let piece = piece.and_then(|piece| self.afforded(piece));
        match &piece {
            Ok(piece) => self.observe(index, piece),
            Err(_) => self.open = 0,
        }
        Some((index, piece))
    }

    /// A piece, as long as there is memory for what has come with it: near the end of it those go who hold much.
    fn afforded(&mut self, piece: Piece) -> Result<Piece, ApiError> {
        let told = |scores: &[TokenScore]| scores.iter().map(|score| 1 + score.top.len()).sum::<usize>();
        let more = match &piece {
            Piece::Text { tokens, .. } | Piece::Said { tokens, .. } => told(tokens),
            Piece::Scored(score) | Piece::Token(score) => told(std::slice::from_ref(score)),
            Piece::Started { .. } | Piece::Embedding(_) | Piece::End { .. } => 0,
        };
        let before = self.scores;
        self.scores += more;
        if before / SCORES_LOOK < self.scores / SCORES_LOOK
            && let Err(error) = self.admission.app.check_memory(0)
        {
            self.answers.cancel();
            return Err(error);
        }
        Ok(piece)
    }

    /// Resolves when something from outside ends it.
    pub(crate) async fn stopped(&mut self) -> Stopped {
        self.stops.wait().await
    }

    /// Lets go of the answers, and says so.
    fn stop(&mut self, stopped: Stopped) -> Result<Piece, ApiError> {
        self.answers.cancel();
        match stopped {
            Stopped::Cancelled => {
                self.open = 1;
                Ok(Piece::End { finish: Finish::Cancelled, usage: Counts::default() })
            }
            Stopped::Killed => Err(ApiError::new(Code::Cancelled, "the server is shutting down")),
            Stopped::Deadline => {
                let limit = self.admission.app.options.request_timeout.unwrap_or_default();
                let message = format!("the answer took longer than {} seconds", limit.as_secs_f64());
                Err(ApiError::new(Code::ExecutionTimeout, message))
            }
        }
    }

    fn observe(&mut self, index: usize, piece: &Piece) {
        let (app, span) = (&self.admission.app, self.admission.span.as_deref());
        let line = self.admission.line.as_deref();
        let metrics = self.admission.served.metrics();
        let now = Instant::now();
        match piece {
            &Piece::Started { cached_tokens, miss, .. } => {
                if let Some(CacheMiss { reason, tokens }) = CacheMiss::of(miss) {
                    let model = self.admission.served.name();
                    tracing::info!(model, reason, tokens, cached_tokens, "prefix cache miss");
                }
                metrics.queue_time.observe(now - self.submitted);
                if let Some(span) = span {
                    span.event("started");
                }
                if let (None, Some(limit)) = (&self.stops.deadline, app.options.request_timeout) {
                    self.stops.deadline = Some(Box::pin(sleep(limit)));
                }
            }
            Piece::Text { .. } | Piece::Said { .. } => {
                match self.last_text[index] {
                    None => metrics.time_to_first_token.observe(now - self.submitted),
                    Some(last) => metrics.inter_token_latency.observe(now - last),
                }
                self.last_text[index] = Some(now);
                if let Some(span) = span {
                    span.event("first token");
                }
                if let Some(line) = line {
                    line.first_token();
                }
            }
            Piece::End { finish, usage } => {
                self.open -= 1;
                if let Some(span) = span {
                    span.ended(*finish, *usage);
                }
                if let Some(line) = line {
                    line.ended(*finish, *usage);
                }
                metrics.ended(*finish);
                metrics.request_latency.observe(now - self.submitted);
            }
            Piece::Scored(_) | Piece::Token(_) | Piece::Embedding(_) => {}
        }
    }
}

/// Hands questions to the engine, each computed by the adapter that the client named, and as its tenant's.
fn submit(admission: &Admission, mut asks: Vec<Ask>) -> Result<Answers, ApiError> {
    let tenant = admission.tenant();
    for ask in &mut asks {
        check_priority(ask.request.priority, admission.is_urgent())?;
        ask.request.adapter = admission.served.adapter();
        ask.request.owner = tenant.clone();
        if let Some(tenant) = tenant.as_deref().filter(|_| !admission.app.options.shared_prefixes) {
            ask.request.salt = salt(tenant, &ask.request.salt);
        }
    }
    Ok(Answers::submit(&admission.served.engine, &admission.served.tokenizer, asks)?)
}

/// Refuses to let a request go before others where the operator has not allowed it.
pub(crate) fn check_priority(priority: i8, urgent: bool) -> Result<(), ApiError> {
    if priority >= 0 || urgent {
        return Ok(());
    }
    let rule = "below 0 goes before others, which this key may not";
    Err(ApiError::fault(Fault::rule("priority", rule)))
}

/// What a tenant's cached prefixes are found by: with a salt of its own they are apart from its others, too. Of one
/// length, whatever the client sent.
fn salt(tenant: &str, own: &str) -> Box<str> {
    let mut hash = Sha256::new();
    // No name of a tenant has this byte in it.
    for part in [tenant, "\0", own] {
        hash.update(part);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()
}

impl Drop for Work {
    fn drop(&mut self) {
        for _ in 0..self.open {
            self.admission.served.metrics().ended(Finish::Cancelled);
            if let Some(span) = &self.admission.span {
                span.ended(Finish::Cancelled, Counts::default());
            }
            if let Some(line) = &self.admission.line {
                line.ended(Finish::Cancelled, Counts::default());
            }
        }
    }
}
