//! Responses that are kept: retrieved, cancelled, forgotten.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, Query, State, rejection::QueryRejection},
};
use fornax_jobs::{State as JobState, StoredResponse};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::IntoParams;

use super::{conversations::is_conversation, create::ResponseAnswer, memory::ended};
use crate::{
    app::App,
    error::{ApiError, Code, Fault},
    front::{keys::Caller, told::Told},
    openai::files::{Listed, listed, which},
    shares::Share,
};

/// Items of one page, as many as OpenAI tells.
pub(super) const PAGE_MAX: i64 = 100;

/// How it is to be told.
#[derive(Debug, Deserialize, IntoParams)]
pub(crate) struct How {
    /// Must not be true: events of a response are told to whoever asked for it, as they come.
    stream: Option<bool>,
}

/// A response that was kept
#[utoipa::path(get, path = "/v1/responses/{response_id}", tag = "openai", params(("response_id" = String, Path), How),
    responses(
        (status = 200, body = ResponseAnswer, description = "How it stands"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    told: Result<Query<How>, QueryRejection>,
) -> Result<Told, ApiError> {
    let Query(told) = told.map_err(|_| ApiError::fault(Fault::rule("stream", "must be true or false")))?;
    if told.stream == Some(true) {
        let rule = "is not supported here; retrieve the response until it has ended";
        return Err(ApiError::fault(Fault::rule("stream", rule)));
    }
    let room = app.response_room(&caller, &id).await?;
    Ok(Told::new(app.response(&caller, &id).await?, room))
}

/// Forget a response
///
/// One that is being answered in the background is stopped. Whoever goes on from a later one of the same conversation
/// finds it broken.
#[utoipa::path(delete, path = "/v1/responses/{response_id}", tag = "openai", params(("response_id" = String, Path)),
    responses(
        (status = 200, description = "{id, object, deleted}"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    match !is_conversation(&id) && app.store()?.delete_response(&caller.key.owner, &id).await? {
        true => Ok(Json(json!({"id": id, "object": "response", "deleted": true}))),
        false => Err(no_response()),
    }
}

/// Cancel a response in the background
///
/// However often; one that has ended stays as it is.
#[utoipa::path(post, path = "/v1/responses/{response_id}/cancel", tag = "openai",
    params(("response_id" = String, Path)),
    responses(
        (status = 200, body = ResponseAnswer, description = "How it stands now"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Told, ApiError> {
    let room = app.response_room(&caller, &id).await?;
    let response = app.response(&caller, &id).await?;
    if response["background"] != json!(true) {
        let rule = "is of a response that was not made in the background: there is nothing to cancel";
        return Err(ApiError::fault(Fault::rule("response_id", rule)));
    }
    match app.store()?.cancel(&id).await {
        // It has ended meanwhile, or long ago.
        Ok(_) | Err(fornax_jobs::Error::NotFound) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(Told::new(app.response(&caller, &id).await?, room))
}

/// What a response was asked with
///
/// Its own items: those of responses before it are theirs.
#[utoipa::path(get, path = "/v1/responses/{response_id}/input_items", tag = "openai",
    params(("response_id" = String, Path), Listed),
    responses(
        (status = 200, description = "{object: list, data: [item], first_id, last_id, has_more}"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn input_items(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    query: Result<Query<Listed>, QueryRejection>,
) -> Result<Told, ApiError> {
    let asked = which(query)?;
    let page = asked.page(PAGE_MAX, 20)?;
    let room = app.response_room(&caller, &id).await?;
    let items = app.store()?.response_input(&caller.key.owner, &id, page).await?;
    Ok(Told::new(listed(items.ok_or_else(no_response)?, page), room))
}

fn no_response() -> ApiError {
    let message = "there is no such response of this key; responses are kept for a limited time";
    ApiError::new(Code::ResponseNotFound, message)
}

impl App {
    /// Room for a response of the caller's key, before it is read.
    async fn response_room(&self, caller: &Caller, id: &str) -> Result<Share, ApiError> {
        let store = self.store()?;
        if is_conversation(id) {
            return Err(no_response());
        }
        let bytes = store.response_bytes(&caller.key.owner, id).await?.ok_or_else(no_response)?;
        self.room(caller.tenant(), bytes).await
    }

    /// A response of the caller's key, as it stands.
    async fn response(&self, caller: &Caller, id: &str) -> Result<Value, ApiError> {
        let (store, owner) = (self.store()?, &*caller.key.owner);
        let found = async || store.response(owner, id).await?.ok_or_else(no_response);
        let mut stored = found().await?;
        if stored.state.is_some_and(JobState::is_final) {
            // Whoever writes down what has ended would come to it soon.
            store.settle_response(id, ended).await?;
            stored = found().await?;
        }
        let StoredResponse { mut body, state } = stored;
        if state == Some(JobState::Running) {
            body["status"] = json!("in_progress");
        }
        Ok(body)
    }
}
