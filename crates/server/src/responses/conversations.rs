//! `/v1/conversations`: conversations with ids of their own. Responses go on from them and are added to them; clients
//! add items and take them away.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, Query, State, rejection::QueryRejection},
};
use fornax_jobs::ResponseItem;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{create::kept, request::InputItem, stored::PAGE_MAX};
use crate::{
    app::{App, random_id, unix_seconds},
    ask::prepare::{Read, blocking, read},
    error::{ApiError, Code},
    front::{body::RawBody, keys::Caller, told::Told},
    openai::{
        batches::check_metadata,
        files::{Listed, listed, which},
    },
    shape::{Unknown, body},
    shares::Share,
};

/// What ids of conversations begin with: they are kept beside responses.
const PREFIX: &str = "conv_";

/// Whether an id is a conversation's, not a response's.
pub(crate) fn is_conversation(id: &str) -> bool {
    id.starts_with(PREFIX)
}

/// A conversation to begin.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewConversationBody {
    /// What it begins with, as in the input of a response.
    #[schema(max_items = 1024)]
    items: Option<Vec<InputItem>>,
    /// Up to 16 notes of the client's own.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Map<String, Value>>,
}

body!(NewConversationBody, Unknown::IgnoreBut(&[]));

/// What is to be told of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ConversationBody {
    /// Up to 16 notes of the client's own, which take the place of those before.
    #[schema(required = true, value_type = Object)]
    metadata: Map<String, Value>,
}

body!(ConversationBody, Unknown::IgnoreBut(&[]));

/// Items to add.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct NewItemsBody {
    #[schema(required = true, min_items = 1, max_items = 1024)]
    items: Vec<InputItem>,
}

body!(NewItemsBody, Unknown::IgnoreBut(&[]));

