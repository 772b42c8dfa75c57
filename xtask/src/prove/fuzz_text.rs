//! Ten million changed inputs of each kind, or as many as an hour has room for: templates and tokenizer files; and what
//! callers send. The cases follow from their numbers: no nightly compiler is needed, and one that fails is the same
//! everywhere. Coverage does not guide them; the targets in `fuzz/` are for that.

use anyhow::{Context, Result};

use super::Facts;
use crate::{command, output};

const CASES: &str = "10000000";

/// How long each kind may take, in seconds, where it is not an hour.
const SECONDS: &str = "FORNAX_FUZZ_SECONDS";
const SECONDS_DEFAULT: &str = "3600";

/// Templates and tokenizer files.
pub(super) fn files() -> Result<Facts> {
    fuzzed(&["mutated"], "changed_", &["templates", "tokenizer.json"])
}

/// What callers, and servers and clients of private inference, send.
pub(super) fn callers() -> Result<Facts> {
    let tests = ["structured", "private", "model", "http"];
    fuzzed(&tests, "fuzz::", &["forms", "bodies", "frames", "sessions", "adapters"])
}

/// Runs the tests, and gives what each kind says of itself.
fn fuzzed(tests: &[&str], filter: &str, kinds: &[&'static str]) -> Result<Facts> {
    let seconds = std::env::var(SECONDS).unwrap_or_else(|_| SECONDS_DEFAULT.to_owned());
    let mut args = vec!["test", "--quiet", "--profile", "checked", "--workspace"];
    args.extend(tests.iter().flat_map(|test| ["--test", test]));
    args.extend(["--", filter, "--nocapture", "--test-threads=2"]);
    let mut tests = command("cargo", &args);
    tests.env("FORNAX_FUZZ_CASES", CASES).env(SECONDS, &seconds);
    let printed = output(&mut tests)?;
    let said = |kind: &str| {
        let line = printed.lines().find_map(|line| line.split_once(&format!("FUZZ {kind}: ")));
        line.map(|(_, said)| said.to_owned()).with_context(|| format!("the test said nothing of {kind}"))
    };
    let mut facts = vec![("each", format!("{CASES} cases, or as many as {seconds} s have room for"))];
    for kind in kinds {
        facts.push((kind, said(kind)?));
    }
    Ok(facts)
}
