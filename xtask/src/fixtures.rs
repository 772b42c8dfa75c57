//! `cargo xtask fixtures`: the models that tests and proofs run, and the suite that schemas are held to, in the cache
//! folder of the binary.

use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::{Context, Result};
use fornax::catalog::{self, Entry, Progress};

use crate::schema_suite;

/// Fetches the models that are offered, or all, and verifies also what was already there; then the JSON Schema Test
/// Suite, whose tests say that they skip where it could not be had.
pub(crate) fn run(all: bool) -> Result<()> {
    let cache = cache_dir()?;
    for entry in catalog::ENTRIES.iter().filter(|entry| all || entry.public) {
        let path = catalog::fetch(entry, &cache, &mut reporter(entry))
            .with_context(|| format!("fixture {} ({})", entry.name, entry.description))?;
        catalog::verify(entry, &path)
            .with_context(|| format!("{} is damaged: remove it and run this again", path.display()))?;
        println!("fixture {}: {}", entry.name, path.display());
    }
    match schema_suite::fetch(&cache) {
        Ok(path) => println!("fixture JSON Schema Test Suite: {}", path.display()),
        Err(error) => println!("fixture JSON Schema Test Suite: left out: {error:#}"),
    }
    Ok(())
}

/// The folder that the binary uses in the same environment.
pub(crate) fn cache_dir() -> Result<PathBuf> {
    Ok(catalog::cache_dir(|name| std::env::var_os(name))?)
}

/// Prints a line for every tenth of a download: logs stay short and still show life.
fn reporter(entry: &Entry) -> impl FnMut(Progress) -> ControlFlow<()> {
    let name = entry.name;
    let mut shown = None;
    move |progress| {
        let line = match progress {
            Progress::Waiting => format!("fixture {name}: waiting for another fetch"),
            Progress::Downloading { bytes, total } => {
                format!("fixture {name}: downloading {} MB, {} %", total / 1_000_000, bytes * 10 / total * 10)
            }
            Progress::Unpacking { .. } => format!("fixture {name}: unpacking"),
        };
        if shown.as_ref() != Some(&line) {
            println!("{line}");
            shown = Some(line);
        }
        ControlFlow::Continue(())
    }
}
