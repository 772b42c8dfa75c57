//! What somebody does who installs the Python package: a clean environment, the wheel, then its tests, its types and its
//! command.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::Facts;
use crate::wheel::{Audience, build};
use crate::{command, fixtures, output, root, run as run_tool};

/// What the tests need, by name and version.
const PACKAGES: [&str; 4] = ["pytest==9.2.0", "pydantic==2.14.3", "mypy==2.4.1", "typing_extensions"];

pub(super) fn run() -> Result<Facts> {
    fixtures::run(false)?;
    // One that is named, such as the one that is shipped, else the one that this machine compiles fastest.
    let wheel = match std::env::var_os("FORNAX_WHEEL") {
        Some(path) => root().join(path),
        None => build(Audience::ThisMachine)?,
    };
    let work = tempfile::tempdir().context("cannot make a temporary folder")?;
    let environment = work.path().join("environment");
    run_tool(command("python3", &["-m", "venv"]).arg(&environment))?;
    let program = |name: &str| environment.join("bin").join(name).to_string_lossy().into_owned();
    let python = program("python");
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    run_tool(command(&python, &pip).arg(&wheel).args(PACKAGES))?;

    // From a copy, so that nothing but what was installed can be imported.
    let tests = work.path().join("tests");
    fs::create_dir(&tests)?;
    for entry in fs::read_dir(root().join("crates/python/tests"))?.flatten() {
        if entry.path().is_file() {
            fs::copy(entry.path(), tests.join(entry.file_name()))?;
        }
    }
    // The page whose programs are run.
    fs::create_dir(tests.join("pages"))?;
    fs::copy(root().join("docs/python.md"), tests.join("pages/python.md"))?;
    let cache = fixtures::cache_dir()?;
    let at = |program: &str, args: &[&str], folder: &Path| {
        let mut command = command(program, args);
        command.current_dir(folder).env("FORNAX_CACHE", &cache);
        command
    };
    let ran = at(&python, &["-m", "pytest", "-q", "-p", "no:cacheprovider"], &tests).output()?;
    let told = String::from_utf8_lossy(&ran.stdout);
    ensure!(ran.status.success(), "pytest ({}): {told}", ran.status);
    let passed = told.trim().lines().last().unwrap_or_default().to_owned();
    ensure!(passed.contains(" passed") && !passed.contains("skipped"), "{told}");
    let typed = output(&mut at(&python, &["-m", "mypy", "--strict", "--package", "fornax"], work.path()))?;

    let version = output(&mut at(&program("fornax"), &["--version"], work.path()))?;
    let by_module = output(&mut at(&python, &["-m", "fornax", "--version"], work.path()))?;
    ensure!(version == by_module, "{version} is not {by_module}");
    let args = ["generate", "smollm2", "--prompt", "The capital of France is", "--max-tokens", "4"];
    let said = output(&mut at(&program("fornax"), &args, work.path()))?;
    ensure!(said.contains("Paris"), "{said}");

    let bytes = fs::metadata(&wheel)?.len();
    let name = wheel.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Ok(vec![
        ("wheel", format!("{name}, {:.1} MB", bytes as f64 / 1e6)),
        ("Python", output(&mut command(&python, &["--version"]))?.trim().to_owned()),
        ("pytest", passed),
        ("mypy --strict", typed.trim().to_owned()),
        ("`fornax --version`", version.lines().next().unwrap_or_default().to_owned()),
    ])
}
