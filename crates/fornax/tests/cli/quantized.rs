//! Safetensors that are quantised, and those that are quantised while they are loaded.

use std::fs;
use std::path::Path;

use crate::fornax;
use crate::tiny::{EXACT, fixtures, floats, log_softmax, tokens};

/// The logits of every position of the tiny llama's tokens.
fn logits(path: &Path, flags: &[&str]) -> Vec<f32> {
    logits_of(path, &tokens("llama").0, flags)
}

fn logits_of(path: &Path, ids: &str, flags: &[&str]) -> Vec<f32> {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("logits.f32");
    let mut args =
        vec!["logits", path.to_str().unwrap(), "--tokens", ids, "--all", "--out", out.to_str().unwrap()];
    args.extend(if flags.is_empty() { &EXACT[..] } else { flags });
    let ran = fornax(args);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    floats(&fs::read(&out).unwrap())
}

/// The largest difference of two log-probabilities.
fn distance(got: &[f32], wanted: &[f32], columns: usize) -> f64 {
    assert_eq!(got.len(), wanted.len());
    let rows = got.chunks(columns).zip(wanted.chunks(columns));
    rows.flat_map(|(got, wanted)| log_softmax(got).into_iter().zip(log_softmax(wanted)))
        .map(|(got, wanted)| (got - wanted).abs())
        .fold(0.0, f64::max)
}

/// One model has all of them: a matrix each.
#[test]
fn every_weight_format_computes_what_transformers_does_with_its_values() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/packed");
    let golden = floats(&fs::read(folder.join("formats.bin")).unwrap());
    let tokens: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.join("formats.json")).unwrap()).unwrap();
    let ids: Vec<String> = tokens["tokens"].as_array().unwrap().iter().map(|id| id.to_string()).collect();
    let path = folder.join("formats.gguf");
    for (flags, bound) in [(&EXACT[..], 1e-3), (&["--activations", "int8", "--kv-dtype", "f32"], 0.02)] {
        let error = distance(&logits_of(&path, &ids.join(","), flags), &golden, golden.len() / ids.len());
        assert!(error <= bound, "{flags:?}: {error}");
    }
    let plan = fornax(["plan", path.to_str().unwrap(), "--json"]).json();
    assert!(plan["weights"].as_array().unwrap().len() > 20, "{plan}");
}

#[test]
fn fp8_gptq_and_awq_compute_what_transformers_does_with_their_values() {
    for (kind, stored, computed) in
        [("fp8", "F8_E4M3", "F32"), ("gptq", "GPTQ_4", "Q4_0"), ("awq", "AWQ_4", "Q8_0")]
    {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/packed").join(kind);
        let golden = floats(&fs::read(path.join("golden.bin")).unwrap());
        let error = distance(&logits(&path, &[]), &golden, 128);
        assert!(error <= 1e-3, "{kind}: {error}");
        let plan = fornax(["plan", path.to_str().unwrap(), "--json"]).json();
        let weights = plan["weights"].as_array().unwrap();
        assert!(
            weights.iter().any(|some| some["dtype"] == stored && some["computed"] == computed),
            "{kind}: {weights:?}"
        );
    }
}

/// Q8_0 is bit by bit that of the `gguf` package, whose values transformers computed with. What Q4_K loses is compared with
/// llama.cpp's quantiser where it is written (`compute/src/landing/quantize.rs`).
#[test]
fn quantising_on_load_gives_the_logits_of_the_quantised_model_and_is_said() {
    let path = fixtures().join("llama");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/packed/q8_0.bin");
    let golden = floats(&fs::read(golden).unwrap());
    let plan = |flags: &[&str]| {
        let mut args = vec!["plan", path.to_str().unwrap(), "--json"];
        args.extend(flags);
        let plan = fornax(args).json();
        (plan["devices"][0]["bytes"]["weights"].as_u64().unwrap(), plan["weights"].to_string())
    };
    assert!(distance(&logits(&path, &[]), &golden, 128) > 1e-2, "what is lost shows");
    // Rows of 64 values do not fill blocks of Q4_K.
    for quant in ["q8_0", "q4_k"] {
        let got = logits(&path, &["--activations", "float", "--kv-dtype", "f32", "--quant", quant]);
        let error = distance(&got, &golden, 128);
        assert!(error <= 1e-3, "{quant}: {error:e}");
        let ((before, _), (after, weights)) = (plan(&[]), plan(&["--quant", quant]));
        assert!(after * 10 < before * 4, "{quant}: {before} bytes and then {after}");
        assert!(weights.contains(r#""computed":"Q8_0""#), "{weights}");
    }
}

#[test]
fn what_cannot_be_quantised_or_read_is_said() {
    let gguf = fixtures().join("llama.gguf");
    let gguf = gguf.to_str().unwrap();
    fornax(["logits", gguf, "--tokens", "1", "--quant", "q8_0"]).fails(
        2,
        "INVALID_INPUT",
        &["GGUF", "as it is stored"],
    );
    let llama = fixtures().join("llama");
    fornax(["logits", llama.to_str().unwrap(), "--tokens", "1", "--quant", "q5_0"]).fails(
        2,
        "INVALID_INPUT",
        &["\"q5_0\"", "q8_0, fp8 or q4_k"],
    );
    let folder = tempfile::tempdir().unwrap();
    let with = |quantization: serde_json::Value| {
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(llama.join("config.json")).unwrap()).unwrap();
        config["quantization_config"] = quantization;
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        fs::copy(llama.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        fornax(["logits", folder.path().to_str().unwrap(), "--tokens", "1"])
    };
    with(serde_json::json!({"quant_method": "bitsandbytes"})).fails(
        4,
        "MODEL_UNSUPPORTED",
        &["\"bitsandbytes\"", "gptq"],
    );
    with(serde_json::json!({"quant_method": "awq", "bits": 3})).fails(
        4,
        "MODEL_UNSUPPORTED",
        &["awq with bits 3"],
    );
}
