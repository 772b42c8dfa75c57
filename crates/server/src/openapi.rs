//! All routes, and the document that describes them: one is made from the other.

use std::{any::Any, sync::Arc};

use axum::{
    Router,
    body::Bytes,
    http::{HeaderName, HeaderValue, Method, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::get,
};
use serde::Serialize;
use serde_json::Value;
use tower_http::{
    catch_panic::CatchPanicLayer,
    cors::{AllowHeaders, AllowOrigin, CorsLayer},
};
use utoipa::{
    IntoResponses, OpenApi, ToSchema,
    openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    anthropic::{count, messages},
    app::App,
    elsewhere::nothing,
    error::{ApiError, Code},
    front::door::{CORRELATION_ID, REQUEST_ID, door},
    jobs::{control, run, schemas, status, stream},
    llama, ollama,
    openai::{
        adapters, batches, chat, classify, completions, decisions, embeddings, files, models, rerank, score,
        tokens,
    },
    ops::{console, health, live, loading, metrics, sleep},
    responses::{conversations, create, stored},
    worker::{cancel, execute},
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Fornax",
        description = "Runs an open-weight language model: for OpenAI's clients, as durable jobs, for workers behind a scheduler, for operators.",
        license(name = "Apache-2.0")
    ),
    components(schemas(AnthropicErrorBody, OllamaErrorBody))
)]
struct Document;

/// An error as OpenAI's clients read it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    error: ErrorDetail,
}

/// What went wrong.
#[derive(Debug, Serialize, ToSchema)]
struct ErrorDetail {
    message: String,
    r#type: String,
    /// The first wrong field.
    param: Option<String>,
    /// What programs know it by, as `INVALID_INPUT`.
    code: String,
    /// Whether the same request may succeed later.
    retryable: bool,
    /// Every wrong field.
    errors: Option<Vec<FieldError>>,
}

/// A wrong field.
#[derive(Debug, Serialize, ToSchema)]
struct FieldError {
    field: String,
    constraint: String,
    message: String,
    /// Where it is a number or a boolean.
    value: Option<f64>,
}

/// An error as Anthropic's clients read it.
#[derive(Debug, Serialize, ToSchema)]
struct AnthropicErrorBody {
    r#type: String,
    error: AnthropicError,
}

/// What went wrong.
#[derive(Debug, Serialize, ToSchema)]
struct AnthropicError {
    r#type: String,
    message: String,
    code: String,
}

/// An error as Ollama's clients read it.
#[derive(Debug, Serialize, ToSchema)]
struct OllamaErrorBody {
    error: String,
    code: String,
}

/// Every status with which a request for an answer may be refused, besides those of the front door.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "only described")]
pub(crate) enum Refusals {
    /// A wrong field or body, a prompt that does not fit, a schema that cannot be followed
    #[response(status = 400)]
    Invalid(ErrorBody),
    /// No such model
    #[response(status = 404)]
    NotFound(ErrorBody),
    /// The computation failed
    #[response(status = 500)]
    Failed(ErrorBody),
    /// The answer took too long
    #[response(status = 504)]
    TooLong(ErrorBody),
}

/// Every status with which any request may be refused, whatever it asks for.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "only described")]
pub(crate) enum DoorRefusals {
    /// No key, or a wrong one
    #[response(status = 401)]
    Unauthorized(ErrorBody),
    /// A page of another site
    #[response(status = 403)]
    Forbidden(ErrorBody),
    /// The body did not arrive in time
    #[response(status = 408)]
    Slow(ErrorBody),
    /// The body is too large
    #[response(status = 413)]
    TooLarge(ErrorBody),
    /// Too much waits already; Retry-After says when to come again
    #[response(status = 429)]
    Full(ErrorBody),
    /// Loading, draining or failed; Retry-After says when to come again
    #[response(status = 503)]
    NotReady(ErrorBody),
}

