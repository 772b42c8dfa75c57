//! Wrong files and wrong requests: one line that says what to do, the right exit code, nothing half-written.

use std::fs;
use std::path::{Path, PathBuf};

use crate::tiny::{fixtures, tokens};
use crate::{command, fornax, model, ran};

/// A copy of a tiny GGUF with the first occurrence of `from` replaced by `to`, of the same length.
fn changed(folder: &Path, from: &[u8], to: &[u8]) -> PathBuf {
    assert_eq!(from.len(), to.len());
    let mut bytes = fs::read(fixtures().join("llama.gguf")).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    bytes[at..][..to.len()].copy_from_slice(to);
    written(folder, &bytes)
}

fn written(folder: &Path, bytes: &[u8]) -> PathBuf {
    let path = folder.join("changed.gguf");
    fs::write(&path, bytes).unwrap();
    path
}

/// Every command that opens a model, with this one.
fn each_command(path: &Path, check: impl Fn(&[&str])) {
    let path = path.to_str().unwrap();
    check(&["generate", path, "--tokens", "1,2", "--max-tokens", "1"]);
    check(&["logits", path, "--tokens", "1,2"]);
    check(&["run", path, "Hello"]);
    let text = fixtures().join("rope.json");
    check(&["perplexity", path, "--file", text.to_str().unwrap()]);
}

#[test]
fn a_missing_file_is_named() {
    let missing = Path::new("no/such/model.gguf");
    each_command(missing, |args| {
        fornax(args).fails(4, "MODEL_NOT_FOUND", &["no/such/model.gguf", "check the path"])
    });
    fornax(["inspect", "no/such/model.gguf"]).fails(4, "MODEL_NOT_FOUND", &["no/such/model.gguf"]);
    fornax(["tokenize", "no/such/model.gguf", "--text", "x"]).fails(
        4,
        "MODEL_NOT_FOUND",
        &["no/such/model.gguf"],
    );
    // One positional that looks like a model file is a missing model, not a question.
    fornax(["run", "no/such/model.gguf"]).fails(4, "MODEL_NOT_FOUND", &["no/such/model.gguf"]);
}

#[test]
fn a_lone_word_that_is_no_model_is_never_answered_by_another_one() {
    let cache = tempfile::tempdir().unwrap();
    let refused = |word: &str, says: &[&str]| {
        let run = ran(command(cache.path()).args(["run", word]).env("HF_HUB_OFFLINE", "1"));
        run.fails(2, "INVALID_INPUT", &[&[word, "fornax list --available"], says].concat());
    };
    refused("mistrall", &["nearest: mistral"]);
    refused("smolm2", &["nearest: smollm2"]);
    refused("deepseek-r1", &["fornax run smollm2 \"deepseek-r1\""]);
    refused("qwen2.5:0.5b", &["nearest: qwen2.5"]);
    refused("no/such/thing", &[]);
    // A name that is known and not on disk is fetched, or said to be missing; it is no question either.
    let known = ran(command(cache.path()).args(["run", "mistral"]).env("HF_HUB_OFFLINE", "1"));
    known.fails(4, "MODEL_NOT_FOUND", &["Mistral-7B-Instruct"]);
}

#[test]
fn empty_prompts_are_refused_before_anything_is_fetched() {
    let cache = tempfile::tempdir().unwrap();
    for prompt in ["", "   ", "\n"] {
        let run = ran(command(cache.path()).args(["run", "smollm2", prompt]));
        run.fails(2, "INVALID_INPUT", &["the prompt is empty"]);
        ran(command(cache.path()).args(["run", prompt])).fails(2, "INVALID_INPUT", &["the prompt is empty"]);
    }
}

#[test]
fn a_directory_without_a_model_says_what_was_expected() {
    let folder = tempfile::tempdir().unwrap();
    each_command(folder.path(), |args| {
        fornax(args).fails(4, "MODEL_NOT_FOUND", &["holds no model", "config.json"])
    });
}

#[test]
fn a_file_that_is_no_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("photo.jpg");
    fs::write(&path, b"\xff\xd8\xff\xe0").unwrap();
    each_command(&path, |args| {
        fornax(args).fails(4, "MODEL_CORRUPT", &["photo.jpg", "neither GGUF nor safetensors"])
    });
}

