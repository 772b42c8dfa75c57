//! `POST /v1/load_lora_adapter`, `POST /v1/unload_lora_adapter` with the fields of vLLM's server, and `GET /lora-adapters`
//! as llama.cpp's tells it.
//!
//! An adapter is a model of its own name here: a request names it. One that is loaded so is there until it is unloaded or
//! its model is.

use std::sync::Arc;

use axum::{Extension, Json, extract::State};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    app::{App, Failed},
    ask::prepare::{Read, read},
    error::{ApiError, Code, Fault},
    front::{body::RawBody, keys::Caller},
    models::{Chosen, Lease, ModelAdapter},
    shape::{Unknown, body},
};

/// An adapter to load.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct LoadAdapterBody {
    /// The model that it is for; without it, the first.
    #[schema(min_length = 1, max_length = 512)]
    #[expect(dead_code, reason = "the model was found by it already")]
    model: Option<String>,
    /// What requests will call it.
    #[schema(required = true, min_length = 1, max_length = 512)]
    lora_name: String,
    /// Its folder, as PEFT writes one: within a folder that the operator allows (`--adapter-root`), from which relative paths
    /// are meant.
    #[schema(required = true, min_length = 1, max_length = 4096)]
    lora_path: String,
    /// Whether it takes the place of one of that name. Requests under way keep the one before.
    load_inplace: Option<bool>,
}

body!(LoadAdapterBody, Unknown::IgnoreBut(&[]));

/// An adapter to unload.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct UnloadAdapterBody {
    /// What requests call it.
    #[schema(required = true, min_length = 1, max_length = 512)]
    lora_name: String,
}

body!(UnloadAdapterBody, Unknown::IgnoreBut(&[]));

