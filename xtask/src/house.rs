//! Rules of this workspace that no off-the-shelf lint knows.
//!
//! Each rule reads the tracked files or the manifests, and reports every offence with its place.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::phases::Outcome;
use crate::{command, output, root};

/// What each crate may use of the others; the same table as in ARCHITECTURE.md.
const MAY_USE: &[(&str, &[&str])] = &[
    ("fornax-format", &[]),
    ("fornax-code", &[]),
    ("fornax-compute", &["fornax-format"]),
    // `format` too: compute's interface speaks of its views and types.
    ("fornax-gpu", &["fornax-compute", "fornax-format"]),
    ("fornax-model", &["fornax-compute", "fornax-format"]),
    // `compute` and `format` are what model's interface and the tests on real backends speak of.
    ("fornax-engine", &["fornax-code", "fornax-model", "fornax-compute", "fornax-format"]),
    // It keeps what the engine hands it.
    ("fornax-disk", &["fornax-compute", "fornax-engine"]),
    // It compiles forms for the engine; the others are for its tests, which run one.
    ("fornax-form", &["fornax-code", "fornax-engine", "fornax-model", "fornax-compute", "fornax-format"]),
    ("fornax-text", &["fornax-format"]),
    ("fornax-image", &[]),
    // What engine and text together mean to whoever chats.
    ("fornax-chat", &["fornax-engine", "fornax-form", "fornax-text"]),
    // It knows matrices by number; `model` is for its tests, which compute one.
    ("fornax-private", &["fornax-compute", "fornax-format", "fornax-model"]),
    // It is handed a model that answers questions, and knows nothing of how; answers are judged by their form.
    ("fornax-jobs", &["fornax-code", "fornax-form"]),
    // `compute` for the sampling parameters that engine's requests carry, `format` for the tokenizers of its tests.
    (
        "fornax-server",
        &[
            "fornax-chat",
            "fornax-code",
            "fornax-engine",
            "fornax-form",
            "fornax-text",
            "fornax-jobs",
            "fornax-compute",
            "fornax-format",
        ],
    ),
    (
        "fornax",
        &[
            "fornax-chat",
            "fornax-code",
            "fornax-format",
            "fornax-compute",
            "fornax-disk",
            "fornax-gpu",
            "fornax-image",
            "fornax-jobs",
            "fornax-model",
            "fornax-engine",
            "fornax-form",
            "fornax-private",
            "fornax-text",
            "fornax-server",
        ],
    ),
    // It translates the facade and knows nothing else.
    ("fornax-python", &["fornax"]),
    ("xtask", &["fornax"]),
];

/// Where errors may be untyped, the environment read and text printed: what people and their programs start. What `fuzz`
/// has is only ever part of a test.
const EDGES: &[&str] = &["fornax", "fuzz", "python", "xtask"];

/// Words that tie the project to one machine or one registry. Written in halves, so that this list is no offence.
const MACHINE: &[&str] = &[
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("/wo", "rk/"),
    concat!("/tmp/", "bash_jobs"),
    concat!("index", "-url"),
    concat!("find", "-links"),
    concat!("replace", "-with"),
];

/// A test that never runs says nothing; one that cannot run here prints `SKIP` and is counted.
const IGNORED: &[&str] = &[concat!("#[", "ignore"), concat!("```", "ignore")];

const UNFINISHED: &[&str] =
    &[concat!("todo", "!("), concat!("unimplemented", "!("), concat!("TO", "DO"), concat!("FIX", "ME")];

/// The lint that unsafe code must be excused from, and the only places that may do so: kernels, the driver, the file
/// map and the proof that breaks a device.
const UNSAFE: &str = concat!("unsafe", "_code");
const MAY_BE_UNSAFE: &[&str] = &[
    "crates/compute/src/cpu/",
    "crates/format/src/map.rs",
    "crates/gpu/src/",
    "crates/fornax/examples/lost.rs",
];

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Checks every rule and reports all offences at once.
pub(crate) fn check() -> Result<Outcome> {
    let mut offences = dependencies(&metadata()?);
    let files = output(&mut command("git", &["ls-files", "-z"]))?;
    for file in files.split('\0').filter(|file| !file.is_empty()) {
        // A binary file, or one deleted but not yet committed, has no lines to judge.
        if let Ok(text) = std::fs::read_to_string(root().join(file)) {
            offences.extend(lines(file, &text));
        }
    }
    for offence in &offences {
        println!("{offence}");
    }
    anyhow::ensure!(offences.is_empty(), "{} offences against the rules of the house", offences.len());
    Ok(Outcome::Passed)
}

