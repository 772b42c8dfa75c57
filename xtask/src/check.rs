//! `cargo xtask check`: everything about the source that can be judged without running it.

use std::process::Command;

use anyhow::Result;

use crate::phases::{Outcome, Phases};
use crate::{command, docs, house, run};

/// Runs every check, also after one has failed.
pub(crate) fn run_all() -> Result<()> {
    let mut phases = Phases::new("check");
    phases.run("fmt", || {
        run(&mut command("cargo", &["fmt", "--all", "--check"]))?;
        // Not a member of the workspace.
        tool(&mut command("cargo", &["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"]))
    });
    phases.run("house", house::check);
    phases.run("pages", docs::check);
    phases.run("clippy", || {
        let args = ["clippy", "--workspace", "--all-targets", "--profile", "checked", "--", "-D", "warnings"];
        tool(&mut command("cargo", &args))
    });
    phases.run("docs", || {
        // The profile of clippy, whose metadata of the dependencies is used again.
        let args = ["doc", "--workspace", "--no-deps", "--profile", "checked"];
        tool(command("cargo", &args).env("RUSTDOCFLAGS", "-D warnings"))
    });
    phases.run("deny", deny);
    phases.finish()
}

fn tool(command: &mut Command) -> Result<Outcome> {
    run(command).map(|()| Outcome::Passed)
}

/// A clone of RustSec's advisory database, for machines that reach crates but not the database.
const ADVISORIES: &str = "FORNAX_ADVISORY_DB";

/// Where it is otherwise fetched from.
const ADVISORIES_URL: &str = "https://github.com/rustsec/advisory-db";

/// Licences, sources, bans and advisories of the dependencies, where cargo-deny is installed.
fn deny() -> Result<Outcome> {
    let installed =
        command("cargo", &["deny", "--version"]).output().is_ok_and(|output| output.status.success());
    if !installed {
        return Ok(Outcome::LeftOut(
            "cargo-deny is not installed (`cargo install --locked cargo-deny`)".to_owned(),
        ));
    }
    run(&mut command("cargo", &["deny", "--log-level", "error", "check", "bans", "licenses", "sources"]))?;
    let mut advisories = command("cargo", &["deny", "--log-level", "error", "check", "advisories"]);
    if let Some(clone) = std::env::var_os(ADVISORIES) {
        // deny.toml lets git itself fetch, which is told here to take the clone.
        advisories.env("GIT_CONFIG_COUNT", "1").env("GIT_CONFIG_VALUE_0", ADVISORIES_URL);
        advisories.env("GIT_CONFIG_KEY_0", format!("url.{}.insteadOf", clone.display()));
    }
    let advisories = advisories.output()?;
    let said = String::from_utf8_lossy(&advisories.stderr);
    if advisories.status.success() {
        return Ok(Outcome::Passed);
    }
    if is_unreachable(&said) {
        return Ok(Outcome::LeftOut(format!(
            "ADVISORIES ONLY: their database cannot be fetched here, so NO KNOWN VULNERABILITY WOULD BE FOUND; {ADVISORIES} may name a clone of it"
        )));
    }
    anyhow::bail!("{said}")
}

/// Whether cargo-deny says that it could not get what it compares with, and so has compared nothing.
fn is_unreachable(said: &str) -> bool {
    said.contains("failed to fetch advisory database")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An advisory that applies must fail the check, however the database came here.
    #[test]
    fn only_a_database_that_cannot_be_fetched_leaves_advisories_out() {
        let offline = "[ERROR] failed to fetch advisory database https://github.com/rustsec/advisory-db";
        assert!(is_unreachable(offline));
        assert!(!is_unreachable("error[vulnerability]: a crate: ID: RUSTSEC-2020-0001"));
        assert!(!is_unreachable("error[yanked]: detected yanked crate"));
    }
}
