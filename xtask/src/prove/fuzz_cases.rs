//! Ten million changed inputs of a kind, or as many as an hour of one core has room for: templates and tokenizer files,
//! and what callers send. Each kind is a proof of its own, so that they can be run one at a time. The cases follow from
//! their numbers, and as many processes as there are cores try ranges of their own: no nightly compiler is needed, and a
//! case that fails is the same everywhere. Coverage does not guide them; the targets in `fuzz/` are for that.

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

/// The number of the first case where it is not 0: another occasion can go on where one has ended.
const FIRST: &str = "FORNAX_FUZZ_FIRST";

/// One kind of input.
pub(super) struct Kind {
    /// What its test calls it.
    name: &'static str,
    /// The package, and the program of tests in it.
    package: &'static str,
    program: &'static str,
    test: &'static str,
}

pub(super) const TEMPLATES: Kind = Kind {
    name: "templates",
    package: "fornax-text",
    program: "mutated",
    test: "changed_templates_end_in_a_text_or_an_error",
};

pub(super) const TOKENIZERS: Kind = Kind {
    name: "tokenizer.json",
    package: "fornax-text",
    program: "mutated",
    test: "changed_tokenizer_files_end_in_a_tokenizer_or_an_error",
};

pub(super) const FORMS: Kind = Kind {
    name: "forms",
    package: "fornax-form",
    program: "structured",
    test: "fuzz::changed_forms_are_compiled_or_refused_in_good_time",
};

pub(super) const BODIES: Kind = Kind {
    name: "bodies",
    package: "fornax-server",
    program: "http",
    test: "fuzz::changed_bodies_are_answered_and_leave_nothing_behind",
};

pub(super) const FRAMES: Kind = Kind {
    name: "frames",
    package: "fornax-private",
    program: "private",
    test: "fuzz::changed_frames_are_read_as_what_they_are_or_refused",
};

pub(super) const SESSIONS: Kind = Kind {
    name: "sessions",
    package: "fornax-private",
    program: "private",
    test: "fuzz::changed_frames_end_their_own_session_alone",
};

pub(super) const ADAPTERS: Kind = Kind {
    name: "adapters",
    package: "fornax-model",
    program: "model",
    test: "fuzz::changed_adapters_are_taken_or_refused_in_a_line",
};

/// Builds the test, tries the cases, and says what came of it.
pub(super) fn fuzzed(kind: &Kind) -> Result<Facts> {
    let number = |name: &str, otherwise: u64| match std::env::var(name) {
        Ok(number) => number.parse().with_context(|| format!("{name} is no number")),
        Err(_) => Ok(otherwise),
    };
    let (seconds, first) = (number(SECONDS, SECONDS_DEFAULT)?, number(FIRST, 0)?);
    let processes = available_parallelism()?.get() as u64;
    let program = built(kind)?;
    let work = tempfile::tempdir().context("cannot make a temporary folder")?;
    println!("==> {}", kind.name);
    let parts: Vec<_> = (0..processes)
        .map(|number| {
            let range = Range { number, first: first + number * each(processes), count: each(processes) };
            Part::start(kind, &program, &range, (seconds / processes).max(1), work.path())
        })
        .collect();
    // All of them, whatever becomes of one: none is left running.
    let ends: Vec<_> = parts.into_iter().map(|part| part.and_then(|part| part.finish(kind))).collect();
    let said = ends.into_iter().collect::<Result<Vec<_>>>()?;
    let sum = |what: fn(&Said) -> u64| said.iter().map(what).sum::<u64>();
    let (cases, time) = (sum(|said| said.cases), said.iter().map(|said| said.seconds).sum::<f64>());
    ensure!(cases >= CASES || time >= 0.99 * seconds as f64, "{cases} cases in {time:.0} s are neither");
    let slowest = said.iter().map(|said| said.slowest_ms).max().unwrap_or(0);
    Ok(vec![
        ("kind", kind.name.to_owned()),
        ("cases", format!("{cases}, {} of them accepted, no crash", sum(|said| said.accepted))),
        ("seconds", format!("{time:.0} of {processes} processes together, at most {seconds}")),
        ("rate", format!("{:.0} a second and process", cases as f64 / time.max(1.0))),
        ("slowest", format!("{slowest} ms")),
        (
            "seed",
            format!("a case follows from its number; each process tries {} from {first} on", each(processes)),
        ),
        ("test", format!("{} of {}", kind.test, kind.package)),
    ])
}

/// Cases of each process.
fn each(processes: u64) -> u64 {
    CASES.div_ceil(processes)
}

/// The program of tests, built.
fn built(kind: &Kind) -> Result<PathBuf> {
    let mut args = vec!["test", "--quiet", "--profile", "checked", "--no-run", "--package", kind.package];
    args.extend(["--message-format=json-render-diagnostics", "--test", kind.program]);
    let printed = output(&mut command("cargo", &args))?;
    let mut messages = printed.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = messages.find_map(|message| {
        let is_it = message["target"]["name"] == kind.program;
        message["executable"].as_str().filter(|_| is_it).map(PathBuf::from)
    });
    program.with_context(|| format!("cargo built no test {}", kind.program))
}

/// Numbers of cases.
struct Range {
    /// Which process tries them.
    number: u64,
    first: u64,
    count: u64,
}

/// Some of a kind's cases, in a process of their own.
struct Part {
    child: Child,
    /// What it prints, and the number of the case that it began last.
    log: PathBuf,
    last: PathBuf,
}

impl Part {
    fn start(kind: &Kind, program: &Path, range: &Range, seconds: u64, work: &Path) -> Result<Part> {
        let file = |what: &str| work.join(format!("{}-{}-{what}", kind.name, range.number));
        let (log, last) = (file("log"), file("last"));
        let mut command = command(&program.to_string_lossy(), &["--exact", kind.test, "--nocapture"]);
        command
            .env("FORNAX_FUZZ_CASES", range.count.to_string())
            .env(FIRST, range.first.to_string())
            .env(SECONDS, seconds.to_string())
            .env("FORNAX_FUZZ_LAST", &last);
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
