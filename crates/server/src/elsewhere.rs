//! Routes that clients of other servers know and this one does not have, each refused by its reason.

use axum::http::Uri;

use crate::error::{ApiError, Code};

/// What paths begin with, and why there is nothing.
const ELSEWHERE: [(&str, &str); 17] = [
    ("/api/blobs/", "models are not made here: give the server a file with `fornax serve FILE`"),
    ("/api/copy", "models are not copied here: a served model has several names with --alias"),
    ("/api/create", "models are not made here: give the server a file with `fornax serve FILE`"),
    ("/api/delete", "models are not deleted here: `fornax rm` does that on the server's machine"),
    ("/api/push", "models are not sent anywhere from here"),
    ("/classify", CLASSIFY),
    ("/v1/classify", CLASSIFY),
    ("/slots/", "slots are not saved, restored or erased: the prefix cache does without them"),
    ("/v1/audio/", "the models here read and write text, no sound"),
    ("/audio/", "the models here read and write text, no sound"),
    ("/v1/images/", "the models here read and write text, no images"),
    ("/v1/moderations", "no model here judges texts by OpenAI's categories"),
    ("/v1/conversations", "conversations are kept as responses here: go on with previous_response_id"),
    ("/v1/assistants", "assistants are no part of this server; /v1/responses keeps conversations"),
    ("/v1/threads", "threads are no part of this server; /v1/responses keeps conversations"),
    ("/v1/vector_stores", "nothing is searched here; /v1/embeddings makes vectors"),
    ("/v1/fine_tuning", "models are not trained here"),
];

const CLASSIFY: &str =
    "no model here has classes; /v1/systemone asks a chat model for one of several answers";

/// What is told of a path that there is nothing at.
pub(crate) async fn nothing(uri: Uri) -> ApiError {
    let known = ELSEWHERE.iter().find(|(path, _)| uri.path().starts_with(path));
    let message = known.map_or("there is nothing at this path", |(_, reason)| reason);
    ApiError::new(Code::UnknownEndpoint, message)
}
