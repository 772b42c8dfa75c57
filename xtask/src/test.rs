//! `cargo xtask test`: fetches what tests need, runs every test, and counts honestly.
//!
//! A test that cannot run on this machine prints `SKIP <test name>: <reason>` and returns; libtest then calls it
//! passed. Here its output is read, so that it is counted and named as skipped, and fails the run unless
//! `tests/skips.allow` names it.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use anyhow::{Context, Result};

use crate::phases::{Outcome, Phases};
use crate::{command, fixtures, python, root, run as run_tool, shown};

/// Sets everything up, runs the tests whose name contains `filter` (all without one), and prints the counts.
pub(crate) fn run(filter: Option<&str>) -> Result<()> {
    let (tally, mut problems) = run_suite(filter, false)?;
    let allowed = Allowed::read()?;
    problems.extend(tally.offences(&allowed, filter.is_none()));
    tally.print_skips();
    for problem in &problems {
        println!("FAILED: {problem}");
    }
    println!("{} passed, {} failed, {} skipped", tally.passed(), tally.failed, tally.skipped.len());
    anyhow::ensure!(problems.is_empty(), "the tests failed");
    Ok(())
}

/// Runs the tests and prints the time of each phase. Returns the counts, and what went wrong beyond them.
pub(crate) fn run_suite(filter: Option<&str>, all_fixtures: bool) -> Result<(Tally, Vec<String>)> {
    let mut phases = Phases::new("test");
    let mut tally = Tally::default();
    let passed = |result: Result<()>| result.map(|()| Outcome::Passed);
    phases.run("python", python::prepare);
    let ready = phases.run("fixtures", || passed(fixtures::run(all_fixtures)))
        && phases.run("build", || {
            passed(run_tool(&mut command(
                "cargo",
                &["test", "--workspace", "--profile", "checked", "--no-run"],
            )))
        });
    if ready {
        let everything_but_docs = ["--lib", "--bins", "--tests", "--examples", "--no-fail-fast"];
        phases.run("tests", || passed(cargo_test(&everything_but_docs, filter, &mut tally)));
        phases.run("doc tests", || passed(cargo_test(&["--doc", "--no-fail-fast"], filter, &mut tally)));
    }
    let problems = phases.finish().err().map(|error| error.to_string()).into_iter().collect();
    Ok((tally, problems))
}

/// One `cargo test`, its output read for counts and skips and shown without the lines about what went well.
fn cargo_test(targets: &[&str], filter: Option<&str>, tally: &mut Tally) -> Result<()> {
    let mut command = command("cargo", &["test", "--workspace", "--profile", "checked"]);
    command.args(targets).arg("--").arg("--show-output").args(filter);
    // Tests of the libraries find fixtures through the variable that the binary also honours.
    command.env("FORNAX_CACHE", fixtures::cache_dir()?).stdout(Stdio::piped());
    command.env("FORNAX_PYTHON", python::interpreter());
    if let Some(nvrtc) = python::nvrtc_folder() {
        // In front: what is there already stays.
        let others = std::env::var_os("LD_LIBRARY_PATH");
        let folders = std::iter::once(nvrtc).chain(others.iter().flat_map(std::env::split_paths));
        command.env("LD_LIBRARY_PATH", std::env::join_paths(folders)?);
    }
    let line = shown(&command);
    let mut child = command.spawn().with_context(|| format!("cannot start `{line}`"))?;
    let stdout = child.stdout.take().context("cargo's output is not piped")?;
    let mut reader = Reader::default();
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.context("cannot read cargo's output")?;
        let line = String::from_utf8_lossy(&line);
        if reader.read(&line, tally) {
            println!("{line}");
        }
    }
    let status = child.wait()?;
    anyhow::ensure!(status.success(), "`{line}` failed ({status})");
    Ok(())
}

/// What the tests did.
#[derive(Default)]
pub(crate) struct Tally {
    /// As libtest counts: skipped ones included.
    ok: usize,
    failed: usize,
    ignored: usize,
    pub(crate) skipped: Vec<Skip>,
    /// Every test that ran, by its full name.
    names: BTreeSet<String>,
}

/// A test that said it could not run here.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Skip {
    name: String,
    reason: String,
}

impl Tally {
    pub(crate) fn passed(&self) -> usize {
        self.ok.saturating_sub(self.skipped.len())
    }

    pub(crate) fn print_skips(&self) {
        for skip in &self.skipped {
            println!("skipped {}: {}", skip.name, skip.reason);
        }
    }

    /// What the counts do not forgive: skips without leave, ignored tests, no tests, and leave for tests that are gone.
    fn offences(&self, allowed: &Allowed, all_ran: bool) -> Vec<String> {
        let mut offences = Vec::new();
        for skip in self.skipped.iter().filter(|skip| !allowed.names.contains(&skip.name)) {
            offences.push(format!("{} was skipped and is not in {}", skip.name, Allowed::FILE));
        }
        if self.ignored > 0 {
            offences.push(format!("{} tests are ignored: run them or remove them", self.ignored));
        }
        if self.ok + self.failed == 0 {
            offences.push("no test ran".to_owned());
        }
        let known = |name: &&String| {
            self.names.iter().any(|test| test == *name || test.rsplit("::").next() == Some(name.as_str()))
        };
        if all_ran {
            for name in allowed.names.iter().filter(|name| !known(name)) {
                offences.push(format!("{} names {name}, but there is no such test", Allowed::FILE));
            }
        }
        offences
    }
}

