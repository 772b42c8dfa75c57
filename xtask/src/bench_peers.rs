//! `cargo xtask bench-peers`: Fornax beside llama.cpp and ik_llama.cpp on the same files, threads and machine, and the
//! table of it in
//! docs/performance-figures.md.
//!
//! The engines take turns, a process each, so that what else the machine does falls on all of them; the ratio is that
//! of the medians. llama.cpp comes twice: as PyPI's `xllamacpp` wheel, made for every processor with AVX2, and as
//! `llama-cpp-python`, which is compiled for this one. ik_llama.cpp is fetched and compiled for this one, too, with a
//! program of ours in front of it. Each has an environment of its own under target/; the product never sees them.
//!
//! Every figure is kept in target/bench-peers.json with the commit it was measured at, so a comparison can be made in
//! pieces: the table is that of all figures of the present commit.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fornax::catalog;
use fornax::random_model::{SHAPES, Types, write_repeating};
use serde_json::Value;

use crate::{command, fixtures, output, root, run};

const FILE: &str = "docs/performance-figures.md";
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

/// An engine of somebody else's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Peer {
    /// llama.cpp as PyPI's wheel `xllamacpp` carries it
    Wheel,
    /// llama.cpp as `llama-cpp-python` compiles it for this machine
    Native,
    /// ik_llama.cpp, fetched with git and compiled for this machine with cmake; with and without repacking, the better
    Ik,
}

/// Where ik_llama.cpp comes from, and which of its commits.
const IK: [&str; 2] =
    ["https://github.com/ikawrakow/ik_llama.cpp", "8337e4cd3861406fc04e0854b1409cd1b027fbc9"];

impl Peer {
    fn name(self) -> &'static str {
        match self {
            Peer::Wheel => "wheel",
            Peer::Native => "native",
            Peer::Ik => "ik",
        }
    }

    /// The package it is, in the version that docs/performance-figures.md has figures of.
    fn package(self) -> &'static str {
        match self {
            Peer::Wheel => "xllamacpp==2026.10.11549",
            Peer::Native => "llama-cpp-python==0.3.36",
            Peer::Ik => "ik_llama.cpp",
        }
    }

    /// An environment with the peer in it: the interpreter that runs its script, or the program that is built of it.
    pub(crate) fn environment(self) -> Result<PathBuf> {
        let folder = root().join("target/bench-peers").join(self.name());
        if self == Peer::Ik {
            return ik(&folder);
        }
        let python = folder.join("bin/python");
        if !python.exists() {
            run(command("python3", &["-m", "venv"]).arg(&folder))?;
            let install = ["-m", "pip", "install", "--quiet", "numpy==2.4.6", "gguf==0.19.0", self.package()];
            let mut install = command(&python.to_string_lossy(), &install);
            // GCC drops the stores that set up tile registers (seen with 12.2), and the process dies by SIGILL.
            let flags = "-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'";
            run(install.env("CMAKE_ARGS", flags))?;
        }
        Ok(python)
    }

    /// What the interpreter runs, where it is one.
    fn script(self) -> Option<PathBuf> {
        let scripts = root().join("xtask/src/bench_peers");
        (self != Peer::Ik).then(|| scripts.join(self.name()).with_extension("py"))
    }

    fn version(self, program: &Path) -> Result<String> {
        if self == Peer::Ik {
            return Ok(IK[1][..12].to_owned());
        }
        let script = format!("import importlib.metadata as m; print(m.version('{}'))", self.package());
        Ok(output(&mut command(&program.to_string_lossy(), &["-c", &script]))?.trim().to_owned())
    }
}

/// Fetches ik_llama.cpp and builds the program that runs it, unless that was done.
fn ik(folder: &Path) -> Result<PathBuf> {
    let (source, build) = (folder.join("source"), folder.join("build"));
    let program = build.join("speed");
    if !program.exists() {
        let [url, commit] = IK;
        fs::create_dir_all(&source)?;
        let git = |arguments: &[&str]| run(command("git", &["-C"]).arg(&source).args(arguments));
        git(&["init", "--quiet"])?;
        git(&["fetch", "--quiet", "--depth", "1", url, commit])?;
        git(&["checkout", "--quiet", "--force", commit])?;
        let own = root().join("xtask/src/bench_peers/ik");
        let named = format!("-DIK={}", source.display());
        run(command("cmake", &["-S"]).arg(own).arg("-B").arg(&build).arg(named))?;
        run(command("cmake", &["--build"]).arg(&build).args(["--target", "speed", "--parallel"]))?;
    }
    Ok(program)
}

