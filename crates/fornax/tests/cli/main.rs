//! The real binary, from outside: what it prints, how it ends, what it leaves behind.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "tests may, and so may what they share")]

mod bad_input;
mod bench;
mod cache;
mod convert;
mod embed;
mod generation;
mod golden;
mod help;
mod hub;
mod hub_server;
mod models;
mod plan;
mod private;
mod quantize;
mod quantized;
mod sampling;
mod serve;
mod sparse;
mod terminal;
mod tiny;
mod trial;

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fornax::catalog;

/// How a run ended.
struct Ran {
    stdout: String,
    stderr: String,
    code: Option<i32>,
}

impl Ran {
    /// The JSON that a successful run printed.
    fn json(&self) -> serde_json::Value {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }

    /// Checks a failure: exit code, error code, one line that says these things, and nothing on standard output.
    fn fails(&self, exit: i32, code: &str, says: &[&str]) {
        // Refusals come before anything is said; these come after work has begun.
        let late = matches!(code, "NUMERIC_FAULT" | "OUTPUT_TRUNCATED");
        let begun = |line: &&str| {
            // How far loading is, which a slow machine says now and then.
            line.starts_with("loading: ")
                || late && (line.starts_with("device: ") || line.contains(" tokens · "))
        };
        let lines: Vec<&str> = self.stderr.lines().filter(|line| !begun(line)).collect();
        let [line] = lines[..] else { panic!("{} lines: {:?}", lines.len(), self.stderr) };
        assert_eq!(self.code, Some(exit), "{line}");
        assert!(line.starts_with(&format!("error: {code}: ")), "{line}");
        for words in says {
            assert!(line.contains(words), "{line:?} does not say {words:?}");
        }
        assert_eq!(self.stdout, "");
    }
}

/// Where no hub listens: the port of a service that is long gone.
const NOBODY: &str = "http://127.0.0.1:9";

/// The binary with a cache of its own choosing.
fn command(cache: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fornax"));
    command.env("FORNAX_CACHE", cache).env_remove("COLUMNS").stdin(Stdio::null());
    // Nothing of the hub but what a test says.
    for name in ["HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "TRANSFORMERS_OFFLINE"] {
        command.env_remove(name);
    }
    command.env("HF_HOME", cache.join("huggingface")).env("HF_ENDPOINT", NOBODY);
    command
}

fn ran(command: &mut Command) -> Ran {
    let output = command.output().unwrap();
    Ran {
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
        code: output.status.code(),
    }
}

/// Runs the binary with the cache of this machine.
fn fornax<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    ran(command(&cache()).args(args))
}

/// Runs it with text on standard input.
fn fornax_with_input(args: &[&str], input: &str) -> Ran {
    let mut child = command(&cache())
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    Ran {
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
        code: output.status.code(),
    }
}

fn cache() -> PathBuf {
    catalog::cache_dir(|name| std::env::var_os(name)).unwrap()
}

/// The path of a catalog model that is on disk; says that `test` is skipped where it is not.
fn model(name: &str, test: &str) -> Option<String> {
    let entry = catalog::find(name).unwrap();
    let path = entry.installed(&cache());
    if path.is_none() {
        println!("SKIP {test}: {name} is not in the cache folder; run `cargo xtask fixtures`");
    }
    path.map(|path| path.to_str().unwrap().to_owned())
}
