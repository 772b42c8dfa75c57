//! A model of the hub without its weights: the beginnings of its files, asked for by range.
//!
//! What is written is as long as the real files and empty where their data would be, so whoever reads headers needs to
//! know nothing of it. It takes as much of the disk as the headers.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use fornax_format::Gguf;

use super::cache::unwritable;
use super::choice::{self, Entry};
use super::download::Checksum;
use super::remote::{Identity, Remote};
use super::{Hub, HubError, Local, Reference, Repository, explained, indexed, model_files, reference};

/// What is asked for first of a file with weights; most headers are in it, vocabulary included.
const FIRST_BYTES: u64 = 4 << 20;

/// A header that is longer is none: the largest vocabularies take some 20 MB.
const HEADER_BYTES_MAX: u64 = 256 << 20;

/// A file beside the weights that is longer is not one of those that are read; tokenizers have up to 35 MB.
const BESIDE_BYTES_MAX: u64 = 128 << 20;

impl Hub {
    /// Puts the headers of the model that `reference` means now into `folder`, and what stands beside its weights. It
    /// can be inspected and planned from there, and not loaded.
    ///
    /// # Errors
    /// See [`HubError`].
    pub fn headers(&self, reference: &Reference, folder: &Path) -> Result<Local, HubError> {
        if self.options.offline {
            let cache = self.options.cache.clone();
            return Err(HubError::Offline { reference: reference.to_string(), cache });
        }
        let remote = Remote::new(&self.options);
        let repository = remote.repository(reference)?;
        let names: Vec<String> = repository.files.iter().map(|file| file.name.clone()).collect();
        let mut choice = choice::choose(&names, &reference.want)
            .map_err(|undecided| explained(undecided, &reference.repo, &names))?;
        let outlined = Outlined { hub: self, remote: &remote, reference, repository: &repository, folder };
        if let Entry::Indexed(index) = &choice.entry {
            outlined.whole(index)?;
            let shards = indexed(&folder.join(index), &reference.repo)?;
            if let Some(missing) = shards.iter().find(|shard| !names.contains(shard)) {
                let (repo, there) = (reference.repo.clone(), model_files(&names));
                return Err(HubError::NoFile { repo, file: missing.clone(), there });
            }
            choice.files.extend(shards);
        }
        let mut bytes = 0;
        for name in &choice.files {
            bytes +=
                if reference::is_model_file(name) { outlined.header(name)? } else { outlined.whole(name)? };
        }
        let (path, name) = match &choice.entry {
            Entry::File(file) => (folder.join(file), file.clone()),
            Entry::Folder | Entry::Indexed(_) => (folder.to_owned(), reference.repo.clone()),
        };
        Ok(Local { path, name, bytes })
    }
}

/// A repository whose outline is being made.
struct Outlined<'a> {
    hub: &'a Hub,
    remote: &'a Remote<'a>,
    reference: &'a Reference,
    repository: &'a Repository,
    folder: &'a Path,
}

impl Outlined<'_> {
    fn identity(&self, name: &str) -> Result<Identity, HubError> {
        let wanted = self.hub.identified(self.remote, self.reference, self.repository, &[name.to_owned()])?;
        let unknown = || HubError::NoFile {
            repo: self.reference.repo.clone(),
            file: name.to_owned(),
            there: Vec::new(),
        };
        wanted.into_iter().next().map(|wanted| wanted.identity).ok_or_else(unknown)
    }

    /// A file that is read as a whole, checked. The bytes of it.
    fn whole(&self, name: &str) -> Result<u64, HubError> {
        let identity = self.identity(name)?;
        if identity.bytes > BESIDE_BYTES_MAX {
            return Err(HubError::TooLong { file: name.to_owned(), wanted: BESIDE_BYTES_MAX });
        }
        let bytes = self.remote.beginning(self.reference, &self.repository.commit, name, identity.bytes)?;
        let mut checksum = Checksum::new(&identity);
        checksum.update(&bytes);
        let got = checksum.hex();
        if got != identity.etag {
            return Err(HubError::WrongChecksum { file: name.to_owned(), got, wanted: identity.etag });
        }
        self.write(name, &bytes, identity.bytes)?;
        Ok(identity.bytes)
    }

    /// The beginning of a file with weights, in a file of its length. The bytes that the real one has.
    fn header(&self, name: &str) -> Result<u64, HubError> {
        let identity = self.identity(name)?;
        let mut length = FIRST_BYTES.min(identity.bytes);
        loop {
            let bytes = self.remote.beginning(self.reference, &self.repository.commit, name, length)?;
            // What is not understood is explained by whoever opens it.
            let wanted = header_bytes(name, &bytes).unwrap_or(length);
            if wanted <= bytes.len() as u64 || length == identity.bytes || length >= HEADER_BYTES_MAX {
                self.write(name, &bytes, identity.bytes)?;
                return Ok(identity.bytes);
            }
            length = wanted.max(length.saturating_mul(4)).min(identity.bytes).min(HEADER_BYTES_MAX);
        }
    }

    fn write(&self, name: &str, bytes: &[u8], length: u64) -> Result<(), HubError> {
        let path = self.folder.join(name);
        let written = || -> std::io::Result<()> {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            let mut file = File::create(&path)?;
            file.write_all(bytes)?;
            file.set_len(length)
        };
        written().map_err(|error| unwritable(&path, error))
    }
}

/// How many bytes the header of a file takes that begins so; more than there are where it is not whole.
fn header_bytes(name: &str, bytes: &[u8]) -> Result<u64, fornax_format::Error> {
    if name.to_ascii_lowercase().ends_with(".gguf") {
        let there = bytes.len() as u64;
        return Ok(if Gguf::has_header(bytes)? { there } else { there + 1 });
    }
    // Safetensors say it in their first eight bytes.
    Ok(match bytes.first_chunk() {
        Some(length) => u64::from_le_bytes(*length).saturating_add(8),
        None => 8,
    })
}