#[test]
fn an_unknown_architecture_is_named_with_what_is_supported_and_can_be_inspected() {
    let folder = tempfile::tempdir().unwrap();
    // The key, its type (a string), its length, its value.
    let path =
        changed(folder.path(), b"\x08\0\0\0\x05\0\0\0\0\0\0\0llama", b"\x08\0\0\0\x05\0\0\0\0\0\0\0rwkv7");
    each_command(&path, |args| fornax(args).fails(4, "MODEL_UNSUPPORTED", &["\"rwkv7\"", "llama, qwen2"]));
    fornax(["plan", path.to_str().unwrap()]).fails(4, "MODEL_UNSUPPORTED", &["\"rwkv7\"", "llama, qwen2"]);
    let shown = fornax(["inspect", path.to_str().unwrap(), "--json"]).json();
    assert_eq!(shown["architecture"], "rwkv7");
    assert!(shown["facts"]["unsupported"].as_str().unwrap().contains("rwkv7"), "{shown}");
}

#[test]
fn inspect_writes_escape_sequences_of_a_file_out_instead_of_sending_them_to_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let path = changed(folder.path(), b"blk.1.ffn_down.weight", b"blk.1.\x1b[2J\x1b[31mweight");
    let shown = fornax(["inspect", path.to_str().unwrap()]).stdout;
    assert!(shown.contains(r"blk.1.\u{1b}[2J\u{1b}[31mweight"), "{shown:?}");
    assert!(!shown.contains('\u{1b}'), "{shown:?}");
}

/// To look at a file is what people do before they trust it: an id of 32 bits asked for 137 GB, and a map of characters
/// that lies ended the process.
#[test]
fn inspect_outlives_hostile_tokenizers_and_templates() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixtures().join("llama").join(file), folder.path().join(file)).unwrap();
    }
    let vocabulary = |id: u32| serde_json::json!({"type": "BPE", "vocab": {"a": 0, "b": id}, "merges": []});
    let with = |normalizer: &serde_json::Value, id: u32| {
        serde_json::json!({"version": "1.0", "normalizer": normalizer, "model": vocabulary(id)}).to_string()
    };
    let charsmap = |map: &str| serde_json::json!({"type": "Precompiled", "precompiled_charsmap": map});
    let deep = "[".repeat(1_000_000);
    for tokenizer in [
        with(&serde_json::Value::Null, u32::MAX),
        with(&charsmap("AAAAgAAA"), 1),
        with(&charsmap("BAAAAP////9hAA=="), 1),
        deep,
        String::new(),
    ] {
        fs::write(folder.path().join("tokenizer.json"), &tokenizer).unwrap();
        for template in ["{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}", &"{{ not ".repeat(100_000)]
        {
            fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
            let shown = fornax(["inspect", folder.path().to_str().unwrap()]);
            // A process that was ended by a signal has no code.
            assert!(matches!(shown.code, Some(0..=9)), "{:?}: {}", shown.code, shown.stderr);
            assert!(!shown.stderr.contains("panicked"), "{}", shown.stderr);
        }
    }
}

#[test]
fn an_encoder_has_no_logits_and_says_what_it_has() {
    let encoder = fixtures().join("bert-pair");
    let encoder = encoder.to_str().unwrap();
    for command in ["logits", "generate"] {
        fornax([command, encoder, "--tokens", "1,2"]).fails(2, "INVALID_INPUT", &["fornax embed"]);
    }
}

#[test]
fn a_missing_tensor_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = changed(folder.path(), b"blk.1.ffn_down.weight", b"blk.1.ffn_gone.weight");
    each_command(&path, |args| fornax(args).fails(4, "MODEL_CORRUPT", &["blk.1.ffn_down.weight", "again"]));
    // In a Hugging Face directory too.
    let directory = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        let mut bytes = fs::read(fixtures().join("llama").join(file)).unwrap();
        let (from, to) = (b"model.norm.weight", b"model.gone.weight");
        if let Some(at) = bytes.windows(from.len()).position(|window| window == from) {
            bytes[at..][..to.len()].copy_from_slice(to);
        }
        fs::write(directory.path().join(file), bytes).unwrap();
    }
    let ran = fornax(["logits", directory.path().to_str().unwrap(), "--tokens", "1"]);
    assert!(
        ran.stderr.contains("model.norm.weight") || ran.stderr.contains("model.gone.weight"),
        "{}",
        ran.stderr
    );
    assert_eq!(ran.code, Some(4));
}

