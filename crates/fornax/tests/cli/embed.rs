//! Texts into vectors, from the command line.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::{fornax, fornax_with_input, model};

/// Texts with their embeddings as transformers makes them.
fn golden() -> Vec<(String, Vec<f32>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/smollm2-embeddings.json");
    let cases: Vec<Value> = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    cases.iter().map(|case| (case["text"].as_str().unwrap().to_owned(), floats(&case["embedding"]))).collect()
}

fn floats(values: &Value) -> Vec<f32> {
    serde_json::from_value(values.clone()).unwrap()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

const EXACT: [&str; 6] = ["--activations", "float", "--kv-dtype", "f32", "--context", "512"];

#[test]
fn texts_are_embedded_as_the_reference_embeds_them() {
    let Some(path) = model("smollm2", "texts_are_embedded_as_the_reference_embeds_them") else { return };
    let golden = golden();
    let mut args = vec!["embed", path.as_str(), "--json", "--parallel", "4"];
    args.extend(EXACT);
    for (text, _) in &golden {
        args.extend(["--text", text]);
    }
    let made = fornax(&args).json();
    let embeddings: Vec<Vec<f32>> = made["embeddings"].as_array().unwrap().iter().map(floats).collect();
    assert_eq!(embeddings.len(), golden.len());
    for ((text, wanted), got) in golden.iter().zip(&embeddings) {
        assert_eq!(made["dimensions"], got.len());
        // The reference is printed with six digits.
        let likeness = dot(got, wanted) / dot(wanted, wanted).sqrt();
        assert!(likeness > 0.99999, "{text}: {likeness}");
        assert!((dot(got, got) - 1.0).abs() < 1e-5, "{text}");
    }
}

#[test]
fn every_way_in_and_out_gives_the_same_numbers() {
    let Some(path) = model("smollm2", "every_way_in_and_out_gives_the_same_numbers") else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (one, two) = (file("one.txt", "A cat sleeps."), file("two.txt", "Stocks fell."));
    let lines = "A cat sleeps.\nStocks fell.\n";
    let ndjson = |ran: crate::Ran| -> Vec<Vec<f32>> {
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let base = ["embed", &path, "--context", "128"];
    let with = |more: &[&str]| ndjson(fornax([&base[..], more].concat()));
    let wanted = with(&["--text", "A cat sleeps.", "--text", "Stocks fell."]);
    assert_eq!(wanted.len(), 2);
    assert_ne!(wanted[0], wanted[1]);
    assert_eq!(with(&["--file", &one, "--file", &two]), wanted);
    assert_eq!(with(&["--lines", &file("lines.txt", lines), "--parallel", "2"]), wanted);
    assert_eq!(ndjson(fornax_with_input(&[&base[..], &["--lines", "-"]].concat(), lines)), wanted);

    let out = folder.path().join("rows.f32");
    let written =
        fornax([&base[..], &["--file", &one, "--file", &two, "--out", out.to_str().unwrap()]].concat());
    assert_eq!((written.code, written.stdout.as_str()), (Some(0), ""), "{}", written.stderr);
    let rows: Vec<f32> =
        fs::read(out).unwrap().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    assert_eq!(rows, wanted.concat());

    // As long as the model makes it, in the same direction.
    let raw = &with(&["--text", "A cat sleeps.", "--raw"])[0];
    let length = dot(raw, raw).sqrt();
    assert!(length > 2.0, "{length}");
    assert!((dot(raw, &wanted[0]) / length - 1.0).abs() < 1e-5);
}

#[test]
fn what_cannot_be_embedded_is_refused_with_its_place() {
    let Some(path) = model("smollm2", "what_cannot_be_embedded_is_refused_with_its_place") else { return };
    let folder = tempfile::tempdir().unwrap();
    let lines = folder.path().join("lines.txt");
    fs::write(&lines, "first\n\nthird\n").unwrap();
    let check = |args: &[&str], exit: i32, code: &str, words: &[&str]| {
        fornax([&["embed", &path, "--context", "16"], args].concat()).fails(exit, code, words);
    };
    check(&["--lines", lines.to_str().unwrap()], 2, "INVALID_INPUT", &["line 2 of", "is empty"]);
    check(&["--text", "ok", "--text", &"word ".repeat(40)], 1, "PROMPT_TOO_LONG", &["--text 2", "holds 16"]);
    check(&["--file", "absent.txt"], 2, "INVALID_INPUT", &["absent.txt"]);
    check(&[], 2, "INVALID_INPUT", &["--text"]);
    fs::write(&lines, "").unwrap();
    check(&["--lines", lines.to_str().unwrap()], 2, "INVALID_INPUT", &["no text to embed"]);
}

#[test]
fn sentences_are_embedded_as_sentence_transformers_does() {
    let Some(path) = model("minilm", "sentences_are_embedded_as_sentence_transformers_does") else { return };
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/minilm-texts.json");
    let golden: Value = serde_json::from_slice(&fs::read(golden).unwrap()).unwrap();
    // The last is what is left of a text that sentence-transformers cuts, which this never does.
    let cases: Vec<&Value> = golden["cases"].as_array().unwrap().iter().chain([&golden["cut"]]).collect();
    let mut args = vec!["embed", path.as_str(), "--json", "--activations", "float", "--parallel", "3"];
    for case in &cases {
        args.extend(["--text", case["text"].as_str().unwrap()]);
    }
    let made = fornax(&args).json();
    let tokens: u64 = cases.iter().map(|case| case["tokens"].as_u64().unwrap()).sum();
    assert_eq!(made["usage"]["prompt_tokens"], tokens);
    for (case, got) in cases.iter().zip(made["embeddings"].as_array().unwrap()) {
        for (got, wanted) in floats(got).into_iter().zip(floats(&case["embedding"])) {
            assert!((got - wanted).abs() <= 1e-4, "{}: {got}, wanted {wanted}", case["text"]);
        }
    }
    // As many as the model has positions for, and the two around them.
    let long = "word ".repeat(511);
    for args in [&["run", &path, "Hello there"][..], &["generate", &path, "--prompt", "Hello"]] {
        fornax(args).fails(2, "INVALID_INPUT", &["makes embeddings and no answers; use `fornax embed`"]);
    }
    fornax(["embed", &path, "--text", &long]).fails(1, "PROMPT_TOO_LONG", &["513 tokens", "holds 512"]);
}

#[test]
fn how_an_encoder_pools_may_be_said() {
    let fixtures = crate::tiny::fixtures();
    let encoder = fixtures.join("xlm-roberta.gguf");
    let embed = |more: &[&str]| {
        let base = ["embed", encoder.to_str().unwrap(), "--device", "cpu", "--text", "sky light", "--json"];
        let made = fornax([&base[..], &EXACT[..4], more].concat()).json();
        floats(&made["embeddings"][0])
    };
    let ways = ["mean", "cls", "last"].map(|way| embed(&["--pooling", way]));
    assert_eq!(ways[0], embed(&[]), "its file does not say");
    assert!(ways[0] != ways[1] && ways[1] != ways[2] && ways[0] != ways[2]);
    let ranker = fixtures.join("bert-pair");
    let refused = fornax(["embed", ranker.to_str().unwrap(), "--text", "w1", "--pooling", "mean"]);
    assert!(refused.stderr.contains("pooling mean"), "{}", refused.stderr);
    assert_ne!(refused.code, Some(0));
}
