//! The workspace as its tests build it. A package alone would be built with other features, and everything below it a
//! second time.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::{command, root, run as run_tool};

/// What every build of the tests says.
const WORKSPACE: [&str; 3] = ["--workspace", "--profile", "checked"];

/// The binary in the profile of the tests, built if need be.
pub(super) fn binary() -> Result<PathBuf> {
    run_tool(command("cargo", &["build"]).args(WORKSPACE).args(["--bin", "fornax"]))?;
    Ok(root().join("target/checked/fornax"))
}

/// Runs the tests of one target whose name contains `filter`, and has their output shown.
pub(super) fn test(target: &str, filter: &str) -> Command {
    let mut cargo = command("cargo", &["test"]);
    cargo.args(WORKSPACE).args(["--test", target, filter, "--", "--show-output"]);
    cargo
}
