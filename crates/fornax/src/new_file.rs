//! A GGUF file that is being made: it has its name only when it is whole.

use std::fs::Permissions;
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use fornax_format::write::{ALIGNMENT, Planned, header};
use fornax_format::{DType, Value};
use tempfile::NamedTempFile;

use crate::Error;
use crate::units::binary;

/// Why a file cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum NewFileError {
    /// The disk has no room for it.
    #[error("{} needs {}, and its disk has {} left", path.display(), binary(*.needed), binary(*.free))]
    DiskFull {
        /// The file that was to be made.
        path: PathBuf,
        /// Its size.
        needed: u64,
        /// What is left.
        free: u64,
    },
    /// It cannot be written.
    #[error("cannot write {}: {reason}", path.display())]
    Write {
        /// The file that was to be made.
        path: PathBuf,
        /// Why.
        reason: io::Error,
    },
}

/// The file, which is gone with its contents where it is not finished.
pub(crate) struct NewFile<'a> {
    out: &'a Path,
    to: BufWriter<NamedTempFile>,
    written: u64,
    total: u64,
    /// Told the bytes written and all bytes; stops it by breaking.
    progress: &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>,
}

impl<'a> NewFile<'a> {
    /// Begins the file with its header, where there is room for all of it. What exists is not replaced.
    pub(crate) fn create(
        out: &'a Path,
        pairs: &[(String, Value)],
        planned: &[Planned],
        progress: &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<NewFile<'a>, Error> {
        let header = header(pairs.iter().map(|(key, value)| (&**key, value)), planned)?;
        let mut total = header.len() as u64;
        for tensor in planned {
            total += tensor.padded_bytes()? as u64;
        }
        let wrong = |reason: io::Error| Error::from(NewFileError::Write { path: out.to_owned(), reason });
        let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        check_room(folder, out, total)?;
        if out.exists() {
            return Err(wrong(io::ErrorKind::AlreadyExists.into()));
        }
        let file = tempfile::Builder::new()
            .prefix(".fornax-")
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(folder)
            .map_err(wrong)?;
        let to = BufWriter::with_capacity(1 << 20, file);
        let mut file = NewFile { out, to, written: 0, total, progress };
        file.write(&header)?;
        Ok(file)
    }

    /// Goes on with these bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.to.write_all(bytes).map_err(|reason| self.wrong(reason))?;
        self.written += bytes.len() as u64;
        match (self.progress)(self.written, self.total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(self.wrong(io::ErrorKind::Interrupted.into())),
        }
    }

    /// Fills up to where the next tensor begins.
    pub(crate) fn end(&mut self, tensor: &Planned) -> Result<(), Error> {
        let pad = tensor.padded_bytes()? - tensor.bytes()?;
        self.to.write_all(&[0; ALIGNMENT][..pad]).map_err(|reason| self.wrong(reason))?;
        self.written += pad as u64;
        Ok(())
    }

    /// The file as long as it will be, with nothing behind what is written so far, under a name that goes with this.
    pub(crate) fn as_if_whole(&mut self) -> Result<&Path, Error> {
        self.to.flush().map_err(|reason| self.wrong(reason))?;
        self.to.get_ref().as_file().set_len(self.total).map_err(|reason| self.wrong(reason))?;
        Ok(self.to.get_ref().path())
    }

    /// Gives the file its name, and says how large it is.
    pub(crate) fn finish(self) -> Result<u64, Error> {
        // The file has its whole length from the start, so what is missing would be zeros.
        assert_eq!(self.written, self.total, "every planned byte is written");
        let (out, written) = (self.out, self.written);
        let wrong = |reason: io::Error| Error::from(NewFileError::Write { path: out.to_owned(), reason });
        let file = self.to.into_inner().map_err(|error| wrong(error.into_error()))?;
        file.as_file().sync_all().map_err(wrong)?;
        file.persist_noclobber(out).map_err(|error| wrong(error.error))?;
        Ok(written)
    }

    fn wrong(&self, reason: io::Error) -> Error {
        NewFileError::Write { path: self.out.to_owned(), reason }.into()
    }
}

/// How many tensors are in each type, in the order in which they first come.
pub(crate) fn types_of(planned: &[Planned]) -> Vec<(DType, usize)> {
    let mut types: Vec<(DType, usize)> = Vec::new();
    for tensor in planned {
        match types.iter_mut().find(|(dtype, _)| *dtype == tensor.dtype) {
            Some((_, count)) => *count += 1,
            None => types.push((tensor.dtype, 1)),
        }
    }
    types
}

fn check_room(folder: &Path, out: &Path, needed: u64) -> Result<(), Error> {
    // A system that does not say is believed to have room.
    let Ok(room) = rustix::fs::statvfs(folder) else { return Ok(()) };
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    match free < needed {
        true => Err(NewFileError::DiskFull { path: out.to_owned(), needed, free }.into()),
        false => Ok(()),
    }
}
