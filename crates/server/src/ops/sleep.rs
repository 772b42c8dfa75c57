//! Models put to sleep and woken: `POST /sleep`, `POST /wake_up` and `GET /is_sleeping` with the fields of vLLM's
//! server, `POST /models/load` and `POST /models/unload` with those of llama.cpp's.
//!
//! A model that sleeps takes no memory, and the first request that names it wakes it: it waits until it is loaded, as
//! long as an answer may take, and `/loading` shows how far that is.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    extract::{Query, State, rejection::QueryRejection},
    http::StatusCode,
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{
    app::App,
    ask::prepare::{Read, read},
    error::{ApiError, Code, Fault},
    front::{body::RawBody, keys::Caller},
    models::Chosen,
    shape::{Unknown, body},
};

/// Whoever uses the model has so long to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// How deep a model sleeps, and which.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct Sleep {
    /// 1 or 2. Either gives back all that the model takes; what was cached stays where `--kv-disk` keeps it.
    level: Option<u8>,
    /// Without it, the first.
    model: Option<String>,
}

/// Which model.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct Which {
    /// Without it, the first.
    model: Option<String>,
}

/// Whether a model sleeps.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Sleeping {
    is_sleeping: bool,
}

/// A model to load or to unload.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ModelBody {
    /// What requests call it.
    #[schema(required = true, min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the model was found by it already")]
    model: String,
}

body!(ModelBody, Unknown::IgnoreBut(&[]));

/// That it is done.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Success {
    success: bool,
}

/// Put a model to sleep
///
/// Returns when its memory is free. Requests under way end first, within a minute.
#[utoipa::path(post, path = "/sleep", tag = "operations", params(Sleep), responses(
    (status = 200, body = Sleeping, description = "It sleeps"),
    (status = 409, body = crate::openapi::ErrorBody, description = "Requests go on using it"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn sleep(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    which: Result<Query<Sleep>, QueryRejection>,
) -> Result<Json<Sleeping>, ApiError> {
    let _entry = app.enter(&caller)?;
    check_right(&caller)?;
    let rule = || ApiError::fault(Fault::rule("level", "must be 1 or 2"));
    let Query(Sleep { level, model }) = which.map_err(|_| rule())?;
    if !matches!(level, None | Some(1 | 2)) {
        return Err(rule());
    }
    app.put_to_sleep(model.as_deref()).await?;
    Ok(Json(Sleeping { is_sleeping: true }))
}

/// Wake a model
///
/// Returns when it is loaded.
#[utoipa::path(post, path = "/wake_up", tag = "operations", params(Which), responses(
    (status = 200, body = Sleeping, description = "It is awake"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn wake(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    which: Result<Query<Which>, QueryRejection>,
) -> Result<Json<Sleeping>, ApiError> {
    let _entry = app.enter(&caller)?;
    check_right(&caller)?;
    let chosen = app.model_alone(asked(which)?.as_deref())?;
    drop(app.lease(chosen).await?);
    Ok(Json(Sleeping { is_sleeping: false }))
}

/// Whether a model sleeps
#[utoipa::path(get, path = "/is_sleeping", tag = "operations", params(Which), responses(
    (status = 200, body = Sleeping, description = "Whether it was put to sleep and has not been woken"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn is_sleeping(
    State(app): State<Arc<App>>,
    which: Result<Query<Which>, QueryRejection>,
) -> Result<Json<Sleeping>, ApiError> {
    let chosen = app.model_alone(asked(which)?.as_deref())?;
    Ok(Json(Sleeping { is_sleeping: app.models.all()[chosen.index].is_asleep() }))
}

/// Load a model, as llama.cpp's clients ask for it
///
/// Returns at once; `/health` and `/v1/models` show how far it is.
#[utoipa::path(post, path = "/models/load", tag = "llama.cpp", request_body = ModelBody, responses(
    (status = 200, body = Success, description = "It is loaded, or being loaded"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn load(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Success>, ApiError> {
    let _entry = app.enter(&caller)?;
    check_right(&caller)?;
    let Read { model, .. } = read::<ModelBody>(&app, caller.tenant(), body).await?;
    let chosen = app.model_alone(model.as_deref())?;
    // What becomes of it is in the log and in the model's state.
    tokio::spawn(async move { app.models.lease(chosen).await.map(drop) });
    Ok(Json(Success { success: true }))
}

/// Unload a model, as llama.cpp's clients ask for it
#[utoipa::path(post, path = "/models/unload", tag = "llama.cpp", request_body = ModelBody, responses(
    (status = 200, body = Success, description = "Its memory is free"),
    (status = 409, body = crate::openapi::ErrorBody, description = "Requests go on using it"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn unload(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Success>, ApiError> {
    let _entry = app.enter(&caller)?;
    check_right(&caller)?;
    let Read { model, .. } = read::<ModelBody>(&app, caller.tenant(), body).await?;
    app.put_to_sleep(model.as_deref()).await?;
    Ok(Json(Success { success: true }))
}

fn asked(which: Result<Query<Which>, QueryRejection>) -> Result<Option<String>, ApiError> {
    let Query(Which { model }) =
        which.map_err(|_| ApiError::fault(Fault::rule("model", "must be one name")))?;
    Ok(model)
}

/// Refuses a key that may not take from others what they use.
fn check_right(caller: &Caller) -> Result<(), ApiError> {
    if caller.key.models {
        return Ok(());
    }
    let message = "this key may not put models to sleep or wake them; the operator allows it by the word `models` behind \
        the key in its file";
    Err(ApiError { status: Some(StatusCode::FORBIDDEN), ..ApiError::new(Code::Unauthorized, message) })
}

impl App {
    /// A model by its name; an adapter sleeps with its model and not by itself.
    fn model_alone(&self, name: Option<&str>) -> Result<Chosen, ApiError> {
        let chosen = self.models.named(name)?;
        match &chosen.adapter {
            None => Ok(chosen),
            Some(adapter) => {
                let rule = format!("must be a model; {:?} is an adapter", adapter.name);
                Err(ApiError::fault(Fault::rule("model", rule)))
            }
        }
    }

    async fn put_to_sleep(&self, name: Option<&str>) -> Result<(), ApiError> {
        let chosen = self.model_alone(name)?;
        if self.models.put_to_sleep(chosen.index, PATIENCE).await {
            return Ok(());
        }
        let seconds = PATIENCE.as_secs();
        let message =
            format!("requests went on using the model for {seconds} seconds; it is loaded as before");
        Err(ApiError { status: Some(StatusCode::CONFLICT), ..ApiError::new(Code::ModelNotReady, message) })
    }
}
