//! The hand-over between callers and the engine's thread under a model checker's schedules.

use anyhow::{Context, Result};

use super::Facts;
use crate::{command, output, root};

pub(super) fn run() -> Result<Facts> {
    let args =
        ["test", "--profile", "checked", "--package", "fornax-engine", "--test", "hand_over", "--target-dir"];
    let mut test = command("cargo", &args);
    // A folder of its own: the flag rebuilds everything.
    test.arg(root().join("target/shuttle")).env("RUSTFLAGS", "--cfg shuttle");
    let printed = output(&mut test)?;
    let result = printed.lines().find(|line| line.starts_with("test result: ok")).context("no test ran")?;
    anyhow::ensure!(!result.contains(" 0 passed"), "the model checker's tests were not built");
    Ok(vec![
        ("schedules", "2000 random and 2000 adversarial for each test".to_owned()),
        ("tests", result.to_owned()),
    ])
}
