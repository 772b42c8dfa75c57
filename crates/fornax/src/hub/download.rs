//! The bytes of one file, on their way to a blob that is whole and right.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::ops::ControlFlow;
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest, Sha256};
use ureq::http::StatusCode;

use super::cache::{Folder, unwritable};
use super::remote::{Failed, Identity, Remote, Retry, cut, header};
use super::{HubError, Progress, Reference, Told, Wanted};

/// Bytes read, hashed and written at once.
const CHUNK_BYTES: usize = 1 << 20;

/// The files of one model on their way to disk.
pub(super) struct Transfer<'a> {
    pub(super) remote: &'a Remote<'a>,
    pub(super) folder: &'a Folder,
    pub(super) reference: &'a Reference,
    pub(super) commit: &'a str,
    pub(super) progress: &'a mut Told<'a>,
}

/// How far all files are.
struct Tally {
    done: u64,
    resumed: u64,
    total: u64,
}

/// A file of which some bytes are there.
struct Partial {
    file: File,
    digest: Checksum,
    bytes: u64,
}

impl Transfer<'_> {
    /// Bytes that are not on disk yet.
    pub(super) fn missing(&self, files: &[Wanted]) -> u64 {
        files.iter().map(|file| file.identity.bytes.saturating_sub(self.bytes_there(&file.identity))).sum()
    }

    fn bytes_there(&self, identity: &Identity) -> u64 {
        if self.is_there(identity) {
            return identity.bytes;
        }
        let partial = fs::metadata(incomplete(&self.folder.blob(&identity.etag)));
        partial.map_or(0, |partial| partial.len()).min(identity.bytes)
    }

    /// A blob has its name because its checksum was right.
    fn is_there(&self, identity: &Identity) -> bool {
        fs::metadata(self.folder.blob(&identity.etag))
            .is_ok_and(|blob| blob.is_file() && blob.len() == identity.bytes)
    }

    /// Fetches what is missing, and lets the commit's names lead to the blobs.
    pub(super) fn fetch_all(&mut self, files: &[Wanted]) -> Result<(), HubError> {
        let absent = files.iter().filter(|file| !self.is_there(&file.identity));
        let mut tally = Tally { done: 0, resumed: 0, total: absent.map(|file| file.identity.bytes).sum() };
        for file in files {
            if !self.is_there(&file.identity) {
                self.fetch(file, &mut tally)?;
            }
            self.folder.point(self.commit, &file.name, &file.identity.etag)?;
        }
        Ok(())
    }

    fn fetch(&mut self, wanted: &Wanted, tally: &mut Tally) -> Result<(), HubError> {
        let Wanted { name, identity } = wanted;
        let blob = self.folder.blob(&identity.etag);
        let blobs = blob.parent().unwrap_or(&blob);
        fs::create_dir_all(blobs).map_err(|error| unwritable(blobs, error))?;
        let mut flow = ControlFlow::Continue(());
        let _lock =
            self.folder.lock(&identity.etag, || flow = (self.progress)(Progress::Waiting { file: name }))?;
        go_on(flow, 0, identity)?;
        if self.is_there(identity) {
            // Whoever was waited for has fetched it.
            tally.done += identity.bytes;
            return Ok(());
        }
        let path = incomplete(&blob);
        let mut partial = self.resume(name, identity, &path)?;
        tally.done += partial.bytes;
        tally.resumed += partial.bytes;
        let mut failures = 0;
        while partial.bytes < identity.bytes {
            let before = partial.bytes;
            if let Err(failed) = self.attempt(wanted, &path, &mut partial, tally) {
                if partial.bytes > before {
                    failures = 0;
                }
                failures += 1;
                if matches!(failed.error, HubError::TooLong { .. }) {
                    drop(fs::remove_file(&path));
                }
                self.remote.wait(failed, failures)?;
            }
        }
        let write_error = |error| unwritable(&path, error);
        partial.file.sync_all().map_err(write_error)?;
        let got = partial.digest.hex();
        if got != identity.etag {
            drop(fs::remove_file(&path));
            return Err(HubError::WrongChecksum { file: name.clone(), got, wanted: identity.etag.clone() });
        }
        fs::rename(&path, &blob).map_err(write_error)
    }

    /// What an earlier attempt left, read again: its checksum goes on from there.
    fn resume(&mut self, name: &str, identity: &Identity, path: &Path) -> Result<Partial, HubError> {
        let opened = OpenOptions::new().read(true).append(true).create(true).open(path);
        let mut file = opened.map_err(|error| unwritable(path, error))?;
        let unreadable = |reason| HubError::Unreadable { path: path.to_owned(), reason };
        let total = file.metadata().map_err(unreadable)?.len();
        let mut partial = Partial {
            digest: Checksum::new(identity),
            bytes: 0,
            file: file.try_clone().map_err(unreadable)?,
        };
        if total > identity.bytes {
            partial.restart(identity, path)?;
            return Ok(partial);
        }
        let mut buffer = vec![0; CHUNK_BYTES];
        while partial.bytes < total {
            let count = file.read(&mut buffer).map_err(unreadable)?;
            if count == 0 {
                break;
            }
            partial.digest.update(&buffer[..count]);
            partial.bytes += count as u64;
            let flow = (self.progress)(Progress::Checking { file: name, bytes: partial.bytes, total });
            go_on(flow, partial.bytes, identity)?;
        }
        Ok(partial)
    }

    /// One connection's worth of bytes.
    fn attempt(
        &mut self,
        wanted: &Wanted,
        path: &Path,
        partial: &mut Partial,
        tally: &mut Tally,
    ) -> Result<(), Failed> {
        let Wanted { name, identity } = wanted;
        let start = partial.bytes;
        let mut response = self.remote.bytes(self.reference, self.commit, name, start)?;
        let range = header(response.headers(), "content-range").unwrap_or_default();
        let goes_on =
            response.status() == StatusCode::PARTIAL_CONTENT && range.starts_with(&format!("bytes {start}-"));
        if start > 0 && !goes_on {
            // The whole file comes, or another part of it: what was there is of no use.
            tally.done -= partial.bytes;
            tally.resumed = tally.resumed.saturating_sub(partial.bytes);
            partial.restart(identity, path)?;
            if response.status() != StatusCode::OK {
                let reason = format!("{} for bytes from {start} of {name}", response.status());
                return Err(cut(self.remote.endpoint(), reason));
            }
        }
        let mut body = response.body_mut().as_reader();
        let mut buffer = vec![0; CHUNK_BYTES];
        while partial.bytes < identity.bytes {
            let count = match body.read(&mut buffer) {
                Ok(0) => {
                    let reason = format!("{name} ends after {} of {} bytes", partial.bytes, identity.bytes);
                    return Err(cut(self.remote.endpoint(), reason));
                }
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(cut(self.remote.endpoint(), error.to_string())),
            };
            if partial.bytes + count as u64 > identity.bytes {
                return Err(HubError::TooLong { file: name.clone(), wanted: identity.bytes }.into());
            }
            partial.append(&buffer[..count], path, identity)?;
            tally.done += count as u64;
            let Tally { done: bytes, resumed, total } = *tally;
            let flow = (self.progress)(Progress::Downloading { file: name, bytes, resumed, total });
            go_on(flow, partial.bytes, identity)?;
        }
        // A byte more than promised, and the file is not the one that was promised.
        match body.read(&mut buffer[..1]) {
            Ok(count) if count > 0 => {
                Err(HubError::TooLong { file: name.clone(), wanted: identity.bytes }.into())
            }
            _ => Ok(()),
        }
    }
}

