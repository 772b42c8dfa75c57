//! Answers that were kept: each takes the room of a body of its size until its last byte is written. A small request has a
//! large answer sent, and whoever asks for it often and reads nothing would have the server hold it as often.

use std::sync::Arc;

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use serde_json::Value;

use crate::shares::Share;

/// What was kept, with the room that it takes.
pub(crate) struct Told {
    value: Value,
    room: Share,
}

/// Its room, which goes along with the answer.
#[derive(Clone)]
pub(crate) struct Room(#[expect(dead_code, reason = "it is held")] Arc<Share>);

impl Told {
    pub(crate) fn new(value: Value, room: Share) -> Told {
        Told { value, room }
    }
}

impl IntoResponse for Told {
    fn into_response(self) -> Response {
        let mut response = Json(self.value).into_response();
        response.extensions_mut().insert(Room(Arc::new(self.room)));
        response
    }
}