/// Load an adapter
///
/// While the model runs: its requests go on. The name is then a model's in every request, and `/v1/models` lists it.
#[utoipa::path(post, path = "/v1/load_lora_adapter", tag = "openai", request_body = LoadAdapterBody, responses(
    (status = 200, content_type = "text/plain", body = String, description = "It is loaded"),
    (status = 409, body = crate::openapi::ErrorBody, description = "All places for adapters are taken"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn load(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<String, ApiError> {
    let entry = app.enter(&caller)?;
    check_right(&caller)?;
    let Read { body, model, .. } = read::<LoadAdapterBody>(&app, caller.tenant(), body).await?;
    let chosen = app.models.named(model.as_deref())?;
    if chosen != Chosen::model(chosen.index) {
        let rule = format!("must be a model; {:?} is an adapter, or made of one", app.models.name(&chosen));
        return Err(ApiError::fault(Fault::rule("model", rule)));
    }
    let lease = app.lease(chosen).await?;
    // On a task of its own: a client that leaves would leave an adapter behind that nobody can name.
    let loaded = tokio::spawn(async move {
        let _entry = entry;
        app.load_adapter(&lease, body).await
    });
    loaded.await.unwrap_or_else(|_| Err(Failed::internal("loading the adapter panicked").into()))
}

/// Unload an adapter
///
/// No request can name it any more; those under way keep it until they end.
#[utoipa::path(post, path = "/v1/unload_lora_adapter", tag = "openai", request_body = UnloadAdapterBody, responses(
    (status = 200, content_type = "text/plain", body = String, description = "It is unloaded"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn unload(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<String, ApiError> {
    let _entry = app.enter(&caller)?;
    check_right(&caller)?;
    let Read { body, .. } = read::<UnloadAdapterBody>(&app, caller.tenant(), body).await?;
    let _turn = app.models.adapter_turn.lock().await;
    let name = &body.lora_name;
    let found = app.models.named(Some(name))?;
    let adapter =
        found.adapter.as_ref().filter(|adapter| found.made.is_none() && adapter.loaded_from.is_some());
    let Some(adapter) = adapter else {
        let rule =
            "must be an adapter that was loaded by /v1/load_lora_adapter; others stay with their model";
        return Err(ApiError::fault(Fault::rule("lora_name", rule)));
    };
    let slot = &app.models.all()[found.index];
    slot.adapters().retain(|there| !Arc::ptr_eq(there, adapter));
    if let Some(served) = slot.loaded() {
        served.engine.unload_adapter(adapter.number);
    }
    tracing::info!(adapter = name, model = slot.offer.card.name, "unloaded");
    Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
}

/// An adapter, as llama.cpp's server tells it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LoraAdapter {
    id: usize,
    /// What requests call it: it is a model here.
    name: String,
    /// The model that it is an adapter of.
    model: String,
    /// Where it was loaded from, for those who may load adapters.
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    /// How much of it is in answers of the model itself: nothing. A request that names it gets all of it.
    scale: f32,
}

/// The adapters
#[utoipa::path(get, path = "/lora-adapters", tag = "llama.cpp", responses(
    (status = 200, body = Vec<LoraAdapter>, description = "All that can be named now"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Vec<LoraAdapter>>, ApiError> {
    app.check_ready()?;
    let choices = app.models.choices();
    let own = choices.iter().filter(|chosen| chosen.made.is_none());
    let adapters = own.filter_map(|chosen| Some((chosen.index, chosen.adapter.as_ref()?)));
    let told = adapters.enumerate().map(|(id, (index, adapter))| LoraAdapter {
        id,
        name: adapter.name.clone(),
        model: app.models.all()[index].offer.card.name.clone(),
        path: adapter.loaded_from.clone().filter(|_| caller.key.adapters),
        scale: 0.0,
    });
    Ok(Json(told.collect()))
}

/// Not had: how much of an adapter is in every answer
#[utoipa::path(
    post,
    path = "/lora-adapters",
    tag = "llama.cpp",
    responses(crate::openapi::Refusals, crate::openapi::DoorRefusals)
)]
pub(crate) async fn scale() -> ApiError {
    let message =
        "adapters are models of their own here, each with its own scale: name one as the request's model";
    ApiError::new(Code::UnknownEndpoint, message)
}

/// Refuses a key that may not load and unload what others use.
fn check_right(caller: &Caller) -> Result<(), ApiError> {
    caller.check_right(caller.key.adapters, "load or unload adapters", "adapters")
}

impl App {
    async fn load_adapter(&self, lease: &Lease, body: LoadAdapterBody) -> Result<String, ApiError> {
        let LoadAdapterBody { lora_name: name, lora_path: path, load_inplace, .. } = body;
        if lease.load_adapter.is_none() {
            let message = "no adapters are loaded over HTTP here; the operator allows it with --adapter-root";
            return Err(ApiError::new(Code::UnknownEndpoint, message));
        }
        let _turn = self.models.adapter_turn.lock().await;
        let before = self.replaced(lease, &name, load_inplace == Some(true))?;
        let (served, from, called) = (Arc::clone(lease.served()), path.clone(), name.clone());
        let loaded = tokio::task::spawn_blocking(move || {
            let load = served.load_adapter.as_ref().expect("looked at above");
            load(&called, &from)
        });
        let number =
            loaded.await.unwrap_or_else(|_| Err(Failed::internal("loading the adapter panicked")))?;
        let adapter = Arc::new(ModelAdapter { name: name.clone(), number, loaded_from: Some(path) });
        let mut adapters = lease.slot().adapters();
        if let Some(before) = before {
            adapters.retain(|there| !Arc::ptr_eq(there, &before));
            lease.engine.unload_adapter(before.number);
        }
        adapters.push(adapter);
        drop(adapters);
        tracing::info!(adapter = name, model = lease.slot().offer.card.name, "loaded");
        Ok(format!("Success: LoRA adapter '{name}' added successfully."))
    }

    /// The adapter whose name another is to have; an error where the name is taken by something that stays.
    fn replaced(
        &self,
        lease: &Lease,
        name: &str,
        in_place: bool,
    ) -> Result<Option<Arc<ModelAdapter>>, ApiError> {
        let Ok(Chosen { index, adapter, made }) = self.models.named(Some(name)) else { return Ok(None) };
        let own = adapter
            .filter(|_| made.is_none())
            .filter(|it| it.loaded_from.is_some() && index == lease.chosen().index);
        match own {
            Some(adapter) if in_place => Ok(Some(adapter)),
            Some(_) => {
                let rule = "is loaded already; load_inplace takes its place";
                Err(ApiError::fault(Fault::rule("lora_name", rule)))
            }
            None => Err(ApiError::fault(Fault::rule("lora_name", "is a model's name already"))),
        }
    }
}
