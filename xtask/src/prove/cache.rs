//! Pages on a disk: writers killed at any moment, and the same answers from what they left.

use anyhow::{Context, Result};

use super::Facts;
use crate::{command, output};

const KILLS: &str = "300";

pub(super) fn run() -> Result<Facts> {
    let tested = |args: &[&str]| -> Result<String> {
        let all = [&["test", "--profile", "checked", "--workspace"], args].concat();
        let printed = output(command("cargo", &all).env("FORNAX_DISK_KILLS", KILLS))?;
        let result = printed.lines().find(|line| line.starts_with("test result: ok"));
        let result = result.context("no test ran")?.to_owned();
        anyhow::ensure!(!result.contains(" 0 passed"), "the tests were not built");
        Ok(result)
    };
    let killed = tested(&["--test", "kills"])?;
    let answers = tested(&["--test", "cli", "cache::"])?;
    Ok(vec![("writers killed", KILLS.to_owned()), ("what they left", killed), ("answers", answers)])
}
