//! Other people's clients, unchanged, through a loop of a tool and an answer. What their model says is scripted: what is
//! tested is the protocol. `cargo xtask prove clients` installs them; `FORNAX_AGENTS` is the folder where they are.
//!
//! `tests/clients/agents.json` lists them by group: what the model says to each, an act a request, and the environment
//! that has it. `tests/clients/agents.py` is what they do. `FORNAX_AGENTS_ONLY` names those that are wanted.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde::Deserialize;

use crate::world::{Setup, World, keeping};

/// A client, and what its model says.
#[derive(Deserialize)]
struct Agent {
    name: String,
    /// The Python that has it, a folder of `FORNAX_AGENTS`; without one, any.
    python: Option<String>,
    acts: Vec<String>,
}

/// The folder with environments of Python and with `npm`, which has `node_modules`.
fn installed(test: &str) -> Option<PathBuf> {
    let folder = env::var_os("FORNAX_AGENTS").map(PathBuf::from).filter(|folder| folder.is_dir());
    if folder.is_none() {
        println!("SKIP {test}: no FORNAX_AGENTS");
    }
    folder
}

/// Runs a client against a model that says these acts, one for each request.
async fn run(agent: &Agent, folder: &Path) -> Result<(), String> {
    let setup = Setup { context: 200_000, ..Setup::skilled(&agent.acts.join("\x0c")) };
    // What clients have kept is forgotten with the folder.
    let store = tempfile::tempdir().unwrap();
    let world = World::ready(keeping(store.path(), setup)).await;
    let program = match &agent.python {
        Some(environment) => folder.join(environment).join("bin/python"),
        None => PathBuf::from("python3"),
    };
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/agents.py");
    let work = tempfile::tempdir().unwrap();
    let mut command = Command::new(program);
    command.arg(suite).args([&agent.name, &format!("http://{}", world.address)]).arg(folder);
    command.current_dir(work.path()).env("HOME", work.path()).stdin(std::process::Stdio::null());
    let ran = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    world.stopped().await.unwrap();
    let Output { status, stdout, stderr } = ran;
    let said = String::from_utf8_lossy(&stdout);
    match status.success() && said.contains("the client is content") {
        true => Ok(()),
        false => Err(format!("{}: {said}{}", agent.name, String::from_utf8_lossy(&stderr))),
    }
}

/// All clients of a group; whichever fail are told together.
async fn check(group: &str, folder: &Path) {
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/agents.json");
    let list = std::fs::read_to_string(list).unwrap();
    let mut groups: std::collections::BTreeMap<String, Vec<Agent>> = serde_json::from_str(&list).unwrap();
    let only = env::var("FORNAX_AGENTS_ONLY").ok();
    let mut failed = Vec::new();
    for agent in groups.remove(group).unwrap() {
        if only.as_ref().is_some_and(|only| !only.split(',').any(|name| name == agent.name)) {
            continue;
        }
        match run(&agent, folder).await {
            Ok(()) => println!("CLIENT {}", agent.name),
            Err(why) => failed.push(why),
        }
    }
    assert!(failed.is_empty(), "{} clients failed:\n{}", failed.len(), failed.join("\n\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn python_s_agents_call_a_tool_and_answer() {
    let Some(folder) = installed("python_s_agents_call_a_tool_and_answer") else { return };
    check("python", &folder).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_s_clients_call_a_tool_and_answer() {
    let Some(folder) = installed("node_s_clients_call_a_tool_and_answer") else { return };
    check("node", &folder).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn coding_agents_run_a_command_and_answer() {
    let Some(folder) = installed("coding_agents_run_a_command_and_answer") else { return };
    check("coding", &folder).await;
}
