//! `GET /props` and `GET /slots`: what llama.cpp's clients ask of a server before they ask its model.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Query, State, rejection::QueryRejection},
};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::IntoParams;

use crate::{
    app::App,
    error::{ApiError, Fault},
    openai::reply::FINGERPRINT,
};

/// Of which model.
#[derive(Debug, Deserialize, IntoParams)]
pub(crate) struct OfModel {
    /// The name of a served model; without it, the first of them.
    model: Option<String>,
}

/// The model that a query names.
fn asked(query: Result<Query<OfModel>, QueryRejection>) -> Result<Option<String>, ApiError> {
    let wrong = |_| ApiError::fault(Fault::rule("model", "must be one name"));
    Ok(query.map_err(wrong)?.0.model)
}

/// What the model is and how much it takes at once
#[utoipa::path(get, path = "/props", tag = "llama.cpp", params(OfModel), responses(
    (status = 200, description = "{default_generation_settings: {n_ctx, params}, total_slots, model_alias, model_path, chat_template, modalities, build_info}"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn props(
    State(app): State<Arc<App>>,
    of: Result<Query<OfModel>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    app.check_ready()?;
    let served = app.lease(app.models.named(asked(of)?.as_deref())?).await?;
    let template = (*served.template).as_ref().map_or(Value::Null, |template| json!(template.source()));
    Ok(Json(json!({
        "default_generation_settings": {
            "n_ctx": served.engine.capacity().context,
            "params": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        },
        "total_slots": served.engine.stats().slots,
        "model_alias": served.name(),
        "model_path": served.card.reference,
        "chat_template": template,
        "modalities": {"vision": false, "audio": false},
        "build_info": FINGERPRINT,
        "is_sleeping": false,
    })))
}

/// What is computed now
///
/// Prompts and answers are not told, whoever asks.
#[utoipa::path(get, path = "/slots", tag = "llama.cpp", params(OfModel), responses(
    (status = 200, description = "[{id, n_ctx, is_processing}]"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn slots(
    State(app): State<Arc<App>>,
    of: Result<Query<OfModel>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    app.check_ready()?;
    let served = app.lease(app.models.named(asked(of)?.as_deref())?).await?;
    let (stats, context) = (served.engine.stats(), served.engine.capacity().context);
    let slot = |id: usize| json!({"id": id, "n_ctx": context, "is_processing": id < stats.running});
    Ok(Json((0..stats.slots).map(slot).collect()))
}
