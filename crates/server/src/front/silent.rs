//! Connections on which nothing is asked.
//!
//! For holding a socket open nobody needs a key. When there is no place for another connection, the one that has been
//! silent for the longest makes room, so that sockets alone shut nobody out. One whose request is being answered, down
//! to the last byte of the answer, is not silent.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use axum::body::Body;
use hyper::body::{Frame, SizeHint};
use tokio::sync::Notify;

use super::{door::Place, told::Room};

/// Those of a server.
#[derive(Default)]
pub(crate) struct Silent {
    /// Held for as long as it takes to look into a map.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Grows with each silence, so that the first of the map is the longest.
    next: u64,
    silences: BTreeMap<u64, Arc<Notify>>,
}

/// A connection among them.
pub(crate) struct Guest {
    silent: Arc<Silent>,
    end: Arc<Notify>,
    /// Its place in the map, while it is silent.
    since: Mutex<Option<u64>>,
}

impl Silent {
    /// A connection that has just come, and has said nothing.
    pub(crate) fn welcome(self: &Arc<Silent>) -> Arc<Guest> {
        let guest = Guest { silent: Arc::clone(self), end: Arc::default(), since: Mutex::default() };
        guest.falls_silent();
        Arc::new(guest)
    }

    /// Ends the connection that has been silent for the longest, if there is one.
    pub(crate) fn end_longest(&self) {
        if let Some((_, end)) = self.lock().silences.pop_first() {
            end.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Guest {
    /// Waits until it has to make room.
    pub(crate) async fn ended(&self) {
        self.end.notified().await;
    }

    /// It asks something; it is silent again when this is dropped.
    pub(crate) fn asks(self: &Arc<Guest>) -> Asking {
        self.speaks();
        Asking(Arc::clone(self))
    }

    fn falls_silent(&self) {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.silent.lock();
        let place = state.next;
        state.next += 1;
        state.silences.insert(place, Arc::clone(&self.end));
        if let Some(old) = since.replace(place) {
            state.silences.remove(&old);
        }
    }

    fn speaks(&self) {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = since.take() {
            self.silent.lock().silences.remove(&place);
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.speaks();
    }
}

/// A request that is being answered.
pub(crate) struct Asking(Arc<Guest>);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.falls_silent();
    }
}

/// The body of an answer, to whose end its connection is not silent.
pub(crate) struct Answer {
    body: Body,
    _asking: Asking,
    /// Among the requests of its key, where it was let in.
    _place: Option<Place>,
    /// Among what is held for callers, of what was kept.
    _room: Option<Room>,
    /// Whether any of it was handed over.
    begun: bool,
}

impl Answer {
    pub(crate) fn new(body: Body, asking: Asking, place: Option<Place>, room: Option<Room>) -> Answer {
        Answer { body, _asking: asking, _place: place, _room: room, begun: false }
    }
}

impl hyper::body::Body for Answer {
    type Data = <Body as hyper::body::Body>::Data;
    type Error = <Body as hyper::body::Body>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        self.begun = true;
        Pin::new(&mut self.body).poll_frame(context)
    }

    /// Not told before the end is asked for: who is told drops the answer, and its place with it, while its last part is
    /// still to be written.
    fn is_end_stream(&self) -> bool {
        !self.begun && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
