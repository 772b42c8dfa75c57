//! Reads little-endian fields from bytes that may lie about what follows.

use crate::Error;

/// A position in a file's bytes. Every read says what it reads, so that an error can.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes, at: 0 }
    }

    /// Offset of the next byte.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Bytes not read yet.
    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(crate) fn bytes(&mut self, what: &'static str, len: u64) -> Result<&'a [u8], Error> {
        let taken = usize::try_from(len).ok().and_then(|len| self.bytes[self.at..].get(..len));
        let Some(taken) = taken else {
            return Err(Error::Truncated { what, at: self.at, need: len, left: self.left() });
        };
        self.at += taken.len();
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Error> {
        let Some(&taken) = self.bytes[self.at..].first_chunk() else {
            return Err(Error::Truncated { what, at: self.at, need: N as u64, left: self.left() });
        };
        self.at += N;
        Ok(taken)
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, Error> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, Error> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things that each take at least `least` bytes: more of them than the file can hold is a lie that
    /// must be found before anything is allocated for them.
    pub(crate) fn count(&mut self, what: &'static str, least: usize) -> Result<usize, Error> {
        let count = self.u64(what)?;
        let most = self.left() / least;
        match usize::try_from(count) {
            Ok(fits) if fits <= most => Ok(fits),
            _ => Err(Error::Count { what, count, left: self.left(), most }),
        }
    }

    /// A string with its length in front.
    pub(crate) fn str(&mut self, what: &'static str) -> Result<&'a str, Error> {
        let len = self.u64(what)?;
        let at = self.at;
        let bytes = self.bytes(what, len)?;
        std::str::from_utf8(bytes).map_err(|error| Error::Utf8 {
            what,
            at,
            len: bytes.len(),
            valid_up_to: error.valid_up_to(),
        })
    }
}
