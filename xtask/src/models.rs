//! `cargo xtask models`: docs/models.md, as a test of the crate of models makes it.

use std::fs;

use anyhow::Result;

use crate::{command, root, run};

/// The test that compares the file with what it should be, and leaves that where Cargo lets tests write.
const TEST: &str = "document::the_document_of_models_is_current";

/// Writes the file where it is not current.
pub(crate) fn write() -> Result<()> {
    let made = root().join("target/tmp/models.md");
    if made.exists() {
        fs::remove_file(&made)?;
    }
    let args =
        ["test", "--profile", "checked", "-p", "fornax-model", "--test", "model", "--", "--exact", TEST];
    let current = run(&mut command("cargo", &args));
    if !made.exists() {
        // It did not run, or there is nothing to write.
        return current;
    }
    fs::copy(&made, root().join("docs/models.md"))?;
    println!("docs/models.md is written");
    Ok(())
}
