//! What a record is protected by: a checksum, or a key that nobody without it can read or forge a record of.

use std::{fs, path::Path};

use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    hkdf::{HKDF_SHA256, KeyType, Salt},
    rand::{SecureRandom, SystemRandom},
};
use sha2::{Digest, Sha256};

use crate::Error;

/// Fewer bytes are guessed.
pub const KEY_BYTES_MIN: usize = 32;

/// The content of a key file.
#[derive(Clone)]
pub struct Key(Vec<u8>);

impl Key {
    /// Reads a key file: at least 32 bytes, as `head -c 32 /dev/urandom` makes them.
    pub fn read(path: &Path) -> Result<Key, Error> {
        let bytes = fs::read(path).map_err(Error::io(path))?;
        match bytes.len() {
            short @ ..KEY_BYTES_MIN => Err(Error::ShortKey { path: path.to_owned(), bytes: short }),
            _ => Ok(Key(bytes)),
        }
    }

    /// What tells keys apart without telling anything of them.
    pub(crate) fn id(&self) -> [u8; 32] {
        self.derived(b"id")
    }

    fn derived(&self, label: &[u8]) -> [u8; 32] {
        let mut bytes = [0; 32];
        let secret = Salt::new(HKDF_SHA256, b"fornax pages, 1").extract(&self.0);
        let labels = [label];
        let expanded = secret.expand(&labels, Length(bytes.len())).expect("32 bytes are few");
        expanded.fill(&mut bytes).expect("as long as was asked for");
        bytes
    }
}

struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// How records are closed and opened.
pub(crate) enum Seal {
    /// SHA-256 over all of it.
    Checksum,
    /// AES-256-GCM with a random nonce; names are hidden, too.
    Key(Box<Sealed>),
}

pub(crate) struct Sealed {
    key: LessSafeKey,
    names: [u8; 32],
    random: SystemRandom,
}

/// Bytes of a nonce, which a record has room for in any case.
pub(crate) const NONCE_BYTES: usize = NONCE_LEN;

/// Bytes behind a record's content.
pub(crate) const CLOSING_BYTES: usize = 32;

impl Seal {
    pub(crate) fn new(key: Option<&Key>) -> Seal {
        let Some(key) = key else { return Seal::Checksum };
        let unbound = UnboundKey::new(&AES_256_GCM, &key.derived(b"seal")).expect("32 bytes are a key");
        let (names, random) = (key.derived(b"names"), SystemRandom::new());
        Seal::Key(Box::new(Sealed { key: LessSafeKey::new(unbound), names, random }))
    }

    /// A name as it is written: whoever has the disk and not the key cannot try whether a prompt is there.
    pub(crate) fn name(&self, name: &[u8]) -> [u8; 32] {
        let hash = match self {
            Seal::Checksum => Sha256::new(),
            Seal::Key(sealed) => Sha256::new().chain_update(sealed.names),
        };
        hash.chain_update(name).finalize().into()
    }

    /// A new nonce; `None` where the system gives no random numbers.
    pub(crate) fn nonce(&self) -> Option<[u8; NONCE_BYTES]> {
        let mut nonce = [0; NONCE_BYTES];
        match self {
            Seal::Checksum => Some(nonce),
            Seal::Key(sealed) => sealed.random.fill(&mut nonce).ok().map(|()| nonce),
        }
    }

    /// Closes `content`, which belongs to this header: what comes behind it.
    pub(crate) fn close(
        &self,
        nonce: [u8; NONCE_BYTES],
        header: &[u8],
        content: &mut [u8],
    ) -> Option<[u8; CLOSING_BYTES]> {
        let mut closing = [0; CLOSING_BYTES];
        match self {
            Seal::Checksum => {
                closing = Sha256::new().chain_update(header).chain_update(content).finalize().into();
            }
            Seal::Key(sealed) => {
                let nonce = Nonce::assume_unique_for_key(nonce);
                let tag = sealed.key.seal_in_place_separate_tag(nonce, Aad::from(header), content).ok()?;
                closing[..tag.as_ref().len()].copy_from_slice(tag.as_ref());
            }
        }
        Some(closing)
    }

    /// Opens what was closed, content and closing together; `None` if anything of it is not what it was.
    pub(crate) fn open(
        &self,
        nonce: [u8; NONCE_BYTES],
        header: &[u8],
        mut closed: Vec<u8>,
    ) -> Option<Vec<u8>> {
        let content = closed.len().checked_sub(CLOSING_BYTES)?;
        match self {
            Seal::Checksum => {
                let closing = closed.split_off(content);
                let wanted = Sha256::new().chain_update(header).chain_update(&closed).finalize();
                (*closing == *wanted).then_some(closed)
            }
            Seal::Key(sealed) => {
                let tag = AES_256_GCM.tag_len();
                if closed[content + tag..].iter().any(|&byte| byte != 0) {
                    return None;
                }
                closed.truncate(content + tag);
                let nonce = Nonce::assume_unique_for_key(nonce);
                sealed.key.open_in_place(nonce, Aad::from(header), &mut closed).ok()?;
                closed.truncate(content);
                Some(closed)
            }
        }
    }
}
