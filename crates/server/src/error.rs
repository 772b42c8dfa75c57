//! What can go wrong with a request, and how each of it looks from outside.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use fornax_engine::{Failure, Refusal};
use fornax_form::FormError;
use serde_json::{Value, json};

use crate::app::Failed;

/// What programs know an error by. The names are the same wherever Fornax reports one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names say it; docs/api.md describes each")]
pub enum Code {
    ModelNotFound,
    ModelNotReady,
    ModelUnsupported,
    ModelDoesNotFit,
    ModelCorrupt,
    OutOfMemory,
    DeviceUnavailable,
    DeviceLost,
    NumericFault,
    PromptTooLong,
    OutputTruncated,
    SchemaUnsupported,
    InvalidInput,
    BodyTooLarge,
    UnknownEndpoint,
    Unauthorized,
    QueueFull,
    Cancelled,
    ExecutionTimeout,
    JobNotFound,
    KeyReused,
    WrongState,
    WebhookRefused,
    SchemaNotFound,
    SchemasFull,
    FileNotFound,
    FilesFull,
    BatchNotFound,
    BatchesFull,
    DiskFull,
    IntegrityFailure,
    Internal,
}

impl Code {
    const ALL: [Code; 32] = [
        Code::ModelNotFound,
        Code::ModelNotReady,
        Code::ModelUnsupported,
        Code::ModelDoesNotFit,
        Code::ModelCorrupt,
        Code::OutOfMemory,
        Code::DeviceUnavailable,
        Code::DeviceLost,
        Code::NumericFault,
        Code::PromptTooLong,
        Code::OutputTruncated,
        Code::SchemaUnsupported,
        Code::InvalidInput,
        Code::BodyTooLarge,
        Code::UnknownEndpoint,
        Code::Unauthorized,
        Code::QueueFull,
        Code::Cancelled,
        Code::ExecutionTimeout,
        Code::JobNotFound,
        Code::KeyReused,
        Code::WrongState,
        Code::WebhookRefused,
        Code::SchemaNotFound,
        Code::SchemasFull,
        Code::FileNotFound,
        Code::FilesFull,
        Code::BatchNotFound,
        Code::BatchesFull,
        Code::DiskFull,
        Code::IntegrityFailure,
        Code::Internal,
    ];

    /// The code of that name.
    pub(crate) fn named(name: &str) -> Option<Code> {
        Code::ALL.into_iter().find(|code| code.name() == name)
    }

