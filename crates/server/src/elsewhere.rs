//! Routes that clients of other servers know and this one does not have, each refused by its reason.

use axum::http::Uri;

use crate::error::{ApiError, Code};

/// What paths begin with, and why there is nothing.
const ELSEWHERE: [(&str, &str); 11] = [
    (
        "/api/blobs/",
        "weights are not sent here: give the server a file with `fornax serve FILE`, and make models of it",
    ),
    ("/api/push", "models are not sent anywhere from here"),
    ("/slots/", "slots are not saved, restored or erased: the prefix cache does without them"),
    ("/v1/audio/", "the models here read and write text, no sound"),
    ("/audio/", "the models here read and write text, no sound"),
    ("/v1/images/", "the models here read and write text, no images"),
    ("/v1/moderations", "no model here judges texts by OpenAI's categories"),
    ("/v1/assistants", "assistants are no part of this server; /v1/conversations keeps conversations"),
    ("/v1/threads", "threads are no part of this server; /v1/conversations keeps conversations"),
    ("/v1/vector_stores", "nothing is searched here; /v1/embeddings makes vectors"),
    ("/v1/fine_tuning", "models are not trained here"),
];

/// What is told of a path that there is nothing at.
pub(crate) async fn nothing(uri: Uri) -> ApiError {
    let known = ELSEWHERE.iter().find(|(path, _)| uri.path().starts_with(path));
    let message = known.map_or("there is nothing at this path", |(_, reason)| reason);
    ApiError::new(Code::UnknownEndpoint, message)
}
