//! What can go wrong with a request, and how each of it looks from outside.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
pub use fornax_code::Code;
use fornax_engine::{Failure, Refusal};
use fornax_form::FormError;
use serde_json::{Value, json};

use crate::app::Failed;

/// What a code means on the wire.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meaning {
    /// The status of a response that fails with it.
    pub(crate) status: StatusCode,
    /// OpenAI's word for the kind.
    kind: &'static str,
    /// Whether the same request may succeed later.
    pub(crate) retryable: bool,
}

/// The one mapping of codes to HTTP.
pub(crate) fn meaning(code: Code) -> Meaning {
    const ASKED: &str = "invalid_request_error";
    const SERVER: &str = "server_error";
    let (status, kind, retryable) = match code {
        Code::ModelNotFound => (StatusCode::NOT_FOUND, ASKED, false),
        Code::ModelNotReady => (StatusCode::SERVICE_UNAVAILABLE, SERVER, true),
        Code::ModelUnsupported => (StatusCode::BAD_REQUEST, ASKED, false),
        // It fits where no other is in use: that was planned at the start.
        Code::ModelDoesNotFit => (StatusCode::SERVICE_UNAVAILABLE, SERVER, true),
        Code::ModelCorrupt => (StatusCode::INTERNAL_SERVER_ERROR, SERVER, false),
        Code::OutOfMemory => (StatusCode::SERVICE_UNAVAILABLE, SERVER, true),
        Code::DeviceUnavailable => (StatusCode::SERVICE_UNAVAILABLE, SERVER, true),
        Code::DeviceLost => (StatusCode::SERVICE_UNAVAILABLE, SERVER, true),
        Code::NumericFault => (StatusCode::INTERNAL_SERVER_ERROR, SERVER, false),
        Code::PromptTooLong => (StatusCode::BAD_REQUEST, ASKED, false),
        Code::OutputTruncated => (StatusCode::UNPROCESSABLE_ENTITY, ASKED, false),
        Code::SchemaUnsupported => (StatusCode::BAD_REQUEST, ASKED, false),
        Code::InvalidInput => (StatusCode::BAD_REQUEST, ASKED, false),
        Code::BodyTooLarge => (StatusCode::PAYLOAD_TOO_LARGE, ASKED, false),
        Code::UnknownEndpoint => (StatusCode::NOT_FOUND, ASKED, false),
        Code::Unauthorized => (StatusCode::UNAUTHORIZED, "authentication_error", false),
        Code::QueueFull => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", true),
        Code::Cancelled => (StatusCode::SERVICE_UNAVAILABLE, SERVER, true),
        Code::ExecutionTimeout | Code::TtlExpired => (StatusCode::GATEWAY_TIMEOUT, SERVER, true),
        Code::JobNotFound => (StatusCode::NOT_FOUND, ASKED, false),
        Code::KeyReused => (StatusCode::CONFLICT, ASKED, false),
        Code::WrongState => (StatusCode::CONFLICT, ASKED, false),
        Code::WebhookRefused => (StatusCode::BAD_REQUEST, ASKED, false),
        Code::SchemaNotFound => (StatusCode::NOT_FOUND, ASKED, false),
        Code::SchemasFull => (StatusCode::CONFLICT, ASKED, false),
        Code::FileNotFound => (StatusCode::NOT_FOUND, ASKED, false),
        Code::FilesFull => (StatusCode::CONFLICT, ASKED, false),
        Code::BatchNotFound => (StatusCode::NOT_FOUND, ASKED, false),
        Code::BatchesFull => (StatusCode::CONFLICT, ASKED, false),
        Code::ResponseNotFound => (StatusCode::NOT_FOUND, ASKED, false),
        Code::ConversationNotFound => (StatusCode::NOT_FOUND, ASKED, false),
        Code::DiskFull => (StatusCode::INSUFFICIENT_STORAGE, SERVER, true),
        Code::WeightsDiffer | Code::IntegrityFailure => (StatusCode::BAD_GATEWAY, SERVER, false),
        Code::AttemptsExhausted | Code::Internal => (StatusCode::INTERNAL_SERVER_ERROR, SERVER, true),
    };
    Meaning { status, kind, retryable }
}

/// Routes of OpenAI's that take a prompt.
const OPENAI: [&str; 4] = ["/v1/chat/", "/v1/completions", "/v1/embeddings", "/v1/responses"];

/// Routes of llama.cpp's that do.
const LLAMA: [&str; 4] = ["/completion", "/chat/completions", "/embeddings", "/infill"];

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
    /// What does not fit, where that is the reason and the tokens were counted: each API has its own words for it, which its
    /// clients look for.
    pub(crate) length: Option<Length>,
}

/// A prompt, and what was to follow it, against the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Length {
    prompt: usize,
    /// Where the prompt alone would fit.
    max_tokens: Option<usize>,
    context: usize,
}

impl Length {
    /// As OpenAI says it.
    fn openai(self) -> String {
        let Length { prompt, max_tokens, context } = self;
        let most = format!("This model's maximum context length is {context} tokens.");
        match max_tokens {
            None => format!(
                "{most} However, your messages resulted in {prompt} tokens. Please reduce the length of the messages."
            ),
            Some(answer) => format!(
                "{most} However, you requested {} tokens ({prompt} in the messages, {answer} in the completion). \
                 Please reduce the length of the messages or completion.",
                prompt.saturating_add(answer)
            ),
        }
    }

