//! Who may come in: keys from a file, compared in constant time.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;

use crate::{front::line::Line, trace::Span};

/// Keys shorter than this are guessed.
const KEY_CHARS_MIN: usize = 16;

/// Who asks. The front door sets it on every request that came with a key, or needs none.
#[derive(Clone)]
pub(crate) struct Caller {
    pub(crate) key: Key,
    /// The request's trace, where traces are wanted.
    pub(crate) span: Option<Arc<Span>>,
    /// The request's line in the log, which ends with it.
    pub(crate) line: Arc<Line>,
}

/// The keys of a file, or nobody's.
pub(crate) struct Keys {
    file: Option<PathBuf>,
    per_key_max: usize,
    /// Replaced as a whole when the file is read again; held for as long as it takes to copy a pointer.
    known: Mutex<Arc<[Key]>>,
}

/// A key, as far as it is remembered.
#[derive(Clone)]
pub(crate) struct Key {
    /// The first bytes of its hash, for logs.
    pub(crate) label: String,
    /// Requests that it may have under way.
    pub(crate) permits: Arc<Semaphore>,
    digest: [u8; 32],
}

/// Why a file of keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// It cannot be read.
    #[error("cannot read the keys in {}: {reason}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: io::Error,
    },
    /// It holds none.
    #[error("{} holds no key; write one a line, each of at least 16 characters", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// One is too short to be a secret.
    #[error("line {line} of {} is a key of {chars} characters; at least 16 are needed", path.display())]
    Short {
        /// The file.
        path: PathBuf,
        /// Which line.
        line: usize,
        /// Its length.
        chars: usize,
    },
    /// It is no key of printable characters.
    #[error("line {line} of {} holds characters that no header can carry", path.display())]
    Unprintable {
        /// The file.
        path: PathBuf,
        /// Which line.
        line: usize,
    },
}

impl Keys {
    /// Reads the file; without one, everybody is one and the same.
    pub(crate) fn open(file: Option<&Path>, per_key_max: usize) -> Result<Keys, KeysError> {
        let keys = Keys {
            file: file.map(Path::to_owned),
            per_key_max,
            known: Mutex::new(Arc::new([Key::new(b"", per_key_max)])),
        };
        keys.reload()?;
        Ok(keys)
    }

    /// Whether a key is needed.
    pub(crate) fn are_needed(&self) -> bool {
        self.file.is_some()
    }

    /// Reads the file again; how many keys there are. What is wrong with it leaves the old ones.
    pub(crate) fn reload(&self) -> Result<usize, KeysError> {
        let Some(path) = &self.file else { return Ok(0) };
        let text =
            std::fs::read_to_string(path).map_err(|reason| KeysError::Read { path: path.clone(), reason })?;
        let old = self.known();
        let mut keys: Vec<Key> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let (line, key) = (index + 1, line.trim());
            if key.is_empty() || key.starts_with('#') {
                continue;
            }
            if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(KeysError::Unprintable { path: path.clone(), line });
            }
            if key.len() < KEY_CHARS_MIN {
                return Err(KeysError::Short { path: path.clone(), line, chars: key.len() });
            }
            let key = Key::new(key.as_bytes(), self.per_key_max);
            // A key that stays keeps its count of requests under way.
            keys.push(old.iter().find(|known| known.digest == key.digest).cloned().unwrap_or(key));
        }
        if keys.is_empty() {
            return Err(KeysError::Empty { path: path.clone() });
        }
        let count = keys.len();
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = keys.into();
        Ok(count)
    }

    /// Whose key it is. Without keys everybody is let in.
    pub(crate) fn find(&self, sent: Option<&[u8]>) -> Option<Key> {
        let known = self.known();
        if !self.are_needed() {
            return known.first().cloned();
        }
        let digest: [u8; 32] = Sha256::digest(sent?).into();
        // All are compared, and all of each: time tells neither which key was close nor how close.
        let mut found = None;
        for key in known.iter() {
            if bool::from(key.digest.ct_eq(&digest)) {
                found = Some(key);
            }
        }
        found.cloned()
    }

    fn known(&self) -> Arc<[Key]> {
        Arc::clone(&self.known.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Key {
    fn new(key: &[u8], permits: usize) -> Key {
        let digest: [u8; 32] = Sha256::digest(key).into();
        let label = if key.is_empty() {
            "local".to_owned()
        } else {
            digest[..4].iter().map(|byte| format!("{byte:02x}")).collect()
        };
        Key { label, permits: Arc::new(Semaphore::new(permits)), digest }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn keys_are_found_whole_and_read_again_on_demand() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        fs::write(&file, "# ours\nfirst-key-0123456789\n\n  second-key-0123456789 \n").unwrap();
        let keys = Keys::open(Some(&file), 2).unwrap();
        let found = |key: &str| keys.find(Some(key.as_bytes())).is_some();
        assert!(found("first-key-0123456789") && found("second-key-0123456789"));
        assert!(!found("first-key-012345678") && !found("first-key-01234567890") && !found(""));
        assert!(!found("# ours") && keys.find(None).is_none());

        let held = keys.find(Some(b"second-key-0123456789")).unwrap().permits.try_acquire_owned().unwrap();
        fs::write(&file, "second-key-0123456789\nthird-key-0123456789\n").unwrap();
        assert_eq!(keys.reload().unwrap(), 2);
        let found = |key: &str| keys.find(Some(key.as_bytes()));
        assert!(found("first-key-0123456789").is_none() && found("third-key-0123456789").is_some());
        let permits = found("second-key-0123456789").unwrap().permits;
        assert_eq!(permits.available_permits(), 1, "what is under way still counts");
        drop(held);
    }

    #[test]
    fn a_file_that_is_wrong_is_refused_and_the_old_keys_stay() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        fs::write(&file, "a-key-of-good-length\n").unwrap();
        let keys = Keys::open(Some(&file), 1).unwrap();
        let check = |text: &str, wanted: &str| {
            fs::write(&file, text).unwrap();
            let error = keys.reload().unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
            assert!(!error.contains("secret"), "{error}");
            assert!(keys.find(Some(b"a-key-of-good-length")).is_some());
        };
        check("# nothing\n", "holds no key");
        check("a-key-of-good-length\nsecret\n", "line 2");
        check("a-secret-with a space in it\n", "no header can carry");
        fs::remove_file(&file).unwrap();
        assert!(matches!(keys.reload(), Err(KeysError::Read { .. })));
        assert!(matches!(Keys::open(Some(&file), 1), Err(KeysError::Read { .. })));
    }
}
