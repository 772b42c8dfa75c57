//! Tiny checkpoints in both containers, through the command line, against their golden logits.

use std::fs;
use std::path::{Path, PathBuf};

use crate::fornax;

/// The tiny checkpoints that the models are tested with.
pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures")
}

/// A fixture's tokens, separated by commas, and how many there are.
pub(crate) fn tokens(name: &str) -> (String, usize) {
    let text = fs::read_to_string(fixtures().join(name).join("golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids: Vec<String> = golden["tokens"].as_array().unwrap().iter().map(|id| id.to_string()).collect();
    (ids.join(","), ids.len())
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect()
}

pub(crate) fn log_softmax(row: &[f32]) -> Vec<f64> {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = row.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
    row.iter().map(|&logit| f64::from(logit) - max - sum.ln()).collect()
}

pub(crate) const EXACT: [&str; 4] = ["--activations", "float", "--kv-dtype", "f32"];

#[test]
fn logits_of_every_position_agree_with_the_reference_in_both_containers() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("logits.f32");
    for name in ["llama", "qwen2", "qwen35"] {
        let golden = floats(&fs::read(fixtures().join(name).join("golden.bin")).unwrap());
        let (ids, count) = tokens(name);
        let columns = golden.len() / count;
        for path in [fixtures().join(name), fixtures().join(format!("{name}.gguf"))] {
            let path = path.to_str().unwrap();
            let mut args =
                vec!["logits", path, "--tokens", &ids, "--all", "--out", out.to_str().unwrap(), "--json"];
            args.extend(EXACT);
            let written = fornax(args).json();
            assert_eq!((&written["rows"], &written["columns"]), (&count.into(), &columns.into()));
            let got = floats(&fs::read(&out).unwrap());
            assert_eq!(got.len(), golden.len(), "{path}");
            for (position, (got, wanted)) in got.chunks(columns).zip(golden.chunks(columns)).enumerate() {
                for (got, wanted) in log_softmax(got).into_iter().zip(log_softmax(wanted)) {
                    assert!((got - wanted).abs() <= 1e-3, "{path} at {position}: {got}, wanted {wanted}");
                }
            }
        }
    }
}

#[test]
fn both_containers_generate_the_same_tokens() {
    for name in ["llama", "qwen2", "lfm2"] {
        let (ids, _) = tokens(name);
        let generate = |path: PathBuf| {
            let mut args =
                vec!["generate", path.to_str().unwrap(), "--tokens", &ids, "--max-tokens", "20", "--json"];
            // A GGUF file names an end token, and a directory without a tokenizer does not.
            args.push("--ignore-eos");
            args.extend(EXACT);
            fornax(args).json()["tokens"].clone()
        };
        let (directory, gguf) =
            (generate(fixtures().join(name)), generate(fixtures().join(format!("{name}.gguf"))));
        assert_eq!(directory, gguf, "{name}");
        assert_eq!(directory.as_array().unwrap().len(), 20, "{name}");
    }
}

#[test]
fn a_seed_reproduces_and_another_differs() {
    let (ids, _) = tokens("llama");
    let path = fixtures().join("llama");
    let generate = |seed: &[&str]| {
        let mut args =
            vec!["generate", path.to_str().unwrap(), "--tokens", &ids, "--max-tokens", "20", "--json"];
        args.extend(["--temperature", "1.5"]);
        args.extend(seed);
        fornax(args).json()
    };
    let first = generate(&["--seed", "7"]);
    assert_eq!(first["seed"], 7);
    assert_eq!(first["tokens"], generate(&["--seed", "7"])["tokens"]);
    assert_ne!(first["tokens"], generate(&["--seed", "8"])["tokens"]);
    // A seed that was drawn is told, and it too reproduces.
    let drawn = generate(&[]);
    let seed = drawn["seed"].as_u64().unwrap().to_string();
    assert_eq!(drawn["tokens"], generate(&["--seed", &seed])["tokens"]);
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let (ids, _) = tokens("llama");
    let path = fixtures().join("llama.gguf");
    let generate = |threads: &str| {
        let args = ["generate", path.to_str().unwrap(), "--tokens", &ids, "--max-tokens", "20", "--json"];
        fornax(args.into_iter().chain(["--threads", threads])).json()["tokens"].clone()
    };
    assert_eq!(generate("1"), generate("3"));
}

#[test]
fn greedy_is_the_top_logit() {
    let (ids, _) = tokens("qwen2");
    let path = fixtures().join("qwen2");
    let path = path.to_str().unwrap();
    let top = fornax(["logits", path, "--tokens", &ids, "--json", "--top", "3"]).json();
    let entries = top["top"].as_array().unwrap();
    assert_eq!(entries.len(), 3);
    assert!(entries[0]["logit"].as_f64() >= entries[1]["logit"].as_f64());
    let answer = fornax(["generate", path, "--tokens", &ids, "--max-tokens", "1", "--json"]).json();
    assert_eq!(answer["tokens"][0], entries[0]["token"]);
}

#[test]
fn inspect_says_from_which_context_on_the_long_rotary_factors_hold() {
    let of = |name: &str| {
        let path = fixtures().join(name);
        fornax(["inspect", path.to_str().unwrap(), "--json"]).json()["facts"]["rope_long_factors"].clone()
    };
    assert_eq!(of("phi3"), "where --context is above 40");
    assert!(of("llama").is_null());
}
