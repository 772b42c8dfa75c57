//! Models of the hub on disk, laid out as the hub's own Python library does, so that each uses what the other fetched:
//! `models--owner--name/{blobs,refs,snapshots}`, and locks beside them.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::choice::{self, Choice, Entry};
use super::{HubError, Reference};

/// What folders of models begin with; data sets lie beside them.
const PREFIX: &str = "models--";

/// One repository at one revision, on disk.
#[derive(Debug)]
pub(super) struct Folder {
    /// Of all repositories.
    root: PathBuf,
    /// Its folder's name there.
    name: String,
    revision: String,
}

/// A model that is complete on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// What to open.
    pub path: PathBuf,
    /// Its weights, for people: the file's name, or what the repository is called.
    pub name: String,
    /// Bytes of all its files.
    pub bytes: u64,
}

impl Folder {
    pub(super) fn new(root: &Path, reference: &Reference) -> Folder {
        let name = format!("{PREFIX}{}", reference.repo.replace('/', "--"));
        Folder { root: root.to_owned(), name, revision: reference.revision.clone() }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.root.join(&self.name)
    }

    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.path().join("blobs").join(etag)
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.path().join("snapshots").join(commit)
    }

    /// The commit that the revision was when it was last fetched.
    fn commit(&self) -> Option<String> {
        if is_commit(&self.revision) {
            return Some(self.revision.clone());
        }
        let text = fs::read_to_string(self.path().join("refs").join(&self.revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Remembers which commit the revision is.
    pub(super) fn remember(&self, commit: &str) -> Result<(), HubError> {
        if self.revision == commit {
            return Ok(());
        }
        let path = self.path().join("refs").join(&self.revision);
        place(&path, |draft| fs::write(draft, commit))
    }

    /// Holds a file's lock, telling `waits` if somebody else has it. A file system without locks gives `None`: what
    /// keeps files whole is that they get their names when their checksums are right.
    pub(super) fn lock(&self, etag: &str, waits: impl FnOnce()) -> Result<Option<File>, HubError> {
        let folder = self.root.join(".locks").join(&self.name);
        fs::create_dir_all(&folder).map_err(|error| unwritable(&folder, error))?;
        let path = folder.join(format!("{etag}.lock"));
        let file = File::create(&path).map_err(|error| unwritable(&path, error))?;
        Ok(match file.try_lock() {
            Ok(()) => Some(file),
            Err(TryLockError::WouldBlock) => {
                waits();
                file.lock().ok().map(|()| file)
            }
            Err(TryLockError::Error(_)) => None,
        })
    }

    /// Lets `name` of a commit be the blob `etag`.
    pub(super) fn point(&self, commit: &str, name: &str, etag: &str) -> Result<(), HubError> {
        let pointer = self.snapshot(commit).join(name);
        let ups = "../".repeat(2 + name.matches('/').count());
        let target = PathBuf::from(format!("{ups}blobs/{etag}"));
        if fs::read_link(&pointer).is_ok_and(|now| now == target) {
            return Ok(());
        }
        place(&pointer, |draft| std::os::unix::fs::symlink(&target, draft))
    }

    /// The model that `reference` means, if it is complete on disk.
    pub(super) fn local(&self, reference: &Reference) -> Option<Local> {
        let snapshot = self.snapshot(&self.commit()?);
        let names = names_below(&snapshot);
        let choice = choice::choose(&names, &reference.want).ok()?;
        local(&snapshot, &choice, &names, &reference.repo)
    }

    /// Every complete model of the revision on disk.
    fn locals(&self, reference: &Reference) -> Vec<(Reference, Local)> {
        let Some(commit) = self.commit() else { return Vec::new() };
        let names = names_below(&self.snapshot(&commit));
        let files = names.iter().filter(|name| name.ends_with(".gguf"));
        let wants =
            std::iter::once(super::Want::Any).chain(files.map(|name| super::Want::File(name.clone())));
        let mut found: Vec<(Reference, Local)> = Vec::new();
        for want in wants {
            let one = Reference { want, ..reference.clone() };
            if let Some(local) = self.local(&one)
                && found.iter().all(|(_, other)| other.path != local.path)
            {
                found.push((one, local));
            }
        }
        found
    }
}

/// The choice as it lies in a snapshot, if all of it is there.
pub(super) fn local(snapshot: &Path, choice: &Choice, names: &[String], repo: &str) -> Option<Local> {
    let mut files = choice.files.clone();
    let (path, name) = match &choice.entry {
        Entry::File(file) => (snapshot.join(file), file.clone()),
        Entry::Folder => (snapshot.to_owned(), repo.to_owned()),
        Entry::Indexed(index) => {
            let index = fs::read(snapshot.join(index)).ok()?;
            files.extend(choice::shards(&serde_json::from_slice(&index).ok()?)?);
            files.sort();
            files.dedup();
            (snapshot.to_owned(), repo.to_owned())
        }
    };
    let mut bytes = 0;
    for file in &files {
        // Names of an index are checked against those of the folder before they become paths.
        names.contains(file).then_some(())?;
        bytes += fs::metadata(snapshot.join(file)).ok()?.len();
    }
    Some(Local { path, name, bytes })
}

/// Every model of the hub that is complete on disk.
pub(super) fn all(root: &Path) -> Vec<(Reference, Local)> {
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    let mut repos: Vec<String> = entries
        .flatten()
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_prefix(PREFIX)?.replace("--", "/")))
        .collect();
    repos.sort();
    let mut found = Vec::new();
    for repo in repos {
        let folder = |revision: &str| {
            let reference =
                Reference { repo: repo.clone(), revision: revision.to_owned(), want: super::Want::Any };
            (Folder::new(root, &reference), reference)
        };
        let refs = names_below(&folder("main").0.path().join("refs"));
        for revision in refs {
            let (folder, reference) = folder(&revision);
            for (reference, local) in folder.locals(&reference) {
                if found.iter().all(|(_, other): &(Reference, Local)| other.path != local.path) {
                    found.push((reference, local));
                }
            }
        }
    }
    found
}

/// The names of all files below a folder that can be read, `/` between their parts.
fn names_below(folder: &Path) -> Vec<String> {
    fn walk(folder: &Path, prefix: &str, depth: usize, names: &mut Vec<String>) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        for entry in entries.flatten() {
            let Some(name) = entry.file_name().to_str().map(|name| format!("{prefix}{name}")) else {
                continue;
            };
            // A link whose blob was removed is no file.
            let Ok(metadata) = fs::metadata(entry.path()) else { continue };
            if metadata.is_file() {
                names.push(name);
            } else if depth > 0 {
                walk(&entry.path(), &format!("{name}/"), depth - 1, names);
            }
        }
    }
    let mut names = Vec::new();
    // Deeper than any repository; a link back to a folder above would go on for ever.
    walk(folder, "", 8, &mut names);
    names.sort();
    names
}

/// Makes something beside `path` and then moves it there: another process may be doing the same, or reading.
fn place(path: &Path, make: impl FnMut(&Path) -> io::Result<()>) -> Result<(), HubError> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(|error| unwritable(folder, error))?;
    let draft = tempfile::Builder::new().make_in(folder, make).map_err(|error| unwritable(path, error))?;
    draft.persist(path).map(drop).map_err(|error| unwritable(path, error.error))
}

pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

pub(super) fn unwritable(path: &Path, reason: io::Error) -> HubError {
    match reason.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            HubError::DiskFull { path: path.to_owned(), needed: 1, free: None }
        }
        _ => HubError::Unwritable { path: path.to_owned(), reason },
    }
}
