//! A thousand mixed requests on the default model: each ends once, nothing stays behind, memory does not grow.

use anyhow::{Context, Result};
use fornax::catalog;

use super::Facts;
use crate::{command, fixtures, output};

const REQUESTS: &str = "1000";

/// What the test prints, in its own order.
const FACTS: [&str; 7] = ["seed", "requests", "choices", "engine", "left behind", "resident memory", "bound"];

pub(super) fn run() -> Result<Facts> {
    fixtures::run(false)?;
    let entry = catalog::find(catalog::DEFAULT).context("the default model is not in the catalog")?;
    let args =
        ["test", "--profile", "checked", "--package", "fornax-form", "--test", "soak", "--", "--nocapture"];
    let mut soak = command("cargo", &args);
    soak.env("FORNAX_SOAK_MODEL", entry.path(&fixtures::cache_dir()?)).env("FORNAX_SOAK_REQUESTS", REQUESTS);
    let printed = output(&mut soak)?;
    let fact = |name: &'static str| {
        let line = printed.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        Ok((name, line.with_context(|| format!("the soak did not print its {name}"))?.to_owned()))
    };
    let mut facts = vec![("model", entry.description.to_owned())];
    facts.extend(FACTS.into_iter().map(fact).collect::<Result<Facts>>()?);
    Ok(facts)
}