    /// As it is written on the wire.
    pub fn name(self) -> &'static str {
        self.facts().0
    }

    /// The status of a response that fails with it.
    pub fn status(self) -> StatusCode {
        self.facts().1
    }

    /// Whether the same request may succeed later.
    pub fn retryable(self) -> bool {
        self.facts().3
    }

    /// Name, status, OpenAI's word for the kind, whether to retry: the one mapping of errors to HTTP.
    fn facts(self) -> (&'static str, StatusCode, &'static str, bool) {
        const ASKED: &str = "invalid_request_error";
        const SERVER: &str = "server_error";
        match self {
            Code::ModelNotFound => ("MODEL_NOT_FOUND", StatusCode::NOT_FOUND, ASKED, false),
            Code::ModelNotReady => ("MODEL_NOT_READY", StatusCode::SERVICE_UNAVAILABLE, SERVER, true),
            Code::ModelUnsupported => ("MODEL_UNSUPPORTED", StatusCode::BAD_REQUEST, ASKED, false),
            // It fits where no other is in use: that was planned at the start.
            Code::ModelDoesNotFit => ("MODEL_DOES_NOT_FIT", StatusCode::SERVICE_UNAVAILABLE, SERVER, true),
            Code::ModelCorrupt => ("MODEL_CORRUPT", StatusCode::INTERNAL_SERVER_ERROR, SERVER, false),
            Code::OutOfMemory => ("OUT_OF_MEMORY", StatusCode::SERVICE_UNAVAILABLE, SERVER, true),
            Code::DeviceUnavailable => ("DEVICE_UNAVAILABLE", StatusCode::SERVICE_UNAVAILABLE, SERVER, true),
            Code::DeviceLost => ("DEVICE_LOST", StatusCode::SERVICE_UNAVAILABLE, SERVER, true),
            Code::NumericFault => ("NUMERIC_FAULT", StatusCode::INTERNAL_SERVER_ERROR, SERVER, false),
            Code::PromptTooLong => ("PROMPT_TOO_LONG", StatusCode::BAD_REQUEST, ASKED, false),
            Code::OutputTruncated => ("OUTPUT_TRUNCATED", StatusCode::UNPROCESSABLE_ENTITY, ASKED, false),
            Code::SchemaUnsupported => ("SCHEMA_UNSUPPORTED", StatusCode::BAD_REQUEST, ASKED, false),
            Code::InvalidInput => ("INVALID_INPUT", StatusCode::BAD_REQUEST, ASKED, false),
            Code::BodyTooLarge => ("BODY_TOO_LARGE", StatusCode::PAYLOAD_TOO_LARGE, ASKED, false),
            Code::UnknownEndpoint => ("UNKNOWN_ENDPOINT", StatusCode::NOT_FOUND, ASKED, false),
            Code::Unauthorized => ("UNAUTHORIZED", StatusCode::UNAUTHORIZED, "authentication_error", false),
            Code::QueueFull => ("QUEUE_FULL", StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", true),
            Code::Cancelled => ("CANCELLED", StatusCode::SERVICE_UNAVAILABLE, SERVER, true),
            Code::ExecutionTimeout => ("EXECUTION_TIMEOUT", StatusCode::GATEWAY_TIMEOUT, SERVER, true),
            Code::JobNotFound => ("JOB_NOT_FOUND", StatusCode::NOT_FOUND, ASKED, false),
            Code::KeyReused => ("KEY_REUSED", StatusCode::CONFLICT, ASKED, false),
            Code::WrongState => ("WRONG_STATE", StatusCode::CONFLICT, ASKED, false),
            Code::WebhookRefused => ("WEBHOOK_REFUSED", StatusCode::BAD_REQUEST, ASKED, false),
            Code::SchemaNotFound => ("SCHEMA_NOT_FOUND", StatusCode::NOT_FOUND, ASKED, false),
            Code::SchemasFull => ("SCHEMAS_FULL", StatusCode::CONFLICT, ASKED, false),
            Code::FileNotFound => ("FILE_NOT_FOUND", StatusCode::NOT_FOUND, ASKED, false),
            Code::FilesFull => ("FILES_FULL", StatusCode::CONFLICT, ASKED, false),
            Code::BatchNotFound => ("BATCH_NOT_FOUND", StatusCode::NOT_FOUND, ASKED, false),
            Code::BatchesFull => ("BATCHES_FULL", StatusCode::CONFLICT, ASKED, false),
            Code::DiskFull => ("DISK_FULL", StatusCode::INSUFFICIENT_STORAGE, SERVER, true),
            Code::IntegrityFailure => ("INTEGRITY_FAILURE", StatusCode::BAD_GATEWAY, SERVER, false),
            Code::Internal => ("INTERNAL", StatusCode::INTERNAL_SERVER_ERROR, SERVER, true),
        }
    }
}

/// One wrong field. What the client wrote as text is never repeated.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fault {
    /// Where, as `messages[2].role`.
    pub(crate) field: String,
    /// What it must be.
    pub(crate) constraint: String,
    /// Both, and what it was.
    pub(crate) message: String,
    /// The value, where it is a number or a boolean.
    pub(crate) value: Option<Value>,
}

