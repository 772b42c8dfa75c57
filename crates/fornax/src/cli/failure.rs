//! How a command ends badly: one line on standard error and an exit code.

use std::io;
use std::path::Path;

use clap::error::ErrorKind;
use fornax::catalog::PullError;
use fornax::hub::{HubError, NameError};
use fornax::{Code, Error};

/// A failure of the command line itself: a code of the error table, what happened and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    code: Code,
    message: String,
}

impl Failure {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Failure {
        Failure { code, message: message.into() }
    }

    pub(crate) fn code(&self) -> Code {
        self.code
    }

    /// A request that is wrong in itself.
    pub(crate) fn usage(message: impl Into<String>) -> Failure {
        Failure::new(Code::InvalidInput, message)
    }

    /// A text or template file named on the command line that cannot be read.
    pub(crate) fn unreadable(path: &Path, error: &io::Error) -> Failure {
        Failure::usage(format!("cannot read {}: {error}; check the path and its permissions", path.display()))
    }

    /// A result file that cannot be written.
    pub(crate) fn unwritable(path: &Path, error: &io::Error) -> Failure {
        if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            let message = format!("no space left for {}; free some or write elsewhere", path.display());
            return Failure::new(Code::DiskFull, message);
        }
        Failure::usage(format!(
            "cannot write {}: {error}; check the folder and its permissions",
            path.display()
        ))
    }
}

/// What the process reports: the line for standard error, if any, and its exit status.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) line: Option<String>,
    pub(crate) exit: u8,
}

/// What a shell expects of a process that Ctrl-C ended.
const EXIT_INTERRUPTED: u8 = 130;

/// Finds the most telling error in the chain. A reader that closed its end of the pipe is no failure: nobody is left
/// to tell.
pub(crate) fn report(error: &anyhow::Error) -> Report {
    for cause in error.chain() {
        if let Some(error) = cause.downcast_ref::<io::Error>()
            && error.kind() == io::ErrorKind::BrokenPipe
        {
            return Report { line: None, exit: 0 };
        }
        if let Some(failure) = cause.downcast_ref::<Failure>() {
            return line(failure.code, &failure.message);
        }
        if let Some(error) = cause.downcast_ref::<Error>() {
            return line(error.code(), &error.to_string());
        }
        if let Some(error) = cause.downcast_ref::<PullError>() {
            return line(error.code(), &error.to_string());
        }
        if let Some(error) = cause.downcast_ref::<NameError>() {
            return line(error.code(), &error.to_string());
        }
        if let Some(error) = cause.downcast_ref::<HubError>() {
            return line(error.code(), &error.to_string());
        }
    }
    line(Code::Internal, &format!("{error:#}"))
}

/// Clap's message in one line. `command` is the command that was typed, if it got that far.
pub(crate) fn usage_report(error: &clap::Error, command: Option<&str>) -> Report {
    let text = error.to_string();
    let mut message: Vec<&str> = text
        .lines()
        .map(|line| line.trim().trim_start_matches("error: "))
        // The message ends where the usage begins; tips and lists of missing arguments belong to it.
        .take_while(|line| !line.starts_with("Usage:"))
        .filter(|line| !line.is_empty() && !line.starts_with("For more information"))
        .collect();
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        message = vec!["no command given"];
    }
    let message = message.join(" ").replace(" tip: ", "; ");
    let command = command.map(|command| format!("{command} ")).unwrap_or_default();
    line(Code::InvalidInput, &format!("{message}; see fornax {command}--help"))
}

fn line(code: Code, message: &str) -> Report {
    // Messages may carry what a file or another program said: control characters would break the line or the terminal.
    let mut message: String = message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // Libraries say what is wrong; what to do about it is the same for all of a kind.
    let advice = match code {
        Code::ModelCorrupt => "fetch or convert the model again",
        Code::ModelUnsupported => "use another model, or another conversion of it",
        Code::OutOfMemory => "use a smaller --context, a smaller model or a larger --memory-limit",
        Code::Internal => "report this with the output of `fornax doctor --report`",
        Code::SchemaUnsupported => "change the form that was asked for",
        Code::ModelNotFound => "check the path, or see `fornax list`",
        _ => "",
    };
    if !advice.is_empty() && !message.contains("; ") {
        message.push_str("; ");
        message.push_str(advice);
    }
    let exit = match code {
        Code::InvalidInput
        | Code::SchemaUnsupported
        | Code::SchemaNotFound
        | Code::BodyTooLarge
        | Code::UnknownEndpoint
        | Code::WebhookRefused
        | Code::KeyReused
        | Code::WrongState => 2,
        Code::ModelDoesNotFit | Code::OutOfMemory => 3,
        Code::ModelNotFound | Code::ModelCorrupt | Code::ModelUnsupported => 4,
        Code::DeviceUnavailable | Code::DeviceLost => 5,
        Code::Cancelled => EXIT_INTERRUPTED,
        Code::ModelNotReady
        | Code::DiskFull
        | Code::NumericFault
        | Code::PromptTooLong
        | Code::OutputTruncated
        | Code::QueueFull
        | Code::Unauthorized
        | Code::ExecutionTimeout
        | Code::TtlExpired
        | Code::AttemptsExhausted
        | Code::JobNotFound
        | Code::SchemasFull
        | Code::FileNotFound
        | Code::FilesFull
        | Code::BatchNotFound
        | Code::ResponseNotFound
        | Code::ConversationNotFound
        | Code::BatchesFull
        | Code::WeightsDiffer
        | Code::IntegrityFailure
        | Code::Internal => 1,
    };
    Report { line: Some(format!("error: {code}: {message}")), exit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_and_ends_in_advice() {
        let check = |code, message: &str, wanted: &str| {
            assert_eq!(line(code, message).line.as_deref(), Some(wanted));
        };
        check(
            Code::ModelCorrupt,
            "tensor \"a\nb\" is missing",
            "error: MODEL_CORRUPT: tensor \"a b\" is missing; fetch or convert the model again",
        );
        check(Code::ModelCorrupt, "cut; fetch it again", "error: MODEL_CORRUPT: cut; fetch it again");
        check(Code::Cancelled, "stopped before it was done", "error: CANCELLED: stopped before it was done");
    }

    #[test]
    fn a_closed_pipe_is_no_failure() {
        let error = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe)).context("printing");
        assert_eq!(report(&error), Report { line: None, exit: 0 });
    }
}
