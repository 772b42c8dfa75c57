//! Work as server-sent events, or as lines of JSON.

use std::{
    future::{Future, ready},
    time::Duration,
};

use axum::{
    body::Body,
    http::header,
    response::{
        IntoResponse, Response, Sse,
        sse::{Event, KeepAlive},
    },
};
use fornax_chat::Piece;
use futures_util::{Stream, StreamExt, stream};
use serde::Serialize;
use tokio::sync::mpsc;

use crate::{error::ApiError, options::ServerOptions, work::Work};

/// Events between the work and the socket: enough to fill a packet, too few to matter in memory.
const EVENTS_AHEAD: usize = 16;

/// Turns pieces into the events of one protocol, or its lines.
pub(crate) trait Transcript<Word = Event>: Send + 'static {
    /// Events that say a piece.
    fn say(&mut self, work: &Work, index: usize, piece: Piece) -> Vec<Word>;
    /// What is to be done once none has failed, before that is said.
    fn finish(&mut self) -> impl Future<Output = Result<(), ApiError>> + Send {
        ready(Ok(()))
    }
    /// Events after the last piece of answers of which none failed.
    fn close(&mut self) -> Vec<Word>;
    /// The event that ends a stream in which something failed.
    fn fail(&mut self, error: &ApiError) -> Word;
}

/// An event that has a name besides its JSON.
pub(crate) fn named_event(name: &str, value: &impl Serialize) -> Event {
    Event::default().event(name).data(serde_json::to_string(value).expect("responses are JSON"))
}

/// An event with JSON in it.
pub(crate) fn event(value: &impl Serialize) -> Event {
    Event::default().data(serde_json::to_string(value).expect("responses are JSON"))
}

/// What the task that makes events tells the body.
enum Said<Word> {
    Event(Word),
    /// Nothing follows. A task that leaves without this word leaves a stream that is broken off, not ended.
    Over,
}

/// The stream ends without having been finished.
#[derive(Debug, thiserror::Error)]
#[error("the stream was broken off")]
struct BrokenOff;

/// Streams work. A client that goes away takes it along; one that does not read is waited for, but not for ever.
pub(crate) fn stream(work: Work, transcript: impl Transcript, options: &ServerOptions) -> Response {
    let events = words(work, transcript, options);
    Sse::new(events).keep_alive(KeepAlive::new().interval(options.keep_alive)).into_response()
}

/// Streams work as JSON, a line each.
pub(crate) fn lines(work: Work, transcript: impl Transcript<String>, options: &ServerOptions) -> Response {
    let lines = words(work, transcript, options).map(|line| line.map(|line| line + "\n"));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

fn words<Word: Send + 'static>(
    work: Work,
    transcript: impl Transcript<Word>,
    options: &ServerOptions,
) -> impl Stream<Item = Result<Word, BrokenOff>> + Send + 'static {
    let (sender, receiver) = mpsc::channel(EVENTS_AHEAD);
    tokio::spawn(pump(work, transcript, sender, options.write_timeout));
    stream::unfold(Some(receiver), |receiver| async move {
        let mut receiver: mpsc::Receiver<Said<Word>> = receiver?;
        match receiver.recv().await {
            Some(Said::Event(event)) => Some((Ok(event), Some(receiver))),
            Some(Said::Over) => None,
            None => Some((Err(BrokenOff), None)),
        }
    })
}

/// Makes events until there are no more, or nobody wants them. On a task of its own, so that deadlines and
/// cancelling reach work whose client does not read.
async fn pump<Word: Send>(
    mut work: Work,
    mut transcript: impl Transcript<Word>,
    said: mpsc::Sender<Said<Word>>,
    patience: Duration,
) {
    loop {
        let piece = tokio::select! {
            piece = work.next() => piece,
            () = said.closed() => return,
        };
        let is_last = matches!(piece, None | Some((_, Err(_))));
        let events = match piece {
            Some((_, Err(error))) => {
                work.failed_midway(&error);
                vec![transcript.fail(&error)]
            }
            Some((index, Ok(piece))) => transcript.say(&work, index, piece),
            None => match transcript.finish().await {
                Ok(()) => transcript.close(),
                Err(error) => {
                    work.failed_midway(&error);
                    vec![transcript.fail(&error)]
                }
            },
        };
        let last = is_last.then_some(Said::Over);
        for word in events.into_iter().map(Said::Event).chain(last) {
            let sent = tokio::select! {
                biased;
                sent = said.send(word) => sent.is_ok(),
                () = tokio::time::sleep(patience) => false,
                _ = work.stopped(), if !is_last => false,
            };
            if !sent {
                return;
            }
        }
        if is_last {
            return;
        }
    }
}
