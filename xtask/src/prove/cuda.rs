//! A GPU against the reference, against transformers, and against itself: what CI, which has none, cannot do.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fornax::catalog;

use super::Facts;
use super::memory::target_dir;
use crate::{command, fixtures, output, root, run as run_tool};

const DEVICE: &str = "cuda:0";
/// Models of the catalog, and what transformers answers.
const ANSWERED: [(&str, &str); 2] = [
    ("smollm2", "tests/golden/smollm2-q4_1.json"),
    ("qwen2.5-coder-0.5b", "tests/golden/qwen2.5-coder-0.5b-q4_k_m.json"),
];
const REQUESTS: &str = "1000";
/// Tokens of the longest prompt whose bits are compared.
const PROMPT: &str = "1500";

pub(super) fn run() -> Result<Facts> {
    let device =
        output(&mut command("nvidia-smi", &["--query-gpu=name,driver_version", "--format=csv,noheader"]))
            .context("this proof needs an NVIDIA GPU")?;
    fixtures::run(true)?;
    run_tool(&mut command("cargo", &["build", "--release", "--package", "fornax", "--bins", "--examples"]))?;
    let release = target_dir()?.join("release");
    let kernels = tempfile::tempdir().context("no folder for kernels")?;
    let kernels = kernels.path();
    let mut facts = vec![("device", device.lines().next().unwrap_or_default().to_owned())];
    facts.push(("conformance", conformance(&release.join("fornax"))?));

    let mut golden = example(&release, "golden");
    golden.args([DEVICE.as_ref(), kernels]);
    for (name, answers) in ANSWERED {
        golden.arg(model(name)?).arg(answers);
    }
    let printed = output(&mut golden)?;
    let said = |words: &str| -> Result<String> {
        let line = printed.lines().find(|line| line.contains(words));
        Ok(line.with_context(|| format!("`golden` said nothing of {words}"))?.to_owned())
    };
    facts.push(("logits against transformers", said("tiny checkpoints")?));
    facts.push(("vectors against transformers", said("bert")?));
    facts.push(("SmolLM2 against transformers", said("smollm2")?));
    facts.push(("Qwen against transformers", said("qwen2.5-coder")?));

    let smollm2 = model("smollm2")?;
    let mut soak = example(&release, "soak");
    soak.arg(&smollm2).args([DEVICE, REQUESTS]).arg(kernels);
    let printed = output(&mut soak)?;
    for (fact, words) in [("soak", "requests: "), ("memory of the device", "free before")] {
        let line = printed.lines().find(|line| line.starts_with(words));
        facts.push((fact, line.with_context(|| format!("`soak` did not print {words}"))?.to_owned()));
    }

    let mut invariance = example(&release, "invariance");
    invariance.arg(&smollm2).args([DEVICE, PROMPT]);
    facts.push(("invariance", output(&mut invariance)?.lines().collect::<Vec<_>>().join("; ")));

    // Last: it breaks the device for its own process.
    let mut lost = example(&release, "lost");
    lost.arg(&smollm2).arg(DEVICE).arg(kernels);
    let printed = output(&mut lost)?;
    facts.push(("a lost device", printed.lines().last().unwrap_or_default().to_owned()));
    Ok(facts)
}

/// Counts of `fornax doctor --conformance`, which fails where one case does.
fn conformance(binary: &Path) -> Result<String> {
    let mut doctor = std::process::Command::new(binary);
    doctor.current_dir(root()).args(["doctor", "--conformance", "--device", DEVICE]);
    let printed = output(&mut doctor)?;
    let (mut passed, mut operations) = (0u64, 0);
    for line in printed.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [_, count, "0", _] = words[..]
            && let Ok(count) = count.parse::<u64>()
        {
            passed += count;
            operations += 1;
        }
    }
    anyhow::ensure!(passed > 0, "`fornax doctor` printed no counts");
    Ok(format!("{passed} cases of {operations} operations passed, none failed"))
}

fn example(release: &Path, name: &str) -> std::process::Command {
    let mut command = std::process::Command::new(release.join("examples").join(name));
    command.current_dir(root());
    command
}

fn model(name: &str) -> Result<PathBuf> {
    let entry = catalog::find(name).with_context(|| format!("{name} is not in the catalog"))?;
    Ok(entry.path(&fixtures::cache_dir()?))
}
