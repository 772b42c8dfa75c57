//! From a model's name to its path, and how far that is.

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::PathBuf;

use fornax::catalog;
use fornax::hub::name::Fetching;
use fornax::hub::{self, Name};
use pyo3::prelude::*;

use crate::fault;

/// Whoever wants to know how far something is, and what came of telling: a callable of Python, or nobody.
pub(crate) struct Listener {
    callable: Option<Py<PyAny>>,
    /// What it raised, or a signal's handler: the work stops where it can, and this is why.
    raised: Option<PyErr>,
}

impl Listener {
    pub(crate) fn new(callable: Option<Py<PyAny>>) -> Listener {
        Listener { callable, raised: None }
    }

    /// Tells it, and hears signals.
    pub(crate) fn tell(&mut self, what: &str, done: u64, total: u64) -> ControlFlow<()> {
        let told = Python::attach(|py| {
            py.check_signals()?;
            match &self.callable {
                Some(callable) => callable.call1(py, (what, done, total)).map(drop),
                None => Ok(()),
            }
        });
        if let Err(error) = told {
            self.raised.get_or_insert(error);
        }
        if self.raised.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// The result of what was told of, or what was raised while it ran.
    pub(crate) fn outcome<T>(self, result: PyResult<T>) -> PyResult<T> {
        self.raised.map_or(result, Err)
    }
}

/// The path of the model that a name means, fetched where it is not on disk.
#[pyfunction]
pub(crate) fn locate(py: Python<'_>, name: &str, progress: Option<Py<PyAny>>) -> PyResult<PathBuf> {
    let mut listener = Listener::new(progress);
    let located = py.detach(|| {
        Name::parse(name).locate(&environment, &mut |told| match told {
            Fetching::OnDisk { .. } => ControlFlow::Continue(()),
            Fetching::Hub(progress) => from_hub(&mut listener, progress),
            Fetching::Packages(_, progress) => from_packages(&mut listener, progress),
        })
    });
    listener.outcome(located.map_err(|error| fault::raised(py, error.code(), error.to_string())))
}

fn from_hub(listener: &mut Listener, progress: hub::Progress<'_>) -> ControlFlow<()> {
    match progress {
        hub::Progress::Chosen { missing, .. } => listener.tell("downloading", 0, missing),
        hub::Progress::Waiting { .. } => listener.tell("waiting", 0, 0),
        hub::Progress::Checking { bytes, total, .. } => listener.tell("checking", bytes, total),
        hub::Progress::Downloading { bytes, total, .. } => listener.tell("downloading", bytes, total),
    }
}

fn from_packages(listener: &mut Listener, progress: catalog::Progress) -> ControlFlow<()> {
    match progress {
        catalog::Progress::Waiting => listener.tell("waiting", 0, 0),
        catalog::Progress::Downloading { bytes, total } => listener.tell("downloading", bytes, total),
        catalog::Progress::Unpacking { bytes, total } => listener.tell("checking", bytes, total),
    }
}

/// This package is an edge as the binary is: the environment is read here and nowhere else.
pub(crate) fn environment(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}