/// Every route behind the front door.
pub(crate) fn router(app: &Arc<App>) -> Router {
    let (router, mut document) = OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(chat::chat))
        .routes(routes!(completions::completions))
        .routes(routes!(embeddings::embeddings))
        .routes(routes!(models::list))
        .routes(routes!(models::one))
        .routes(routes!(models::one_of_owner))
        .routes(routes!(adapters::load))
        .routes(routes!(adapters::unload))
        .routes(routes!(adapters::list, adapters::scale))
        .routes(routes!(tokens::tokenize))
        .routes(routes!(tokens::detokenize))
        .routes(routes!(messages::messages))
        .routes(routes!(count::count))
        .routes(routes!(create::create))
        .routes(routes!(create::count))
        .routes(routes!(stored::retrieve, stored::delete))
        .routes(routes!(stored::cancel))
        .routes(routes!(stored::input_items))
        .routes(routes!(conversations::create))
        .routes(routes!(conversations::retrieve, conversations::update, conversations::delete))
        .routes(routes!(conversations::items, conversations::add))
        .routes(routes!(conversations::item, conversations::delete_item))
        .routes(routes!(rerank::rerank))
        .routes(routes!(rerank::rerank_short))
        .routes(routes!(classify::classify))
        .routes(routes!(classify::classify_short))
        .routes(routes!(score::score))
        .routes(routes!(score::score_short))
        .routes(routes!(decisions::decide))
        .routes(routes!(ollama::chat::chat))
        .routes(routes!(ollama::generate::generate))
        .routes(routes!(ollama::embed::embed))
        .routes(routes!(ollama::embed::embeddings))
        .routes(routes!(ollama::models::list))
        .routes(routes!(ollama::models::running))
        .routes(routes!(ollama::models::show))
        .routes(routes!(ollama::models::pull))
        .routes(routes!(ollama::models::version))
        .routes(routes!(ollama::make::create))
        .routes(routes!(ollama::make::copy))
        .routes(routes!(ollama::make::delete))
        .routes(routes!(files::upload, files::list))
        .routes(routes!(files::retrieve, files::delete))
        .routes(routes!(files::content))
        .routes(routes!(batches::create, batches::list))
        .routes(routes!(batches::retrieve))
        .routes(routes!(batches::cancel))
        .routes(routes!(llama::completion::completion))
        .routes(routes!(llama::completion::completions))
        .routes(routes!(llama::completion::infill))
        .routes(routes!(llama::aliases::chat))
        .routes(routes!(llama::aliases::embeddings))
        .routes(routes!(llama::aliases::models))
        .routes(routes!(llama::props::props))
        .routes(routes!(llama::props::slots))
        .routes(routes!(llama::template::apply))
        .routes(routes!(run::run))
        .routes(routes!(run::runsync))
        .routes(routes!(status::status))
        .routes(routes!(stream::stream))
        .routes(routes!(control::cancel))
        .routes(routes!(control::retry))
        .routes(routes!(control::purge))
        .routes(routes!(status::health))
        .routes(routes!(status::list))
        .routes(routes!(status::timeline))
        .routes(routes!(schemas::put, schemas::get))
        .routes(routes!(execute::execute))
        .routes(routes!(cancel::cancel))
        .routes(routes!(console::console))
        .routes(routes!(console::jobs))
        .routes(routes!(console::files))
        .routes(routes!(live::live))
        .routes(routes!(health::health))
        .routes(routes!(health::ready))
        .routes(routes!(loading::loading))
        .routes(routes!(sleep::sleep))
        .routes(routes!(sleep::wake))
        .routes(routes!(sleep::is_sleeping))
        .routes(routes!(sleep::load))
        .routes(routes!(sleep::unload))
        .routes(routes!(metrics::metrics))
        .split_for_parts();
    document.info.version = env!("CARGO_PKG_VERSION").to_owned();
    if let Some(components) = &mut document.components {
        let bearer = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
        components.add_security_scheme("key", bearer);
    }
    if app.keys.are_needed() {
        document.security = Some(vec![SecurityRequirement::new("key", Vec::<String>::new())]);
    }
    let mut document = serde_json::to_value(&document).expect("the document is JSON");
    reshape_errors(&mut document);
    let document = Bytes::from(serde_json::to_vec(&document).expect("the document is JSON"));
    let document = ([(header::CONTENT_TYPE, "application/json")], document);
    let router = router
        .route("/openapi.json", get(async move || document.clone()))
        .route("/console/{file}", get(console::part))
        .fallback(nothing)
        .method_not_allowed_fallback(async || {
            let wrong = ApiError::new(Code::UnknownEndpoint, "this path does not take that method");
            ApiError { status: Some(StatusCode::METHOD_NOT_ALLOWED), ..wrong }
        })
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(Arc::clone(app), door))
        .with_state(Arc::clone(app));
    match app.options.cors_origins.is_empty() {
        true => router,
        false => router.layer(cors(&app.options.cors_origins)),
    }
}

/// Errors have the shape that a path's clients read: the document says so as the front door does.
fn reshape_errors(document: &mut Value) {
    fn refer(value: &mut Value, to: &str) {
        match value {
            Value::String(reference) if reference == "#/components/schemas/ErrorBody" => {
                *reference = format!("#/components/schemas/{to}");
            }
            Value::Object(fields) => fields.values_mut().for_each(|value| refer(value, to)),
            Value::Array(items) => items.iter_mut().for_each(|value| refer(value, to)),
            _ => {}
        }
    }
    for (path, operations) in document["paths"].as_object_mut().into_iter().flatten() {
        if path.starts_with("/v1/messages") {
            refer(operations, "AnthropicErrorBody");
        } else if path.starts_with("/api/") {
            refer(operations, "OllamaErrorBody");
        }
    }
}

fn cors(origins: &[String]) -> CorsLayer {
    let origins: Vec<HeaderValue> = origins.iter().filter_map(|origin| origin.parse().ok()).collect();
    let retry_after: HeaderName = header::RETRY_AFTER;
    CorsLayer::new()
        .allow_origin(AllowOrigin::list(origins))
        .allow_methods([Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::DELETE])
        // Clients send headers of their own (x-stainless-os, anthropic-version, ...), more with each version; which
        // pages may call is decided by their origin alone.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([REQUEST_ID, CORRELATION_ID, retry_after])
}

/// A bug here fails its own request, and says nothing of what it was about.
fn panicked(_panic: Box<dyn Any + Send>) -> Response {
    ApiError::new(Code::Internal, "the request failed inside the server").into_response()
}
