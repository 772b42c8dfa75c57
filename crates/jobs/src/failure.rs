//! Why a job, or an item of a batch, has no result.

use fornax_code::Code;
use fornax_form::FormError;
use serde_json::{Value, json};

/// A failure as users see it. Never holds what was asked or answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// What programs know it by.
    pub code: Code,
    /// For people.
    pub message: String,
    /// Whether the same job may succeed later.
    pub retryable: bool,
    /// After how many seconds, where that is known.
    pub retry_after_s: Option<u32>,
    /// Where it happened: `submit`, `queue`, `prepare`, `generate`, `validate`.
    pub stage: &'static str,
    /// Numbers and places that help.
    pub diagnostics: Box<Value>,
}

impl From<FormError> for Failure {
    /// A schema that is none.
    fn from(error: FormError) -> Failure {
        Failure::new(error.code(), "submit", error.to_string())
    }
}

impl Failure {
    /// A failure that will be the same every time.
    pub fn new(code: Code, stage: &'static str, message: impl Into<String>) -> Failure {
        let (message, diagnostics) = (message.into(), Box::new(json!({})));
        Failure { code, message, retryable: false, retry_after_s: None, stage, diagnostics }
    }

    /// One that may not happen again.
    pub fn retryable(code: Code, stage: &'static str, message: impl Into<String>) -> Failure {
        Failure { retryable: true, ..Failure::new(code, stage, message) }
    }

    /// What is wrong with an input.
    pub fn input(field: &str, rule: &str) -> Failure {
        Failure::field(Code::InvalidInput, field, rule)
    }

    /// A field that has a code of its own.
    pub fn field(code: Code, field: &str, rule: &str) -> Failure {
        let diagnostics = Box::new(json!({"errors": [{"field": field, "constraint": rule}]}));
        Failure { diagnostics, ..Failure::new(code, "submit", format!("{field}: {rule}")) }
    }

    /// The answer was cut.
    pub fn truncated(generated: usize) -> Failure {
        let message = format!("the answer was cut after {generated} tokens, before it was whole");
        let diagnostics = Box::new(json!({"completion_tokens": generated}));
        Failure { diagnostics, ..Failure::new(Code::OutputTruncated, "generate", message) }
    }

    /// The kind of failure, as the older handler's clients sort them.
    fn error_type(&self) -> &'static str {
        match self.code {
            Code::InvalidInput
            | Code::PromptTooLong
            | Code::SchemaUnsupported
            | Code::SchemaNotFound
            | Code::WebhookRefused
            | Code::ModelNotFound => "validation_error",
            Code::OutputTruncated => "output_error",
            Code::ExecutionTimeout | Code::TtlExpired => "timeout_error",
            Code::Cancelled => "cancelled",
            _ => "server_error",
        }
    }

    /// The envelope of a failure.
    pub fn envelope(&self, attempt: i64) -> Value {
        json!({
            "success": false,
            "error": self.message,
            "error_type": self.error_type(),
            "code": self.code.name(),
            "retryable": self.retryable,
            "retry_after_s": self.retry_after_s,
            "stage": self.stage,
            "attempt": attempt,
            "diagnostics": self.diagnostics,
        })
    }
}