/// Begin a conversation
#[utoipa::path(post, path = "/v1/conversations", tag = "openai", request_body = NewConversationBody, responses(
    (status = 200, description = "{id, object: conversation, created_at, metadata}"),
    (status = 507, body = crate::openapi::ErrorBody, description = "The disk is full: nothing was kept"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Value>, ApiError> {
    let store = app.store()?;
    let Read { body, share, .. } = read::<NewConversationBody>(&app, caller.tenant(), body).await?;
    let metadata = checked(body.metadata.unwrap_or_default())?;
    let items = understood(&app, &caller, body.items.unwrap_or_default()).await?;
    let id = format!("{PREFIX}{}", random_id());
    let told =
        json!({"id": id, "object": "conversation", "created_at": unix_seconds(), "metadata": metadata});
    store.begin_conversation(&caller.key.owner, &id, &told, items).await?;
    drop(share);
    Ok(Json(told))
}

/// A conversation, without its items
#[utoipa::path(get, path = "/v1/conversations/{conversation_id}", tag = "openai",
    params(("conversation_id" = String, Path)),
    responses(
        (status = 200, description = "{id, object: conversation, created_at, metadata}"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    app.conversation(&caller, &id).await.map(Json)
}

/// Change what is noted of a conversation
#[utoipa::path(post, path = "/v1/conversations/{conversation_id}", tag = "openai", request_body = ConversationBody,
    params(("conversation_id" = String, Path)),
    responses(
        (status = 200, description = "{id, object: conversation, created_at, metadata}"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn update(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    body: RawBody,
) -> Result<Json<Value>, ApiError> {
    let body = read::<ConversationBody>(&app, caller.tenant(), body).await?.body;
    let mut told = app.conversation(&caller, &id).await?;
    told["metadata"] = json!(checked(body.metadata)?);
    match app.store()?.describe_conversation(&caller.key.owner, &id, &told).await? {
        true => Ok(Json(told)),
        false => Err(no_conversation()),
    }
}

/// Forget a conversation
///
/// Responses that were made in it stay.
#[utoipa::path(delete, path = "/v1/conversations/{conversation_id}", tag = "openai",
    params(("conversation_id" = String, Path)),
    responses(
        (status = 200, description = "{id, object: conversation.deleted, deleted}"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    match is_conversation(&id) && app.store()?.delete_response(&caller.key.owner, &id).await? {
        true => Ok(Json(json!({"id": id, "object": "conversation.deleted", "deleted": true}))),
        false => Err(no_conversation()),
    }
}

/// Items of a conversation
#[utoipa::path(get, path = "/v1/conversations/{conversation_id}/items", tag = "openai",
    params(("conversation_id" = String, Path), Listed),
    responses(
        (status = 200, description = "{object: list, data: [item], first_id, last_id, has_more}"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn items(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    query: Result<Query<Listed>, QueryRejection>,
) -> Result<Told, ApiError> {
    let asked = which(query)?;
    let page = asked.page(PAGE_MAX, 20)?;
    let room = app.conversation_room(&caller, &id).await?;
    let items = app.store()?.items(&caller.key.owner, &id, page).await?;
    Ok(Told::new(listed(items.ok_or_else(no_conversation)?, page), room))
}

/// Add items to a conversation
#[utoipa::path(post, path = "/v1/conversations/{conversation_id}/items", tag = "openai", request_body = NewItemsBody,
    params(("conversation_id" = String, Path)),
    responses(
        (status = 200, description = "{object: list, data: [item], first_id, last_id, has_more}"),
        (status = 507, body = crate::openapi::ErrorBody, description = "The disk is full: nothing was kept"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn add(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    body: RawBody,
) -> Result<Told, ApiError> {
    let store = app.store()?;
    let Read { body, share, .. } = read::<NewItemsBody>(&app, caller.tenant(), body).await?;
    let items = understood(&app, &caller, body.items).await?;
    if !is_conversation(&id) || !store.add_items(&caller.key.owner, &id, &items).await? {
        return Err(no_conversation());
    }
    let told = items.iter().map(|item| serde_json::from_str(&item.body).expect("what was written is JSON"));
    let told: Vec<Value> = told.collect();
    let of_end = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let (first, last) = (of_end(told.first()), of_end(told.last()));
    let told = json!({"object": "list", "data": told, "first_id": first, "last_id": last, "has_more": false});
    Ok(Told::new(told, share))
}

/// An item of a conversation
#[utoipa::path(get, path = "/v1/conversations/{conversation_id}/items/{item_id}", tag = "openai",
    params(("conversation_id" = String, Path), ("item_id" = String, Path)),
    responses(
        (status = 200, description = "The item"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn item(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path((id, item)): Path<(String, String)>,
) -> Result<Told, ApiError> {
    let room = app.conversation_room(&caller, &id).await?;
    let found = app.store()?.item(&caller.key.owner, &id, &item).await?;
    Ok(Told::new(found.ok_or_else(no_item)?, room))
}

/// Take an item out of a conversation
#[utoipa::path(delete, path = "/v1/conversations/{conversation_id}/items/{item_id}", tag = "openai",
    params(("conversation_id" = String, Path), ("item_id" = String, Path)),
    responses(
        (status = 200, description = "The conversation: {id, object: conversation, created_at, metadata}"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn delete_item(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path((id, item)): Path<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    let told = app.conversation(&caller, &id).await?;
    match app.store()?.delete_item(&caller.key.owner, &id, &item).await? {
        true => Ok(Json(told)),
        false => Err(no_item()),
    }
}

/// Notes that may be kept.
fn checked(metadata: Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    let mut faults = Vec::new();
    check_metadata(&metadata, &mut faults);
    if faults.is_empty() { Ok(metadata) } else { Err(ApiError::faults(faults)) }
}

/// Items as they are kept, if a response could be asked with them.
async fn understood(
    app: &App,
    caller: &Caller,
    items: Vec<InputItem>,
) -> Result<Vec<ResponseItem>, ApiError> {
    let work = move |_: &_| {
        let mut faults = Vec::new();
        for (index, item) in items.iter().enumerate() {
            item.check(&format!("items[{index}]"), &mut faults);
        }
        if faults.is_empty() { Ok(items.iter().map(kept).collect()) } else { Err(ApiError::faults(faults)) }
    };
    blocking(app, caller.tenant(), work).await
}

fn no_conversation() -> ApiError {
    let message = "there is no such conversation of this key; they are kept for a limited time";
    ApiError::new(Code::ConversationNotFound, message)
}

fn no_item() -> ApiError {
    ApiError::new(Code::ConversationNotFound, "there is no such item in this conversation")
}

impl App {
    /// What is told of a conversation of the caller's key.
    async fn conversation(&self, caller: &Caller, id: &str) -> Result<Value, ApiError> {
        let store = self.store()?;
        if !is_conversation(id) {
            return Err(no_conversation());
        }
        let stored = store.response(&caller.key.owner, id).await?;
        stored.map(|stored| stored.body).ok_or_else(no_conversation)
    }

    /// Room for a conversation of the caller's key and all its items, before they are read.
    async fn conversation_room(&self, caller: &Caller, id: &str) -> Result<Share, ApiError> {
        let store = self.store()?;
        if !is_conversation(id) {
            return Err(no_conversation());
        }
        let bytes = store.response_bytes(&caller.key.owner, id).await?.ok_or_else(no_conversation)?;
        self.room(caller.tenant(), bytes).await
    }
}
