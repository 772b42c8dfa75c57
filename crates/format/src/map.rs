//! The bytes of one model file: a read-only map, or a buffer that tests and tools hand in.
#![expect(unsafe_code, reason = "mapping a file and giving its pages back have no safe interface")]

use std::fs::{self, File};
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap, UncheckedAdvice};

use crate::Error;

/// One file's bytes and its path.
#[derive(Debug)]
pub(crate) struct Map {
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Map {
    /// Maps the regular file at `path`.
    pub(crate) fn open(path: &Path) -> Result<Map, Error> {
        let open = || {
            // Before it is opened: opening a pipe waits for a writer.
            if !fs::metadata(path)?.is_file() {
                return Err(Error::NotAFile);
            }
            let file = File::open(path)?;
            // SAFETY: the map is private to this struct and only ever read. What remains is the assumption that every
            // mapped file makes: nobody truncates or rewrites the file while it is open. A program that does can
            // change weights under us or stop the process with SIGBUS; it cannot make a read leave the map, because
            // every range was checked against the mapped length. Model files are written once and renamed into place.
            let map = unsafe { Mmap::map(&file)? };
            Ok(map)
        };
        let map = open().map_err(|error: Error| error.at(path))?;
        Ok(Map { path: path.to_path_buf(), bytes: Bytes::Mapped(map) })
    }

    /// A file that lives in memory, under a path that errors can name.
    pub(crate) fn from_bytes(path: &Path, bytes: Vec<u8>) -> Map {
        Map { path: path.to_path_buf(), bytes: Bytes::Owned(bytes) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Brings the pages of `part` into this process at once, where the system can: faults one by one take longer than
    /// copying what they bring. An error where reading them would stop the process.
    pub(crate) fn fetch(&self, part: &[u8]) -> io::Result<()> {
        let Bytes::Mapped(map) = &self.bytes else { return Ok(()) };
        let (map_range, part_range) = (map.as_ptr_range(), part.as_ptr_range());
        if part.is_empty() || part_range.start < map_range.start || part_range.end > map_range.end {
            return Ok(());
        }
        let begin = (part_range.start.addr() - map_range.start.addr()) / PAGE * PAGE;
        let end = part_range.end.addr() - map_range.start.addr();
        #[cfg(target_os = "linux")]
        let fetched = map.advise_range(Advice::PopulateRead, begin, end - begin);
        #[cfg(not(target_os = "linux"))]
        let fetched = map.advise_range(Advice::WillNeed, begin, end - begin);
        match fetched {
            Err(error) if error.raw_os_error() == Some(NOT_THERE) => {
                let reason = format!("{}: became shorter, or cannot be read", self.path.display());
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason))
            }
            // It is advice: older systems refuse it, and pages come when they are read.
            _ => Ok(()),
        }
    }

    /// Tells the operating system that the pages which lie wholly inside `part` are not needed for now. They leave
    /// this process's resident memory and come back from the file if they are read again. Bytes that are not of this
    /// map are left alone; a buffer has nothing to give back.
    pub(crate) fn release(&self, part: &[u8]) {
        let Bytes::Mapped(map) = &self.bytes else { return };
        let (map_range, part_range) = (map.as_ptr_range(), part.as_ptr_range());
        if part_range.start < map_range.start || part_range.end > map_range.end {
            return;
        }
        let begin = (part_range.start.addr() - map_range.start.addr()).next_multiple_of(PAGE);
        let end = (part_range.end.addr() - map_range.start.addr()) / PAGE * PAGE;
        if begin >= end {
            return;
        }
        // SAFETY: DONTNEED drops pages of a shared, read-only, file-backed map; the next read faults the same bytes
        // in from the file (under the assumption of `open`), so no reader can see a difference. It is advice: a
        // system that refuses it only keeps the pages resident.
        let _advice_only =
            unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, begin, end - begin) };
    }
}

/// The smallest page of the systems we run on. Where pages are larger, the advice reaches at most into a neighbouring
/// tensor's page, which then faults in again.
const PAGE: usize = 4096;
/// What Linux answers (EFAULT) where a page that is asked for cannot be had.
const NOT_THERE: i32 = 14;

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_became_shorter_is_an_error_before_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w");
        fs::write(&path, vec![7; 64 * PAGE]).unwrap();
        let map = Map::open(&path).unwrap();
        map.fetch(&map[3..60 * PAGE]).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(16 * PAGE as u64).unwrap();
        map.fetch(&map[..16 * PAGE]).unwrap();
        let error = map.fetch(&map[3..60 * PAGE]).unwrap_err();
        assert!(error.to_string().ends_with("w: became shorter, or cannot be read"), "{error}");
    }
}