#[test]
fn a_truncated_file_is_corrupt() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = fs::read(fixtures().join("llama.gguf")).unwrap();
    let path = written(folder.path(), &bytes[..bytes.len() - 1000]);
    each_command(&path, |args| fornax(args).fails(4, "MODEL_CORRUPT", &["changed.gguf"]));
    let path = written(folder.path(), &bytes[..100]);
    each_command(&path, |args| fornax(args).fails(4, "MODEL_CORRUPT", &["changed.gguf"]));
}

#[test]
fn a_tensor_of_nonsense_is_a_numeric_fault_and_never_an_answer() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = fs::read(fixtures().join("llama.gguf")).unwrap();
    // The end of the file is the last tensor's data; all ones is NaN in every float type.
    let end = bytes.len();
    bytes[end - 20_000..].fill(0xff);
    let path = written(folder.path(), &bytes);
    let path = path.to_str().unwrap();
    let (ids, _) = tokens("llama");
    let out = folder.path().join("logits.f32");
    fornax(["generate", path, "--tokens", &ids, "--max-tokens", "4"]).fails(
        1,
        "NUMERIC_FAULT",
        &["NaN or infinity"],
    );
    fornax(["logits", path, "--tokens", &ids]).fails(1, "NUMERIC_FAULT", &["after token"]);
    let all = ["logits", path, "--tokens", &ids, "--all", "--out", out.to_str().unwrap()];
    fornax(all).fails(1, "NUMERIC_FAULT", &["after token"]);
    let left: Vec<_> =
        fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["changed.gguf"], "nothing half-written");
}

