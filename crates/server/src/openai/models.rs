//! `GET /v1/models` and `GET /v1/models/{id}`.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State, rejection::PathRejection},
};
use serde::Serialize;
use utoipa::ToSchema;

use super::prepare::check_model;
use crate::{
    app::App,
    error::{ApiError, Fault},
    served::Served,
};

/// All models, which is one.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

/// A model that can be asked for.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// Tokens of a request, prompt and answer together.
    max_model_len: usize,
}

impl Model {
    fn of(served: &Served) -> Model {
        Model {
            id: served.card.name.clone(),
            object: "model",
            created: served.card.created,
            owned_by: "fornax",
            max_model_len: served.engine.capacity().context,
        }
    }
}

/// What can be asked for
#[utoipa::path(get, path = "/v1/models", tag = "openai", responses(
    (status = 200, body = ModelList, description = "The served model"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn list(State(app): State<Arc<App>>) -> Result<Json<ModelList>, ApiError> {
    let model = Model::of(&*app.model()?);
    Ok(Json(ModelList { object: "list", data: vec![model] }))
}

/// One model
#[utoipa::path(get, path = "/v1/models/{id}", tag = "openai", params(("id" = String, Path, description = "Its name")),
    responses((status = 200, body = Model, description = "The model"), crate::openapi::Refusals,
    crate::openapi::DoorRefusals))]
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path(id) = id.map_err(|_| no_text())?;
    named(&app, &id)
}

/// One model whose name has two parts
///
/// Clients do not escape the slash of `owner/name`.
#[utoipa::path(get, path = "/v1/models/{owner}/{name}", tag = "openai",
    params(("owner" = String, Path, description = "What is before the slash"),
        ("name" = String, Path, description = "What is behind it")),
    responses((status = 200, body = Model, description = "The model"), crate::openapi::Refusals,
    crate::openapi::DoorRefusals))]
pub(crate) async fn one_of_owner(
    State(app): State<Arc<App>>,
    id: Result<Path<(String, String)>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path((owner, name)) = id.map_err(|_| no_text())?;
    named(&app, &format!("{owner}/{name}"))
}

fn no_text() -> ApiError {
    ApiError::fault(Fault::rule("id", "must be UTF-8"))
}

fn named(app: &App, name: &str) -> Result<Json<Model>, ApiError> {
    let served = app.model()?;
    check_model(&served, Some(name))?;
    Ok(Json(Model::of(&served)))
}
