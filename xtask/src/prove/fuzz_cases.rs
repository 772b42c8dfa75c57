//! Ten million changed inputs of a kind, or as many as an hour of one core has room for: templates and tokenizer files,
//! and what callers send. Each kind is a proof of its own, so that they can be run one at a time. The cases follow from
//! their numbers, and as many processes as there are cores try ranges of their own: no nightly compiler is needed, and a
//! case that fails is the same everywhere. Coverage does not guide them; the targets in `fuzz/` are for that.
//!
//! They may also have been tried elsewhere, in pieces, by `fuzz/pieces.sh`: what that printed is added up.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::available_parallelism;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Facts;
use crate::{command, output};

const CASES: u64 = 10_000_000;

/// How long all processes of a kind together may take, in seconds, where it is not an hour.
const SECONDS: &str = "FORNAX_FUZZ_SECONDS";
const SECONDS_DEFAULT: u64 = 3600;

/// The number of the first case where it is not 0: another occasion can go on where one has ended.
const FIRST: &str = "FORNAX_FUZZ_FIRST";

/// Files that `fuzz/pieces.sh` has printed, with `:` between their names: they are added up, and nothing is run.
const PIECES: &str = "FORNAX_FUZZ_PIECES";

/// A folder that is memory, where there is one.
const IN_MEMORY: &str = "/dev/shm";

/// What a piece of these begins with.
const PIECE: &str = "PIECE of ";

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

pub(super) const CHECKPOINTS: Kind = Kind {
    name: "checkpoints",
    package: "fornax-model",
    program: "model",
    test: "fuzz::changed_checkpoints_are_read_or_refused_in_a_line",
};

pub(super) const IMAGES: Kind = Kind {
    name: "images",
    package: "fornax-image",
    program: "mutated",
    test: "changed_pictures_are_decoded_within_their_bounds_or_refused_in_a_line",
};

/// Builds the test, tries the cases, and says what came of it; or says what came of them elsewhere.
pub(super) fn fuzzed(kind: &Kind) -> Result<Facts> {
    let number = |name: &str, otherwise: u64| match std::env::var(name) {
        Ok(number) => number.parse().with_context(|| format!("{name} is no number")),
        Err(_) => Ok(otherwise),
    };
    let (seconds, first) = (number(SECONDS, SECONDS_DEFAULT)?, number(FIRST, 0)?);
    let pieces = match std::env::var(PIECES) {
        Ok(files) => pieces(kind, files.split(':').map(Path::new))?,
        Err(_) => here(kind, seconds, first)?,
    };
    facts(kind, seconds, &pieces)
}

/// Tries the cases on this machine.
fn here(kind: &Kind, seconds: u64, first: u64) -> Result<Vec<Piece>> {
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
    ends.into_iter().collect()
}

/// What was tried elsewhere.
fn pieces<'a>(kind: &Kind, files: impl Iterator<Item = &'a Path>) -> Result<Vec<Piece>> {
    let mut pieces = Vec::new();
    for file in files {
        let text =
            std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        for printed in text.split(PIECE).skip(1) {
            let (head, log) = printed.split_once('\n').context("a piece is cut in its first line")?;
            let (test, from) = head.split_once(" from ").context("a piece does not say its first case")?;
            let (first, at) = from.split_once(" at ").context("a piece does not say its commit")?;
            let (commit, machine) = at.split_once(" on ").context("a piece does not say its machine")?;
            if test == kind.test {
                let first = first.parse().with_context(|| format!("{first:?} is no number"))?;
                let elsewhere = Elsewhere { commit: commit.to_owned(), machine: machine.to_owned() };
                pieces.push(Piece { said: Said::read(log, kind, first)?, elsewhere: Some(elsewhere) });
            }
        }
    }
    Ok(pieces)
}