#[test]
fn a_prompt_beyond_the_context_is_refused_with_counts() {
    let (ids, count) = tokens("llama");
    let path = fixtures().join("llama");
    let path = path.to_str().unwrap();
    let count_text = count.to_string();
    let check = |args: &[&str], says: &[&str]| {
        let args = ["generate", path, "--tokens", &ids].into_iter().chain(args.iter().copied());
        fornax(args).fails(1, "PROMPT_TOO_LONG", says);
    };
    check(&["--context", "10"], &[&count_text, "10", "or use a larger --context, of at most"]);
    check(&["--context", &count_text], &[&count_text]);
    let context = (count + 5).to_string();
    check(&["--context", &context, "--max-tokens", "6"], &[&count_text, "6", "at most 5"]);
    fornax(["logits", path, "--tokens", &ids, "--context", "10"]).fails(1, "PROMPT_TOO_LONG", &[&count_text]);
    // What fits exactly is answered.
    // Beyond what the model was made for no longer context helps, and none is advised.
    let trained = fornax(["plan", path, "--json"]).json()["context_trained"].as_u64().unwrap() as usize;
    let long = vec!["1"; trained + 1].join(",");
    let refused = fornax(["generate", path, "--tokens", &long]);
    refused.fails(1, "PROMPT_TOO_LONG", &["was made for no more"]);
    assert!(!refused.stderr.contains("--context"), "{}", refused.stderr);
    let exact = ["generate", path, "--tokens", &ids, "--context", &context, "--max-tokens", "5", "--json"];
    assert_eq!(fornax(exact).json()["finish_reason"], "length");
    let rest = ["generate", path, "--tokens", &ids, "--context", &context, "--json"];
    assert_eq!(fornax(rest).json()["usage"]["completion_tokens"], 5);
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers() {
    let path = fixtures().join("llama.gguf");
    let args = ["generate", path.to_str().unwrap(), "--tokens", "1,2", "--memory-limit", "100000"];
    fornax(args).fails(3, "MODEL_DOES_NOT_FIT", &["97.7 KiB may be used", "weights", "--context"]);
}

#[test]
fn a_hybrid_whose_states_or_positions_are_too_many_is_refused_before_it_is_loaded() {
    let path = fixtures().join("qwen35.gguf");
    let path = path.to_str().unwrap();
    let long = ["generate", path, "--tokens", "1,2", "--context", "257"];
    fornax(long).fails(2, "INVALID_INPUT", &["a context of 257 tokens is more than the 256"]);
    let many = ["serve", path, "--port", "0", "--parallel", "200000", "--memory-limit", "256MiB"];
    fornax(many).fails(3, "MODEL_DOES_NOT_FIT", &["256.0 MiB may be used", "use --parallel"]);
}

#[test]
fn tokens_that_do_not_exist_are_refused() {
    let path = fixtures().join("llama");
    let path = path.to_str().unwrap();
    fornax(["generate", path, "--tokens", "1,99999"]).fails(
        2,
        "INVALID_INPUT",
        &["token 99999 at position 1"],
    );
    fornax(["generate", path, "--tokens", "1,x"]).fails(2, "INVALID_INPUT", &["--tokens", "whole number"]);
    fornax(["generate", path, "--prompt", "text"]).fails(2, "INVALID_INPUT", &["no tokenizer", "--tokens"]);
}

#[test]
fn wrong_usage_is_one_line_with_the_flag() {
    let check = |args: &[&str], says: &[&str]| fornax(args).fails(2, "INVALID_INPUT", says);
    check(&[], &["no command given", "fornax --help"]);
    check(&["frobnicate"], &["frobnicate"]);
    // A model and an empty cache of its own: the default would be fetched first where it is not there, which takes
    // lines.
    let (path, cache) = (fixtures().join("llama"), tempfile::tempdir().unwrap());
    let check = |args: &[&str], says: &[&str]| {
        let args = [&args[..1], &[path.to_str().unwrap()], &args[1..]].concat();
        ran(command(cache.path()).args(args)).fails(2, "INVALID_INPUT", says);
    };
    check(&["generate"], &["--prompt", "fornax generate --help"]);
    check(&["generate", "--prompt", "x", "--tokens", "1"], &["--tokens"]);
    check(
        &["generate", "--prompt", "x", "--temperature", "nan"],
        &["--temperature", "fornax generate --help"],
    );
    check(&["generate", "--prompt", "x", "--temprature", "1"], &["--temprature", "--temperature"]);
    check(&["generate", "--prompt", "x", "--repeat-penalty", "0"], &["--repeat-penalty", "above 0"]);
    check(&["generate", "--prompt", "x", "--regex", "a", "--json-object"], &["--regex", "--json-object"]);
    check(&["generate", "--prompt", "x", "--n", "2"], &["--n", "--json"]);
    check(&["generate", "--prompt", "x", "--logprobs"], &["--json"]);
    check(&["generate", "--prompt", "x", "--schema", "no/such.json"], &["no/such.json"]);
    check(&["generate", "--prompt", "x", "--grammar", "no/such.lark"], &["no/such.lark"]);
    check(&["generate", "--prompt", "x", "--kv-dtype", "fp4"], &["--kv-dtype fp4", "q8_0 or fp8"]);
    check(&["generate", "--prompt", "x", "--memory-limit", "lots"], &["--memory-limit"]);
    check(&["logits", "--prompt", "x", "--all"], &["--out"]);
    check(&["tokenize"], &["--text"]);
    check(&["generate", "--prompt-file", "no/such.txt"], &["no/such.txt"]);
    check(&["perplexity", "--file", "no/such.txt"], &["no/such.txt"]);
    check(&["generate", "--tokens", "1", "--context", "100000000"], &["--context"]);
}

#[test]
fn a_device_that_is_not_there_is_an_error_and_never_replaced() {
    let path = fixtures().join("llama");
    each_command(&path, |args| {
        let args = args.iter().copied().chain(["--device", "cuda:99"]);
        fornax(args).fails(5, "DEVICE_UNAVAILABLE", &["cuda:99", "--device cpu"]);
    });
}

#[test]
fn logits_cannot_be_written_into_a_folder_that_is_not_there() {
    let path = fixtures().join("llama");
    let args = ["logits", path.to_str().unwrap(), "--tokens", "1", "--all", "--out", "no/such/folder/x.f32"];
    fornax(args).fails(2, "INVALID_INPUT", &["cannot write no/such/folder/x.f32: No such file"]);
}

#[test]
fn an_empty_prompt_is_refused() {
    let Some(path) = model("smollm2", "an_empty_prompt_is_refused") else { return };
    fornax(["generate", &path, "--prompt", ""]).fails(2, "INVALID_INPUT", &["empty"]);
}

#[test]
fn requests_that_contradict_themselves_are_refused_with_their_own_message() {
    let path = fixtures().join("llama");
    let check = |args: &[&str], says: &[&str]| {
        let args =
            ["generate", path.to_str().unwrap(), "--tokens", "1,2"].into_iter().chain(args.iter().copied());
        fornax(args).fails(2, "INVALID_INPUT", says);
    };
    check(&["--n", "1000", "--json"], &["n is 1000", "1 to 128"]);
    check(&["--n", "0", "--json"], &["n is 0", "1 to 128"]);
    check(&["--stop", &"x".repeat(100_000)], &["stop string 0 has 100000 bytes", "4096"]);
    check(&["--stop", "x"].repeat(70), &["70 stop strings", "64"]);
    check(&["--stop", "x", "--choice", "xx"], &["stop string", "form"]);
    check(&["--xtc-probability", "0.5"], &["xtc_probability is 0.5", "temperature is 0"]);
    check(&["--temperature", "1", "--mirostat", "2", "--top-k", "5"], &["top_k is 5", "mirostat"]);
    check(&["--min-tokens", "9", "--max-tokens", "8"], &["min_tokens is 9", "at most max_tokens"]);
    check(&["--logit-bias", "99999=1"], &["logit_bias is 99999", "vocabulary"]);
    check(&["--banned-tokens", "99999"], &["bad_words is 99999", "vocabulary"]);
    check(&["--allowed-tokens", "99999"], &["allowed_token_ids is 99999", "vocabulary"]);
    check(&["--top-logprobs", "500", "--json"], &["top_logprobs is 500", "at most 128"]);
    check(&["--bad-word", "cheese"], &["no tokenizer"]);
    check(&["--regex", "a+"], &["no tokenizer"]);
    // Allowed and banned tokens that leave nothing are found at the first token.
    let none = ["--allowed-tokens", "5", "--banned-tokens", "5", "--device", "cpu"];
    check(&none, &["no token may be chosen at position 2"]);
}

#[test]
fn forms_that_cannot_be_followed_are_refused_with_their_place() {
    let Some(path) = model("smollm2", "forms_that_cannot_be_followed_are_refused_with_their_place") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("form");
    let check = |flag: &str, form: &str, says: &[&str]| {
        fs::write(&file, form).unwrap();
        let given = if flag == "--regex" { form } else { file.to_str().unwrap() };
        fornax(["generate", &path, "--prompt", "x", flag, given]).fails(2, "SCHEMA_UNSUPPORTED", says);
    };
    check(
        "--schema",
        r#"{"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}"#,
        &["\"uniqueItems\"", "/properties/a"],
    );
    check("--schema", "false", &["change the form"]);
    check("--schema", r#"{"type": "integer", "minimum": 3, "maximum": 2}"#, &["change the form"]);
    check("--grammar", "start: nothing_of_the_kind", &["nothing_of_the_kind"]);
    check("--regex", "(", &["change the form"]);
    fs::write(&file, "{").unwrap();
    fornax(["generate", &path, "--prompt", "x", "--schema", file.to_str().unwrap()]).fails(
        2,
        "INVALID_INPUT",
        &["is no JSON", "line 1"],
    );
}

#[test]
fn an_answer_that_is_cut_before_its_form_is_complete_is_no_success() {
    let Some(path) = model("smollm2", "an_answer_that_is_cut_before_its_form_is_complete_is_no_success")
    else {
        return;
    };
    let args =
        ["generate", &path, "--prompt", "JSON: ", "--regex", "[a-z]{200}", "--max-tokens", "4", "--json"];
    fornax(args).fails(1, "OUTPUT_TRUNCATED", &["after 4 tokens", "--max-tokens"]);
}
