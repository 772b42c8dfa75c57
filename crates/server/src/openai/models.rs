//! `GET /v1/models` and `GET /v1/models/{id}`.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State, rejection::PathRejection},
};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    app::App,
    error::{ApiError, Fault},
    models::{Chosen, Models, Standing, State as Stands},
};

/// All models, the default first.
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
    /// Whether it is loaded. One that is not is loaded by the first request for it.
    state: Standing,
    /// The model that it is an adapter of, or was made of.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    /// Further names for it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    aliases: Vec<String>,
}

impl Model {
    fn of(models: &Models, chosen: &Chosen) -> Model {
        let slot = &models.all()[chosen.index];
        let card = &slot.offer.card;
        let planned = slot.offer.context;
        Model {
            id: models.name(chosen).to_owned(),
            object: "model",
            created: chosen.made.as_ref().map_or(card.created, |made| made.told.created),
            owned_by: "fornax",
            max_model_len: slot.loaded().map_or(planned, |served| served.engine.capacity().context),
            state: slot.look(Stands::standing),
            parent: match (&chosen.made, &chosen.adapter) {
                (Some(made), _) => Some(made.told.from.clone()),
                (None, adapter) => adapter.as_ref().map(|_| card.name.clone()),
            },
            aliases: match *chosen == Chosen::model(chosen.index) {
                true => card.aliases.clone(),
                false => Vec::new(),
            },
        }
    }
}

/// What can be asked for
#[utoipa::path(get, path = "/v1/models", tag = "openai", responses(
    (status = 200, body = ModelList, description = "The served models"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn list(State(app): State<Arc<App>>) -> Result<Json<ModelList>, ApiError> {
    app.check_ready()?;
    let data = app.models.choices().iter().map(|chosen| Model::of(&app.models, chosen)).collect();
    Ok(Json(ModelList { object: "list", data }))
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
    app.check_ready()?;
    Ok(Json(Model::of(&app.models, &app.models.named(Some(name))?)))
}
