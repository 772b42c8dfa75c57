//! The vector code for ARM under an emulator: every level that it has, forced in turn.

use anyhow::{Context, Result, ensure};

use super::Facts;
use crate::{command, output};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64-static";
/// What brings the three, for those who have them not.
const NEEDS: &str =
    "`rustup target add aarch64-unknown-linux-gnu`, and Debian's gcc-aarch64-linux-gnu and qemu-user-static";
/// Levels, each with an emulated processor whose best one it is.
const LEVELS: [(&str, &str); 3] = [("neon", "cortex-a72"), ("dotprod", "neoverse-n1"), ("i8mm", "max")];

pub(super) fn run() -> Result<Facts> {
    for tool in [LINKER, EMULATOR] {
        output(&mut command(tool, &["--version"]))
            .with_context(|| format!("no {tool}; this needs {NEEDS}"))?;
    }
    let emulator = output(&mut command(EMULATOR, &["--version"]))?;
    let mut facts = vec![
        ("emulator", emulator.lines().next().unwrap_or_default().to_owned()),
        ("target", TARGET.to_owned()),
    ];
    // Formats, attention, norms and the rest, each level against the scalar code by bits.
    let printed = tests("max", &["--lib"], &["cpu::"])?;
    facts.push(("kernels", summary(&printed)?));
    for (level, processor) in LEVELS {
        let printed =
            tests(processor, &["--lib"], &["--nocapture", "the_best_level_is_the_last_that_is_there"])?;
        let best = printed.lines().find_map(|line| line.split_once("best level: "));
        ensure!(best.is_some_and(|(_, best)| best.trim() == level), "{processor} does not choose {level}");
        facts.push(("chosen", format!("{level} on {processor}")));
    }
    let printed = tests("max", &["--test", "conformance"], &["--nocapture", "cpu_conforms"])?;
    summary(&printed)?;
    let reports: Vec<_> = printed.lines().filter_map(|line| line.split_once("conforms: ")).collect();
    for (level, _) in LEVELS {
        let of_level = reports.iter().filter(|(_, report)| report.starts_with(&format!("{level} ")));
        ensure!(of_level.count() == 2, "{level} did not run with both kinds of activations");
    }
    facts.extend(reports.iter().map(|(_, report)| ("conforms", (*report).to_owned())));
    Ok(facts)
}

/// What some tests of the crate print on an emulated processor.
fn tests(processor: &str, which: &[&str], arguments: &[&str]) -> Result<String> {
    let mut test = command("cargo", &["test", "--profile", "checked", "--package", "fornax-compute"]);
    let levels: Vec<&str> = LEVELS.iter().map(|(level, _)| *level).collect();
    test.args(["--target", TARGET]).args(which).arg("--").args(arguments);
    test.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
            format!("{EMULATOR} -cpu {processor} -L /usr/aarch64-linux-gnu"),
        )
        .env("FORNAX_TEST_LEVELS", levels.join(","));
    output(&mut test)
}

fn summary(printed: &str) -> Result<String> {
    let result = printed.lines().find(|line| line.starts_with("test result: ok")).context("no test ran")?;
    ensure!(!result.contains(" 0 passed"), "no test ran");
    Ok(result.to_owned())
}
