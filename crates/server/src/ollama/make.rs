//! `POST /api/create`, `POST /api/copy`, `DELETE /api/delete`: models that are made of those that are served.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::{models::Pulled, request::untagged};
use crate::{
    app::{App, unix_seconds},
    ask::prepare::{blocking, read},
    error::{ApiError, Code, Fault},
    front::{body::RawBody, keys::Caller},
    made::{Description, MadeMessage, MadeModel},
    shape::{Unknown, Unsupported, body},
};

/// Models that clients made, of one server.
const MADE_MAX: usize = 256;

/// Bytes of what is kept of one.
const MADE_BYTES_MAX: usize = 1 << 20;

/// A model to make.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CreateBody {
    /// What it is to be called.
    #[schema(min_length = 1, max_length = 512)]
    model: Option<String>,
    /// The older name of model.
    #[schema(min_length = 1, max_length = 512)]
    name: Option<String>,
    /// A model that is served, one of its adapters, or one that was made.
    #[schema(required = true, min_length = 1, max_length = 512)]
    from: String,
    /// What a conversation begins with that has no such message of its own.
    system: Option<String>,
    /// A chat template in the place of the model's own. It is Jinja, as models carry it.
    template: Option<String>,
    /// Options of requests that do not say them.
    #[schema(value_type = Option<Object>)]
    parameters: Option<Map<String, Value>>,
    /// What every conversation begins with.
    #[schema(max_items = 1024)]
    messages: Option<Vec<MadeMessage>>,
    /// A text or several, told by `/api/show`.
    license: Option<Value>,
    /// Lines as they come, unless this is false.
    stream: Option<bool>,
}

// Weights come from the server's own machine.
body!(
    CreateBody,
    Unknown::IgnoreBut(&[
        Unsupported { field: "adapters", neutral: &["{}"] },
        Unsupported { field: "files", neutral: &["{}"] },
        Unsupported { field: "modelfile", neutral: &["\"\""] },
        Unsupported { field: "path", neutral: &["\"\""] },
        Unsupported { field: "quantize", neutral: &["\"\""] },
    ])
);

/// Make a model of one that is served
///
/// A name with instructions, options, messages and a template of its own, kept where jobs are kept. Every route takes
/// the name. A later one of that name takes its place.
#[utoipa::path(post, path = "/api/create", tag = "ollama", request_body = CreateBody, responses(
    (status = 200, description = "It is made",
        content((Pulled = "application/json"), (Pulled = "application/x-ndjson"))),
    (status = 507, body = crate::openapi::ErrorBody, description = "The disk is full: nothing was kept"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<Response, ApiError> {
    let _entry = app.enter(&caller)?;
    caller.check_right(caller.key.models, "make or delete models", "models")?;
    let body = read::<CreateBody>(&app, caller.tenant(), body).await?.body;
    let name = body.model.as_ref().or(body.name.as_ref());
    let name = name.ok_or_else(|| ApiError::fault(Fault::rule("model", "is required")))?;
    // One that was made is repeated: it may go, or become another.
    let from = app.models.named(Some(untagged(&body.from)))?;
    let before = from.made.as_ref().map(|made| made.told.clone());
    let told = Description {
        name: untagged(name).to_owned(),
        from: before.as_ref().map_or_else(|| app.models.name(&from).to_owned(), |made| made.from.clone()),
        system: body.system.or_else(|| before.as_ref()?.system.clone()),
        template: body.template.filter(|text| !text.is_empty()).or_else(|| before.as_ref()?.template.clone()),
        parameters: before
            .as_ref()
            .map(|made| made.parameters.clone())
            .into_iter()
            .chain(body.parameters)
            .flatten()
            .collect(),
        messages: body.messages.or_else(|| Some(before.as_ref()?.messages.clone())).unwrap_or_default(),
        license: body.license.or_else(|| before.as_ref()?.license.clone()),
        created: unix_seconds(),
    };
    app.make_model(&caller, told).await?;
    if body.stream == Some(false) {
        return Ok(Json(Pulled::success()).into_response());
    }
    let lines = "{\"status\":\"writing manifest\"}\n{\"status\":\"success\"}\n";
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], lines).into_response())
}

/// A model to have under another name.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct CopyBody {
    #[schema(required = true, min_length = 1, max_length = 512)]
    source: String,
    #[schema(required = true, min_length = 1, max_length = 512)]
    destination: String,
}