/// Offences in the text of one file.
fn lines(file: &str, text: &str) -> Vec<String> {
    let rust = Path::new(file).extension().is_some_and(|extension| extension == "rs");
    let mut in_tests = file.split('/').any(|part| matches!(part, "tests" | "benches" | "tests.rs"));
    let edge = EDGES
        .iter()
        .any(|name| file.starts_with(&format!("{name}/")) || file.starts_with(&format!("crates/{name}/")));
    let mut offences = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let mut offend = |what: &str| offences.push(format!("{file}:{}: {what}: {}", index + 1, line.trim()));
        if names(line, MACHINE) {
            offend("names a machine or a registry");
        }
        if file == "Cargo.lock" && line.starts_with("source = ") && !line.contains(CRATES_IO) {
            offend("a dependency from elsewhere than crates.io");
        }
        if rust {
            // Unit tests stand at the foot of a file.
            in_tests |= line.trim() == "#[cfg(test)]";
            if names(line, IGNORED) {
                offend("a test that never runs");
            }
            if names(line, UNFINISHED) {
                offend("unfinished");
            }
            if !edge && !in_tests && line.contains("env::var") {
                offend("reads the environment outside the binary");
            }
            if !in_tests
                && line.contains(UNSAFE)
                && !MAY_BE_UNSAFE.iter().any(|place| file.starts_with(place))
            {
                offend("unsafe code outside the kernels and the file map");
            }
        }
    }
    offences
}

fn names(line: &str, words: &[&str]) -> bool {
    words.iter().any(|word| line.contains(word))
}

/// The part of `cargo metadata` that is needed.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// Present on dependencies inside the workspace.
    path: Option<String>,
}

fn metadata() -> Result<Metadata> {
    let text = output(&mut command("cargo", &["metadata", "--no-deps", "--format-version", "1"]))?;
    serde_json::from_str(&text).context("cannot read what `cargo metadata` printed")
}

/// Dependencies, also those of tests, that the table does not allow.
fn dependencies(metadata: &Metadata) -> Vec<String> {
    let mut offences = Vec::new();
    for package in &metadata.packages {
        let Some((_, allowed)) = MAY_USE.iter().find(|(name, _)| *name == package.name) else {
            offences.push(format!("{}: not in the table of crates (xtask/src/house.rs)", package.name));
            continue;
        };
        for dependency in &package.dependencies {
            let inside = dependency.path.is_some();
            if inside && !allowed.contains(&dependency.name.as_str()) {
                offences.push(format!("{} may not use {}", package.name, dependency.name));
            }
            if dependency.name == "anyhow" && !EDGES.contains(&package.name.as_str()) {
                offences.push(format!("{} may not use anyhow: a library's errors have types", package.name));
            }
        }
    }
    offences
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offences_are_found_where_they_matter() {
        let check = |file: &str, text: &str, offences: usize| {
            let found = lines(file, text);
            assert_eq!(found.len(), offences, "{file}: {text:?} gave {found:?}");
        };
        let todo = concat!("    todo", "!()");
        check("crates/model/src/llama.rs", todo, 1);
        check("README.md", todo, 0);
        check("crates/model/src/llama.rs", concat!("#[", "ignore = \"slow\"]"), 1);
        check("docs/use.md", concat!("cd /ro", "ot/fornax"), 1);
        check("crates/text/src/lib.rs", "let x = std::env::var(\"X\");", 1);
        check("crates/text/src/lib.rs", "#[cfg(test)]\nlet x = std::env::var(\"X\");", 0);
        check("crates/text/tests/golden.rs", "let x = std::env::var(\"X\");", 0);
        check("crates/fornax/src/main.rs", "let x = std::env::var_os(\"X\");", 0);
        check("xtask/src/main.rs", "let x = std::env::var_os(\"X\");", 0);
        let excuse = format!("#![expect({UNSAFE}, reason = \"fast\")]");
        check("crates/model/src/llama.rs", &excuse, 1);
        check("crates/format/tests/memory.rs", &excuse, 0);
        check("crates/compute/src/cpu/mod.rs", &excuse, 0);
        check("Cargo.lock", &format!("source = \"{CRATES_IO}\""), 0);
        check("Cargo.lock", "source = \"git+https://example.com/a\"", 1);
    }

    #[test]
    fn the_table_of_crates_is_enforced() {
        let check = |name: &str, dependency: &str, inside: bool, offences: usize| {
            let path = inside.then(String::new);
            let dependencies = vec![Dependency { name: dependency.to_owned(), path }];
            let packages = vec![Package { name: name.to_owned(), dependencies }];
            assert_eq!(
                super::dependencies(&Metadata { packages }).len(),
                offences,
                "{name} uses {dependency}"
            );
        };
        check("fornax-format", "fornax-compute", true, 1);
        check("fornax-compute", "fornax-format", true, 0);
        check("fornax-text", "fornax-model", true, 1);
        check("fornax-text", "anyhow", false, 1);
        check("fornax", "anyhow", false, 0);
        check("fornax-unknown", "serde", false, 1);
    }
}
