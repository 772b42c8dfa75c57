//! From what a person types as MODEL to a path on disk, fetched if need be.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fornax::Code;
use fornax::catalog::{self, Entry, Progress};
use fornax::hub::{self, Hub, HubError};

use super::failure::Failure;
use super::meter::{Meter, Rate, megabytes};
use super::output;

/// What a MODEL argument is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reference {
    Path(PathBuf),
    Catalog(&'static Entry),
    /// A reference to the hub, as it was typed.
    Hub(String),
    /// None of these: a file that is not there, a misspelt name, or a prompt.
    Unknown(String),
}

impl Reference {
    /// A name of the catalog means the model whose checksum is known, whatever the folder holds that somebody happens to
    /// be in: a file that is called so is `./smollm2`. Otherwise an existing path wins over every other reading.
    pub(crate) fn parse(text: &str) -> Reference {
        if let Some(entry) = catalog::find(text) {
            return Reference::Catalog(entry);
        }
        if Path::new(text).exists() {
            return Reference::Path(PathBuf::from(text));
        }
        if hub::Reference::is_meant(text) {
            return Reference::Hub(text.to_owned());
        }
        Reference::Unknown(text.to_owned())
    }

    /// Whether a lone positional of `run` is a model; anything else is the prompt. A word that ends like a model file
    /// is a file that is missing, and is said to be missing rather than answered.
    pub(crate) fn is_model(&self) -> bool {
        match self {
            Reference::Unknown(text) => is_model_file(text) && !text.contains(char::is_whitespace),
            _ => true,
        }
    }
}

fn is_model_file(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|ext| ext.to_str()).unwrap_or_default();
    matches!(extension.to_ascii_lowercase().as_str(), "gguf" | "safetensors")
}

/// The path of the model that `text` names, or of the default model.
pub(crate) fn locate(text: Option<&str>) -> anyhow::Result<PathBuf> {
    match Reference::parse(text.unwrap_or(catalog::DEFAULT)) {
        Reference::Path(path) => Ok(path),
        Reference::Catalog(entry) => pull(entry, &cache_dir()?),
        Reference::Hub(text) => hub_model(&text),
        Reference::Unknown(name) => Err(Failure::new(
            Code::ModelNotFound,
            format!("no model {name:?}: no such file and no such name; check the path, or see `fornax list`"),
        )
        .into()),
    }
}

/// The model that a reference to the hub means. What is on disk is used as it is, so that a model that was fetched needs
/// no network to run; `fornax pull` asks for the newest.
fn hub_model(text: &str) -> anyhow::Result<PathBuf> {
    let reference = hub::Reference::parse(text)?;
    let hub = hub()?;
    match hub.local(&reference) {
        Some(local) => {
            if local.path.is_file() {
                say(&format!("model: {} of {}", local.name, reference.repo));
            }
            Ok(local.path)
        }
        None => Ok(pull_hub(&hub, &reference)?),
    }
}

/// The hub as this user's environment reaches it.
pub(crate) fn hub() -> Result<Hub, HubError> {
    Ok(Hub::new(hub::Options::from_env(|name| std::env::var_os(name))?))
}

/// Fetches a model of the hub, showing progress on standard error.
pub(crate) fn pull_hub(hub: &Hub, reference: &hub::Reference) -> Result<PathBuf, HubError> {
    let mut meter = Meter::new(Duration::ZERO);
    let mut rate = Rate::new();
    let local = hub.pull(reference, &mut |progress| match progress {
        hub::Progress::Chosen { name, files, missing } => {
            let files = if files == 1 { String::new() } else { format!(" ({files} files)") };
            let missing = match missing {
                0 => "on disk already".to_owned(),
                bytes => format!(
                    "{} to download (Ctrl-C stops; the same command goes on from there)",
                    output::bytes(bytes)
                ),
            };
            meter.line(&format!("model: {name}{files}: {missing}"));
        }
        hub::Progress::Waiting { file } => meter.line(&format!("waiting for another fetch of {file}")),
        hub::Progress::Checking { file, bytes, total } => {
            meter.show(
                &format!("checking what is there of {file}:"),
                (bytes, total),
                &megabytes(bytes, total),
            );
        }
        hub::Progress::Downloading { file, bytes, resumed, total } => {
            let amount =
                format!("{}{}", megabytes(bytes, total), rate.words(bytes - resumed, total - resumed));
            meter.show(&format!("downloading {file}:"), (bytes, total), &amount);
        }
    })?;
    Ok(local.path)
}

/// One line on standard error; nobody reading it is no reason to stop.
fn say(line: &str) {
    drop(writeln!(std::io::stderr(), "{line}"));
}

/// The cache folder of this user. The environment is read here and nowhere else.
pub(crate) fn cache_dir() -> anyhow::Result<PathBuf> {
    Ok(catalog::cache_dir(|name| std::env::var_os(name))?)
}

/// Fetches a model of the catalog unless it is there, showing progress on standard error.
pub(crate) fn pull(entry: &Entry, cache: &Path) -> anyhow::Result<PathBuf> {
    if let Some(path) = entry.installed(cache) {
        return Ok(path);
    }
    let mut meter = Meter::new(Duration::ZERO);
    let mut show = |progress| {
        let (what, (done, total)) = match progress {
            Progress::Waiting => ("waiting for another fetch of", (0, entry.download_bytes())),
            Progress::Downloading { bytes, total } => ("downloading", (bytes, total)),
            Progress::Unpacking { bytes, total } => ("checking", (bytes, total)),
        };
        meter.show(&format!("{what} {}:", entry.name), (done, total), &megabytes(done, total));
    };
    Ok(catalog::fetch(entry, cache, &mut show)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_argument_is_read_as_the_design_says() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("m.gguf");
        std::fs::write(&file, b"").unwrap();
        let existing = file.to_str().unwrap();
        assert_eq!(Reference::parse(existing), Reference::Path(file.clone()));
        assert!(matches!(Reference::parse("smollm2"), Reference::Catalog(entry) if entry.name == "smollm2"));
        let check = |text: &str, hub: bool| {
            let reference = Reference::parse(text);
            assert_eq!(matches!(reference, Reference::Hub(_)), hub, "{text}: {reference:?}");
            assert_eq!(reference.is_model(), hub || text.ends_with(".gguf"), "{text}");
        };
        check("hf:org/repo", true);
        check("hf:org/repo@main:model.gguf", true);
        check("Qwen/Qwen2.5-0.5B", true);
        check("Qwen/Qwen2.5-0.5B-GGUF:Q4_K_M", true);
        check("Qwen/Qwen2.5-0.5B-GGUF:model-q8_0.gguf", true);
        check("Qwen/Qwen2.5-0.5B-GGUF/model-q8_0.gguf", false);
        check("https://huggingface.co/Qwen/Qwen2.5-0.5B", true);
        check("Why is the sky blue?", false);
        check("either/or what", false);
        check("and/or?", false);
        check("a/b/c", false);
        check("missing/model.gguf", false);
        check("missing.gguf", false);
        check("./missing", false);
        check("/missing", false);
        check("hello", false);
    }
}