    /// As Anthropic says it.
    fn anthropic(self) -> String {
        let Length { prompt, max_tokens, context } = self;
        match max_tokens {
            None => format!("prompt is too long: {prompt} tokens > {context} maximum"),
            Some(answer) => format!(
                "input length and `max_tokens` exceed context limit: {prompt} + {answer} > {context}, \
                 decrease input length or `max_tokens` and try again"
            ),
        }
    }

    /// As Ollama says it, with what it leaves out.
    fn ollama(self) -> String {
        format!("the input length exceeds the context length. {}", self.openai())
    }
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
        ApiError {
            code,
            message: message.into(),
            faults: Vec::new(),
            retry_after_s,
            status: None,
            length: None,
        }
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
        self.status.unwrap_or(meaning(self.code).status)
    }

    /// The body that OpenAI's clients expect, with what Fornax adds: every wrong field, and whether to retry.
    pub(crate) fn to_json(&self) -> Value {
        let Meaning { kind, retryable, .. } = meaning(self.code);
        let mut error = json!({
            "message": self.message,
            "type": kind,
            "param": self.faults.first().map(|fault| fault.field.as_str()),
            "code": self.code.name(),
            "retryable": retryable,
        });
        if !self.faults.is_empty() {
            error["errors"] = self.faults.iter().map(Fault::to_json).collect();
        }
        json!({"error": error})
    }

    /// The same on OpenAI's own routes: where a prompt is too long, clients look for its word and its sentence, and shorten
    /// what they send.
    fn to_openai(&self) -> Value {
        let mut body = self.to_json();
        if self.code == Code::PromptTooLong {
            body["error"]["code"] = json!("context_length_exceeded");
        }
        if let Some(length) = self.length {
            body["error"]["message"] = json!(length.openai());
        }
        body
    }

    /// The same on llama.cpp's routes: its clients look for another word, and for the numbers.
    fn to_llama(&self) -> Value {
        let mut body = self.to_json();
        if self.code == Code::PromptTooLong {
            body["error"]["type"] = json!("exceed_context_size_error");
        }
        if let Some(length) = self.length {
            body["error"]["message"] = json!(length.openai());
            body["error"]["n_prompt_tokens"] = json!(length.prompt);
            body["error"]["n_ctx"] = json!(length.context);
        }
        body
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
        let message = match self.length {
            Some(length) => length.anthropic(),
            None if self.code == Code::PromptTooLong => format!("prompt is too long: {}", self.message),
            None => self.message.clone(),
        };
        json!({"type": "error", "error": {"type": kind, "message": message, "code": self.code.name()}})
    }

    /// The body that Ollama's clients expect, with the code beside it.
    pub(crate) fn to_ollama(&self) -> Value {
        let message = self.length.map_or_else(|| self.message.clone(), Length::ollama);
        json!({"error": message, "code": self.code.name()})
    }

    /// In the shape that clients of a path read.
    pub(crate) fn shaped_for(&self, path: &str) -> Option<Response> {
        if path.starts_with("/v1/messages") {
            Some(self.respond(self.to_anthropic()))
        } else if path.starts_with("/api/") {
            Some(self.respond(self.to_ollama()))
        } else if self.code == Code::PromptTooLong && OPENAI.iter().any(|route| path.starts_with(route)) {
            Some(self.respond(self.to_openai()))
        } else if self.code == Code::PromptTooLong && LLAMA.iter().any(|route| path.starts_with(route)) {
            Some(self.respond(self.to_llama()))
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
        ApiError::new(failed.code, failed.message)
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        let (code, message) = (refusal.code(), refusal.to_string());
        let too_long = |prompt, max_tokens, context| ApiError {
            length: Some(Length { prompt, max_tokens, context }),
            ..ApiError::new(code, message.as_str())
        };
        match refusal {
            Refusal::PromptTooLong { prompt, context } => too_long(prompt, None, context),
            Refusal::ContextExceeded { prompt, max_tokens, context } => {
                too_long(prompt, Some(max_tokens), context)
            }
            Refusal::PromptEmpty | Refusal::TokenOutOfRange { .. } => ApiError::fault(Fault {
                message,
                ..Fault::rule("prompt", "tokens of the model, at least one")
            }),
            Refusal::Parameter { name, wanted, .. } => {
                ApiError::fault(Fault { message, ..Fault::rule(name, wanted) })
            }
            Refusal::PoolExceeded { .. }
            | Refusal::QueueFull { .. }
            | Refusal::ShareFull { .. }
            | Refusal::Closed
            | Refusal::DeviceLost(_) => ApiError::new(code, message),
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
        ApiError::new(failure.code(), failure.to_string())
    }
}

impl ApiError {
    /// A form that cannot be had, asked for in `field`.
    pub(crate) fn form(field: &str, error: &FormError) -> ApiError {
        let message = error.to_string();
        let faults = vec![Fault::rule(field, message.as_str())];
        ApiError { faults, ..ApiError::new(error.code(), format!("{field}: {message}")) }
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
