//! Models of the catalog from the hub: no Python is needed, and a fetch that was stopped goes on.
//!
//! What is pinned decides: where the hub promises another checksum for a file than the catalog, nothing is fetched.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::cache::unwritable;
use super::catalog::Entry;
use super::download::Transfer;
use super::remote::Remote;
use super::{Hub, HubError, Options, Progress, Reference, Told, Wanted};

/// Why a model of the catalog was not had from the hub.
#[derive(Debug)]
pub enum NotHad {
    /// The hub does not have it, or not these bytes.
    Differs,
    /// Whatever else.
    Hub(HubError),
}

impl From<HubError> for NotHad {
    fn from(error: HubError) -> NotHad {
        NotHad::Hub(error)
    }
}

/// Fetches `entry` from the hub into `cache`, where its packages would put it. Whoever calls has another way, so one
/// attempt is enough.
///
/// # Errors
/// [`NotHad`]. What of it is on disk by then is kept, and the next fetch goes on with it.
pub fn fetch(
    entry: &Entry,
    options: Options,
    cache: &Path,
    progress: &mut Told<'_>,
) -> Result<PathBuf, NotHad> {
    if let Some(path) = entry.installed(cache) {
        return Ok(path);
    }
    let reference = Reference::parse(entry.hub.ok_or(NotHad::Differs)?)?;
    let hub = Hub::new(Options { attempts: 1, ..options });
    if hub.options.offline {
        return Err(NotHad::Differs);
    }
    let remote = Remote::new(&hub.options);
    let repository = remote.repository(&reference)?;
    let listed = |wanted: &dyn Fn(&Wanted) -> bool| {
        let known = repository
            .files
            .iter()
            .filter_map(|file| Some(Wanted { name: file.name.clone(), identity: file.identity.clone()? }));
        known.into_iter().find(|file| wanted(file)).ok_or(NotHad::Differs)
    };
    let weights = listed(&|file| file.identity.etag == entry.sha256 && file.identity.bytes == entry.bytes)?;
    let mut wanted = Vec::new();
    for beside in entry.beside {
        wanted.push(listed(&|file| file.name == beside.file && file.identity.bytes == beside.bytes)?);
    }
    wanted.push(weights);

    let folder = hub.folder(&reference);
    let mut transfer = Transfer {
        remote: &remote,
        folder: &folder,
        reference: &reference,
        commit: &repository.commit,
        progress,
    };
    let missing = transfer.missing(&wanted);
    if (transfer.progress)(Progress::Chosen { name: entry.name, files: wanted.len(), missing }).is_break() {
        return Err(
            HubError::Stopped { kept: entry.bytes.saturating_sub(missing), total: entry.bytes }.into()
        );
    }
    hub.check_room(missing)?;
    transfer.fetch_all(&wanted)?;
    let path = entry.path(cache);
    let beside = path.parent().unwrap_or(cache);
    for (file, pinned) in wanted.iter().zip(entry.beside) {
        let blob = folder.blob(&file.identity.etag);
        if sha256(&blob)? != pinned.sha256 {
            return Err(NotHad::Differs);
        }
        place(&blob, &beside.join(pinned.file))?;
    }
    // The weights come last: where they are, everything is.
    if let Some(weights) = wanted.last() {
        place(&folder.blob(&weights.identity.etag), &path)?;
    }
    Ok(path)
}

/// A second name for a blob where the file system has such, else a copy.
fn place(blob: &Path, path: &Path) -> Result<(), HubError> {
    let folder = path.parent().unwrap_or(path);
    let placed = || -> std::io::Result<()> {
        fs::create_dir_all(folder)?;
        let draft = tempfile::Builder::new().prefix(".placed-").tempdir_in(folder)?;
        let draft = draft.path().join("file");
        if fs::hard_link(blob, &draft).is_err() {
            fs::copy(blob, &draft)?;
        }
        fs::rename(&draft, path)
    };
    placed().map_err(|error| unwritable(path, error))
}

fn sha256(path: &Path) -> Result<String, HubError> {
    let bytes = fs::read(path).map_err(|reason| HubError::Unreadable { path: path.to_owned(), reason })?;
    Ok(Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}
