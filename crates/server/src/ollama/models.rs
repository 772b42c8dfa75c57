//! `GET /api/tags`, `GET /api/ps`, `POST /api/show`, `GET /api/version`.

use std::sync::Arc;

use axum::{Extension, Json, extract::State};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::request::untagged;
use crate::{
    app::App,
    ask::prepare::{on_a_thread, read},
    error::{ApiError, Fault},
    front::{body::RawBody, keys::Caller},
    models::Slot,
    served::ModelCard,
    shape::{Unknown, body},
};

/// All models, which is one.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Tags {
    models: Vec<Tag>,
}

/// A model that can be asked for.
#[derive(Debug, Serialize, ToSchema)]
struct Tag {
    name: String,
    model: String,
    /// When it was loaded.
    modified_at: String,
    /// Bytes that it has on its devices.
    size: u64,
    details: Details,
}

#[derive(Debug, Serialize, ToSchema)]
struct Details {
    format: &'static str,
    family: String,
    families: Vec<String>,
    parameter_size: String,
    quantization_level: String,
}

impl Details {
    fn of(card: &ModelCard) -> Details {
        let family = card.architecture.clone();
        let quantization_level = card.quant.clone();
        let format = if card.reference.ends_with(".gguf") { "gguf" } else { "safetensors" };
        Details {
            format,
            families: vec![family.clone()],
            family,
            parameter_size: String::new(),
            quantization_level,
        }
    }
}

fn tag(slot: &Slot) -> Tag {
    let loaded = slot.loaded();
    let card = loaded.as_ref().map_or(&slot.offer.card, |served| &served.card);
    let created = i64::try_from(card.created).ok().and_then(|at| Timestamp::from_second(at).ok());
    Tag {
        name: card.name.clone(),
        model: card.name.clone(),
        modified_at: created.unwrap_or(Timestamp::UNIX_EPOCH).to_string(),
        // Nothing until it is loaded.
        size: loaded.as_ref().map_or(0, |served| served.device_bytes()),
        details: Details::of(card),
    }
}

/// What can be asked for, as Ollama's clients ask
#[utoipa::path(get, path = "/api/tags", tag = "ollama", responses(
    (status = 200, body = Tags, description = "The served models"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn list(State(app): State<Arc<App>>) -> Result<Json<Tags>, ApiError> {
    app.check_ready()?;
    Ok(Json(Tags { models: app.models.all().iter().map(tag).collect() }))
}

/// What is loaded, as Ollama's clients ask
#[utoipa::path(get, path = "/api/ps", tag = "ollama", responses(
    (status = 200, body = Tags, description = "Those that are loaded"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn running(State(app): State<Arc<App>>) -> Result<Json<Tags>, ApiError> {
    app.check_ready()?;
    let loaded = app.models.all().iter().filter(|slot| slot.loaded().is_some());
    Ok(Json(Tags { models: loaded.map(tag).collect() }))
}

/// A model to describe.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ShowBody {
    #[schema(min_length = 1, max_length = 512)]
    model: Option<String>,
    /// The older name of model.
    #[schema(min_length = 1, max_length = 512)]
    name: Option<String>,
}

body!(ShowBody, Unknown::IgnoreBut(&[]));

/// What a model is.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Shown {
    modelfile: String,
    parameters: String,
    /// The model's chat template, which is Jinja.
    template: String,
    details: Details,
    #[schema(value_type = Object)]
    model_info: Value,
    /// completion or embedding; tools and thinking where the model's template has them.
    capabilities: Vec<&'static str>,
}

/// What a model is, as Ollama's clients ask
#[utoipa::path(post, path = "/api/show", tag = "ollama", request_body = ShowBody, responses(
    (status = 200, body = Shown, description = "The model"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Json<Shown>, ApiError> {
    app.check_ready()?;
    let body = read::<ShowBody>(&app, caller.tenant(), body).await?.body;
    let name = body.model.as_ref().or(body.name.as_ref());
    let name = name.ok_or_else(|| ApiError::fault(Fault::rule("model", "is required")))?;
    let lease = app.lease(app.models.named(Some(untagged(name)))?).await?;
    let shown = on_a_thread(&app, caller.tenant(), lease.served(), |served| {
        let template = served.template.as_ref().as_ref().ok();
        let capacity = served.engine.capacity();
        let mut capabilities = if capacity.encodes { vec!["embedding"] } else { vec!["completion"] };
        if let Some(template) = template {
            let dialect = template.dialect(true);
            if dialect.family().is_some() && template.source().contains("tools") {
                capabilities.push("tools");
            }
            if dialect.thinks() {
                capabilities.push("thinking");
            }
        }
        let architecture = &served.card.architecture;
        let mut model_info = json!({"general.architecture": architecture});
        model_info[format!("{architecture}.context_length")] = json!(capacity.context);
        Ok(Shown {
            modelfile: String::new(),
            parameters: String::new(),
            template: template.map_or_else(String::new, |template| template.source().to_owned()),
            details: Details::of(&served.card),
            model_info,
            capabilities,
        })
    });
    Ok(Json(shown.await?))
}

/// Which version answers.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Version {
    version: &'static str,
}

/// The version of this server
#[utoipa::path(get, path = "/api/version", tag = "ollama", responses(
    (status = 200, body = Version, description = "Fornax's own"),
    crate::openapi::DoorRefusals
))]
pub(crate) async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}
