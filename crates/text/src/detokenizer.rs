//! Tokens to text, one at a time.

use std::{ops::Deref, sync::Arc};

use crate::Tokenizer;

/// Turns tokens into text as they come. Only whole characters are given out: bytes that may still become one are
/// held. The parts joined are exactly [`Tokenizer::decode`] of the whole.
///
/// The tokenizer is borrowed, or shared (an `Arc`) by an answer that outlives whoever began it.
#[derive(Debug)]
pub struct Detokenizer<T> {
    tokenizer: T,
    /// The beginning of a character: at most three bytes.
    held: Vec<u8>,
    /// The space that encoding put before the first word is still to be taken away.
    strip_space: bool,
    /// Control tokens that are written out all the same, ascending: whoever reads the text looks for them.
    shown: Arc<[u32]>,
}

impl<T: Deref<Target = Tokenizer>> Detokenizer<T> {
    /// For a text that starts here.
    pub fn new(tokenizer: T) -> Detokenizer<T> {
        let strip_space = tokenizer.strips_space();
        Detokenizer { tokenizer, held: Vec::new(), strip_space, shown: Arc::new([]) }
    }

    /// For a text that goes on from an earlier one: a space at its start is its own.
    pub fn continuing(tokenizer: T) -> Detokenizer<T> {
        Detokenizer { strip_space: false, ..Detokenizer::new(tokenizer) }
    }

    /// Writes out these control tokens (ascending), which are silent otherwise.
    pub fn showing(self, shown: Arc<[u32]>) -> Detokenizer<T> {
        Detokenizer { shown, ..self }
    }

    /// The text that `token` completes; control tokens are silent.
    pub fn push(&mut self, token: u32) -> String {
        if self.tokenizer.is_control(token) && self.shown.binary_search(&token).is_err() {
            return String::new();
        }
        let mut bytes = self.tokenizer.token_bytes(token);
        if self.strip_space && !bytes.is_empty() {
            self.strip_space = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.held.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = self.held.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(e) => {
                    let (valid, broken) = rest.split_at(e.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = broken;
                    // No length: the end of input came inside a character that may still be completed.
                    let Some(len) = e.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[len..];
                }
            }
        }
        self.held = rest.to_vec();
        text
    }

    /// What was held: U+FFFD if a character was left unfinished.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.held).into_owned()
    }
}