/// What is compared.
#[derive(clap::Args)]
pub(crate) struct BenchPeers {
    /// How often the engines take turns
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Engines to compare with [default: all]
    #[arg(long)]
    peer: Vec<Peer>,
    /// Numbers of threads, such as 2,8,16
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
    threads: Vec<usize>,
    /// Instruction set that Fornax is held to [default: the best of this machine]
    #[arg(long)]
    simd: Option<String>,
    /// Measure a hybrid too: random weights in the shape of Qwen3.5-4B, Q4_K_M (2.6 GB in target/)
    #[arg(long)]
    hybrid: bool,
    /// Model files [default: those of the catalog, and two with random weights]
    models: Vec<PathBuf>,
}

/// Alternates the engines for each model and number of threads, and writes the table.
pub(crate) fn bench(args: &BenchPeers) -> Result<()> {
    let peers =
        if args.peer.is_empty() { vec![Peer::Wheel, Peer::Native, Peer::Ik] } else { args.peer.clone() };
    let peers = peers.into_iter().map(|peer| Ok((peer, peer.environment()?))).collect::<Result<Vec<_>>>()?;
    run(&mut command("cargo", &["build", "--release", "-p", "fornax-model", "--example", "speed"]))?;
    let speed = root().join("target/release/examples/speed");
    let mut chosen = args.models.clone();
    if args.hybrid {
        chosen.push(hybrid()?);
    } else if chosen.is_empty() {
        chosen = default_models()?;
    }
    let commit = output(&mut command("git", &["rev-parse", "--short=12", "HEAD"]))?.trim().to_owned();
    let mut runs = Runs::read(commit)?;
    for model in &chosen {
        for &threads in &args.threads {
            for round in 1..=args.rounds {
                println!("{}: {threads} threads, round {round} of {}", model.display(), args.rounds);
                let simd = args.simd.as_deref();
                let figures = figures(&speed, None, model, threads, simd)?;
                let level = figures["simd"].as_str().unwrap_or_default().to_owned();
                runs.add(model, threads, &level, "fornax", figures);
                for (peer, program) in &peers {
                    let script = peer.script();
                    let mut figures = self::figures(program, script.as_deref(), model, threads, None)?;
                    figures["version"] = peer.version(program)?.into();
                    runs.add(model, threads, &level, peer.name(), figures);
                }
                runs.write()?;
            }
        }
    }
    record(&runs)
}

/// Every run of the present commit.
struct Runs {
    commit: String,
    /// By model, threads, Fornax's instruction set and engine.
    all: BTreeMap<String, Vec<Value>>,
}

impl Runs {
    fn path() -> PathBuf {
        root().join("target/bench-peers.json")
    }

    fn read(commit: String) -> Result<Runs> {
        let text = fs::read_to_string(Runs::path()).unwrap_or_else(|_| "{}".to_owned());
        let mut kept: Value = serde_json::from_str(&text).context("target/bench-peers.json")?;
        Ok(Runs { all: serde_json::from_value(kept[&commit].take()).unwrap_or_default(), commit })
    }

    fn write(&self) -> Result<()> {
        let kept = BTreeMap::from([(&self.commit, &self.all)]);
        Ok(fs::write(Runs::path(), serde_json::to_string(&kept)?)?)
    }

    fn add(&mut self, model: &Path, threads: usize, simd: &str, engine: &str, figures: Value) {
        let model = model.file_stem().unwrap_or_default().to_string_lossy();
        self.all.entry(format!("{model} {threads} {simd} {engine}")).or_default().push(figures);
    }
}

/// The models of the catalog that are fetched, and two with random weights.
fn default_models() -> Result<Vec<PathBuf>> {
    let python = Peer::Wheel.environment()?;
    fixtures::run(true)?;
    let cache = fixtures::cache_dir()?;
    let fetched = catalog::ENTRIES.iter().map(|entry| entry.path(&cache));
    let mut models: Vec<PathBuf> =
        fetched.filter(|path| path.extension().is_some_and(|ext| ext == "gguf")).collect();
    for dtype in ["q8_0", "bf16"] {
        let path = root().join(format!("target/random-qwen2.5-0.5b-{dtype}.gguf"));
        if !path.exists() {
            let script = root().join("xtask/src/bench_peers/random_model.py");
            run(command(&python.to_string_lossy(), &[]).arg(script).arg(dtype).arg(&path))?;
        }
        models.push(path);
    }
    Ok(models)
}

