//! `/v1/files`: what batches read and write.
//!
//! Files are kept beside the jobs, belong to the key that sent them, and are forgotten when results are.

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, Query, State, rejection::QueryRejection},
    http::header,
    response::{IntoResponse, Response},
};
use fornax_jobs::{NewFile, Page, Store, StoredFile};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{IntoParams, ToSchema};

use crate::{
    app::App,
    error::{ApiError, Code, Fault},
    front::{keys::Caller, upload::Upload},
};

/// What files may be for: others would be kept for nobody.
const PURPOSE: &str = "batch";

/// Files of one page.
const PAGE_MAX: i64 = 10_000;

/// A file, without what is in it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct FileObject {
    id: String,
    object: &'static str,
    bytes: i64,
    created_at: i64,
    /// When it is forgotten.
    expires_at: i64,
    filename: String,
    /// batch, or batch_output.
    purpose: String,
    status: &'static str,
}

impl From<StoredFile> for FileObject {
    fn from(file: StoredFile) -> FileObject {
        FileObject {
            id: file.id,
            object: "file",
            bytes: file.bytes,
            created_at: file.created_us / 1_000_000,
            expires_at: file.expires_us / 1_000_000,
            filename: file.name,
            purpose: file.purpose,
            status: "processed",
        }
    }
}

/// A file of requests.
#[derive(ToSchema)]
#[expect(dead_code, reason = "only described")]
pub(crate) struct FileForm {
    /// Lines of JSON, in UTF-8.
    #[schema(value_type = String, format = Binary)]
    file: String,
    /// `batch`; files for anything else are refused.
    purpose: String,
}

/// Keep a file
///
/// It is on disk before its id is returned, and belongs to the key that sent it.
#[utoipa::path(post, path = "/v1/files", tag = "openai",
    request_body(content = FileForm, content_type = "multipart/form-data"),
    responses(
        (status = 200, body = FileObject, description = "It is kept"),
        (status = 409, body = crate::openapi::ErrorBody, description = "As many are kept as may be"),
        (status = 507, body = crate::openapi::ErrorBody, description = "The disk is full: nothing was kept"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn upload(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    upload: Upload,
) -> Result<Json<FileObject>, ApiError> {
    let store = app.store()?;
    let mut purpose = None;
    for (name, value) in upload.fields {
        match name.as_str() {
            "purpose" => purpose = Some(value),
            // When files are forgotten is the server's to say; the answer tells when.
            name if name.starts_with("expires_after") => {
                return Err(ApiError::fault(Fault::rule("expires_after", "is not supported by this server")));
            }
            _ => {}
        }
    }
    if purpose.as_deref() != Some(PURPOSE) {
        return Err(ApiError::fault(Fault::rule(
            "purpose",
            "must be \"batch\": files have no other use here",
        )));
    }
    let (owner, purpose) = (caller.key.owner.to_string(), PURPOSE.to_owned());
    let file = NewFile { owner, name: upload.name, purpose, text: upload.text };
    let stored = store.put_file(file).await?;
    drop(upload.held);
    Ok(Json(stored.into()))
}

/// Which files or batches.
#[derive(Debug, Default, Deserialize, IntoParams)]
pub(crate) struct Listed {
    /// Those behind this one.
    after: Option<String>,
    /// At most this many.
    limit: Option<i64>,
    /// `desc`, the newest first, or `asc`.
    order: Option<String>,
    /// Only files for this.
    purpose: Option<String>,
}

impl Listed {
    /// The page that is asked for, and one more than it holds: whether there are others behind it.
    pub(crate) fn page(&self, most: i64, usual: i64) -> Result<Page<'_>, ApiError> {
        let limit = self.limit.unwrap_or(usual);
        if !(1..=most).contains(&limit) {
            let rule = format!("an integer from 1 to {most}");
            return Err(ApiError::fault(Fault::value("limit", rule, &limit.into())));
        }
        let newest_first = match self.order.as_deref() {
            None | Some("desc") => true,
            Some("asc") => false,
            Some(_) => return Err(ApiError::fault(Fault::rule("order", "must be asc or desc"))),
        };
        Ok(Page { after: self.after.as_deref(), newest_first, most: limit + 1 })
    }
}

/// A page of things that have ids, as OpenAI's clients turn its leaves.
pub(crate) fn listed(mut data: Vec<Value>, page: Page<'_>) -> Value {
    let most = usize::try_from(page.most - 1).unwrap_or(0);
    let has_more = data.len() > most;
    data.truncate(most);
    let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let (first, last) = (id(data.first()), id(data.last()));
    json!({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more})
}

/// Reads the query of a list.
pub(crate) fn which(query: Result<Query<Listed>, QueryRejection>) -> Result<Listed, ApiError> {
    let wrong = |_| ApiError::fault(Fault::rule("limit", "must be one integer"));
    Ok(query.map_err(wrong)?.0)
}

/// The files of the caller's key
#[utoipa::path(get, path = "/v1/files", tag = "openai", params(Listed), responses(
    (status = 200, description = "{object: list, data: [file], first_id, last_id, has_more}"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<Listed>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let asked = which(query)?;
    let page = asked.page(PAGE_MAX, PAGE_MAX)?;
    let files = app.store()?.files(&caller.key.owner, asked.purpose.as_deref(), page).await?;
    let files = files.into_iter().map(|file| json!(FileObject::from(file)));
    Ok(Json(listed(files.collect(), page)))
}

/// A file, without what is in it
#[utoipa::path(get, path = "/v1/files/{file_id}", tag = "openai", params(("file_id" = String, Path)), responses(
    (status = 200, body = FileObject, description = "What is known of it"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<FileObject>, ApiError> {
    Ok(Json(app.file(&caller, &id).await?.into()))
}

/// What is in a file
#[utoipa::path(get, path = "/v1/files/{file_id}/content", tag = "openai", params(("file_id" = String, Path)),
    responses(
        (status = 200, description = "Its bytes", content_type = "application/octet-stream"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn content(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let file = app.file(&caller, &id).await?;
    let store = app.store()?.clone();
    // Part by part: a file may be larger than what anybody wants to hold.
    let parts = stream::try_unfold((store, id, 0), |(store, id, n): (Store, String, i64)| async move {
        let part = store.file_part(&id, n).await?;
        Ok::<_, fornax_jobs::Error>(part.map(|part| (part, (store, id, n + 1))))
    });
    let head = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, file.bytes.to_string()),
    ];
    Ok((head, Body::from_stream(parts)).into_response())
}

/// Forget a file
#[utoipa::path(delete, path = "/v1/files/{file_id}", tag = "openai", params(("file_id" = String, Path)), responses(
    (status = 200, description = "{id, object, deleted}"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    match app.store()?.delete_file(&caller.key.owner, &id).await? {
        true => Ok(Json(json!({"id": id, "object": "file", "deleted": true}))),
        false => Err(no_file()),
    }
}

fn no_file() -> ApiError {
    ApiError::new(Code::FileNotFound, "there is no such file of this key; files are kept for a limited time")
}

impl App {
    /// The store that jobs and files are kept in, or why there is none.
    pub(crate) fn store(&self) -> Result<&Store, ApiError> {
        Ok(&self.durable()?.store)
    }

    /// A file of the caller's key.
    pub(crate) async fn file(&self, caller: &Caller, id: &str) -> Result<StoredFile, ApiError> {
        self.store()?.file(&caller.key.owner, id).await?.ok_or_else(no_file)
    }
}
