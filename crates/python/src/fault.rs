//! Errors as Python sees them: one exception, with the code that programs know it by.

use fornax::Code;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

use crate::ask::Fault;

create_exception!(
    fornax,
    Error,
    PyException,
    "What Fornax refuses or fails, in one line that says what to do. `code` is its stable name, such as \
     \"MODEL_NOT_FOUND\" or \"PROMPT_TOO_LONG\"."
);

/// An exception with its code.
pub(crate) fn raised(py: Python<'_>, code: Code, message: String) -> PyErr {
    let error = Error::new_err((message,));
    match error.value(py).setattr("code", code.name()) {
        Ok(()) => error,
        Err(worse) => worse,
    }
}

/// The same of the facade's own.
pub(crate) fn of(py: Python<'_>, error: &fornax::Error) -> PyErr {
    raised(py, error.code(), error.to_string())
}

/// An input that is wrong in itself.
pub(crate) fn invalid(py: Python<'_>, message: String) -> PyErr {
    raised(py, Code::InvalidInput, message)
}

/// What is wrong with a request.
pub(crate) fn asked(py: Python<'_>, fault: Fault) -> PyErr {
    match fault {
        Fault::Wrong(message) => invalid(py, message),
        Fault::Facade(error) => of(py, &error),
    }
}

/// A model that another process opened.
pub(crate) fn forked(py: Python<'_>) -> PyErr {
    let why = "the model was opened before this process was forked, and its threads are not here; open it in this \
               process, or start processes by \"spawn\"";
    raised(py, Code::ModelNotReady, why.to_owned())
}
