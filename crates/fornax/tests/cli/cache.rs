//! What lasts and what is guessed: pages on a disk, and models that draft. Neither changes a bit of an answer.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::fornax;
use crate::tiny::fixtures;

fn fixture(name: &str) -> String {
    fixtures().join(name).to_str().unwrap().to_owned()
}

/// Seventy tokens of a vocabulary of 128.
fn prompt() -> String {
    let ids: Vec<String> = (0..70).map(|at| ((at * 37 + 11) % 97).to_string()).collect();
    ids.join(",")
}

/// A sampled answer with its log-probabilities, and its usage.
fn answer(model: &str, more: &[&str]) -> Value {
    let ids = prompt();
    let mut args =
        vec!["generate", model, "--device", "cpu", "--tokens", &ids, "--max-tokens", "24", "--json"];
    args.extend(["--ignore-eos", "--logprobs", "--temperature", "0.9", "--seed", "5"]);
    args.extend(["--repeat-penalty", "1.1"]);
    args.extend(more);
    let mut answer = fornax(args).json();
    // Times are not part of it.
    answer.as_object_mut().unwrap().remove("timings");
    answer
}

/// What was said, to the bit.
fn said(answer: &Value) -> (&Value, &Value) {
    assert_eq!(answer["tokens"].as_array().unwrap().len(), 24);
    assert!(answer["logprobs"].is_array() || answer["logprobs"].is_object(), "{answer}");
    (&answer["tokens"], &answer["logprobs"])
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["cached_tokens"].as_u64().unwrap()
}

fn segments(folder: &Path) -> Vec<PathBuf> {
    let stores = fs::read_dir(folder).unwrap().map(|store| store.unwrap().path());
    let files = stores.flat_map(|store| fs::read_dir(store).unwrap().map(|file| file.unwrap().path()));
    files.filter(|file| file.extension().is_some_and(|extension| extension == "pages")).collect()
}

#[test]
fn a_prompt_read_before_a_restart_comes_from_the_disk_and_says_the_same_to_the_bit() {
    // Keys and values, with a window, latent rows, states.
    for name in ["llama.gguf", "mistral", "deepseek-v3.gguf", "qwen35"] {
        let (folder, model) = (tempfile::tempdir().unwrap(), fixture(name));
        let disk = ["--kv-disk", folder.path().to_str().unwrap(), "--kv-disk-bytes", "64MiB"];
        let plain = answer(&model, &[]);
        let (cold, warm) = (answer(&model, &disk), answer(&model, &disk));
        assert_eq!((cached(&plain), cached(&cold), cached(&warm)), (0, 0, 64), "{name}");
        assert_eq!(said(&cold), said(&plain), "{name}");
        assert_eq!(said(&warm), said(&plain), "{name}");
        // Another way of computing has other bits: nothing of it is found.
        let float = answer(&model, &[&disk[..], &["--activations", "float"]].concat());
        assert_eq!(cached(&float), 0, "{name}");
    }
}

#[test]
fn a_damaged_disk_costs_the_time_to_compute_and_nothing_else() {
    let (folder, model) = (tempfile::tempdir().unwrap(), fixture("llama.gguf"));
    let disk = ["--kv-disk", folder.path().to_str().unwrap()];
    let plain = answer(&model, &disk);
    for path in segments(folder.path()) {
        let mut bytes = fs::read(&path).unwrap();
        // Within the contents of every record, a byte each three hundred.
        bytes[200..].iter_mut().step_by(300).for_each(|byte| *byte ^= 4);
        fs::write(&path, bytes).unwrap();
    }
    let damaged = answer(&model, &disk);
    assert_eq!((cached(&damaged), said(&damaged)), (0, said(&plain)));
    // What is no folder at all is said, and answered without.
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let ids = prompt();
    let args = ["generate", &model, "--device", "cpu", "--tokens", &ids, "--max-tokens", "4", "--ignore-eos"];
    let ran = fornax(args.into_iter().chain(["--json", "--kv-disk", file.to_str().unwrap()]));
    assert!(ran.stderr.contains("pages are kept in memory alone"), "{}", ran.stderr);
    assert_eq!(ran.json()["tokens"].as_array().unwrap().len(), 4);
}

