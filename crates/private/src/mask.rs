//! Masks: the keystream of ChaCha20 under a seed that lives as long as a session.
//!
//! A pad that blinds two messages gives away their difference. So a place in the stream is a [`Counter`], which is
//! neither copied nor set, only moved forward; and every connection has a seed of its own, so that a reconnection
//! cannot come back to a place either.

use chacha20::ChaCha20;
use chacha20::cipher::{KeyIvInit, StreamCipher};
use zeroize::Zeroize;

use crate::Error;

/// Bytes of a seed.
pub const SEED_BYTES: usize = 32;

/// Words of one stream: ChaCha20 counts its blocks of sixteen words with 32 bits.
pub const STREAM_WORDS: u64 = 16 << 32;

/// What a mask stream comes from. It is forgotten when it is dropped, and never shown.
pub struct Seed([u8; SEED_BYTES]);

impl Seed {
    /// A seed that came from elsewhere.
    pub fn new(bytes: [u8; SEED_BYTES]) -> Seed {
        Seed(bytes)
    }

    /// A new one from the operating system.
    pub fn random() -> Result<Seed, Error> {
        let mut bytes = [0; SEED_BYTES];
        random(&mut bytes)?;
        Ok(Seed(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8; SEED_BYTES] {
        &self.0
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// Fills `bytes` from the operating system.
pub(crate) fn random(bytes: &mut [u8]) -> Result<(), Error> {
    let failed = |error: getrandom::Error| Error::System {
        what: "the operating system gives no random numbers",
        reason: std::io::Error::other(error.to_string()),
    };
    getrandom::fill(bytes).map_err(failed)
}

/// A place in a mask stream, in words. It only moves forward, and there is one for each stream.
#[derive(Debug, Default)]
pub struct Counter(u64);

impl Counter {
    /// The words that are next.
    pub fn get(&self) -> u64 {
        self.0
    }

    /// Takes the next `words` words and returns where they begin.
    pub fn advance(&mut self, words: u64) -> Result<u64, Error> {
        let start = self.0;
        match start.checked_add(words).filter(|&end| end <= STREAM_WORDS) {
            Some(end) => self.0 = end,
            None => return Err(Error::Exhausted { used: start, wanted: words, limit: STREAM_WORDS }),
        }
        Ok(start)
    }
}

/// Where pads come from. The client has the cipher; tests of the claim have others.
pub trait Pads {
    /// Fills `pad` with the next words and returns their place in the stream.
    fn draw(&mut self, pad: &mut [u32]) -> Result<u64, Error>;
    /// Words drawn so far.
    fn position(&self) -> u64;
}

/// The masks of one session.
pub struct Masks {
    cipher: ChaCha20,
    counter: Counter,
}

impl Masks {
    /// The stream of a seed, from its beginning.
    pub fn new(seed: &Seed) -> Masks {
        // The key is used for one stream only, so the nonce has nothing to tell apart.
        Masks { cipher: ChaCha20::new(seed.bytes().into(), &[0; 12].into()), counter: Counter::default() }
    }
}

impl Pads for Masks {
    fn draw(&mut self, pad: &mut [u32]) -> Result<u64, Error> {
        let start = self.counter.advance(pad.len() as u64)?;
        pad.fill(0);
        self.cipher.apply_keystream(bytemuck::cast_slice_mut(pad));
        if cfg!(target_endian = "big") {
            pad.iter_mut().for_each(|word| *word = u32::from_le(*word));
        }
        Ok(start)
    }

    fn position(&self) -> u64 {
        self.counter.get()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_stream_is_the_one_of_rfc_8439() {
        // Section 2.3.2's key with the nonce and counter of this stream; the words are those of RFC 7539's test vector
        // 1 of appendix A.1 for the key of zeros.
        let mut pad = [0; 4];
        Masks::new(&Seed::new([0; SEED_BYTES])).draw(&mut pad).unwrap();
        assert_eq!(pad, [0xade0b876, 0x903df1a0, 0xe56a5d40, 0x28bd8653]);
    }

    #[test]
    fn pieces_of_any_length_are_the_stream() {
        let seed = || Seed::new([9; SEED_BYTES]);
        let mut whole = vec![0; 1000];
        Masks::new(&seed()).draw(&mut whole).unwrap();
        let (mut masks, mut pieces) = (Masks::new(&seed()), Vec::new());
        for len in [1, 15, 16, 17, 300, 651] {
            let mut pad = vec![7; len];
            assert_eq!(masks.draw(&mut pad).unwrap(), pieces.len() as u64);
            pieces.extend(pad);
        }
        assert_eq!(pieces, whole);
    }

    #[test]
    fn a_stream_ends_before_it_repeats() {
        let mut counter = Counter(STREAM_WORDS - 3);
        counter.advance(3).unwrap();
        let error = counter.advance(1).unwrap_err().to_string();
        assert_eq!(
            error,
            "the mask stream ends after 68719476736 words; 1 more after 68719476736 would repeat it"
        );
        assert!(Counter(1).advance(u64::MAX).is_err(), "no wrapping either");
    }

    proptest! {
        /// However sessions are opened, dropped and opened again, no place of any stream is taken twice, and no two
        /// streams have a seed in common.
        #[test]
        fn counters_never_repeat_across_reconnections(
            sessions in prop::collection::vec(prop::collection::vec(0_u64..5000, 0..20), 1..20),
        ) {
            let mut seen = HashSet::new();
            for draws in sessions {
                let seed = Seed::random().unwrap();
                let (mut counter, mut end) = (Counter::default(), 0);
                for words in draws {
                    let start = counter.advance(words).unwrap();
                    prop_assert_eq!(start, end, "a place is taken once, and none is left out");
                    end = start + words;
                }
                prop_assert!(seen.insert(*seed.bytes()), "a seed came twice");
            }
        }
    }
}
