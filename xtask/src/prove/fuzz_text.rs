//! Ten million changed templates and tokenizer files. The cases follow from their numbers: no nightly compiler is needed,
//! and one that fails is the same everywhere. Coverage does not guide them.

use anyhow::{Context, Result};

use super::Facts;
use crate::{command, output};

const CASES: &str = "10000000";

pub(super) fn run() -> Result<Facts> {
    let args =
        ["test", "--quiet", "--profile", "checked", "--package", "fornax-text", "--test", "mutated", "--"];
    let mut tests = command("cargo", &args);
    tests.args(["--nocapture", "--test-threads=2"]).env("FORNAX_FUZZ_CASES", CASES);
    let printed = output(&mut tests)?;
    let said = |what: &str| {
        let line = printed.lines().find_map(|line| line.strip_prefix(&format!("FUZZ {what}: ")));
        line.map(str::to_owned).with_context(|| format!("the test said nothing of {what}"))
    };
    Ok(vec![("templates", said("templates")?), ("tokenizer.json", said("tokenizer.json")?)])
}
