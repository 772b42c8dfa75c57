//! What programs know an error by.
//!
//! One list for the wire, the library, jobs and the command line. An error has its code beside its message (`code()`),
//! never inside of it. Two tables say what a code means to those outside, and nobody else maps one: statuses of HTTP
//! are in `server/src/error.rs`, exit codes in `fornax/src/cli/failure.rs`. Both name every code, so a new one does not
//! compile before it has both.

use std::fmt;

macro_rules! codes {
    ($($code:ident $name:literal)*) => {
        /// What programs know an error by. The names are the same wherever Fornax reports one.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[expect(missing_docs, reason = "the names say it; docs/api.md describes each")]
        pub enum Code {
            $($code,)*
        }

        impl Code {
            /// Every one.
            pub const ALL: &'static [Code] = &[$(Code::$code,)*];

            /// As it is written everywhere: `QUEUE_FULL`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Code::$code => $name,)*
                }
            }
        }
    };
}

codes! {
    ModelNotFound "MODEL_NOT_FOUND"
    ModelNotReady "MODEL_NOT_READY"
    ModelUnsupported "MODEL_UNSUPPORTED"
    ModelDoesNotFit "MODEL_DOES_NOT_FIT"
    ModelCorrupt "MODEL_CORRUPT"
    OutOfMemory "OUT_OF_MEMORY"
    DeviceUnavailable "DEVICE_UNAVAILABLE"
    DeviceLost "DEVICE_LOST"
    NumericFault "NUMERIC_FAULT"
    PromptTooLong "PROMPT_TOO_LONG"
    OutputTruncated "OUTPUT_TRUNCATED"
    SchemaUnsupported "SCHEMA_UNSUPPORTED"
    InvalidInput "INVALID_INPUT"
    BodyTooLarge "BODY_TOO_LARGE"
    UnknownEndpoint "UNKNOWN_ENDPOINT"
    Unauthorized "UNAUTHORIZED"
    QueueFull "QUEUE_FULL"
    Cancelled "CANCELLED"
    ExecutionTimeout "EXECUTION_TIMEOUT"
    TtlExpired "TTL_EXPIRED"
    AttemptsExhausted "ATTEMPTS_EXHAUSTED"
    JobNotFound "JOB_NOT_FOUND"
    KeyReused "KEY_REUSED"
    WrongState "WRONG_STATE"
    WebhookRefused "WEBHOOK_REFUSED"
    SchemaNotFound "SCHEMA_NOT_FOUND"
    SchemasFull "SCHEMAS_FULL"
    FileNotFound "FILE_NOT_FOUND"
    FilesFull "FILES_FULL"
    BatchNotFound "BATCH_NOT_FOUND"
    BatchesFull "BATCHES_FULL"
    ResponseNotFound "RESPONSE_NOT_FOUND"
    ConversationNotFound "CONVERSATION_NOT_FOUND"
    DiskFull "DISK_FULL"
    WeightsDiffer "WEIGHTS_DIFFER"
    IntegrityFailure "INTEGRITY_FAILURE"
    Internal "INTERNAL"
}

impl Code {
    /// The code of that name.
    pub fn named(name: &str) -> Option<Code> {
        Code::ALL.iter().copied().find(|code| code.name() == name)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_that_of_one_code_alone() {
        for &code in Code::ALL {
            assert_eq!(Code::named(code.name()), Some(code));
            assert!(code.name().bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_'), "{code}");
        }
        assert_eq!(Code::named("Internal"), None);
    }
}