/// A hybrid, of random weights.
fn hybrid() -> Result<PathBuf> {
    const NAME: &str = "qwen3.5-4b";
    let path = root().join(format!("target/random-{NAME}-q4_k_m.gguf"));
    if !path.exists() {
        let shape = SHAPES.iter().find(|shape| shape.name == NAME).context("the shape is known")?;
        write_repeating(&path, shape, Types::Q4_K_M, &mut |_, _| ControlFlow::Continue(()))?;
    }
    Ok(path)
}

/// One run of one engine.
fn figures(
    program: &Path,
    script: Option<&Path>,
    model: &Path,
    threads: usize,
    simd: Option<&str>,
) -> Result<Value> {
    let mut command = command(&program.to_string_lossy(), &[]);
    let text = output(command.args(script).arg(model).arg(threads.to_string()).args(simd))?;
    let line = text.lines().rfind(|line| line.starts_with('{')).context("an engine printed no figures")?;
    Ok(serde_json::from_str(line)?)
}

/// The rows of one model, number of threads and instruction set.
fn rows(table: &mut String, runs: &Runs, case: &str) {
    let engine = |name: &str| runs.all.get(&format!("{case} {name}")).map(Vec::as_slice).unwrap_or_default();
    let engines = ["fornax", "wheel", "native", "ik"].map(engine);
    let mut words = case.split(' ');
    let [model, threads, simd] = [(); 3].map(|()| words.next().unwrap_or_default());
    for (key, figure, more_is_better) in FIGURES {
        let medians = engines.map(|runs| median(runs.iter().filter_map(|run| run[key].as_f64())));
        let [ours, wheel, native, ik] = medians;
        // NaN, where a peer was not run, loses both.
        let better_of = if more_is_better { f64::max } else { f64::min };
        let best = better_of(better_of(wheel, native), ik);
        let better = if more_is_better { "times as many" } else { "of its" };
        let (ratio, digits) = (ours / best, if key == "load_s" { 2 } else { 1 });
        let shown = |value: f64| if value.is_nan() { "–".to_owned() } else { format!("{value:.digits$}") };
        // Writing to a string cannot fail.
        _ = writeln!(
            table,
            "| {model} | {threads} | {figure} | {} ({simd}) | {} | {} | {} | {ratio:.2} {better} |",
            shown(ours),
            shown(wheel),
            shown(native),
            shown(ik)
        );
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Replaces the table in the file.
fn record(runs: &Runs) -> Result<()> {
    let mut table = String::from(
        "| model | threads | figure | Fornax | wheel | native | ik_llama.cpp | ratio to the best |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    let cases: BTreeSet<&str> =
        runs.all.keys().filter_map(|key| key.rsplit_once(' ').map(|(case, _)| case)).collect();
    cases.into_iter().for_each(|case| rows(&mut table, runs, case));
    let peer = |peer: Peer| {
        let one = runs
            .all
            .iter()
            .find(|(key, _)| key.ends_with(&format!(" {}", peer.name())))
            .and_then(|(_, runs)| runs.first());
        one.map_or("not run".to_owned(), |run| {
            let text = |name: &str| run[name].as_str().unwrap_or_default().to_owned();
            format!("{} {}, {}", peer.package(), text("version"), text("build"))
        })
    };
    let rounds = runs.all.values().map(Vec::len);
    let facts = BTreeMap::from([
        ("machine", machine()),
        ("date", output(&mut command("date", &["-u", "+%Y-%m-%d"]))?.trim().to_owned()),
        ("commit", runs.commit.clone()),
        ("compiler", output(&mut command("rustc", &["--version"]))?.trim().to_owned()),
        ("wheel", peer(Peer::Wheel)),
        ("native", peer(Peer::Native)),
        ("ik_llama.cpp", peer(Peer::Ik)),
        ("medians of", format!("at least {} alternations", rounds.min().unwrap_or_default())),
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
