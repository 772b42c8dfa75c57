//! Forms from callers: compiled, then followed by an answer that is chosen at random among what is allowed.

use std::sync::Arc;

use fornax_engine::allows;
use fornax_form::{Form, Grammars, Vocabulary};

/// Tokens of an answer.
const TOKENS_MAX: usize = 48;

/// A vocabulary of single bytes, and one end token.
pub fn grammars() -> Grammars {
    let mut bytes: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    bytes.push(Vec::new());
    let encode = Arc::new(|bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).collect());
    Grammars::new(Vocabulary { bytes, end_tokens: vec![256], encode }).expect("bytes are a vocabulary")
}

/// Reads the input as a form: its first byte says in which language the rest is. Compiles it and writes an answer to
/// it. Whether it is one that can be had.
pub fn form(grammars: &Grammars, data: &[u8]) -> bool {
    let Some((&kind, rest)) = data.split_first() else { return false };
    let Ok(text) = std::str::from_utf8(rest) else { return false };
    let form = match kind {
        b'g' => Form::Grammar(text.to_owned()),
        b'r' => Form::Regex(text.to_owned()),
        b'c' => Form::Choice(text.split('\n').map(str::to_owned).collect()),
        _ => match serde_json::from_str(text) {
            Ok(schema) => Form::JsonSchema(schema),
            Err(_) => return false,
        },
    };
    let mut grammar = match grammars.compile(&form) {
        Ok(grammar) => grammar,
        Err(error) => {
            let message = error.to_string();
            assert!(!message.is_empty() && !message.contains('\n'), "{message:?}");
            return false;
        }
    };
    // Chosen by the input's own bytes, so that a case can be repeated.
    let mut chooser =
        data.iter().fold(17_u64, |sum, &byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    for _ in 0..TOKENS_MAX {
        // What is too much work while an answer is made ends that answer.
        let Ok(mask) = grammar.mask() else { return true };
        let allowed: Vec<u32> = (0..257).filter(|&token| allows(&mask, token)).collect();
        assert!(
            !allowed.is_empty() || grammar.is_over(),
            "a form that begins must not end in nothing: {form:?}"
        );
        assert_eq!(allows(&mask, 256), grammar.may_end(), "the end token is allowed exactly there");
        chooser = chooser.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let Some(&token) =
            allowed.get(usize::try_from(chooser >> 33).expect("31 bits") % allowed.len().max(1))
        else {
            break;
        };
        if token == 256 || grammar.accept(token).is_err() {
            break;
        }
    }
    true
}
