//! What tests need of Python's packages: other people's clients, and the compiler of GPU kernels, in a virtual
//! environment below `target`. The project's own package is tested with it.

use std::path::PathBuf;

use anyhow::Result;

use crate::phases::Outcome;
use crate::{command, root, run};

/// The versions of what they need.
const CONSTRAINTS: &str = "xtask/python.txt";

/// By name and version, from wherever pip gets its packages.
const PACKAGES: &[&str] = &[
    "openai==3.49.0",
    "anthropic==2.8.0",
    "ollama==0.6.3",
    "huggingface_hub==2.4.0",
    "runpod==1.12.0",
    "schemathesis==4.32.5",
    "nvidia-cuda-nvrtc==13.0.88",
    "playwright==1.65.0",
    "axe-playwright-python==0.1.8",
];

/// The interpreter, whether or not it is there.
pub(crate) fn interpreter() -> PathBuf {
    root().join("target/python/bin/python")
}

/// Where the compiler of GPU kernels lies in it, if it is there: the folder is called after the version of Python.
pub(crate) fn nvrtc_folder() -> Option<PathBuf> {
    let versions = std::fs::read_dir(root().join("target/python/lib")).ok()?;
    let folders = versions.flatten().map(|version| version.path().join("site-packages/nvidia/cu13/lib"));
    folders.into_iter().find(|folder| folder.is_dir())
}

/// Makes the environment. Where that is not possible the tests that need it say so and are counted as skipped.
pub(crate) fn prepare() -> Result<Outcome> {
    let python = interpreter();
    let stamp = root().join("target/python/packages");
    let constraints = std::fs::read_to_string(root().join(CONSTRAINTS))?;
    let wanted = format!("{}\n{constraints}", PACKAGES.join("\n"));
    if std::fs::read_to_string(&stamp).is_ok_and(|packages| packages == wanted) {
        return Ok(Outcome::Passed);
    }
    let folder = root().join("target/python");
    let made = run(command("python3", &["-m", "venv"]).arg(&folder)).and_then(|()| {
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        run(command(&python.to_string_lossy(), &pip).args(["--constraint", CONSTRAINTS]).args(PACKAGES))
    });
    if let Err(error) = made {
        return Ok(Outcome::LeftOut(format!("no Python with {}: {error:#}", PACKAGES.join(" and "))));
    }
    std::fs::write(stamp, wanted)?;
    Ok(Outcome::Passed)
}