body!(CopyBody, Unknown::IgnoreBut(&[]));

/// Have a model under another name, too
#[utoipa::path(post, path = "/api/copy", tag = "ollama", request_body = CopyBody, responses(
    (status = 200, description = "It is there"),
    (status = 507, body = crate::openapi::ErrorBody, description = "The disk is full: nothing was kept"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn copy(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<(), ApiError> {
    let _entry = app.enter(&caller)?;
    caller.check_right(caller.key.models, "make or delete models", "models")?;
    let body = read::<CopyBody>(&app, caller.tenant(), body).await?.body;
    let from = app.models.named(Some(untagged(&body.source)))?;
    let name = untagged(&body.destination).to_owned();
    let told = match &from.made {
        Some(made) => Description { name, created: unix_seconds(), ..made.told.clone() },
        None => Description {
            name,
            from: app.models.name(&from).to_owned(),
            system: None,
            template: None,
            parameters: Map::new(),
            messages: Vec::new(),
            license: None,
            created: unix_seconds(),
        },
    };
    app.make_model(&caller, told).await
}

/// A model to forget.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct DeleteBody {
    #[schema(min_length = 1, max_length = 512)]
    model: Option<String>,
    /// The older name of model.
    #[schema(min_length = 1, max_length = 512)]
    name: Option<String>,
}

body!(DeleteBody, Unknown::IgnoreBut(&[]));

/// Forget a model that was made
///
/// Requests under way keep it. Those that the server was started with stay.
#[utoipa::path(delete, path = "/api/delete", tag = "ollama", request_body = DeleteBody, responses(
    (status = 200, description = "It is forgotten"),
    crate::openapi::Refusals,
    crate::openapi::DoorRefusals
))]
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: RawBody,
) -> Result<(), ApiError> {
    let _entry = app.enter(&caller)?;
    caller.check_right(caller.key.models, "make or delete models", "models")?;
    let body = read::<DeleteBody>(&app, caller.tenant(), body).await?.body;
    let name = body.model.as_ref().or(body.name.as_ref());
    let name = name.ok_or_else(|| ApiError::fault(Fault::rule("model", "is required")))?;
    let _turn = app.models.making.lock().await;
    // What it was made of may be gone.
    let made = app.models.made().iter().find(|made| made.told.name == untagged(name)).cloned();
    let Some(made) = made else {
        app.models.named(Some(untagged(name)))?;
        let rule =
            "must be a model that was made by /api/create or /api/copy; others stay while the server runs";
        return Err(ApiError::fault(Fault::rule("model", rule)));
    };
    app.store()?.forget_made(&made.told.name).await?;
    app.models.made().retain(|there| !Arc::ptr_eq(there, &made));
    tracing::info!(model = made.told.name, "forgotten");
    Ok(())
}

impl App {
    /// Makes a model, which may take the place of one that was made before, and keeps it.
    async fn make_model(&self, caller: &Caller, told: Description) -> Result<(), ApiError> {
        let wrong = |rule: &str| ApiError::fault(Fault::rule("model", rule));
        let made = blocking(self, caller.tenant(), move |_| {
            let kept = serde_json::to_value(&told).expect("descriptions are JSON");
            Ok((MadeModel::new(told)?, kept))
        });
        let (made, kept) = made.await?;
        let name = &made.told.name;
        if kept.to_string().len() > MADE_BYTES_MAX {
            return Err(wrong(&format!("must be described in at most {MADE_BYTES_MAX} bytes")));
        }
        if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-:/".contains(&byte)) {
            return Err(wrong("must be called by letters, digits, and the signs . _ - : and /"));
        }
        // One name, one model: it is kept in the order in which it is known.
        let _turn = self.models.making.lock().await;
        if self.models.served(name).is_some() {
            return Err(wrong("is the name of a model that is served"));
        }
        let others = self.models.made().iter().filter(|there| there.told.name != *name).count();
        if others >= MADE_MAX {
            let message = format!("{MADE_MAX} models were made already, which is as many as may be");
            return Err(ApiError::new(Code::SchemasFull, message));
        }
        self.store()?.keep_made(name, &kept).await?;
        tracing::info!(model = name, from = made.told.from, "made");
        self.models.add_made(made);
        Ok(())
    }
}
