//! llama.cpp's own tests of its server, through a launcher that starts Fornax in its place. Which of them fail, and
//! why, is committed beside the launcher; the proof fails where another one does, or one of the list no longer does.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{
    Facts, checked,
    clients::{Environment, environments},
    templates::SOURCE,
};
use crate::{fixtures, output, root};

const SUITE: &str = "crates/fornax/tests/clients/llama_server_suite.py";
const PACKAGES: &[&str] = &[
    "filelock==3.20.0",
    "gguf==0.19.0",
    "numpy==2.4.6",
    "openai==3.51.0",
    "prometheus-client==0.26.0",
    "pytest==9.2.0",
    "pytest-timeout==2.4.0",
    "requests==2.34.2",
    "wget==3.2",
];

pub(super) fn run() -> Result<Facts> {
    fixtures::run(true)?;
    let binary = checked::binary()?;
    let agents = root().join("target/agents");
    environments(&agents, &[Environment { name: "python-llama-cpp", packages: PACKAGES }])?;
    let work = tempfile::tempdir()?;
    let archive = SOURCE.download(work.path())?;
    // Its tests name templates from the top of its sources.
    let server = work.path().join("tools/server");
    std::fs::create_dir_all(&server)?;
    std::fs::create_dir_all(work.path().join("models"))?;
    SOURCE.unpack(&archive, "vendor/llama.cpp/tools/server/tests", &server)?;
    SOURCE.unpack(&archive, "vendor/llama.cpp/models/templates", &work.path().join("models"))?;
    let told = output(
        Command::new(agents.join("python-llama-cpp/bin/python"))
            .arg(root().join(SUITE))
            .arg(server.join("tests"))
            .arg(&binary)
            .arg(fixtures::cache_dir()?.join("models"))
            .env("FORNAX_CACHE", fixtures::cache_dir()?),
    )?;
    let counts =
        told.lines().find(|line| line.starts_with("{\"passed\"")).context("the suite told no counts")?;
    let counts: Value = serde_json::from_str(counts)?;
    ensure!(counts["passed"].as_u64().is_some_and(|passed| passed > 100), "{counts}");
    let reasons = counts["by_reason"].as_object().context("the suite told no reasons")?;
    let reasons: Vec<String> = reasons.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
    Ok(vec![
        ("tests", format!("those in the sources of {} {}", SOURCE.package, SOURCE.version)),
        ("passed", counts["passed"].to_string()),
        ("failed, as listed", format!("{} ({})", counts["failed"], reasons.join(", "))),
        ("skipped by themselves", counts["skipped"].to_string()),
    ])
}
