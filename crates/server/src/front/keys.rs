//! Who may come in: keys from a file, compared in constant time.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use axum::http::StatusCode;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;

use crate::{
    error::{ApiError, Code},
    front::line::Line,
    secret,
    trace::Span,
};

/// Keys shorter than this are guessed.
const KEY_CHARS_MIN: usize = 16;

/// Whose a request is, where several share the server; `None` where all requests are one's. Tenants have shares of what
/// there is, and see nothing of each other.
pub(crate) type Tenant = Option<Arc<str>>;

/// Who asks. The front door sets it on every request that came with a key, or needs none.
#[derive(Clone)]
pub(crate) struct Caller {
    pub(crate) key: Key,
    /// The request's trace, where traces are wanted.
    pub(crate) span: Option<Arc<Span>>,
    /// The request's line in the log, which ends with it.
    pub(crate) line: Arc<Line>,
}

impl Caller {
    pub(crate) fn tenant(&self) -> &Tenant {
        &self.key.tenant
    }

    /// Refuses what this key may not do, with the word that allows it.
    pub(crate) fn check_right(&self, may: bool, what: &str, word: &str) -> Result<(), ApiError> {
        if may {
            return Ok(());
        }
        let message = format!(
            "this key may not {what}; the operator allows it by the word `{word}` behind the key in its file"
        );
        Err(ApiError { status: Some(StatusCode::FORBIDDEN), ..ApiError::new(Code::Unauthorized, message) })
    }
}

/// What every key may.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rights {
    /// Requests under way.
    pub(crate) requests_max: usize,
    /// Whether requests may go before others.
    pub(crate) urgent: bool,
    /// Whether adapters may be loaded and unloaded.
    pub(crate) adapters: bool,
    /// Whether models may be made of others and forgotten, put to sleep and woken.
    pub(crate) models: bool,
}

/// The keys of a file, or nobody's.
pub(crate) struct Keys {
    file: Option<PathBuf>,
    rights: Rights,
    /// Replaced as a whole when the file is read again; held for as long as it takes to copy a pointer.
    known: Mutex<Arc<[Key]>>,
}

/// A key, as far as it is remembered.
#[derive(Clone)]
pub(crate) struct Key {
    /// The first bytes of its hash, for logs.
    pub(crate) label: String,
    /// Whose it is: the name beside it in the file, or its label. Jobs and schemas are kept under it.
    pub(crate) owner: Arc<str>,
    /// The same, where there are others.
    pub(crate) tenant: Tenant,
    /// Whether its requests may go before others.
    pub(crate) urgent: bool,
    /// Whether it may load and unload adapters, which others use too.
    pub(crate) adapters: bool,
    /// Whether it may make models of others and have them forgotten, and put models to sleep and wake them.
    pub(crate) models: bool,
    /// Requests that it may have under way, to the last byte of their answers.
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
    /// What stands behind a key is nothing that is known.
    #[error("line {line} of {}: behind a key may stand owner=NAME, priority, adapters and models, and nothing else", path.display())]
    Option {
        /// The file.
        path: PathBuf,
        /// Which line.
        line: usize,
    },
    /// Two keys cannot be told apart by what they are called.
    #[error("line {line} of {} is a key whose label is another's; choose another key or add owner=NAME", path.display())]
    Alike {
        /// The file.
        path: PathBuf,
        /// Which line.
        line: usize,
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
    pub(crate) fn open(file: Option<&Path>, rights: Rights) -> Result<Keys, KeysError> {
        let keys = Keys {
            file: file.map(Path::to_owned),
            rights,
            known: Mutex::new(Arc::new([Key::new(
                b"",
                None,
                Rights { urgent: true, adapters: true, models: true, ..rights },
            )])),
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
        let text = secret::check(path).and_then(|()| std::fs::read_to_string(path));
        let text = text.map_err(|reason| KeysError::Read { path: path.clone(), reason })?;
        let old = self.known();
        let mut keys: Vec<Key> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let (line, mut words) = (index + 1, line.split([' ', '\t']).filter(|word| !word.is_empty()));
            let Some(key) = words.next().filter(|key| !key.starts_with('#')) else { continue };
            if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(KeysError::Unprintable { path: path.clone(), line });
            }
            if key.len() < KEY_CHARS_MIN {
                return Err(KeysError::Short { path: path.clone(), line, chars: key.len() });
            }
            let (mut owner, mut rights) = (None, self.rights);
            for word in words {
                match word.strip_prefix("owner=") {
                    Some(name) if is_name(name) => owner = Some(name),
                    None if word == "priority" => rights.urgent = true,
                    None if word == "adapters" => rights.adapters = true,
                    None if word == "models" => rights.models = true,
                    _ => return Err(KeysError::Option { path: path.clone(), line }),
                }
            }
            let mut key = Key::new(key.as_bytes(), owner, rights);
            // A key that stays keeps its count of requests under way.
            if let Some(known) = old.iter().find(|known| known.digest == key.digest) {
                key.permits = Arc::clone(&known.permits);
            }
            if owner.is_none()
                && keys.iter().any(|other| other.owner == key.owner && other.digest != key.digest)
            {
                return Err(KeysError::Alike { path: path.clone(), line });
            }
            keys.push(key);
        }
        if keys.is_empty() {
            return Err(KeysError::Empty { path: path.clone() });
        }
        let count = keys.len();
        if keys.iter().any(|key| key.owner != keys[0].owner) {
            for key in &mut keys {
                key.tenant = Some(Arc::clone(&key.owner));
            }
        }
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = keys.into();
        Ok(count)
    }

