//! What a newcomer does: clone, then the two commands of the README, on a machine that has fetched nothing yet.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};

use super::Facts;
use crate::{root, run as run_tool, shown};

pub(super) fn run() -> Result<Facts> {
    let work = tempfile::tempdir().context("cannot make a temporary folder")?;
    let clone = work.path().join("fornax");
    let cache = work.path().join("cache");
    run_tool(Command::new("git").args(["clone", "--quiet"]).arg(root()).arg(&clone))?;

    let start = Instant::now();
    let answer = newcomer(&clone, &cache, &["run", "--release", "--", "run", "Why is the sky blue?"])?;
    anyhow::ensure!(answer.iter().any(|line| !line.trim().is_empty()), "the model answered nothing");
    let first = start.elapsed().as_secs_f64();

    let start = Instant::now();
    let tests = newcomer(&clone, &cache, &["xtask", "test"])?;
    let counts = tests.last().context("the tests printed nothing")?.clone();
    let second = start.elapsed().as_secs_f64();

    Ok(vec![
        (
            "`cargo run --release -- run \"Why is the sky blue?\"`",
            format!("answered after {first:.0} s, build and download included"),
        ),
        ("`cargo xtask test`", format!("{counts}, after {second:.0} s")),
    ])
}

/// Runs cargo in the clone; the lines it printed, which are also shown as they come.
fn newcomer(clone: &Path, cache: &Path, args: &[&str]) -> Result<Vec<String>> {
    let mut command = Command::new("cargo");
    command.args(args).current_dir(clone).env("FORNAX_CACHE", cache).stdout(Stdio::piped());
    // The clone builds from nothing, in its own folder.
    command.env_remove("CARGO_TARGET_DIR");
    let line = shown(&command);
    println!("==> clean clone: {line}");
    let mut child = command.spawn().with_context(|| format!("cannot start `{line}`"))?;
    let stdout = child.stdout.take().context("cargo's output is not piped")?;
    let mut lines = Vec::new();
    for text in BufReader::new(stdout).lines() {
        let text = text.with_context(|| format!("cannot read the output of `{line}`"))?;
        println!("{text}");
        lines.push(text);
    }
    let status = child.wait()?;
    anyhow::ensure!(status.success(), "`{line}` failed ({status})");
    Ok(lines)
}
