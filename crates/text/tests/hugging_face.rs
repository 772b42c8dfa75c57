//! Tokenizers of Hugging Face directories: `tokenizer.json` with the configuration files beside it.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking and says what it skips"
)]

mod support;

use fornax_format::{Checkpoint, Metadata};
use fornax_text::{Chat, ChatTemplate, Error, Special, Tokenizer};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use support::smollm2;

/// Opens a directory with these JSON files, and weights that nobody looks at.
fn open(files: &[(&str, Value)]) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    let header = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let weights = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    std::fs::write(folder.path().join("model.safetensors"), weights).unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content.to_string()).unwrap();
    }
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

/// The same vocabulary as GGUF metadata, for the `tokenizers` crate to encode in its own way.
fn tokenizer_json(metadata: &Metadata) -> Value {
    let tokens = metadata.strings("tokenizer.ggml.tokens").unwrap();
    let kinds = metadata.i32s("tokenizer.ggml.token_type").unwrap();
    let vocab: Map<String, Value> = tokens.iter().cloned().zip((0..).map(Value::from)).collect();
    let added: Vec<Value> = (0..)
        .zip(tokens.iter().zip(kinds.iter()))
        .filter(|(_, (_, kind))| **kind == support::CONTROL)
        .map(|(id, (token, _))| added(id, token, true))
        .collect();
    json!({
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": metadata.strings("tokenizer.ggml.merges").unwrap()},
    })
}

fn added(id: u32, content: &str, special: bool) -> Value {
    json!({
        "id": id, "content": content, "special": special,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
    })
}

#[test]
fn both_containers_give_the_same_tokens_and_text() {
    let Checkpoint::Gguf(gguf) = smollm2() else { panic!("a GGUF file") };
    let ours = Tokenizer::from_gguf(gguf.metadata()).unwrap();
    let (_folder, checkpoint) =
        open(&[("config.json", json!({})), ("tokenizer.json", tokenizer_json(gguf.metadata()))]);
    let theirs = Tokenizer::open(&checkpoint).unwrap();
    assert_eq!(ours.vocab_len(), theirs.vocab_len());
    for id in 0..u32::try_from(ours.vocab_len()).unwrap() {
        assert_eq!(
            (ours.token_bytes(id), ours.is_control(id)),
            (theirs.token_bytes(id), theirs.is_control(id))
        );
    }
    let text = prop_oneof![
        "\\PC{0,40}",
        any::<String>(),
        "([ \\t\\r\\n]{0,4}|[a-zA-Z]{1,8}|'(s|ll|RE)|[0-9]{1,5}|<\\|im_end\\|>|[.,éß東🙂]){0,20}",
    ];
    proptest!(|(text in text)| {
        for special in [Special::AsText, Special::Parse] {
            let tokens = ours.encode(&text, special).unwrap();
            prop_assert_eq!(&tokens, &theirs.encode(&text, special).unwrap());
            prop_assert_eq!(ours.decode(&tokens), theirs.decode(&tokens));
        }
    });
}

/// Llama 2's kind: `▁` for spaces, one before the first word and after each whole token, bytes as a fallback.
fn llama_json() -> Value {
    let tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "▁a", "▁ab", "<tool>", "[END]"];
    let vocab: Map<String, Value> =
        tokens.iter().map(|t| (*t).to_owned()).zip((0..).map(Value::from)).collect();
    json!({
        "version": "1.0",
        "added_tokens": [
            added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true),
            added(10, "<tool>", false), added(11, "[END]", false),
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "vocab": vocab,
            "merges": ["▁ a", "▁a b"],
        },
    })
}

#[test]
fn configuration_files_say_where_texts_begin_and_end() {
    let check = |config: Value, generation: Value, bos: bool, ends: &[u32]| {
        let files = [
            ("config.json", json!({"eos_token_id": 2})),
            ("tokenizer.json", llama_json()),
            ("tokenizer_config.json", config.clone()),
            ("generation_config.json", generation),
        ];
        let tokenizer = Tokenizer::open(&open(&files).1).unwrap();
        assert_eq!(tokenizer.add_bos(), bos, "{config}");
        assert_eq!(tokenizer.encode_prompt("ab", Special::AsText).unwrap()[..], [1, 9][usize::from(!bos)..]);
        assert_eq!(tokenizer.end_tokens(), ends);
        for &end in ends {
            let spelled = tokenizer.encode(&tokenizer.piece(end), Special::AsText).unwrap();
            assert!(!spelled.contains(&end), "an end token is never spelled by users");
        }
    };
    let eos = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>"});
    check(eos.clone(), json!({"eos_token_id": [2, 11]}), true, &[2, 11]);
    check(json!({"bos_token": "<s>", "add_bos_token": false}), json!({"eos_token_id": 2}), false, &[2]);
    check(eos, json!({}), true, &[2]);
}