/// The sum of all pieces.
fn facts(kind: &Kind, seconds: u64, pieces: &[Piece]) -> Result<Facts> {
    let mut said: Vec<&Said> = pieces.iter().map(|piece| &piece.said).collect();
    said.sort_by_key(|said| said.first);
    for pair in said.windows(2) {
        ensure!(pair[0].end() <= pair[1].first, "case {} was tried twice", pair[1].first);
    }
    let sum = |what: fn(&Said) -> u64| said.iter().map(|said| what(said)).sum::<u64>();
    let (cases, time) = (sum(|said| said.cases), said.iter().map(|said| said.seconds).sum::<f64>());
    ensure!(cases >= CASES || time >= 0.99 * seconds as f64, "{cases} cases in {time:.0} s are neither");
    let slowest = said.iter().map(|said| said.slowest_ms).max().unwrap_or(0);
    let ranges: Vec<String> =
        ranges(&said).iter().map(|(first, end)| format!("{first} to {}", end - 1)).collect();
    let mut facts = vec![
        ("kind", kind.name.to_owned()),
        ("cases", format!("{cases}, {} of them accepted, no crash", sum(|said| said.accepted))),
        (
            "seconds",
            format!("{time:.0} of {} processes together, enough are {seconds} or {CASES} cases", said.len()),
        ),
        ("rate", format!("{:.0} a second and process", cases as f64 / time.max(1.0))),
        ("slowest", format!("{slowest} ms")),
        ("seed", format!("a case follows from its number; numbers {}", ranges.join(", "))),
        ("test", format!("{} of {}", kind.test, kind.package)),
    ];
    let elsewhere: Vec<&Elsewhere> = pieces.iter().filter_map(|piece| piece.elsewhere.as_ref()).collect();
    if !elsewhere.is_empty() {
        let each = |what: fn(&Elsewhere) -> &str| {
            let mut each: Vec<&str> = elsewhere.iter().map(|elsewhere| what(elsewhere)).collect();
            each.sort_unstable();
            each.dedup();
            each.join("; ")
        };
        facts.push(("duration", format!("{} pieces, by fuzz/pieces.sh", elsewhere.len())));
        facts.push(("machine", each(|elsewhere| &elsewhere.machine)));
        facts.push(("commit", each(|elsewhere| &elsewhere.commit)));
    }
    Ok(facts)
}

/// Numbers that were tried, from and to, where those that follow each other are one range.
fn ranges(said: &[&Said]) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for said in said {
        match ranges.last_mut() {
            Some((_, end)) if *end == said.first => *end = said.end(),
            _ => ranges.push((said.first, said.end())),
        }
    }
    ranges
}

/// Some of a kind's cases, tried by a process.
struct Piece {
    said: Said,
    /// `None`: on this machine, just now.
    elsewhere: Option<Elsewhere>,
}

/// What was tried elsewhere, and where.
struct Elsewhere {
    commit: String,
    machine: String,
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
    /// The number of its first case.
    first: u64,
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
        // Adapters, tokenizer files and databases are written for each case: in memory that is ten times as fast.
        if Path::new(IN_MEMORY).is_dir() {
            command.env("TMPDIR", IN_MEMORY);
        }
        let written = File::create(&log)?;
        command.stdout(written.try_clone()?).stderr(written).stdin(Stdio::null());
        let child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Part { child, first: range.first, log, last })
    }

    /// What it says of itself.
    fn finish(mut self, kind: &Kind) -> Result<Piece> {
        let status = self.child.wait()?;
        let log = std::fs::read_to_string(&self.log).context("cannot read what the test said")?;
        let said = Said::read(&log, kind, self.first).with_context(|| {
            let last = std::fs::read_to_string(&self.last).unwrap_or_default();
            format!("{} ended with {status}; the last case was FORNAX_FUZZ_FIRST={last}", kind.name)
        })?;
        Ok(Piece { said, elsewhere: None })
    }
}

/// What a test says of the cases that it tried.
struct Said {
    first: u64,
    cases: u64,
    seconds: f64,
    accepted: u64,
    slowest_ms: u64,
}

