//! `GET /api/tags`, `GET /api/ps`, `POST /api/show`, `POST /api/pull`, `GET /api/version`.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::request::untagged;
use crate::{
    app::App,
    ask::prepare::{on_a_thread, read},
    error::{ApiError, Fault},
    front::{body::RawBody, keys::Caller},
    made::{MadeMessage, MadeModel},
    models::Slot,
    served::{Device, ModelCard},
    shape::{Unknown, body},
};

/// All models.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Tags {
    models: Vec<Tag>,
}

/// All models that are loaded.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Processes {
    models: Vec<Process>,
}

/// A model that can be asked for.
#[derive(Debug, Serialize, ToSchema)]
struct Tag {
    name: String,
    model: String,
    /// When it was loaded, or the server started.
    modified_at: String,
    /// Bytes of its files.
    size: u64,
    /// Tells its files from others.
    digest: String,
    details: Details,
}

/// A model that is loaded.
#[derive(Debug, Serialize, ToSchema)]
struct Process {
    name: String,
    model: String,
    /// Bytes that it has on its devices.
    size: u64,
    /// Of these, on devices other than the processor.
    size_vram: u64,
    digest: String,
    details: Details,
    /// When it will be unloaded if nobody asks for it; far away where that is never.
    expires_at: String,
    context_length: usize,
}

#[derive(Debug, Serialize, ToSchema)]
struct Details {
    /// What it was made of by `/api/create`; empty of others.
    parent_model: String,
    format: &'static str,
    family: String,
    families: Vec<String>,
    /// Numbers that its weights hold, as `134.52M`.
    parameter_size: String,
    quantization_level: String,
}

impl Details {
    fn of(card: &ModelCard) -> Details {
        let family = card.architecture.clone();
        let quantization_level = card.quant.clone();
        Details {
            parent_model: String::new(),
            format: card.files.format,
            families: vec![family.clone()],
            family,
            parameter_size: rounded(card.files.parameters),
            quantization_level,
        }
    }
}

fn tag(slot: &Slot, made: Option<&MadeModel>) -> Tag {
    let loaded = slot.loaded();
    let card = loaded.as_ref().map_or(&slot.offer.card, |served| &served.card);
    let (name, created) =
        made.map_or((&card.name, card.created), |made| (&made.told.name, made.told.created));
    let created = i64::try_from(created).ok().and_then(|at| Timestamp::from_second(at).ok());
    Tag {
        name: name.clone(),
        model: name.clone(),
        modified_at: created.unwrap_or(Timestamp::UNIX_EPOCH).to_string(),
        size: card.files.bytes,
        digest: made.map_or_else(|| card.files.digest.clone(), |made| made.digest(&card.files.digest)),
        details: Details { parent_model: parent(made), ..Details::of(card) },
    }
}

/// What a model was made of; nothing where it was not made.
fn parent(made: Option<&MadeModel>) -> String {
    made.map_or_else(String::new, |made| made.told.from.clone())
}

fn process(slot: &Slot, idle_unload: Option<Duration>) -> Option<Process> {
    let served = slot.loaded()?;
    let off_processor = |device: &&Device| device.name != "cpu";
    let until = slot.leaves(idle_unload).and_then(|left| SignedDuration::try_from(left).ok());
    let expires = until.and_then(|left| Timestamp::now().checked_add(left).ok()).unwrap_or(Timestamp::MAX);
    Some(Process {
        name: served.card.name.clone(),
        model: served.card.name.clone(),
        size: served.device_bytes(),
        size_vram: served.devices.iter().filter(off_processor).map(Device::total).sum(),
        digest: served.card.files.digest.clone(),
        details: Details::of(&served.card),
        expires_at: expires.to_string(),
        context_length: served.engine.capacity().context,
    })
}

