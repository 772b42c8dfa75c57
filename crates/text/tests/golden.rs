//! Prompts of the golden data give the tokens that transformers gave.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and says what it skips"
)]

mod support;

use fornax_format::Checkpoint;
use fornax_text::{Chat, ChatTemplate, Special, Tokenizer};
use serde_json::Value;
use support::{QWEN, json, model, skip, smollm2};

fn check(checkpoint: &Checkpoint, cases: &Value) {
    let tokenizer = Tokenizer::open(checkpoint).unwrap();
    let template = ChatTemplate::open(checkpoint).unwrap();
    let cases = cases.as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let want: Vec<u32> = serde_json::from_value(case["prompt_tokens"].clone()).unwrap();
        let got = match &case["prompt"] {
            Value::String(text) => tokenizer.encode_prompt(text, Special::Parse).unwrap(),
            messages => {
                let chat = Chat::new(messages.as_array().unwrap().clone());
                tokenizer.encode_chat(&template.render(&chat, &tokenizer).unwrap()).unwrap()
            }
        };
        assert_eq!(got, want, "{}", case["name"]);
        if let (Some(text), Some(tokens)) = (case["greedy_text"].as_str(), case["greedy_tokens"].as_array()) {
            let tokens: Vec<u32> =
                tokens.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect();
            // The reference shows control tokens; a reader does not see them.
            let bytes: Vec<u8> = tokens.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
            assert_eq!(String::from_utf8_lossy(&bytes), text, "{}", case["name"]);
            assert_eq!(tokenizer.decode(&tokens), text.replace("<|im_end|>", ""), "{}", case["name"]);
        }
    }
}

#[test]
fn smollm2_prompts_give_the_reference_tokens() {
    check(&smollm2(), &json("tests/golden/smollm2-q4_1.json"));
}

#[test]
fn qwen_prompts_give_the_reference_tokens() {
    let test = "qwen_prompts_give_the_reference_tokens";
    let Some(checkpoint) = model(QWEN) else {
        return skip(test, "the Qwen model is not in the cache folder");
    };
    check(&checkpoint, &json("tests/golden/qwen2.5-coder-0.5b-q4_k_m.json")["cases"]);
}
