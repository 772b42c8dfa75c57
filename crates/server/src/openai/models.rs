//! `GET /v1/models` and `GET /v1/models/{id}`.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State},
};
use serde::Serialize;
use utoipa::ToSchema;

use super::prepare::check_model;
use crate::{app::App, error::ApiError, served::Served};

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
    Path(id): Path<String>,
) -> Result<Json<Model>, ApiError> {
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
    Path((owner, name)): Path<(String, String)>,
) -> Result<Json<Model>, ApiError> {
    named(&app, &format!("{owner}/{name}"))
}

fn named(app: &App, name: &str) -> Result<Json<Model>, ApiError> {
    let served = app.model()?;
    check_model(&served, Some(name))?;
    Ok(Json(Model::of(&served)))
}
