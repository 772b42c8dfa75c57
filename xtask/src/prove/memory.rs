//! The peak memory of the program while it generates with the default model.

use std::path::PathBuf;

use anyhow::{Context, Result};
use fornax::catalog;

use super::Facts;
use crate::{command, fixtures, output, run as run_tool};

const CONTEXT: u64 = 2048;
const TOKENS: u64 = 256;

/// SmolLM2-135M: layers x (keys and values) x KV heads x head size x bytes of an f16.
const KV_BYTES_PER_TOKEN: u64 = 30 * 2 * 3 * 64 * 2;

/// Starts a program and prints the peak of its resident memory in KiB, as the kernel tells its parent (the VmHWM of
/// /proc at the moment of its end, which nobody can read in time from outside).
const MEASURE: &str = "import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)";

pub(super) fn run() -> Result<Facts> {
    fixtures::run(false)?;
    run_tool(&mut command("cargo", &["build", "--release", "--package", "fornax"]))?;
    let entry = catalog::find(catalog::DEFAULT).context("the default model is not in the catalog")?;
    // Long enough for the widest prefill step, short enough to leave room for the answer.
    let prompt = "The quick brown fox jumps over the lazy dog. ".repeat(100);
    let (context, tokens) = (CONTEXT.to_string(), TOKENS.to_string());
    let binary = target_dir()?.join("release/fornax");
    let mut measured = command("python3", &["-c", MEASURE]);
    measured.arg(&binary).args(["generate", entry.name, "--prompt", &prompt, "--context", &context]);
    measured.args(["--max-tokens", &tokens, "--ignore-eos", "--kv-dtype", "f16", "--json"]);
    let peak_kib: u64 = output(&mut measured)?.trim().parse().context("the peak is not a number")?;

    let peak = peak_kib << 10;
    let kv = CONTEXT * KV_BYTES_PER_TOKEN;
    let bound = entry.bytes + entry.bytes / 2 + kv + (64 << 20);
    anyhow::ensure!(peak < bound, "the peak is {peak} bytes, the bound {bound}");
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    Ok(vec![
        ("model file", format!("{}, {}", entry.file, mib(entry.bytes))),
        ("KV cache", format!("{CONTEXT} tokens in f16, {}", mib(kv))),
        ("generated", format!("{TOKENS} tokens after a prompt of about 1000")),
        ("bound", mib(bound)),
        ("peak (VmHWM)", mib(peak)),
    ])
}

/// Where cargo puts what it builds, whatever the environment says about it.
pub(super) fn target_dir() -> Result<PathBuf> {
    let text = output(&mut command("cargo", &["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&text)?;
    let dir = metadata["target_directory"].as_str().context("cargo metadata names no target directory")?;
    Ok(PathBuf::from(dir))
}
