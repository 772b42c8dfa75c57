//! The load that agents make: several conversations at once, each of which begins with a long prompt and goes on turn by
//! turn with what tools said. Their model is a hybrid, whose states cannot be cut where a prefix ends. The same load is
//! given to llama.cpp.

use std::fs;
use std::ops::ControlFlow;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use fornax::random_model::{SHAPES, Types, write_repeating};
use serde_json::{Value, json};

use super::serving::Server;
use super::{Facts, memory};
use crate::bench_peers::Peer;
use crate::{command, output, root, run as run_tool};

const AGENTS: usize = 8;
const TURNS: usize = 10;
/// Tokens that a turn adds to a conversation: what the model answered, then what its tools said.
const MORE: usize = 800;
const ANSWER: usize = 64;
/// Tokens of a page: what a hit may be short of the tokens that were computed before.
const PAGE: usize = 32;
/// Tokens of the first prompt, and of one on a machine of few cores, where the long one would take most of an hour.
const FIRST: usize = 30_000;
const FIRST_SMALL: usize = 6000;
const CORES_FEW: usize = 8;

pub(super) fn run() -> Result<Facts> {
    run_tool(&mut command("cargo", &["build", "--release", "--package", "fornax"]))?;
    let binary = memory::target_dir()?.join("release/fornax");
    let python = Peer::Wheel.environment()?;
    let cores = std::thread::available_parallelism()?.get();
    let load = Load { first: if cores < CORES_FEW { FIRST_SMALL } else { FIRST } };

    let folder = tempfile::tempdir()?;
    let model = folder.path().join("hybrid.gguf");
    let shape = SHAPES.iter().find(|shape| shape.name == "tiny-hybrid").context("the shape is known")?;
    let shape = shape.with_context(u32::try_from(2 * load.context())?);
    let types = Types::named("q8_0").context("the type is known")?;
    write_repeating(&model, &shape, types, &mut |_, _| ControlFlow::Continue(()))?;

    let (context, agents, threads) = (load.context().to_string(), AGENTS.to_string(), cores.to_string());
    let mut serve = Command::new(&binary);
    serve.arg("serve").arg(&model).args(["--port", "0", "--context", &context, "--parallel", &agents]);
    let server = Server::of(serve.args(["--threads", &threads]).stderr(Stdio::null()), "")?;
    let began = Instant::now();
    let turns = load.run(&|tokens| answered(&server, tokens))?;
    let seconds = began.elapsed().as_secs_f64();
    server.settled()?;
    drop(server);
    let beyond = turns.iter().map(|turn| turn.computed.saturating_sub(turn.new)).max().unwrap_or(0);
    ensure!(beyond <= PAGE, "a turn computed {beyond} tokens beyond what was new");

    let script = root().join("xtask/src/prove/agents_peer.py");
    let said = output(
        command(&python.to_string_lossy(), &[])
            .arg(script)
            .arg(&model)
            .args([&threads, &context, &load.first.to_string()])
            .args([AGENTS, TURNS, MORE, ANSWER].map(|number| number.to_string())),
    )?;
    let line = said.lines().rfind(|line| line.starts_with('{')).context("the peer printed no figures")?;
    let peer: Value = serde_json::from_str(line)?;
    let theirs = peer["seconds"].as_f64().context("seconds")?;
    let sum = |of: fn(&Done) -> usize| turns.iter().filter(|turn| turn.index > 0).map(of).sum::<usize>();
    Ok(vec![
        ("model", format!("{}, random weights, Q8_0, {} MiB", shape.name, fs::metadata(&model)?.len() >> 20)),
        (
            "load",
            format!("{AGENTS} agents at once, {} tokens at first, {TURNS} turns of {MORE} more", load.first),
        ),
        ("threads", threads.clone()),
        ("tokens that were new in later turns", sum(|turn| turn.new).to_string()),
        ("prompt tokens computed in later turns", sum(|turn| turn.computed).to_string()),
        ("most beyond what was new, of a turn", format!("{beyond} tokens")),
        ("llama.cpp, prompt tokens computed in later turns", peer["later"].to_string()),
        ("seconds in all", format!("{seconds:.1}")),
        ("llama.cpp, seconds in all", format!("{theirs:.1}")),
        ("llama.cpp's time to ours", format!("{:.2}", theirs / seconds)),
    ])
}

/// What the agents ask.
struct Load {
    first: usize,
}

/// A turn that was answered.
struct Done {
    index: usize,
    /// Tokens of the prompt that nobody had computed before: those behind the last turn's prompt and answer.
    new: usize,
    /// Tokens of the prompt that were computed.
    computed: usize,
}

/// What a server said of a prompt.
struct Answer {
    tokens: Vec<u64>,
    computed: usize,
}

impl Load {
    fn context(&self) -> usize {
        self.first + TURNS * MORE + ANSWER
    }

    /// All agents at once, each turn by turn.
    fn run(&self, ask: &(dyn Fn(&[u64]) -> Result<Answer> + Sync)) -> Result<Vec<Done>> {
        std::thread::scope(|scope| {
            let agents: Vec<_> =
                (0..AGENTS).map(|agent| scope.spawn(move || self.converse(agent, ask))).collect();
            let ended = agents.into_iter().map(|agent| agent.join().expect("agents do not panic"));
            Ok(ended.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
        })
    }

    fn converse(&self, agent: usize, ask: &dyn Fn(&[u64]) -> Result<Answer>) -> Result<Vec<Done>> {
        let mut tokens: Vec<u64> = Vec::new();
        let mut turns = Vec::new();
        for index in 0..TURNS {
            let known = tokens.len();
            // What tools say; the same in agents_peer.py.
            let said = if index == 0 { self.first } else { MORE - ANSWER };
            let word = |place: usize| 300 + ((known + place) * 7919 + agent * 104_729) as u64 % 700;
            tokens.extend((0..said).map(word));
            let answer = ask(&tokens)?;
            ensure!(answer.tokens.len() == ANSWER, "an answer of {} tokens", answer.tokens.len());
            turns.push(Done { index, new: tokens.len() - known, computed: answer.computed });
            tokens.extend(answer.tokens);
        }
        Ok(turns)
    }
}

fn answered(server: &Server, tokens: &[u64]) -> Result<Answer> {
    let body = json!({"prompt": tokens, "n_predict": ANSWER, "temperature": 0, "ignore_eos": true, "return_tokens": true});
    let response = server.exchange("POST", "/completion", &body.to_string())?;
    ensure!(response.starts_with("HTTP/1.1 200"), "{}", &response[..response.len().min(2000)]);
    let body = response.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let said: Value = serde_json::from_str(body)?;
    let tokens = said["tokens"].as_array().context("tokens")?.iter().filter_map(Value::as_u64).collect();
    let computed = said["timings"]["prompt_n"].as_u64().context("prompt_n")?;
    Ok(Answer { tokens, computed: usize::try_from(computed)? })
}
