//! `cargo xtask bench-peers`: Fornax beside llama.cpp on the same files, threads and machine, and the table of it in
//! docs/performance.md.
//!
//! The two engines take turns, a process each, so that what else the machine does falls on both; the ratio is that of the
//! medians. llama.cpp is PyPI's `xllamacpp` in an environment of its own under target/; the product never sees it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fornax::catalog;
use serde_json::Value;

use crate::{command, fixtures, output, root, run};

const FILE: &str = "docs/performance.md";
/// The part of the file that this writes anew.
const MARKS: (&str, &str) = ("<!-- bench-peers: begin -->", "<!-- bench-peers: end -->");
/// What both engines report, and whether more is better.
const FIGURES: [(&str, &str, bool); 5] = [
    ("decode", "decode, tokens/s", true),
    ("prefill", "prefill 512, tokens/s", true),
    ("streams", "8 streams, tokens/s in all", true),
    ("load_s", "load, s", false),
    ("resident_mib", "resident, MiB", false),
];

/// Alternates the engines `rounds` times for each model and number of threads, and writes the table.
pub(crate) fn bench(rounds: usize, models: &[PathBuf]) -> Result<()> {
    let python = environment()?;
    run(&mut command("cargo", &["build", "--release", "-p", "fornax-model", "--example", "speed"]))?;
    let speed = root().join("target/release/examples/speed");
    let chosen = if models.is_empty() { default_models(&python)? } else { models.to_vec() };
    let mut table = String::from(
        "| model | threads | figure | Fornax | llama.cpp | ratio |\n|---|---|---|---|---|---|\n",
    );
    let mut peer = String::new();
    for model in &chosen {
        for threads in ["1", "2"] {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for round in 1..=rounds {
                println!("{}: {threads} threads, round {round} of {rounds}", model.display());
                ours.push(figures(&speed, &[], model, threads)?);
                let script = root().join("xtask/src/bench_peers/peer.py");
                theirs.push(figures(&python, &[&script], model, threads)?);
            }
            peer = theirs[0]["build"].as_str().unwrap_or_default().to_owned();
            rows(&mut table, model, threads, &ours, &theirs);
        }
    }
    record(&table, rounds, &peer, &python)
}

/// An environment with the peer in it.
fn environment() -> Result<PathBuf> {
    let folder = root().join("target/bench-peers");
    let python = folder.join("bin/python");
    if !python.exists() {
        run(command("python3", &["-m", "venv"]).arg(&folder))?;
        let wheels = ["-m", "pip", "install", "--quiet", "xllamacpp", "gguf"];
        run(&mut command(&python.to_string_lossy(), &wheels))?;
    }
    Ok(python)
}

/// The models of the catalog that are fetched, and two with random weights.
fn default_models(python: &Path) -> Result<Vec<PathBuf>> {
    fixtures::run(true)?;
    let cache = fixtures::cache_dir()?;
    let fetched = catalog::ENTRIES.iter().map(|entry| entry.path(&cache));
    let mut models: Vec<PathBuf> =
        fetched.filter(|path| path.extension().is_some_and(|ext| ext == "gguf")).collect();
    for dtype in ["q8_0", "bf16"] {
        let path = root().join(format!("target/random-qwen2.5-0.5b-{dtype}.gguf"));
        if !path.exists() {
            let script = root().join("xtask/src/bench_peers/random.py");
            run(command(&python.to_string_lossy(), &[]).arg(script).arg(dtype).arg(&path))?;
        }
        models.push(path);
    }
    Ok(models)
}

/// One run of one engine.
fn figures(program: &Path, script: &[&Path], model: &Path, threads: &str) -> Result<Value> {
    let mut command = command(&program.to_string_lossy(), &[]);
    let text = output(command.args(script).arg(model).arg(threads))?;
    let line = text.lines().rfind(|line| line.starts_with('{')).context("an engine printed no figures")?;
    Ok(serde_json::from_str(line)?)
}

fn rows(table: &mut String, model: &Path, threads: &str, ours: &[Value], theirs: &[Value]) {
    let name = model.file_stem().unwrap_or_default().to_string_lossy();
    for (key, figure, more_is_better) in FIGURES {
        let [ours, theirs] =
            [ours, theirs].map(|runs| median(runs.iter().filter_map(|run| run[key].as_f64())));
        let better = if more_is_better { "times as many" } else { "of its" };
        let (ratio, digits) = (ours / theirs, if key == "load_s" { 2 } else { 1 });
        // Writing to a string cannot fail.
        _ = writeln!(
            table,
            "| {name} | {threads} | {figure} | {ours:.digits$} | {theirs:.digits$} | {ratio:.2} {better} |"
        );
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Replaces the table in the file.
fn record(table: &str, rounds: usize, peer: &str, python: &Path) -> Result<()> {
    let version = ["-c", "import importlib.metadata as m; print(m.version('xllamacpp'))"];
    let facts = BTreeMap::from([
        ("machine", machine()),
        ("date", output(&mut command("date", &["-u", "+%Y-%m-%d"]))?.trim().to_owned()),
        ("commit", output(&mut command("git", &["rev-parse", "--short=12", "HEAD"]))?.trim().to_owned()),
        ("compiler", output(&mut command("rustc", &["--version"]))?.trim().to_owned()),
        (
            "llama.cpp",
            format!(
                "xllamacpp {}, {peer}",
                output(&mut command(&python.to_string_lossy(), &version))?.trim()
            ),
        ),
        ("medians of", format!("{rounds} alternations")),
    ]);
    let mut section = format!("{}\n\n| | |\n|---|---|\n", MARKS.0);
    for (name, fact) in facts {
        // A cell of a table ends at a bar.
        _ = writeln!(section, "| {name} | {} |", fact.replace('|', ",").trim());
    }
    _ = write!(section, "\n{table}\n{}", MARKS.1);
    let path = root().join(FILE);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {FILE}"))?;
    let (before, rest) = text.split_once(MARKS.0).with_context(|| format!("{FILE} has no `{}`", MARKS.0))?;
    let (_, after) = rest.split_once(MARKS.1).with_context(|| format!("{FILE} has no `{}`", MARKS.1))?;
    fs::write(&path, format!("{before}{section}{after}"))?;
    println!("{FILE} has the table");
    Ok(())
}

/// The processor's name and how many there are.
fn machine() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let names: Vec<_> =
        text.lines().filter_map(|line| line.strip_prefix("model name")?.split(": ").nth(1)).collect();
    format!("{}, {} cores", names.first().unwrap_or(&"unnamed"), names.len())
}