    /// What an owner of jobs is among those who ask now, and whether one of its keys may go before others.
    pub(crate) fn tenant_of(&self, owner: &str) -> (Tenant, bool) {
        let known = self.known();
        match known.iter().find(|key| *key.owner == *owner) {
            Some(key) => {
                let urgent = known.iter().any(|key| *key.owner == *owner && key.urgent);
                (key.tenant.clone(), urgent)
            }
            // Whose key is gone still has jobs.
            None => (known.iter().any(|key| key.tenant.is_some()).then(|| owner.into()), false),
        }
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
    fn new(key: &[u8], owner: Option<&str>, rights: Rights) -> Key {
        let digest: [u8; 32] = Sha256::digest(key).into();
        let label = if key.is_empty() {
            "local".to_owned()
        } else {
            digest[..4].iter().map(|byte| format!("{byte:02x}")).collect()
        };
        Key {
            owner: owner.unwrap_or(&label).into(),
            tenant: None,
            urgent: rights.urgent,
            adapters: rights.adapters,
            models: rights.models,
            label,
            permits: Arc::new(Semaphore::new(rights.requests_max)),
            digest,
        }
    }
}

/// A name that an operator may give an owner.
fn is_name(name: &str) -> bool {
    let sane = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=64).contains(&name.len()) && name.bytes().all(sane)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const RIGHTS: Rights = Rights { requests_max: 2, urgent: false, adapters: false, models: false };

    #[test]
    fn owners_are_told_apart_where_there_are_several() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        let (old, new, other) = ("first-key-0123456789", "second-key-0123456789", "third-key-0123456789");
        fs::write(&file, format!("{old} owner=us\n{new} priority owner=us\n")).unwrap();
        let keys = Keys::open(Some(&file), RIGHTS).unwrap();
        let find = |key: &str| keys.find(Some(key.as_bytes())).unwrap();
        // Two keys of one owner, while one takes the other's place: nobody else is there.
        assert_eq!((&*find(old).owner, find(old).tenant, find(old).urgent), ("us", None, false));
        assert_eq!((&*find(new).owner, find(new).tenant, find(new).urgent), ("us", None, true));
        fs::write(&file, format!("{old} owner=us\n{new} owner=us\n{other}\n")).unwrap();
        keys.reload().unwrap();
        assert_eq!((find(old).tenant.as_deref(), find(new).tenant.as_deref()), (Some("us"), Some("us")));
        let own = find(other);
        assert_eq!((own.tenant.as_deref(), &*own.owner), (Some(&*own.label), &*own.label));
        assert_eq!(keys.tenant_of("gone").0.as_deref(), Some("gone"), "its jobs are nobody else's");
        // Without keys everybody is one, who may do everything.
        let local = Keys::open(None, RIGHTS).unwrap().find(None).unwrap();
        assert_eq!((&*local.owner, local.tenant, local.urgent), ("local", None, true));
        assert!(
            local.adapters && !find(old).adapters,
            "those who use one server's adapters are not those who load"
        );
        fs::write(&file, format!("{old} owner=us\n{new} adapters priority\n")).unwrap();
        keys.reload().unwrap();
        assert!(find(new).adapters && find(new).urgent && !find(old).adapters);
    }

    #[test]
    fn keys_are_found_whole_and_read_again_on_demand() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        fs::write(&file, "# ours\nfirst-key-0123456789\n\n  second-key-0123456789 \n").unwrap();
        let keys = Keys::open(Some(&file), RIGHTS).unwrap();
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
        let keys = Keys::open(Some(&file), RIGHTS).unwrap();
        let check = |text: &str, wanted: &str| {
            fs::write(&file, text).unwrap();
            let error = keys.reload().unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
            assert!(!error.contains("secret"), "{error}");
            assert!(keys.find(Some(b"a-key-of-good-length")).is_some());
        };
        check("# nothing\n", "holds no key");
        check("a-key-of-good-length\nsecret\n", "line 2");
        check(
            "a-secret-of-good-length with words\n",
            "owner=NAME, priority, adapters and models, and nothing else",
        );
        check(
            "a-secret-with-an-owner owner=a/b\n",
            "owner=NAME, priority, adapters and models, and nothing else",
        );
        check("a-secret-with-an-\u{fc}mlaut\n", "no header can carry");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;

            let mode = |mode: u32| fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            mode(0o622);
            check("another-key-of-good-length\n", "may write it (mode 0622); use chmod 600");
            mode(0o640);
            fs::write(&file, "a-key-of-good-length\n").unwrap();
            assert_eq!(keys.reload().unwrap(), 1, "a group may read it");
        }
        fs::remove_file(&file).unwrap();
        assert!(matches!(keys.reload(), Err(KeysError::Read { .. })));
        assert!(matches!(Keys::open(Some(&file), RIGHTS), Err(KeysError::Read { .. })));
    }
}
