//! Other people's agents, unchanged, against a server whose model says what a script says: they are installed here, and
//! the tests of `crates/server/tests/http/agents.rs` run them.

use std::fs;

use anyhow::{Result, ensure};

use super::Facts;
use crate::{command, output, root, run as run_tool};

/// From PyPI, by name and version.
const PYTHON: &[&str] = &[
    "smolagents[openai]==1.26.0",
    "langchain==1.4.7",
    "langchain-openai==1.7.3",
    "openai-agents==0.24.0",
    "pydantic-ai-slim[openai]==2.38.0",
];

/// The same, in an environment of its own: it wants an older client of OpenAI's.
const LITELLM: &str = "litellm==1.106.2";

/// From npm, by name and version.
const NPM: &[&str] = &[
    "@anthropic-ai/claude-code@2.1.197",
    "@openai/codex@0.169.0",
    "ai@6.0.326",
    "@ai-sdk/openai-compatible@2.0.87",
    "zod@4.6.7",
];

const TESTS: [&str; 3] = [
    "agents::python_s_agents_call_a_tool_and_answer",
    "agents::the_ai_sdk_calls_a_tool_and_makes_an_object",
    "agents::coding_agents_run_a_command_and_answer",
];

pub(super) fn run() -> Result<Facts> {
    let folder = root().join("target/agents");
    let npm = folder.join("npm");
    fs::create_dir_all(&npm)?;
    for (name, packages) in [("python", PYTHON), ("python-litellm", &[LITELLM][..])] {
        let environment = folder.join(name);
        run_tool(command("python3", &["-m", "venv"]).arg(&environment))?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        run_tool(command(&environment.join("bin/python").to_string_lossy(), &pip).args(packages))?;
    }
    let install = ["install", "--no-audit", "--no-fund", "--prefix"];
    run_tool(command("npm", &install).arg(&npm).args(NPM))?;
    let cargo = ["test", "--package", "fornax-server", "--profile", "checked", "--test", "http", "agents::"];
    let told = output(command("cargo", &cargo).args(["--", "--show-output"]).env("FORNAX_AGENTS", &folder))?;
    ensure!(!told.contains("SKIP "), "a test was skipped: {told}");
    for test in TESTS {
        ensure!(told.contains(&format!("test {test} ... ok")), "{test} did not pass: {told}");
    }
    Ok(vec![
        ("packages of PyPI", format!("{}, {LITELLM}", PYTHON.join(", "))),
        ("packages of npm", NPM.join(", ")),
    ])
}