impl Partial {
    fn append(&mut self, bytes: &[u8], path: &Path, identity: &Identity) -> Result<(), Failed> {
        self.file.write_all(bytes).map_err(|error| {
            // What was written of this chunk is not hashed: the next attempt reads the file again.
            let error = match unwritable(path, error) {
                HubError::DiskFull { path, free, .. } => {
                    HubError::DiskFull { path, needed: identity.bytes - self.bytes, free }
                }
                other => other,
            };
            Failed { error, retry: Retry::Never }
        })?;
        self.digest.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn restart(&mut self, identity: &Identity, path: &Path) -> Result<(), HubError> {
        self.file.set_len(0).map_err(|error| unwritable(path, error))?;
        self.digest = Checksum::new(identity);
        self.bytes = 0;
        Ok(())
    }
}

/// Stops where that is wanted, and says what is kept.
fn go_on(flow: ControlFlow<()>, kept: u64, identity: &Identity) -> Result<(), HubError> {
    if flow.is_break() { Err(HubError::Stopped { kept, total: identity.bytes }) } else { Ok(()) }
}

/// The name of a blob that is not whole.
fn incomplete(blob: &Path) -> std::path::PathBuf {
    blob.with_added_extension("incomplete")
}

/// What the hub calls a file by: large files by their SHA-256, others as Git does.
pub(super) enum Checksum {
    Sha256(Sha256),
    Git(Sha1),
}

impl Checksum {
    pub(super) fn new(identity: &Identity) -> Checksum {
        if identity.etag.len() == 64 {
            return Checksum::Sha256(Sha256::new());
        }
        let mut digest = Sha1::new();
        digest.update(format!("blob {}\0", identity.bytes));
        Checksum::Git(digest)
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Checksum::Sha256(digest) => digest.update(bytes),
            Checksum::Git(digest) => digest.update(bytes),
        }
    }

    pub(super) fn hex(self) -> String {
        let bytes = match self {
            Checksum::Sha256(digest) => digest.finalize().to_vec(),
            Checksum::Git(digest) => digest.finalize().to_vec(),
        };
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_git_and_sha256() {
        let check = |etag_len: usize, wanted: &str| {
            let identity = Identity { etag: "0".repeat(etag_len), bytes: 6 };
            let mut checksum = Checksum::new(&identity);
            checksum.update(b"hel");
            checksum.update(b"lo\n");
            assert_eq!(checksum.hex(), wanted);
        };
        // `printf 'hello\n' | git hash-object --stdin`, and `| sha256sum`.
        check(40, "ce013625030ba8dba906f756967f9e9ca394464a");
        check(64, "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03");
    }
}