/// The committed list of tests that may be skipped.
struct Allowed {
    names: BTreeSet<String>,
}

impl Allowed {
    const FILE: &str = "tests/skips.allow";

    fn read() -> Result<Self> {
        let text = std::fs::read_to_string(root().join(Self::FILE))
            .with_context(|| format!("cannot read {}", Self::FILE))?;
        Self::parse(&text)
    }

    /// A line is `name: why it may be skipped`; lines that start with `#` and empty ones say nothing.
    fn parse(text: &str) -> Result<Self> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let names = lines.map(|line| match line.split_once(": ") {
            Some((name, reason)) if !reason.trim().is_empty() => Ok(name.to_owned()),
            _ => anyhow::bail!("{}: `{line}` is not `name: reason`", Self::FILE),
        });
        Ok(Self { names: names.collect::<Result<_>>()? })
    }
}

/// Where in libtest's output the next line stands.
#[derive(Default)]
struct Reader {
    /// Between `successes:` and the next section.
    in_successes: bool,
    /// This test has said that it skips: it counts once however often it says so.
    skip_seen: bool,
}

impl Reader {
    /// Takes one line into the tally; true if a person should see it.
    fn read(&mut self, line: &str, tally: &mut Tally) -> bool {
        if let Some(counts) = line.strip_prefix("test result: ") {
            self.in_successes = false;
            for (count, kind) in counts.split([';', '.']).filter_map(|part| part.trim().split_once(' ')) {
                let count: usize = count.parse().unwrap_or(0);
                match kind {
                    "passed" => tally.ok += count,
                    "failed" => tally.failed += count,
                    "ignored" => tally.ignored += count,
                    _ => {}
                }
            }
            return true;
        }
        if line == "successes:" || line == "failures:" {
            self.in_successes = line == "successes:";
            return !self.in_successes;
        }
        if self.in_successes {
            let skip = line.strip_prefix("SKIP ").and_then(|rest| rest.split_once(": "));
            if line.starts_with("---- ") {
                self.skip_seen = false;
            } else if let (Some((name, reason)), false) = (skip, self.skip_seen) {
                self.skip_seen = true;
                tally.skipped.push(Skip { name: name.to_owned(), reason: reason.to_owned() });
            }
            return false;
        }
        if let Some((name, outcome)) = line.strip_prefix("test ").and_then(|rest| rest.rsplit_once(" ... ")) {
            tally.names.insert(name.trim_end_matches(" - should panic").to_owned());
            return outcome != "ok";
        }
        !(line.is_empty() || line.starts_with("running "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "
running 3 tests
test golden::qwen ... ok
test adds ... ok
test golden::smollm ... FAILED

successes:

---- adds stdout ----
one and one

---- golden::qwen stdout ----
SKIP qwen: no model file
SKIP qwen: no vectors either


successes:
    adds
    golden::qwen

failures:

---- golden::smollm stdout ----
SKIP smollm: printed by a test that then failed
assertion failed


failures:
    golden::smollm

test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    fn read(output: &str) -> (Tally, String) {
        let mut tally = Tally::default();
        let mut reader = Reader::default();
        let shown: Vec<_> = output.lines().filter(|line| reader.read(line, &mut tally)).collect();
        (tally, shown.join("\n"))
    }

    fn offences(output: &str, allowed: &str) -> Vec<String> {
        read(output).0.offences(&Allowed::parse(allowed).unwrap(), true)
    }

    #[test]
    fn counts_skips_and_failures_are_told_apart() {
        let (tally, shown) = read(OUTPUT);
        assert_eq!((tally.passed(), tally.failed, tally.skipped.len()), (1, 1, 1));
        assert_eq!(tally.skipped, [Skip { name: "qwen".to_owned(), reason: "no model file".to_owned() }]);
        assert!(shown.contains("assertion failed") && shown.contains("golden::smollm ... FAILED"), "{shown}");
        assert!(!shown.contains("one and one") && !shown.contains("... ok"), "{shown}");
    }

    #[test]
    fn a_skip_needs_leave() {
        assert_eq!(offences(OUTPUT, "qwen: large").len(), 0);
        assert!(offences(OUTPUT, "# nothing\n")[0].contains("qwen was skipped"));
    }

    #[test]
    fn leave_for_a_test_that_is_gone_is_reported() {
        assert!(offences(OUTPUT, "qwen: large\nadds: why not\nold: gone")[0].contains("names old"));
    }

    #[test]
    fn ignored_tests_and_empty_runs_fail() {
        let ignored = "test result: ok. 1 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out";
        assert!(offences(ignored, "")[0].contains("2 tests are ignored"));
        assert!(offences("", "")[0].contains("no test ran"));
    }

    #[test]
    fn leave_without_a_reason_is_refused() {
        assert!(Allowed::parse("name").is_err());
        assert!(Allowed::parse("name: ").is_err());
    }
}
