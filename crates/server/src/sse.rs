//! Work as server-sent events.

use std::time::Duration;

use axum::response::{
    IntoResponse, Response, Sse,
    sse::{Event, KeepAlive},
};
use futures_util::stream;
use serde::Serialize;
use tokio::sync::mpsc;

use crate::{answer::Piece, error::ApiError, options::ServerOptions, work::Work};

/// Events between the work and the socket: enough to fill a packet, too few to matter in memory.
const EVENTS_AHEAD: usize = 16;

/// Turns pieces into the events of one protocol.
pub(crate) trait Transcript: Send + 'static {
    /// Events that say a piece, which is no failure.
    fn say(&mut self, work: &Work, index: usize, piece: Piece) -> Vec<Event>;
    /// Events after the last piece of answers of which none failed.
    fn close(&mut self) -> Vec<Event>;
    /// The event that ends a stream in which something failed; as OpenAI's clients read it, unless said otherwise.
    fn fail(&mut self, error: &ApiError) -> Event {
        event(&error.to_json())
    }
}

/// An event with JSON in it.
pub(crate) fn event(value: &impl Serialize) -> Event {
    Event::default().data(serde_json::to_string(value).expect("responses are JSON"))
}

/// What the task that makes events tells the body.
enum Said {
    Event(Event),
    /// Nothing follows. A task that leaves without this word leaves a stream that is broken off, not ended.
    Over,
}

/// The stream ends without having been finished.
#[derive(Debug, thiserror::Error)]
#[error("the stream was broken off")]
struct BrokenOff;

/// Streams work. A client that goes away takes it along; one that does not read is waited for, but not for ever.
pub(crate) fn stream(work: Work, transcript: impl Transcript, options: &ServerOptions) -> Response {
    let (sender, receiver) = mpsc::channel(EVENTS_AHEAD);
    tokio::spawn(pump(work, transcript, sender, options.write_timeout));
    let events = stream::unfold(Some(receiver), |receiver| async move {
        let mut receiver = receiver?;
        match receiver.recv().await {
            Some(Said::Event(event)) => Some((Ok(event), Some(receiver))),
            Some(Said::Over) => None,
            None => Some((Err(BrokenOff), None)),
        }
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(options.keep_alive)).into_response()
}

/// Makes events until there are no more, or nobody wants them. On a task of its own, so that deadlines and
/// cancelling reach work whose client does not read.
async fn pump(mut work: Work, mut transcript: impl Transcript, said: mpsc::Sender<Said>, patience: Duration) {
    loop {
        let piece = tokio::select! {
            piece = work.next() => piece,
            () = said.closed() => return,
        };
        let is_last = matches!(piece, None | Some((_, Piece::Failed(_))));
        let events = match piece {
            Some((_, Piece::Failed(error))) => {
                work.failed_midway(&error);
                vec![transcript.fail(&error)]
            }
            Some((index, piece)) => transcript.say(&work, index, piece),
            None => transcript.close(),
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
