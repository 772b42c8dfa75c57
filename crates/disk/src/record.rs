//! The bytes of a segment: a head, then records one behind the other.

use sha2::{Digest, Sha256};

use crate::seal::{CLOSING_BYTES, NONCE_BYTES, Seal};

/// What a segment begins with: what it is, in which version, and whose.
pub(crate) const SEGMENT_BYTES: usize = 64;

const SEGMENT_MAGIC: [u8; 16] = *b"fornax pages  1\n";

/// The head of a segment of this store.
pub(crate) fn segment_head(identity: &[u8; 32]) -> [u8; SEGMENT_BYTES] {
    let mut head = [0; SEGMENT_BYTES];
    head[..16].copy_from_slice(&SEGMENT_MAGIC);
    head[16..48].copy_from_slice(identity);
    let check = Sha256::digest(&head[..48]);
    head[48..].copy_from_slice(&check[..16]);
    head
}

/// Bytes of a record's head.
pub(crate) const HEAD_BYTES: usize = 72;

const RECORD_MAGIC: [u8; 4] = *b"page";

/// What stands before a record's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) name: [u8; 32],
    /// Bytes of the content.
    pub(crate) len: u32,
    /// The copy's own fingerprint.
    pub(crate) fingerprint: u64,
    pub(crate) nonce: [u8; NONCE_BYTES],
}

impl Head {
    /// Bytes of the whole record.
    pub(crate) fn record_bytes(&self) -> u64 {
        (HEAD_BYTES + CLOSING_BYTES) as u64 + u64::from(self.len)
    }

    pub(crate) fn bytes(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&RECORD_MAGIC);
        bytes[4..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.fingerprint.to_le_bytes());
        bytes[16..28].copy_from_slice(&self.nonce);
        bytes[28..60].copy_from_slice(&self.name);
        // A length that is not what was written would lead into the middle of something else.
        let check = Sha256::digest(&bytes[..60]);
        bytes[60..].copy_from_slice(&check[..12]);
        bytes
    }

    /// `None` if these bytes are no head.
    pub(crate) fn parse(bytes: &[u8; HEAD_BYTES]) -> Option<Head> {
        let array = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let (mut name, mut nonce, mut fingerprint) = ([0; 32], [0; NONCE_BYTES], [0; 8]);
        name.copy_from_slice(&bytes[28..60]);
        nonce.copy_from_slice(&bytes[16..28]);
        fingerprint.copy_from_slice(&bytes[8..16]);
        let head = Head {
            name,
            len: u32::from_le_bytes(array(4)),
            fingerprint: u64::from_le_bytes(fingerprint),
            nonce,
        };
        (head.bytes() == *bytes).then_some(head)
    }
}

/// A whole record; `None` where the system gives no random numbers, or a page is larger than anything.
pub(crate) fn written(seal: &Seal, name: [u8; 32], fingerprint: u64, content: &[u8]) -> Option<Vec<u8>> {
    let head = Head { name, len: u32::try_from(content.len()).ok()?, fingerprint, nonce: seal.nonce()? };
    let bytes = head.bytes();
    let mut record = Vec::with_capacity(HEAD_BYTES + content.len() + CLOSING_BYTES);
    record.extend_from_slice(&bytes);
    record.extend_from_slice(content);
    let closing = seal.close(head.nonce, &bytes, &mut record[HEAD_BYTES..])?;
    record.extend_from_slice(&closing);
    Some(record)
}

/// The content of a whole record, if it is the one of this name and nothing of it was changed.
pub(crate) fn read(seal: &Seal, name: &[u8; 32], mut record: Vec<u8>) -> Option<(Vec<u8>, u64)> {
    if record.len() < HEAD_BYTES {
        return None;
    }
    let closed = record.split_off(HEAD_BYTES);
    let bytes: [u8; HEAD_BYTES] = record.try_into().ok()?;
    let head = Head::parse(&bytes).filter(|head| head.name == *name)?;
    let content = seal.open(head.nonce, &bytes, closed)?;
    (content.len() == head.len as usize).then_some((content, head.fingerprint))
}