#[test]
fn added_tokens_are_whole_and_special_ones_are_not_for_users() {
    let files = [("config.json", json!({})), ("tokenizer.json", llama_json())];
    let tokenizer = Tokenizer::open(&open(&files).1).unwrap();
    let check = |text: &str, special, want: &[u32]| {
        assert_eq!(tokenizer.encode(text, special).unwrap(), want, "{text:?} {special:?}");
    };
    check("ab<tool>b", Special::AsText, &[9, 10, 5, 7]);
    check("ab</s>", Special::Parse, &[9, 2]);
    assert!(!tokenizer.encode("ab</s>", Special::AsText).unwrap().contains(&2));
    check("é", Special::AsText, &[5, 3, 4]);
    assert_eq!(tokenizer.decode(&[1, 9, 5, 3, 4]), "ab é");
    let chat = Chat::new(vec![json!({"role": "user", "content": "a</s>"})]);
    let template = ChatTemplate::new("{{ bos_token }}{{ messages[0].content }}</s>").unwrap();
    let tokens = tokenizer.encode_chat(&template.render(&chat, &tokenizer).unwrap()).unwrap();
    assert_eq!(tokens.iter().filter(|&&id| id == 2).count(), 1, "the template's </s> and not the message's");
    assert_eq!(tokens.last(), Some(&2));
}

#[test]
fn a_directory_without_a_usable_tokenizer_says_so() {
    let error = |files: &[(&str, Value)]| Tokenizer::open(&open(files).1).unwrap_err();
    assert!(matches!(error(&[("config.json", json!({}))]), Error::NoTokenizer));
    let broken = error(&[("config.json", json!({})), ("tokenizer.json", json!({"model": 1}))]);
    assert!(
        matches!(&broken, Error::TokenizerJson { path, .. } if path.ends_with("tokenizer.json")),
        "{broken:?}"
    );
    let unknown_id = [
        ("config.json", json!({})),
        ("tokenizer.json", llama_json()),
        ("generation_config.json", json!({"eos_token_id": 99})),
    ];
    assert!(matches!(error(&unknown_id), Error::TokenId { id: 99, .. }));
}

#[test]
fn a_hostile_tokenizer_json_is_an_error() {
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
    let file = |vocab: Value, merges: Value, normalizer: Value| {
        json!({"version": "1.0", "normalizer": normalizer, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges}})
    };
    let refused = |what: &str, file: Value| {
        let (_folder, checkpoint) = open(&[("config.json", json!({})), ("tokenizer.json", file)]);
        let opened = Tokenizer::open(&checkpoint);
        assert!(matches!(opened, Err(Error::TokenizerJson { .. })), "{what}: {opened:?}");
    };
    let vocab = json!({"a": 0, "b": 1, "ab": 2});
    refused("an id of 32 bits", file(json!({"a": 0, "b": u32::MAX}), json!([]), Value::Null));
    refused("a merge without its token", file(vocab.clone(), json!(["b a"]), Value::Null));
    let many = vec![json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(100)}); 8];
    let many = json!({"type": "Sequence", "normalizers": many});
    refused("normalisers that multiply", file(vocab.clone(), json!([]), many));
    let charsmap = |map: &str| json!({"type": "Precompiled", "precompiled_charsmap": map});
    refused("a map that lies", file(vocab.clone(), json!([]), charsmap("AAAAgAAA")));
    // Its length is right and what it says is not: the crate would read behind the end of its table.
    refused("a map that points beyond itself", file(vocab, json!([]), charsmap("BAAAAP////9hAA==")));
}

/// Pieces that weigh, with a map of characters: in both containers as sentencepiece cuts them, and two texts as the hub's own
/// tokenizer puts them together.
#[test]
fn unigram_pieces_are_those_of_sentencepiece_in_both_containers() {
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    let golden = std::fs::read(fixtures.join("xlm-roberta-pair/golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let tokens = |value: &Value| -> Vec<u32> { serde_json::from_value(value["tokens"].clone()).unwrap() };
    for place in ["xlm-roberta-pair", "xlm-roberta-pair.gguf"] {
        let tokenizer = Tokenizer::open(&Checkpoint::open(&fixtures.join(place)).unwrap()).unwrap();
        for case in golden["encodings"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let ours = tokenizer.encode(text, Special::AsText).unwrap();
            assert_eq!(ours, tokens(case), "{place}: {text:?}");
        }
        for pair in golden["pairs"].as_array().unwrap() {
            let text = |which: &str| pair[which].as_str().unwrap();
            let mut both = tokenizer.encode_prompt(text("query"), Special::AsText).unwrap();
            assert_eq!(both.len() as u64, pair["second"].as_u64().unwrap(), "{place}");
            both.extend(tokenizer.encode_second(text("document"), Special::AsText).unwrap());
            assert_eq!(both, tokens(pair), "{place}");
        }
        assert_eq!(
            tokenizer.decode(&tokenizer.encode("sky is blue", Special::AsText).unwrap()),
            "sky is blue"
        );
        // Pieces that are written as control tokens weigh nothing, so that a model of pieces likes them best.
        for text in ["<s>", "sky</s>blue", "<s></s><s><pad>", "</</s>s>"] {
            let ours = tokenizer.encode(text, Special::AsText).unwrap();
            assert!(ours.iter().all(|&id| ![0, 1, 2].contains(&id)), "{place}: {text} is {ours:?}");
        }
        assert_eq!(tokenizer.encode("<s>", Special::Parse).unwrap(), [0], "{place}");
        // Many of them are cut in one pass.
        let many = "<s>".repeat(1_000);
        assert!(tokenizer.encode(&many, Special::AsText).unwrap().iter().all(|&id| id > 2), "{place}");
    }
}
