//! `PUT` and `GET /v2/{endpoint}/schemas/{name}`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use fornax_form::{Form, Schema};
use fornax_jobs::Failure;
use serde_json::{Value, json};

use crate::{
    app::App,
    ask::prepare::on_a_thread,
    error::{ApiError, Code, Fault},
    front::{body::RawBody, keys::Caller},
    shape,
};

/// Register a schema
///
/// Jobs of the same key refer to it by its name, `{"schema": "name"}`; those that were submitted before keep what they had.
#[utoipa::path(put, path = "/v2/{endpoint}/schemas/{name}", tag = "jobs",
    request_body(content = Object, description = "A JSON Schema"),
    params(("endpoint" = String, Path, description = "`default` or a model's name"),
        ("name" = String, Path, description = "1 to 128 letters, digits, dots, dashes and underlines")),
    responses(
        (status = 200, description = "{name, status}"),
        (status = 409, body = crate::openapi::ErrorBody, description = "As many are registered as may be"),
        (status = 507, body = crate::openapi::ErrorBody, description = "The disk is full: nothing was kept"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn put(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path((endpoint, name)): Path<(String, String)>,
    body: RawBody,
) -> Result<Json<Value>, ApiError> {
    let (durable, model) = app.jobs_of(&endpoint)?;
    let sane = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if !(1..=128).contains(&name.len()) || !name.bytes().all(sane) {
        let rule = "must have 1 to 128 letters, digits, dots, dashes and underlines";
        return Err(ApiError::fault(Fault::rule("name", rule)));
    }
    // Compiled now: a schema that cannot be followed is refused here, and the first job finds it ready.
    let lease = app.lease(model.clone()).await?;
    let schema = on_a_thread(&app, caller.tenant(), &lease, move |served| {
        let schema = shape::parse(&body.bytes, &|| served.check().is_ok())?;
        Schema::new(&schema, None).map_err(Failure::from)?;
        let compiled = served.compile(&Form::JsonSchema(schema.clone()));
        compiled.map_err(|error| ApiError::form("body", &error))?;
        Ok(schema)
    })
    .await?;
    durable.store.put_schema(app.name_of(&model), &caller.key.owner, &name, &schema).await?;
    Ok(Json(json!({"name": name, "status": "registered"})))
}

/// A registered schema
#[utoipa::path(get, path = "/v2/{endpoint}/schemas/{name}", tag = "jobs",
    params(("endpoint" = String, Path, description = "`default` or a model's name"), ("name" = String, Path)),
    responses(
        (status = 200, description = "The schema"),
        crate::openapi::Refusals,
        crate::openapi::DoorRefusals
))]
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path((endpoint, name)): Path<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    let (durable, model) = app.jobs_of(&endpoint)?;
    let schema = durable.store.schema(app.name_of(&model), &caller.key.owner, &name).await?;
    schema
        .map(Json)
        .ok_or_else(|| ApiError::new(Code::SchemaNotFound, "there is no schema of that name here"))
}