impl Fault {
    /// A field whose value breaks its rule.
    pub(crate) fn value(field: impl Into<String>, constraint: impl Into<String>, value: &Value) -> Fault {
        let (field, constraint) = (field.into(), constraint.into());
        let shown = matches!(value, Value::Number(_) | Value::Bool(_)).then(|| value.clone());
        let got = match value {
            Value::Number(_) | Value::Bool(_) => value.to_string(),
            Value::Null => "null".to_owned(),
            Value::String(text) => format!("a string of {} characters", text.chars().count()),
            Value::Array(items) => format!("an array of {}", items.len()),
            Value::Object(_) => "an object".to_owned(),
        };
        let message = format!("{field} must be {constraint}; got {got}");
        Fault { field, constraint, message, value: shown }
    }

    /// A field that cannot be as it is, for a reason that its value alone does not tell.
    pub(crate) fn rule(field: impl Into<String>, constraint: impl Into<String>) -> Fault {
        let (field, constraint) = (field.into(), constraint.into());
        let message = format!("{field}: {constraint}");
        Fault { field, constraint, message, value: None }
    }

    /// For `/execute`, and as detail of every other 400.
    pub(crate) fn to_json(&self) -> Value {
        let mut fault = json!({"field": self.field, "constraint": self.constraint, "message": self.message});
        if let Some(value) = &self.value {
            fault["value"] = value.clone();
        }
        fault
    }
}

/// A request that fails, in terms of the wire.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) code: Code,
    pub(crate) message: String,
    /// Every wrong field, when that is the reason.
    pub(crate) faults: Vec<Fault>,
    /// After how many seconds to come again, where that is known.
    pub(crate) retry_after_s: Option<u32>,
    /// The status, where it is not the code's.
    pub(crate) status: Option<StatusCode>,
}

impl ApiError {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> ApiError {
        // A queue moves within a step or two; loading and draining take their time.
        let retry_after_s = match code {
            Code::QueueFull => Some(1),
            Code::ModelNotReady
            | Code::ModelDoesNotFit
            | Code::OutOfMemory
            | Code::DeviceUnavailable
            | Code::Cancelled
            | Code::DeviceLost => Some(5),
            _ => None,
        };
        ApiError { code, message: message.into(), faults: Vec::new(), retry_after_s, status: None }
    }

    /// What the client sent is wrong, in at least one field.
    pub(crate) fn faults(faults: Vec<Fault>) -> ApiError {
        let messages: Vec<&str> = faults.iter().map(|fault| fault.message.as_str()).collect();
        ApiError { faults: faults.clone(), ..ApiError::new(Code::InvalidInput, messages.join("; ")) }
    }

    pub(crate) fn fault(fault: Fault) -> ApiError {
        ApiError::faults(vec![fault])
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.status.unwrap_or(self.code.status())
    }

    /// The body that OpenAI's clients expect, with what Fornax adds: every wrong field, and whether to retry.
    pub(crate) fn to_json(&self) -> Value {
        let (name, _, kind, retryable) = self.code.facts();
        let mut error = json!({
            "message": self.message,
            "type": kind,
            "param": self.faults.first().map(|fault| fault.field.as_str()),
            "code": name,
            "retryable": retryable,
        });
        if !self.faults.is_empty() {
            error["errors"] = self.faults.iter().map(Fault::to_json).collect();
        }
        json!({"error": error})
    }

    /// The body that Anthropic's clients expect, with the code beside their word for it.
    pub(crate) fn to_anthropic(&self) -> Value {
        let kind = match self.status().as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 | 405 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            400..=499 => "invalid_request_error",
            _ => "api_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message, "code": self.code.name()}})
    }

    /// The body that Ollama's clients expect, with the code beside it.
    pub(crate) fn to_ollama(&self) -> Value {
        json!({"error": self.message, "code": self.code.name()})
    }

    /// In the shape that clients of a path read.
    pub(crate) fn shaped_for(&self, path: &str) -> Option<Response> {
        if path.starts_with("/v1/messages") {
            Some(self.respond(self.to_anthropic()))
        } else if path.starts_with("/api/") {
            Some(self.respond(self.to_ollama()))
        } else {
            None
        }
    }

