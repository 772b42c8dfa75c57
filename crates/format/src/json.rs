//! Small JSON documents beside the weights.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::Error;
use crate::map::Map;

/// Reads the document at `path`, which may be at most `most` bytes long: parsed JSON can take thirty times the room
/// of its text, so an absurd document must be refused before it is parsed.
pub(crate) fn read<T: DeserializeOwned>(path: &Path, most: u64) -> Result<T, Error> {
    parse(&Map::open(path)?, most).map_err(|error| error.at(path))
}

/// Like [`read`], `None` where nothing exists at `path`.
pub(crate) fn read_if_there<T: DeserializeOwned>(path: &Path, most: u64) -> Result<Option<T>, Error> {
    match read(path, most) {
        Err(error) if matches!(error.fault(), Error::NotFound) => Ok(None),
        read => read.map(Some),
    }
}

pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8], most: u64) -> Result<T, Error> {
    let len = bytes.len() as u64;
    if len > most {
        return Err(Error::TooLong { len, most });
    }
    serde_json::from_slice(bytes).map_err(Error::Json)
}
