//! The JSON Schema Test Suite in the cache folder: what schemas mean, told by those who define them.
//!
//! It has no package of its own. The source archive of the Python package `jsonschema` carries it whole, so that is
//! what pip is asked for, by version and hash. The suite's licence is in the archive; nothing of it is committed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::source::Source;

const SOURCE: Source = Source {
    package: "jsonschema",
    version: "4.25.1",
    sha256: "e4a9655ce0da0c0b67a085847e00a3a51449e1157f4f75e9fb5aa545e122eb85",
};

/// Where the suite lies inside a cache folder; tests look there.
pub(crate) fn path(cache: &Path) -> PathBuf {
    cache.join("json-schema-test-suite")
}

/// Fetches it unless it is there: it gets its name only when it is whole.
pub(crate) fn fetch(cache: &Path) -> Result<PathBuf> {
    let path = path(cache);
    if path.is_dir() {
        return Ok(path);
    }
    fs::create_dir_all(cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let work = tempfile::Builder::new().prefix(".schema-suite-").tempdir_in(cache)?;
    let unpacked = work.path().join("suite");
    fs::create_dir(&unpacked)?;
    let archive = SOURCE.download(work.path())?;
    SOURCE.unpack(&archive, "json/tests", &unpacked)?;
    match fs::rename(&unpacked, &path) {
        // Somebody else's fetch was quicker, and theirs is as good.
        Err(_) if path.is_dir() => {}
        renamed => renamed.with_context(|| format!("cannot make {}", path.display()))?,
    }
    Ok(path)
}