    /// A response with this error's status and headers, and a body of the caller's shape.
    pub(crate) fn respond(&self, body: Value) -> Response {
        let mut response = (self.status(), Json(body)).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.code == Code::Unauthorized {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // For the log line and the count of failures, and for routes whose clients read errors of another shape.
        response.extensions_mut().insert(self.code);
        response.extensions_mut().insert(self.clone());
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.respond(self.to_json())
    }
}

impl From<Failed> for ApiError {
    /// A model that was asked for could not be loaded.
    fn from(failed: Failed) -> ApiError {
        match Code::named(&failed.code) {
            Some(code) => ApiError::new(code, failed.message),
            None => ApiError::new(Code::ModelNotReady, failed.to_string()),
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        let message = refusal.to_string();
        match refusal {
            Refusal::PromptTooLong { .. }
            | Refusal::ContextExceeded { .. }
            | Refusal::PoolExceeded { .. } => ApiError::new(Code::PromptTooLong, message),
            Refusal::QueueFull { .. } => ApiError::new(Code::QueueFull, message),
            Refusal::Closed => ApiError::new(Code::ModelNotReady, message),
            Refusal::DeviceLost(reason) => ApiError::new(Code::DeviceLost, reason),
            Refusal::PromptEmpty | Refusal::TokenOutOfRange { .. } => ApiError::fault(Fault {
                message,
                ..Fault::rule("prompt", "tokens of the model, at least one")
            }),
            Refusal::Parameter { name, wanted, .. } => {
                ApiError::fault(Fault { message, ..Fault::rule(name, wanted) })
            }
        }
    }
}

impl From<fornax_chat::Failed> for ApiError {
    /// An answer broke off.
    fn from(failed: fornax_chat::Failed) -> ApiError {
        match failed {
            fornax_chat::Failed::Engine(failure) => failure.into(),
            fornax_chat::Failed::Refused(refusal) => refusal.into(),
        }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> ApiError {
        let code = match failure {
            Failure::NumericFault { .. } => Code::NumericFault,
            Failure::NothingAllowed { .. } => Code::InvalidInput,
            Failure::DeviceLost(_) => Code::DeviceLost,
            Failure::Integrity(_) => Code::IntegrityFailure,
            Failure::EngineGone => Code::Cancelled,
            // The form compiled, and following it took more than forms may take.
            Failure::Form(_) => Code::SchemaUnsupported,
            Failure::Backend(_) | Failure::Panicked(_) => Code::Internal,
        };
        let message = failure.to_string();
        // The engine writes the code in front for people; here it has its own place.
        let message = message.split_once(": ").map_or(message.as_str(), |(_, rest)| rest);
        ApiError::new(code, message)
    }
}

impl ApiError {
    /// A form that cannot be had, asked for in `field`.
    pub(crate) fn form(field: &str, error: &FormError) -> ApiError {
        let message = error.to_string();
        let faults = vec![Fault::rule(field, message.as_str())];
        ApiError { faults, ..ApiError::new(Code::SchemaUnsupported, format!("{field}: {message}")) }
    }
}

impl From<fornax_text::Error> for ApiError {
    fn from(error: fornax_text::Error) -> ApiError {
        use fornax_text::Error as Fails;
        let field = match &error {
            Fails::TemplateRefused { .. } | Fails::TemplateFailed { .. } | Fails::Role { .. } => "messages",
            Fails::EmptyStop { .. } => "stop",
            Fails::Encode { .. } => "prompt",
            Fails::NoTemplate | Fails::TemplateSyntax { .. } => {
                return ApiError::new(Code::ModelUnsupported, error.to_string());
            }
            _ => return ApiError::new(Code::Internal, error.to_string()),
        };
        ApiError::fault(Fault::rule(field, error.to_string()))
    }
}
