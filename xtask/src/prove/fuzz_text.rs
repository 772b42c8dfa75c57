//! Ten million changed inputs of each kind, or as many as an hour of one core has room for: templates and tokenizer
//! files; and what callers send. The cases follow from their numbers, and as many processes as there are cores try
//! ranges of their own: no nightly compiler is needed, and a case that fails is the same everywhere. Coverage does not
//! guide them; the targets in `fuzz/` are for that.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::available_parallelism;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::Facts;
use crate::{command, output};

const CASES: u64 = 10_000_000;

/// How long all processes of a kind together may take, in seconds, where it is not an hour.
const SECONDS: &str = "FORNAX_FUZZ_SECONDS";
const SECONDS_DEFAULT: u64 = 3600;

/// One kind of input.
struct Kind {
    /// What its test calls it.
    name: &'static str,
    /// The program of tests that it is in.
    program: &'static str,
    test: &'static str,
}

/// Templates and tokenizer files.
pub(super) fn files() -> Result<Facts> {
    fuzzed(&[
        Kind { name: "templates", program: "mutated", test: "changed_templates_end_in_a_text_or_an_error" },
        Kind {
            name: "tokenizer.json",
            program: "mutated",
            test: "changed_tokenizer_files_end_in_a_tokenizer_or_an_error",
        },
    ])
}

/// What callers, and servers and clients of private inference, send.
pub(super) fn callers() -> Result<Facts> {
    fuzzed(&[
        Kind {
            name: "forms",
            program: "structured",
            test: "fuzz::changed_forms_are_compiled_or_refused_in_good_time",
        },
        Kind {
            name: "bodies",
            program: "http",
            test: "fuzz::changed_bodies_are_answered_and_leave_nothing_behind",
        },
        Kind {
            name: "frames",
            program: "private",
            test: "fuzz::changed_frames_are_read_as_what_they_are_or_refused",
        },
        Kind {
            name: "sessions",
            program: "private",
            test: "fuzz::changed_frames_end_their_own_session_alone",
        },
        Kind {
            name: "adapters",
            program: "model",
            test: "fuzz::changed_adapters_are_taken_or_refused_in_a_line",
        },
    ])
}

/// Builds the tests, tries each kind, and says what came of it.
fn fuzzed(kinds: &[Kind]) -> Result<Facts> {
    let seconds = match std::env::var(SECONDS) {
        Ok(seconds) => seconds.parse().with_context(|| format!("{SECONDS} is no number"))?,
        Err(_) => SECONDS_DEFAULT,
    };
    let processes = available_parallelism()?.get() as u64;
    let mut facts = vec![(
        "each",
        format!(
            "{CASES} cases, or as many as {processes} processes at a time have room for in {seconds} s of all together"
        ),
    )];
    let programs = built(kinds)?;
    let work = tempfile::tempdir().context("cannot make a temporary folder")?;
    for kind in kinds {
        let program = programs.iter().find(|(name, _)| name == kind.program);
        let (_, program) = program.with_context(|| format!("cargo built no test {}", kind.program))?;
        facts.push((kind.name, tried(kind, program, processes, seconds, work.path())?));
    }
    Ok(facts)
}

/// The programs of tests by their names.
fn built(kinds: &[Kind]) -> Result<Vec<(String, PathBuf)>> {
    let mut args = vec!["test", "--quiet", "--profile", "checked", "--workspace", "--no-run"];
    args.push("--message-format=json-render-diagnostics");
    args.extend(kinds.iter().flat_map(|kind| ["--test", kind.program]));
    let printed = output(&mut command("cargo", &args))?;
    let messages = printed.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(messages
        .filter_map(|message| {
            let name = message["target"]["name"].as_str()?.to_owned();
            Some((name, PathBuf::from(message["executable"].as_str()?)))
        })
        .collect())
}

/// Some of a kind's cases, in a process of their own.
struct Part {
    child: Child,
    /// What it prints, and the number of the case that it began last.
    log: PathBuf,
    last: PathBuf,
}