/// A count as Ollama writes it: `7.6B`, `134.52M`.
fn rounded(count: u64) -> String {
    let thousands = |unit: f64| count as f64 / unit;
    match count {
        0 => String::new(),
        1_000_000_000.. => format!("{:.1}B", thousands(1e9)),
        1_000_000.. => format!("{:.2}M", thousands(1e6)),
        _ => format!("{:.0}K", thousands(1e3)),
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
    let choices = app.models.choices();
    let own = choices.iter().filter(|chosen| chosen.made.is_some() || chosen.adapter.is_none());
    let tags = own.map(|chosen| tag(&app.models.all()[chosen.index], chosen.made.as_deref()));
    Ok(Json(Tags { models: tags.collect() }))
}

/// What is loaded, as Ollama's clients ask
#[utoipa::path(get, path = "/api/ps", tag = "ollama", responses(
    (status = 200, body = Processes, description = "Those that are loaded"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn running(State(app): State<Arc<App>>) -> Result<Json<Processes>, ApiError> {
    app.check_ready()?;
    let loaded = app.models.all().iter().filter_map(|slot| process(slot, app.options.idle_unload));
    Ok(Json(Processes { models: loaded.collect() }))
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
    /// What a conversation begins with that has no such message of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    system: Option<String>,
    /// What every conversation begins with.
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<Vec<MadeMessage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    license: Option<Value>,
    details: Details,
    #[schema(value_type = Object)]
    model_info: Value,
    /// completion or embedding; tools and thinking where the model's template has them; vision where it reads images.
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
    let shown = on_a_thread(&app, caller.tenant(), &lease, |served| {
        let template = served.template().ok();
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
        if served.sight.is_ok() {
            capabilities.push("vision");
        }
        let architecture = &served.card.architecture;
        let mut model_info = json!({"general.architecture": architecture,
            "general.parameter_count": served.card.files.parameters});
        model_info[format!("{architecture}.context_length")] = json!(capacity.context);
        let made = served.made();
        let mut parameters = vec![format!("num_ctx {}", capacity.context)];
        parameters.extend(made.map(MadeModel::parameters).into_iter().flatten());
        Ok(Shown {
            modelfile: made.map_or_else(String::new, MadeModel::modelfile),
            parameters: parameters.join("\n"),
            template: template.map_or_else(String::new, |template| template.source().to_owned()),
            system: made.and_then(|made| made.told.system.clone()),
            messages: made.map(|made| made.told.messages.clone()).filter(|messages| !messages.is_empty()),
            license: made.and_then(|made| made.told.license.clone()),
            details: Details { parent_model: parent(made), ..Details::of(&served.card) },
            model_info,
            capabilities,
        })
    });
    Ok(Json(shown.await?))
}

/// A model to have.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct PullBody {
    #[schema(min_length = 1, max_length = 512)]
    model: Option<String>,
    /// The older name of model.
    #[schema(min_length = 1, max_length = 512)]
    name: Option<String>,
    /// Lines as they come, unless this is false.
    stream: Option<bool>,
}

body!(PullBody, Unknown::IgnoreBut(&[]));

/// How far it is.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Pulled {
    status: &'static str,
}

impl Pulled {
    /// Nothing is left to do.
    pub(super) fn success() -> Pulled {
        Pulled { status: "success" }
    }
}

/// Have a model, as Ollama's clients ask
///
/// A model that is served is there; others are not fetched. Lines of JSON unless `stream` is false.
#[utoipa::path(post, path = "/api/pull", tag = "ollama", request_body = PullBody, responses(
    (status = 200, description = "It is there",
        content((Pulled = "application/json"), (Pulled = "application/x-ndjson"))),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn pull(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    let body = read::<PullBody>(&app, caller.tenant(), body).await?.body;
    let name = body.model.as_ref().or(body.name.as_ref());
    let name = name.ok_or_else(|| ApiError::fault(Fault::rule("model", "is required")))?;
    // One that is not served is refused with the names of those that are.
    app.models.named(Some(untagged(name)))?;
    if body.stream == Some(false) {
        return Ok(Json(Pulled::success()).into_response());
    }
    let lines = "{\"status\":\"pulling manifest\"}\n{\"status\":\"success\"}\n";
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], lines).into_response())
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
