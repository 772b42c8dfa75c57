//! Every weight format on the default model, quantised anew, against transformers with the dequantised weights.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fornax::catalog;
use serde_json::Value;

use super::Facts;
use super::memory::target_dir;
use crate::{command, fixtures, root, run as run_tool};

/// A Python that has what the scripts name.
const PYTHON: &str = "FORNAX_ORACLE_PYTHON";
/// The largest difference of a prompt's log-probabilities above -10: below, digits of the logits are lost in them.
const FLOAT_BOUND: f64 = 0.001;
const INT8_BOUND: f64 = 0.02;
/// Nothing is left of a model that was not made for three values, so rounded activations show more.
const TERNARY: [&str; 2] = ["TQ1_0", "TQ2_0"];
const TERNARY_INT8_BOUND: f64 = 0.1;
/// The model made wider, so that rows fill blocks of 256, against what it was before.
const WIDE: &str = "F32-WIDE";

/// GGUF files, and the model made wider.
pub(super) fn gguf() -> Result<Facts> {
    prove("tests/golden/make_formats.py", "formats", 24)
}

/// Quantised safetensors.
pub(super) fn checkpoints() -> Result<Facts> {
    prove("tests/golden/make_checkpoints.py", "checkpoints", 6)
}

/// `script` writes so many models, and what transformers computes with them.
fn prove(script: &str, folder: &str, count: usize) -> Result<Facts> {
    fixtures::run(false)?;
    run_tool(&mut command("cargo", &["build", "--profile", "checked", "--package", "fornax"]))?;
    let python = std::env::var_os(PYTHON)
        .with_context(|| format!("set {PYTHON} to a Python with what {script} needs"))?;
    let entry = catalog::find(catalog::DEFAULT).context("the default model is not in the catalog")?;
    let model = fixtures::cache_dir()?.join("models").join(entry.file);
    let folder = target_dir()?.join(folder);
    run_tool(Command::new(&python).arg(root().join(script)).arg(&model).arg(&folder))?;
    let binary = target_dir()?.join("checked/fornax");
    let mut facts = vec![
        ("model", entry.file.to_owned()),
        (
            "bounds",
            format!(
                "{FLOAT_BOUND} with float activations, {INT8_BOUND} with int8 ({TERNARY_INT8_BOUND} for {})",
                TERNARY.join(" and ")
            ),
        ),
    ];
    let mut files: Vec<_> = std::fs::read_dir(&folder)?.collect::<Result<_, _>>()?;
    files.sort_by_key(std::fs::DirEntry::file_name);
    for golden in files.iter().map(std::fs::DirEntry::path) {
        if golden.extension().is_some_and(|extension| extension == "json") {
            facts.push(format(&binary, &golden)?);
        }
    }
    ensure!(facts.len() == 2 + count, "{} models were written, not {count}", facts.len() - 2);
    std::fs::remove_dir_all(&folder)?;
    Ok(facts)
}

/// One format's worst log-probability for each kind of activations.
fn format(binary: &Path, path: &Path) -> Result<(&'static str, String)> {
    let golden: Value = serde_json::from_slice(&std::fs::read(path)?)?;
    let model = path.with_file_name(golden["model"].as_str().context("no model")?);
    let name = path.file_stem().unwrap_or_default().to_string_lossy().to_uppercase();
    let mut words = Vec::new();
    let int8 = if TERNARY.contains(&&*name) { TERNARY_INT8_BOUND } else { INT8_BOUND };
    for (activations, bound) in [("float", FLOAT_BOUND), ("int8", int8)] {
        let mut worst = 0.0f64;
        for case in golden["cases"].as_array().context("no cases")? {
            let numbers = |key: &str| case[key].as_array().context("no list");
            let tokens: Vec<usize> =
                numbers("tokens")?.iter().filter_map(|token| token.as_u64()?.try_into().ok()).collect();
            let rows = logits(binary, &model, &tokens, activations)?;
            for (position, wanted) in numbers("logprobs")?.iter().enumerate() {
                let wanted = wanted.as_f64().context("no number")?;
                if wanted > -10.0 {
                    worst =
                        worst.max((log_probability(&rows[position], tokens[position + 1]) - wanted).abs());
                }
            }
        }
        ensure!(worst <= bound, "{name} with {activations} activations: {worst:.5}, at most {bound}");
        words.push(format!("{worst:.5} {activations}"));
    }
    let (words, share) = (words.join(", "), golden["share"].as_f64().unwrap_or_default() * 100.0);
    if name == WIDE {
        return Ok(("the model made 768 wide, F32", format!("{words}, from the model as it is")));
    }
    Ok(("format", format!("{name} ({share:.0} % of the values): {words}")))
}

fn logits(binary: &Path, model: &Path, tokens: &[usize], activations: &str) -> Result<Vec<Vec<f32>>> {
    let out = model.with_extension("f32");
    let ids: Vec<String> = tokens.iter().map(usize::to_string).collect();
    run_tool(
        Command::new(binary)
            .arg("logits")
            .arg(model)
            .args(["--device", "cpu", "--kv-dtype", "f32", "--activations", activations, "--json"])
            .args(["--tokens", &ids.join(","), "--all", "--out"])
            .arg(&out),
    )?;
    let bytes = std::fs::read(&out)?;
    let values: Vec<f32> = bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    Ok(values.chunks(values.len() / tokens.len()).map(<[f32]>::to_vec).collect())
}

fn log_probability(row: &[f32], token: usize) -> f64 {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&logit| f64::from(logit - most).exp()).sum();
    f64::from(row[token] - most) - sum.ln()
}
