//! lm-evaluation-harness' multiple choice against a running server, and transformers on the same weights.

use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use super::{
    Facts, checked,
    clients::{Environment, environments},
    serving::Server,
};
use crate::{fixtures, output, root, run as run_tool};

const SUITE: &str = "crates/fornax/tests/clients/lm_eval_suite.py";
/// A Python that has transformers, torch and gguf.
const PYTHON: &str = "FORNAX_ORACLE_PYTHON";
const PACKAGES: &[&str] = &["lm-eval[api]==0.4.13", "transformers==5.23.0", "datasets==5.2.0"];

pub(super) fn run() -> Result<Facts> {
    let oracle = std::env::var_os(PYTHON)
        .with_context(|| format!("set {PYTHON} to a Python with transformers, torch and gguf"))?;
    fixtures::run(false)?;
    let binary = checked::binary()?;
    let agents = root().join("target/agents");
    environments(&agents, &[Environment { name: "python-lm-eval", packages: PACKAGES }])?;
    let gguf = fixtures::cache_dir()?.join("models/smollm2-135m-instruct-q4_1.gguf");
    let work = tempfile::tempdir()?;
    let suite = root().join(SUITE);
    run_tool(Command::new(&oracle).arg(&suite).arg("tokenizer").arg(&gguf).arg(work.path()))?;
    // As exact as there is: what is compared is the form of the answers, not what quantising activations costs.
    let exact = ["--kv-dtype", "f32", "--activations", "float", "--context", "512"];
    let server = Server::start(&binary, &exact, "none")?;
    let base = format!("http://{}", server.address());
    run_tool(
        Command::new(agents.join("python-lm-eval/bin/python"))
            .arg(&suite)
            .args(["ask", &base, "none", "smollm2"])
            .arg(work.path()),
    )?;
    drop(server);
    let told = output(Command::new(&oracle).arg(&suite).arg("compare").arg(&gguf).arg(work.path()))?;
    let told: Value = serde_json::from_str(told.lines().last().context("it told nothing")?)?;
    Ok(vec![
        ("asked by", PACKAGES[0].to_owned()),
        (
            "compared with",
            format!(
                "transformers on the dequantised {}",
                gguf.file_name().map_or("".into(), |name| name.to_string_lossy())
            ),
        ),
        ("questions of four choices", told["questions"].to_string()),
        ("of which the model gets right, here and there", told["right"].to_string()),
        ("largest difference of a choice's log-probability", format!("{} (bound 0.01)", told["worst"])),
    ])
}
