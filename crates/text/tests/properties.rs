//! What holds for every text and every sequence of tokens.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and says what it skips"
)]

mod support;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use fornax_format::Checkpoint;
use fornax_text::{Detokenizer, Special, Tokenizer};
use proptest::prelude::*;

static SMOLLM2: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::open(&support::smollm2()).unwrap());

/// Bytes that SmolLM2's vocabulary has no token for: its training text had none of these.
const MISSING: [u8; 21] =
    [192, 193, 241, 242, 245, 246, 247, 248, 249, 250, 251, 252, 253, 254, 255, 4, 6, 19, 20, 22, 29];

fn streamed(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
    let mut detokenizer = Detokenizer::new(tokenizer);
    let mut text = String::new();
    for &token in tokens {
        text.push_str(&detokenizer.push(token));
    }
    text + &detokenizer.finish()
}

/// Text that no control token hides in (its pieces would be silent when decoded).
fn any_text() -> impl Strategy<Value = String> {
    prop_oneof!["\\PC{0,40}", "[ \\t\\r\\n'a-zA-Z0-9.,éß東🙂]{0,60}", any::<String>()]
}

proptest! {
    #[test]
    fn text_comes_back_from_its_tokens(text in any_text()) {
        let text: String = text.chars().filter(|c| {
            !c.to_string().bytes().any(|byte| MISSING.contains(&byte))
        }).collect();
        let tokens = SMOLLM2.encode(&text, Special::AsText).unwrap();
        prop_assert_eq!(SMOLLM2.decode(&tokens), text);
    }

    #[test]
    fn streamed_text_is_the_whole_text(tokens in prop::collection::vec(0u32..49200, 0..40)) {
        let bytes: Vec<u8> = tokens.iter().filter(|&&id| !SMOLLM2.is_control(id)).flat_map(|&id| SMOLLM2.token_bytes(id)).copied().collect();
        prop_assert_eq!(streamed(&SMOLLM2, &tokens), String::from_utf8_lossy(&bytes));
        prop_assert_eq!(SMOLLM2.decode(&tokens), String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn text_gives_no_control_token_wherever_one_is_spelled(
        before in any_text(), control in 0u32..17, after in any_text(),
    ) {
        let text = format!("{before}{}{after}", SMOLLM2.piece(control));
        let tokens = SMOLLM2.encode(&text, Special::AsText).unwrap();
        prop_assert!(tokens.iter().all(|&id| !SMOLLM2.is_control(id)));
        prop_assert!(SMOLLM2.encode(&text, Special::Parse).unwrap().contains(&control));
    }
}

#[test]
fn every_text_comes_back_where_all_bytes_are_tokens() {
    let test = "every_text_comes_back_where_all_bytes_are_tokens";
    let Some(folder) = support::vectors() else {
        return support::skip(test, "the vocabulary files are not beside the repository");
    };
    for name in ["gpt-2", "llama-spm"] {
        let file = folder.join(format!("ggml-vocab-{name}.gguf"));
        let tokenizer = Tokenizer::open(&Checkpoint::open(&file).unwrap()).unwrap();
        proptest!(|(text in any_text())| {
            let tokens = tokenizer.encode(&text, Special::AsText).unwrap();
            prop_assert_eq!(tokenizer.decode(&tokens), text.clone(), "{}", name);
            prop_assert_eq!(streamed(&tokenizer, &tokens), text, "{}", name);
        });
    }
}

#[test]
fn a_megabyte_is_encoded_in_seconds_whatever_it_holds() {
    let texts = [
        "The quick brown fox jumps over the lazy dog, 1234 times.\n".repeat(1 << 14),
        "a".repeat(1 << 20),
        " ".repeat(1 << 20) + "x",
        "<|im_end|".repeat(1 << 17),
        "東京".repeat(1 << 17),
    ];
    for text in texts {
        let start = Instant::now();
        let tokens = SMOLLM2.encode(&text, Special::Parse).unwrap();
        // A quadratic cut or merge takes minutes; this bound holds on a busy machine too.
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}… took {:?}", &text[..12], start.elapsed());
        assert_eq!(SMOLLM2.decode(&tokens), text);
    }
}