impl Said {
    /// Reads the line that `fuzz/src/mutate.rs` prints, of a test that passed.
    fn read(log: &str, kind: &Kind, first: u64) -> Result<Said> {
        let passed = log.contains("test result: ok. 1 passed;");
        passed.then(|| Said::of(log, kind.name, first)).flatten().with_context(|| {
            let lines: Vec<_> = log.lines().collect();
            let end = lines[lines.len().saturating_sub(40)..].join("\n");
            format!("a test of {} did not pass; its output ends with:\n{end}", kind.name)
        })
    }

    fn of(log: &str, name: &str, first: u64) -> Option<Said> {
        let line = log.lines().find_map(|line| line.split_once(&format!("FUZZ {name}: ")))?.1;
        let (cases, rest) = line.split_once(" cases in ")?;
        let (seconds, rest) = rest.split_once(" s, ")?;
        let (accepted, rest) = rest.split_once(" of them accepted")?;
        let slowest = rest.rsplit_once("the slowest ")?.1.strip_suffix(" ms")?;
        Some(Said {
            first,
            cases: cases.parse().ok()?,
            seconds: seconds.parse().ok()?,
            accepted: accepted.parse().ok()?,
            slowest_ms: slowest.parse().ok()?,
        })
    }

    /// The number behind the last case.
    fn end(&self) -> u64 {
        self.first + self.cases
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(cases: u64, end: &str) -> String {
        let rest = "in 2.5 s, 700 of them accepted, 600 a second, the slowest 12 ms";
        format!("running 1 test\nFUZZ forms: {cases} cases {rest}\n\ntest result: {end}; 0 failed\n")
    }

    #[test]
    fn what_a_test_says_of_its_cases_is_read() {
        let said = Said::read(&printed(1500, "ok. 1 passed"), &FORMS, 7).unwrap();
        assert_eq!((said.first, said.cases, said.accepted, said.slowest_ms), (7, 1500, 700, 12));
        assert!((said.seconds - 2.5).abs() < 1e-9);
        assert!(Said::read(&printed(1500, "FAILED. 0 passed"), &FORMS, 7).is_err());
        assert!(Said::read(&printed(1500, "ok. 1 passed"), &FRAMES, 7).is_err());
    }

    #[test]
    fn pieces_are_added_up_where_they_passed_and_none_was_tried_twice() {
        let folder = tempfile::tempdir().unwrap();
        let tried = |firsts: &[u64], end: &str| {
            let piece = |first: &u64| {
                let log = printed(5_000_000, end);
                format!("{PIECE}{} from {first} at abc on a machine, 2 cores\n{log}", FORMS.test)
            };
            // Of another kind, which failed.
            let other = format!("{PIECE}{} from 0 at abc on a machine\nnothing\n", FRAMES.test);
            let file = folder.path().join("pieces");
            std::fs::write(&file, firsts.iter().map(piece).collect::<String>() + &other).unwrap();
            facts(&FORMS, 3600, &pieces(&FORMS, [file.as_path()].into_iter())?)
        };
        let found = tried(&[5_000_000, 0], "ok. 1 passed").unwrap();
        let fact = |key: &str| &found.iter().find(|(name, _)| *name == key).unwrap().1;
        assert_eq!(fact("cases"), "10000000, 1400 of them accepted, no crash");
        assert_eq!(fact("seed"), "a case follows from its number; numbers 0 to 9999999");
        assert_eq!((fact("commit").as_str(), fact("machine").as_str()), ("abc", "a machine, 2 cores"));
        let refused = |firsts: &[u64], end: &str| format!("{:#}", tried(firsts, end).unwrap_err());
        assert!(refused(&[0, 4_999_999], "ok. 1 passed").contains("case 4999999 was tried twice"));
        assert!(refused(&[0], "ok. 1 passed").contains("5000000 cases in 2 s are neither"));
        assert!(refused(&[0, 5_000_000], "FAILED. 0 passed").contains("did not pass"));
    }
}