impl Part {
    fn start(kind: &Kind, program: &Path, number: u64, of: u64, seconds: u64, work: &Path) -> Result<Part> {
        let each = CASES.div_ceil(of);
        let file = |what: &str| work.join(format!("{}-{number}-{what}", kind.name));
        let (log, last) = (file("log"), file("last"));
        let mut command = command(&program.to_string_lossy(), &["--exact", kind.test, "--nocapture"]);
        command
            .env("FORNAX_FUZZ_CASES", each.to_string())
            .env("FORNAX_FUZZ_FIRST", (number * each).to_string());
        command.env(SECONDS, (seconds / of).max(1).to_string()).env("FORNAX_FUZZ_LAST", &last);
        let written = File::create(&log)?;
        command.stdout(written.try_clone()?).stderr(written).stdin(Stdio::null());
        let child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Part { child, log, last })
    }

    /// What it says of itself.
    fn finish(mut self, kind: &Kind) -> Result<Said> {
        let status = self.child.wait()?;
        let log = std::fs::read_to_string(&self.log).context("cannot read what the test said")?;
        if !status.success() {
            let lines: Vec<_> = log.lines().collect();
            println!("{}", lines[lines.len().saturating_sub(40)..].join("\n"));
            let last = std::fs::read_to_string(&self.last).unwrap_or_default();
            bail!("{} ended with {status}; the last case was FORNAX_FUZZ_FIRST={last}", kind.name);
        }
        Said::read(&log, kind.name).with_context(|| format!("the test said nothing of {}", kind.name))
    }
}

/// What a test says of the cases that it tried.
struct Said {
    cases: u64,
    seconds: f64,
    accepted: u64,
    slowest_ms: u64,
}

impl Said {
    /// Reads the line that `fuzz/src/mutate.rs` prints.
    fn read(log: &str, name: &str) -> Option<Said> {
        let line = log.lines().find_map(|line| line.split_once(&format!("FUZZ {name}: ")))?.1;
        let (cases, rest) = line.split_once(" cases in ")?;
        let (seconds, rest) = rest.split_once(" s, ")?;
        let (accepted, rest) = rest.split_once(" of them accepted")?;
        let slowest = rest.rsplit_once("the slowest ")?.1.strip_suffix(" ms")?;
        Some(Said {
            cases: cases.parse().ok()?,
            seconds: seconds.parse().ok()?,
            accepted: accepted.parse().ok()?,
            slowest_ms: slowest.parse().ok()?,
        })
    }
}

/// Tries one kind in all processes; none is left running.
fn tried(kind: &Kind, program: &Path, processes: u64, seconds: u64, work: &Path) -> Result<String> {
    println!("==> {}", kind.name);
    let parts: Vec<_> =
        (0..processes).map(|number| Part::start(kind, program, number, processes, seconds, work)).collect();
    let ends: Vec<_> = parts.into_iter().map(|part| part.and_then(|part| part.finish(kind))).collect();
    let said = ends.into_iter().collect::<Result<Vec<_>>>()?;
    let sum = |what: fn(&Said) -> u64| said.iter().map(what).sum::<u64>();
    let (cases, time) = (sum(|said| said.cases), said.iter().map(|said| said.seconds).sum::<f64>());
    ensure!(cases >= CASES || time >= 0.99 * seconds as f64, "{cases} cases in {time:.0} s are neither");
    let slowest = said.iter().map(|said| said.slowest_ms).max().unwrap_or(0);
    Ok(format!(
        "{cases} cases in {time:.0} s of all processes, {} accepted, no crash; {:.0} a second and process, the slowest {slowest} ms",
        sum(|said| said.accepted),
        cases as f64 / time.max(1.0)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_test_says_of_its_cases_is_read() {
        let log = "running 1 test\nFUZZ forms: 1500 cases in 2.5 s, 700 of them accepted, 600 a second, the slowest 12 ms\n";
        let said = Said::read(log, "forms").unwrap();
        assert_eq!((said.cases, said.accepted, said.slowest_ms), (1500, 700, 12));
        assert!((said.seconds - 2.5).abs() < 1e-9);
        assert!(Said::read(log, "frames").is_none());
    }
}
