//! A tokenizer as structured output sees it: the bytes of every token, and how the model would spell given bytes.

use std::sync::Arc;

use fornax_form::Vocabulary;
use fornax_text::{Special, Tokenizer};

/// The vocabulary of a model that can choose `tokens` tokens.
pub(crate) fn vocabulary(tokenizer: &Arc<Tokenizer>, tokens: usize) -> Vocabulary {
    let ids = 0..u32::try_from(tokens).expect("token ids fit 32 bits");
    let bytes: Vec<Vec<u8>> = ids
        .map(|id| if tokenizer.is_control(id) { Vec::new() } else { tokenizer.token_bytes(id).to_vec() })
        .collect();
    let mut single = [None; 256];
    for (id, bytes) in (0..).zip(&bytes) {
        if let [byte] = bytes[..] {
            single[usize::from(byte)].get_or_insert(id);
        }
    }
    let shared = Arc::clone(tokenizer);
    Vocabulary {
        bytes,
        end_tokens: tokenizer.end_tokens().iter().copied().filter(|&id| (id as usize) < tokens).collect(),
        encode: Arc::new(move |bytes| spelling(&shared, &single, bytes)),
    }
}

/// The tokens that the model knows these bytes by. Parts of characters, which forced text may end in, are spelled by
/// single bytes; without tokens for those the rest is left to be chosen.
fn spelling(tokenizer: &Tokenizer, single: &[Option<u32>; 256], bytes: &[u8]) -> Vec<u32> {
    let mut tokens = Vec::new();
    for chunk in bytes.utf8_chunks() {
        let text = chunk.valid();
        if !text.is_empty() {
            match text_spelling(tokenizer, text) {
                Some(spelled) => tokens.extend(spelled),
                None => return tokens,
            }
        }
        for &byte in chunk.invalid() {
            match single[usize::from(byte)] {
                Some(token) => tokens.push(token),
                None => return tokens,
            }
        }
    }
    tokens
}

/// Where encoding puts a space before the first word, the text is encoded behind a line break, whose tokens are then
/// taken away.
fn text_spelling(tokenizer: &Tokenizer, text: &str) -> Option<Vec<u32>> {
    let encode = |text: &str| tokenizer.encode(text, Special::AsText).ok();
    let spells = |tokens: &[u32]| {
        let bytes = tokens.iter().flat_map(|&token| tokenizer.token_bytes(token));
        bytes.eq(text.as_bytes())
    };
    let plain = encode(text)?;
    if spells(&plain) {
        return Some(plain);
    }
    let broken = encode(&format!("\n{text}"))?;
    (0..broken.len()).map(|skip| broken[skip..].to_vec()).find(|rest| spells(rest))
}
