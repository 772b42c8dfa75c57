//! Ten million mutated files for each reader, and how much of the parser they reach. The commands are those of
//! `fuzz/README.md`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use super::Facts;
use crate::{command, output, root, run as run_tool, shown};

const CASES: u64 = 10_000_000;
const SEED: u64 = 1;
const TARGETS: [&str; 2] = ["gguf", "safetensors"];

/// Seeds of both, from the folder of the targets.
const HOSTILE: &str = "../crates/format/tests/hostile";

/// Percent of the parser's lines that the corpus must reach.
const LINES_MIN: f64 = 90.0;

/// Everything between untrusted bytes and checked ranges.
const PARSER: &[&str] = &[
    "reader.rs",
    "metadata.rs",
    "table.rs",
    "gguf/header.rs",
    "safetensors/header.rs",
    "safetensors/index.rs",
];

pub(super) fn run() -> Result<Facts> {
    // Everything that is needed, before the hour that it takes.
    let llvm = Llvm::find()?;
    let work = tempfile::tempdir().context("cannot make a temporary folder")?;
    run_tool(&mut nightly(&["fuzz", "build", "--sanitizer", "none"]))
        .context("fuzzing needs a nightly compiler and cargo-fuzz (`cargo install cargo-fuzz`)")?;

    let runs = TARGETS.map(|target| Run::start(target, work.path()));
    let mut facts = vec![("seed", SEED.to_string())];
    // Both are waited for before either may fail: none is left running.
    let ends = runs.map(|run| run.and_then(Run::finish));
    for end in ends {
        facts.push(end?);
    }
    let (covered, lines) = llvm.coverage(work.path())?;
    let percent = covered as f64 * 100.0 / lines as f64;
    anyhow::ensure!(
        percent >= LINES_MIN,
        "the corpus reaches {percent:.1} % of the parser's lines, not {LINES_MIN} %"
    );
    facts.push(("parser lines reached", format!("{covered} of {lines}, {percent:.1} %")));
    Ok(facts)
}

/// A tool of the nightly compiler, in the folder of the targets.
fn nightly(args: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]).args(args).current_dir(root().join("fuzz"));
    command
}

/// One fuzzer at work, its words going to a file.
struct Run {
    target: &'static str,
    line: String,
    log: PathBuf,
    child: Child,
}

impl Run {
    /// Starts from the seeds and an empty corpus, so that the run is repeatable.
    fn start(target: &'static str, work: &Path) -> Result<Run> {
        let corpus = work.join(target);
        fs::create_dir(&corpus)?;
        let seeds = format!("seeds/{target}");
        let mut command = nightly(&["fuzz", "run", "--sanitizer", "none", target]);
        command.arg(&corpus).args([&seeds, HOSTILE, "--"]);
        command.args([format!("-runs={CASES}"), format!("-seed={SEED}"), format!("-dict={target}.dict")]);
        command.args(["-max_len=2048", "-timeout=5", "-rss_limit_mb=1024", "-print_final_stats=1"]);
        let log = work.join(format!("{target}.log"));
        command.stdout(Stdio::null()).stderr(File::create(&log)?);
        let line = shown(&command);
        println!("==> fuzz-format: {line}");
        let child = command.spawn().with_context(|| format!("cannot start `{line}`"))?;
        Ok(Run { target, line, log, child })
    }

    /// The fact that it ran to its end.
    fn finish(mut self) -> Result<(&'static str, String)> {
        let status = self.child.wait()?;
        let log = fs::read_to_string(&self.log).context("cannot read what the fuzzer said")?;
        if !status.success() {
            let lines: Vec<_> = log.lines().collect();
            println!("{}", lines[lines.len().saturating_sub(40)..].join("\n"));
            anyhow::bail!(
                "`{}` failed ({status}); the input is in fuzz/artifacts/{}",
                self.line,
                self.target
            );
        }
        let cases =
            stat(&log, "number_of_executed_units").context("the fuzzer printed no number of cases")?;
        anyhow::ensure!(cases >= CASES, "{}: {cases} cases were run, not {CASES}", self.target);
        let speed = stat(&log, "average_exec_per_sec").unwrap_or(0);
        Ok((self.target, format!("{cases} cases, no crash, no time-out; {speed} a second")))
    }
}

fn stat(log: &str, name: &str) -> Option<u64> {
    let line =
        log.lines().find_map(|line| line.strip_prefix("stat::")?.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().parse().ok()
}

/// The names of LLVM's coverage tools on this machine.
struct Llvm {
    profdata: String,
    cov: String,
}

impl Llvm {
    /// Distributions put the version into the name; 19 is the first that reads what the compiler writes.
    fn find() -> Result<Llvm> {
        let works = |name: &str| {
            Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success())
        };
        let suffix = (19..=30)
            .rev()
            .map(|version| format!("-{version}"))
            .find(|suffix| works(&format!("llvm-cov{suffix}")));
        let suffix = suffix
            .context("llvm-cov of version 19 or newer is not installed (Debian: the package llvm-19)")?;
        Ok(Llvm { profdata: format!("llvm-profdata{suffix}"), cov: format!("llvm-cov{suffix}") })
    }

    /// Lines of the parser that the corpora in `work` reach, and all its lines.
    fn coverage(&self, work: &Path) -> Result<(u64, u64)> {
        let fuzz = root().join("fuzz");
        let target_dir = fuzz.join("target/coverage");
        let args = ["build", "--release", "--no-default-features", "--example", "replay", "--target-dir"];
        let mut build = command("cargo", &args);
        build.arg(&target_dir).current_dir(&fuzz);
        // Build scripts are instrumented too; what they would write is nobody's.
        run_tool(build.env("RUSTFLAGS", "-C instrument-coverage").env("LLVM_PROFILE_FILE", "/dev/null"))?;

        let replay = target_dir.join("release/examples/replay");
        let mut merge = Command::new(&self.profdata);
        merge.args(["merge", "-sparse"]);
        for target in TARGETS {
            let raw = work.join(format!("{target}.profraw"));
            let mut command = Command::new(&replay);
            command
                .arg(target)
                .arg(fuzz.join("seeds").join(target))
                .arg(work.join(target))
                .arg(fuzz.join(HOSTILE));
            run_tool(command.env("LLVM_PROFILE_FILE", &raw))?;
            merge.arg(&raw);
        }
        let merged = work.join("all.profdata");
        run_tool(merge.arg("-o").arg(&merged))?;

        let sources = PARSER.iter().map(|file| root().join("crates/format/src").join(file));
        let mut export = Command::new(&self.cov);
        export.args(["export", "-summary-only", "-instr-profile"]).arg(&merged).arg(&replay).args(sources);
        let summary: serde_json::Value = serde_json::from_str(&output(&mut export)?)?;
        let data = &summary["data"][0];
        let files = data["files"].as_array().map_or(0, Vec::len);
        anyhow::ensure!(
            files == PARSER.len(),
            "coverage tells of {files} files of the parser, not {}",
            PARSER.len()
        );
        let lines = &data["totals"]["lines"];
        lines["covered"].as_u64().zip(lines["count"].as_u64()).context("coverage tells no lines")
    }
}
