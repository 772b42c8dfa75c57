//! Hundreds of workers killed while they submit, run, complete and tell of jobs: nothing is lost, nothing done twice.

use anyhow::{Context, Result};

use super::Facts;
use crate::{command, output};

/// The test that kills.
const TEST: &str = "workers_killed_at_random_moments_lose_nothing_and_complete_nothing_twice";

/// On each database.
const KILLS: &str = "300";

/// What the test prints: for each database, then how it was run.
const FACTS: [&str; 4] = ["SQLite", "PostgreSQL", "seed", "kills"];

pub(super) fn run() -> Result<Facts> {
    // The other test of that file prints its own, much smaller, count.
    let args = [
        "test",
        "--profile",
        "checked",
        "--package",
        "fornax-jobs",
        "--test",
        "crash",
        "--",
        TEST,
        "--nocapture",
    ];
    let printed = output(command("cargo", &args).env("FORNAX_KILLS", KILLS))?;
    let fact = |name: &'static str| {
        let line = printed.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        Ok((name, line.with_context(|| format!("the test did not print its {name}"))?.to_owned()))
    };
    FACTS.into_iter().map(fact).collect()
}