#[test]
fn what_is_sealed_is_found_with_its_key_alone_and_stores_are_listed_and_cleared() {
    let (folder, model) = (tempfile::tempdir().unwrap(), fixture("llama.gguf"));
    let kept = folder.path().join("kept");
    let (key, short) = (folder.path().join("key"), folder.path().join("short"));
    fs::write(&key, [7; 32]).unwrap();
    fs::write(&short, "secret").unwrap();
    let disk = ["--kv-disk", kept.to_str().unwrap()];
    let sealed = [&disk[..], &["--kv-disk-key", key.to_str().unwrap()]].concat();
    let cold = answer(&model, &sealed);
    assert_eq!((cached(&answer(&model, &sealed)), cached(&answer(&model, &disk))), (64, 0));
    assert_eq!(said(&answer(&model, &sealed)), said(&cold));
    let ids = prompt();
    let args = ["generate", &model, "--tokens", &ids, "--kv-disk", kept.to_str().unwrap(), "--kv-disk-key"];
    let refused = fornax(args.into_iter().chain([short.to_str().unwrap()]));
    refused.fails(2, "INVALID_INPUT", &["has 6 bytes, too few for a key", "at least 32"]);

    let list = |folder: &Path| fornax(["cache", "list", folder.to_str().unwrap(), "--json"]).json();
    let stores = list(&kept);
    let stores = stores.as_array().unwrap();
    assert_eq!(stores.len(), 2, "with the key and without");
    for store in stores {
        assert!(store["bytes"].as_u64().unwrap() > 1000 && store["in_use"] == false);
        assert!(store["model"].as_str().unwrap().ends_with("llama.gguf"));
    }
    let wrong = fornax(["cache", "clear", kept.to_str().unwrap(), "nothing"]);
    wrong.fails(2, "INVALID_INPUT", &["0 stores of", "are called \"nothing\""]);
    let one = stores[0]["store"].as_str().unwrap();
    assert!(fornax(["cache", "clear", kept.to_str().unwrap(), one]).stdout.starts_with("1 stores removed"));
    assert!(fornax(["cache", "clear", kept.to_str().unwrap()]).stdout.starts_with("1 stores removed"));
    assert_eq!(list(&kept), Value::Array(Vec::new()));
    assert_eq!(list(&folder.path().join("nowhere")), Value::Array(Vec::new()));
}

#[test]
fn a_model_that_drafts_changes_no_token_and_is_in_the_plan() {
    let (llama, qwen2) = (fixture("llama.gguf"), fixture("qwen2.gguf"));
    for (model, draft) in [(&llama, &llama), (&llama, &qwen2), (&qwen2, &llama)] {
        let (plain, drafted) = (answer(model, &[]), answer(model, &["--draft", draft]));
        assert_eq!(said(&drafted), said(&plain), "{draft} for {model}");
        assert_eq!(drafted["memory"]["difference_bytes"], 0, "{draft} for {model}");
    }
    let plan =
        |more: &[&str]| fornax(["plan", &llama, "--device", "cpu", "--json"].iter().chain(more)).json();
    let (alone, both) = (plan(&[]), plan(&["--draft", &qwen2]));
    let runtime = |plan: &Value| plan["devices"][0]["bytes"]["runtime"].as_u64().unwrap();
    let bytes = both["draft"]["bytes"].as_object().unwrap();
    let drafting: u64 = bytes.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert!(drafting > 10_000 && alone.get("draft").is_none(), "{both}");
    assert_eq!(runtime(&both), runtime(&alone) + drafting);
}

#[test]
fn a_model_that_cannot_draft_is_refused_by_name() {
    let check = |model: &str, draft: &str, says: &str| {
        let (model, draft, ids) = (fixture(model), fixture(draft), prompt());
        let args = ["generate", &model, "--device", "cpu", "--tokens", &ids, "--draft", &draft];
        fornax(args).fails(2, "INVALID_INPUT", &[&draft, "cannot draft for", &model, says]);
    };
    check("llama.gguf", "llama", "one of them has a tokenizer and the other one has none");
    check("qwen35", "llama.gguf", "keeps states of sequences");
    check("llama.gguf", "lfm2.gguf", "keeps states of sequences");
    check("llama.gguf", "bert.gguf", "it makes embeddings");
}
