//! The library facade for Python: what `fornax` (python/fornax) is made of.
//!
//! It translates and nothing else. A request comes as JSON, so that one place names what is wrong with it; an answer
//! goes out piece by piece. Whatever waits lets other threads of Python run, and returns often enough for Python to hear
//! Ctrl-C. It knows the facade alone. It must never know a backend, print, or keep what was dropped alive.

mod answer;
mod ask;
mod fault;
mod fetch;
mod message;
mod model;
mod process;

use pyo3::prelude::*;

#[pymodule]
mod _fornax {
    #[pymodule_export]
    use super::answer::Answer;
    #[pymodule_export]
    use super::fault::Error;
    #[pymodule_export]
    use super::fetch::locate;
    #[pymodule_export]
    use super::model::{Model, open};

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("DEFAULT", fornax::catalog::DEFAULT)
    }
}
