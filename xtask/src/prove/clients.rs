//! Other people's clients, unchanged, against a server whose model says what a script says: they are installed here, and
//! the tests of `crates/server/tests/http/agents.rs` run them.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};

use super::{Facts, checked};
use crate::{command, output, root, run as run_tool};

/// Finds versions that go together in a second, where pip takes an hour.
const UV: &str = "uv==0.13.8";

/// A Python with packages of its own.
pub(super) struct Environment {
    /// Its folder.
    pub(super) name: &'static str,
    /// By name and version.
    pub(super) packages: &'static [&'static str],
}

/// From PyPI, by name and version. Those that want other versions of the same packages have environments of their own.
const PYTHON: &[Environment] = &[
    Environment {
        name: "python",
        packages: &[
            "openai==3.3.0",
            "anthropic==2.10.0",
            "ollama==0.6.3",
            "smolagents[openai]==1.26.0",
            "langchain==1.4.7",
            "langchain-openai==1.7.3",
            "langchain-anthropic==1.7.7",
            "langchain-ollama==1.1.0",
            "langgraph==1.2.22",
            "openai-agents==0.24.0",
            "pydantic-ai-slim[openai]==2.38.0",
            "instructor==1.17.0",
            "llm==0.36",
        ],
    },
    Environment { name: "python-litellm", packages: &["litellm==1.106.2"] },
    Environment { name: "python-dspy", packages: &["dspy==3.4.1"] },
    Environment {
        name: "python-llama-index",
        packages: &[
            "llama-index-core==0.14.25",
            "llama-index-llms-openai-like==0.8.1",
            "llama-index-llms-ollama==0.11.0",
            "llama-index-embeddings-openai-like==0.4.0",
        ],
    },
    Environment { name: "python-outlines", packages: &["outlines[openai]==1.3.3"] },
    Environment { name: "python-semantic-kernel", packages: &["semantic-kernel==1.45.0"] },
    Environment { name: "python-aider", packages: &["aider-chat==0.86.2"] },
    Environment { name: "python-agno", packages: &["agno==3.1.10", "openai==3.51.0"] },
    Environment { name: "python-strands", packages: &["strands-agents[openai,ollama,anthropic]==1.62.0"] },
    Environment {
        name: "python-autogen",
        packages: &["autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"],
    },
    Environment { name: "python-gptme", packages: &["gptme==0.35.1"] },
    Environment { name: "python-haystack", packages: &["haystack-ai==3.4.0"] },
    // It needs click, and does not say so.
    Environment { name: "python-shell-gpt", packages: &["shell-gpt==1.5.1", "click==8.3.0"] },
];

/// From npm, by name and version.
const NPM: &[&str] = &[
    "@ai-sdk/anthropic@3.0.138",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.87",
    "@anthropic-ai/claude-code@2.1.197",
    "@anthropic-ai/sdk@1.10.0",
    "@langchain/core@1.2.13",
    "@langchain/openai@1.6.0",
    "@openai/codex@0.169.0",
    "@qwen-code/qwen-code@0.15.10",
    "ai@6.0.326",
    "ollama@0.6.4",
    "openai@6.49.0",
    "opencode-ai@1.18.33",
    "zod@4.6.7",
];

const TESTS: [&str; 3] = [
    "agents::python_s_agents_call_a_tool_and_answer",
    "agents::node_s_clients_call_a_tool_and_answer",
    "agents::coding_agents_run_a_command_and_answer",
];

/// Environments of Python in a folder below `target`, each with its packages.
pub(super) fn environments(folder: &Path, wanted: &[Environment]) -> Result<()> {
    fs::create_dir_all(folder)?;
    let tools = folder.join("tools");
    run_tool(command("python3", &["-m", "venv"]).arg(&tools))?;
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV];
    run_tool(&mut command(&tools.join("bin/python").to_string_lossy(), &pip))?;
    let uv = tools.join("bin/uv").to_string_lossy().into_owned();
    for Environment { name, packages } in wanted {
        let environment = folder.join(name);
        run_tool(command(&uv, &["venv", "--quiet", "--clear", "--python", "python3"]).arg(&environment))?;
        let python = environment.join("bin/python").to_string_lossy().into_owned();
        run_tool(command(&uv, &["pip", "install", "--quiet", "--python", &python]).args(*packages))?;
    }
    Ok(())
}

pub(super) fn run() -> Result<Facts> {
    let folder = root().join("target/agents");
    environments(&folder, PYTHON)?;
    let npm = folder.join("npm");
    fs::create_dir_all(&npm)?;
    let install = ["install", "--no-audit", "--no-fund", "--prefix"];
    run_tool(command("npm", &install).arg(&npm).args(NPM))?;
    let told = output(
        checked::test("http", "agents::").env("FORNAX_AGENTS", &folder).env_remove("FORNAX_AGENTS_ONLY"),
    )?;
    ensure!(!told.contains("SKIP "), "a test was skipped: {told}");
    for test in TESTS {
        ensure!(told.contains(&format!("test {test} ... ok")), "{test} did not pass: {told}");
    }
    let mut clients: Vec<&str> = told.lines().filter_map(|line| line.strip_prefix("CLIENT ")).collect();
    clients.sort_unstable();
    let packages: Vec<String> = PYTHON.iter().map(|environment| environment.packages.join(", ")).collect();
    Ok(vec![
        ("clients that were content", format!("{}: {}", clients.len(), clients.join(", "))),
        ("packages of PyPI", packages.join(", ")),
        ("packages of npm", NPM.join(", ")),
    ])
}
