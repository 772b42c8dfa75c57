//! The claim of docs/private.md on the default model: the crate's tests of it, then three processes and their figures.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use fornax::catalog;
use serde_json::Value;

use super::Facts;
use super::memory::target_dir;
use crate::{command, fixtures, output, root, run as run_tool};

/// The tests that hold for any model; the others are about limits and need a tiny one.
const ON_ANY_MODEL: &[&str] = &["exact::logits", "exact::a_step", "views::", "tampering::"];

/// English text of this repository, which no model has learned by heart.
const TEXT: &str = "docs/memory-plan.md";

/// How often speed is measured: both ways in each run.
const RUNS: usize = 5;

/// How much worse the integer model may predict than the float model.
const PERPLEXITY_MOST: f64 = 1.01;

pub(super) fn run() -> Result<Facts> {
    fixtures::run(false)?;
    run_tool(&mut command("cargo", &["build", "--release", "--package", "fornax"]))?;
    let entry = catalog::find(catalog::DEFAULT).context("the default model is not in the catalog")?;
    let model = fixtures::cache_dir()?.join("models").join(entry.file);
    let binary = target_dir()?.join("release/fornax");
    let mut facts = vec![
        ("model", entry.file.to_owned()),
        ("tests on tiny models", tests(&[], None)?),
        ("tests on this model", tests(ON_ANY_MODEL, Some(&model))?),
    ];
    facts.extend(perplexity(&binary, &model)?);
    facts.extend(figures(&binary, &model)?);
    Ok(facts)
}

fn tests(filters: &[&str], model: Option<&Path>) -> Result<String> {
    let mut test = command(
        "cargo",
        &["test", "--profile", "checked", "--package", "fornax-private", "--test", "private", "--"],
    );
    test.args(filters);
    if let Some(model) = model {
        // One after the other: each test has two servers with the whole model.
        test.env("FORNAX_PRIVATE_MODEL", model).arg("--test-threads=1");
    }
    let printed = output(&mut test)?;
    let result = printed.lines().find(|line| line.starts_with("test result: ok")).context("no result")?;
    Ok(result.to_owned())
}

/// The integer model beside the float model, on the same text.
fn perplexity(binary: &Path, model: &Path) -> Result<Facts> {
    let measure = |flags: &[&str]| -> Result<(f64, u64)> {
        let mut run = Command::new(binary);
        run.arg("perplexity").arg(model).args([
            "--file",
            TEXT,
            "--context",
            "512",
            "--device",
            "cpu",
            "--json",
        ]);
        let text = output(run.args(flags).current_dir(root()))?;
        let json: Value = serde_json::from_str(&text)?;
        let number = json["perplexity"].as_f64().context("no perplexity")?;
        Ok((number, json["tokens"].as_u64().context("no tokens")?))
    };
    let (float, tokens) = measure(&["--activations", "float"])?;
    let (integer, _) = measure(&["--w8", "--kv-dtype", "f32"])?;
    let ratio = integer / float;
    anyhow::ensure!(ratio <= PERPLEXITY_MOST, "perplexity {integer} against {float}");
    Ok(vec![(
        "perplexity",
        format!(
            "{integer:.4} of the integer model, {float:.4} of the float model: {ratio:.4} ({tokens} tokens of {TEXT})"
        ),
    )])
}

/// A server, ended with the proof.
struct Server {
    child: Child,
    url: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already gone is as good.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn server(binary: &Path, model: &Path, party: &str) -> Result<Server> {
    let mut command = Command::new(binary);
    command.args(["private", "serve"]).arg(model).args([
        "--party",
        party,
        "--port",
        "0",
        "--demo-single-host",
    ]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("not piped")?).read_line(&mut line)?;
    let url = line.trim().rsplit(' ').next().unwrap_or_default().to_owned();
    Ok(Server { child, url })
}

fn figures(binary: &Path, model: &Path) -> Result<Facts> {
    let (zero, one) = (server(binary, model, "0")?, server(binary, model, "1")?);
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let share = |json: &Value| number(&json["share_of_plaintext"]);
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        let mut bench = Command::new(binary);
        bench.args(["private", "bench"]).arg(model).args(["--party0", &zero.url, "--party1", &one.url]);
        bench.args(["--demo-single-host", "--json", "--tokens", "128"]).stderr(Stdio::null());
        runs.push(serde_json::from_str::<Value>(&output(&mut bench)?)?);
    }
    runs.sort_by(|one, other| share(one).total_cmp(&share(other)));
    let shares: Vec<String> = runs.iter().map(|run| format!("{:.3}", share(run))).collect();
    let json = &runs[RUNS / 2];
    let speed = |name: &str| {
        let speed = &json[name];
        format!(
            "{:.1} tok/s of decode, first token after {:.0} ms, {:.1} ms of CPU a token",
            number(&speed["decode_tokens_per_second"]),
            number(&speed["first_token_ms"]),
            number(&speed["client_cpu_ms_per_token"])
        )
    };
    let wire = &json["wire_per_token"];
    let bytes = |way: &str, party: usize| format!("{:.1} kB", number(&wire[way][party]) / 1e3);
    Ok(vec![
        ("plaintext, all cores", speed("plaintext")),
        ("private, both servers and the client on the same cores", speed("private")),
        (
            "share of plaintext",
            format!(
                "{:.2}, the median of {RUNS} runs (the others of this list are its): {}",
                share(json),
                shares.join(", ")
            ),
        ),
        (
            "a token of decode",
            format!(
                "{:.0} rounds; party 0: {} up, {} down; party 1: {} up, {} down",
                number(&wire["rounds"]),
                bytes("sent", 0),
                bytes("received", 0),
                bytes("sent", 1),
                bytes("received", 1)
            ),
        ),
        (
            "waiting, masks, checks",
            format!(
                "{:.1} ms for party 0, {:.1} ms for party 1, {:.1} ms, {:.1} ms a token",
                number(&wire["waited_ms"][0]),
                number(&wire["waited_ms"][1]),
                number(&wire["masks_ms"]),
                number(&wire["checks_ms"])
            ),
        ),
    ])
}
