//! The bytes of one model file: a read-only map, or a buffer that tests and tools hand in.
#![expect(unsafe_code, reason = "mapping a file and giving its pages back have no safe interface")]

use std::fs::{self, File};
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, UncheckedAdvice};

use crate::Error;

/// One file's bytes and its path.
#[derive(Debug)]
pub(crate) struct Map {
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Mapped {
        map: Mmap,
        /// The same file, for whoever wants its bytes in memory of his own.
        #[cfg_attr(not(unix), expect(dead_code, reason = "reading at an offset is a function of Unix"))]
        file: File,
    },
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
            Ok(Bytes::Mapped { map, file })
        };
        let bytes = open().map_err(|error: Error| error.at(path))?;
        Ok(Map { path: path.to_path_buf(), bytes })
    }

    /// A file that lives in memory, under a path that errors can name.
    pub(crate) fn from_bytes(path: &Path, bytes: Vec<u8>) -> Map {
        Map { path: path.to_path_buf(), bytes: Bytes::Owned(bytes) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Copies `part`, some of these bytes, to `to`, which is as long. Bytes of a mapped file are read from it and no
    /// page of it is mapped: where several threads do that, page tables take longer than the copy. A file that does not
    /// hold them any more is an error, where a read through the map would stop the process.
    pub(crate) fn read(&self, part: &[u8], to: &mut [u8]) -> io::Result<()> {
        assert_eq!(part.len(), to.len(), "as long");
        #[cfg(unix)]
        if let (Bytes::Mapped { file, .. }, Some(at)) = (&self.bytes, self.offset(part)) {
            let read = std::os::unix::fs::FileExt::read_exact_at(file, to, at as u64);
            return read.map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => {
                    io::Error::new(error.kind(), format!("{}: became shorter", self.path.display()))
                }
                kind => io::Error::new(kind, format!("{}: cannot be read: {error}", self.path.display())),
            });
        }
        to.copy_from_slice(part);
        Ok(())
    }

    /// Where `part` begins, if it lies in here.
    fn offset(&self, part: &[u8]) -> Option<usize> {
        let (all, part) = (self.as_ptr_range(), part.as_ptr_range());
        (all.start <= part.start && part.end <= all.end).then(|| part.start.addr() - all.start.addr())
    }

    /// Tells the operating system that the pages which lie wholly inside `part` are not needed for now. They leave
    /// this process's resident memory and come back from the file if they are read again. Bytes that are not of this
    /// map are left alone; a buffer has nothing to give back.
    pub(crate) fn release(&self, part: &[u8]) {
        let (Bytes::Mapped { map, .. }, Some(at)) = (&self.bytes, self.offset(part)) else { return };
        let (begin, end) = (at.next_multiple_of(PAGE), (at + part.len()) / PAGE * PAGE);
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

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped { map, .. } => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of bytes that say where they are, and its map.
    fn mapped(bytes: usize) -> (tempfile::TempDir, PathBuf, Map) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w");
        let content: Vec<u8> =
            (0..bytes as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        fs::write(&path, content).unwrap();
        let map = Map::open(&path).unwrap();
        (folder, path, map)
    }

    #[test]
    fn what_is_read_is_what_is_mapped_wherever_it_begins() {
        let (_folder, _, map) = mapped(5 * PAGE + 123);
        let len = map.len();
        for range in [0..len, 1..2, 3..4 * PAGE + 5, PAGE - 1..PAGE + 1, len - 1..len, 7..7, len..len] {
            let mut to = vec![0xaa; range.len()];
            map.read(&map[range.clone()], &mut to).unwrap();
            assert!(to == map[range.clone()], "{range:?}");
        }
    }

    #[test]
    fn bytes_of_no_file_are_copied() {
        let bytes: Vec<u8> = (0..200).collect();
        let mut to = [0; 20];
        let owned = Map::from_bytes(Path::new("w"), bytes.clone());
        owned.read(&owned[100..120], &mut to).unwrap();
        assert_eq!(to, bytes[100..120]);
        let (_folder, _, map) = mapped(PAGE);
        map.read(&bytes[50..70], &mut to).unwrap();
        assert_eq!(to, bytes[50..70]);
    }

    #[test]
    #[cfg(unix)]
    fn a_file_that_became_shorter_is_an_error_that_says_so() {
        let (_folder, path, map) = mapped(64 * PAGE);
        let mut to = vec![0; 57 * PAGE];
        map.read(&map[3 * PAGE..60 * PAGE], &mut to).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(16 * PAGE as u64).unwrap();
        map.read(&map[..16 * PAGE], &mut to[..16 * PAGE]).unwrap();
        for range in [3 * PAGE..60 * PAGE, 15 * PAGE..16 * PAGE + 1, 40 * PAGE..41 * PAGE] {
            let error = map.read(&map[range.clone()], &mut to[..range.len()]).unwrap_err();
            assert!(error.to_string().ends_with("w: became shorter"), "{error}");
        }
    }
}
