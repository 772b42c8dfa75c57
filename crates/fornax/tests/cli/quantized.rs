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
        [("fp8", "F8_E4M3", "F32"), ("gptq", "GPTQ_4", "Q4_0"), ("awq", "AWQ_4", "Q5_0")]
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

/// Q8_0 is bit by bit that of the `gguf` package, whose values transformers computed with. What Q4_K loses is compared
/// with llama.cpp's quantiser where it is written (`compute/src/landing/quantize.rs`).
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

/// The nearest of all that 8-bit floats can say beside the power of two that suits the largest of 32 values.
fn rounded(values: &[f32]) -> Vec<f32> {
    let floats: Vec<f64> = (0..127)
        .map(|code| match (code / 8, code % 8) {
            (0, mantissa) => f64::from(mantissa) / 512.0,
            (exponent, mantissa) => f64::from(8 + mantissa) * 2f64.powi(exponent - 10),
        })
        .collect();
    let largest = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let power = (-60..60).map(|power| 2f64.powi(power)).find(|power| f64::from(largest) <= 448.0 * power);
    let power = power.unwrap();
    let nearest = |value: &f32| {
        let error = |float: &f64| (float * power - f64::from(value.abs())).abs();
        let float = floats.iter().min_by(|a, b| error(a).total_cmp(&error(b))).unwrap();
        (float * power) as f32 * value.signum()
    };
    values.iter().map(nearest).collect()
}

/// Against a checkpoint whose matrices were rounded here.
#[test]
fn eight_bit_floats_give_the_logits_of_the_rounded_model_and_take_33_bytes_for_32_values() {
    let path = fixtures().join("llama");
    let folder = tempfile::tempdir().unwrap();
    fs::copy(path.join("config.json"), folder.path().join("config.json")).unwrap();
    let mut file = fs::read(path.join("model.safetensors")).unwrap();
    let header = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let tensors: serde_json::Value = serde_json::from_slice(&file[8..8 + header]).unwrap();
    let mut values = 0;
    for tensor in tensors.as_object().unwrap().values().filter(|tensor| tensor["shape"][1].is_u64()) {
        assert_eq!(tensor["dtype"], "F32");
        let [from, to] = [0, 1].map(|i| tensor["data_offsets"][i].as_u64().unwrap() as usize + 8 + header);
        for block in file[from..to].chunks_exact_mut(32 * 4) {
            let bytes: Vec<u8> =
                rounded(&floats(block)).iter().flat_map(|value| value.to_le_bytes()).collect();
            block.copy_from_slice(&bytes);
        }
        values += (to - from) / 4;
    }
    fs::write(folder.path().join("model.safetensors"), file).unwrap();
    let golden = logits(folder.path(), &[]);
    assert!(distance(&logits(&path, &[]), &golden, 128) > 5e-2, "what is lost shows");
    let got = logits(&path, &["--activations", "float", "--kv-dtype", "f32", "--quant", "fp8"]);
    let error = distance(&got, &golden, 128);
    assert!(error <= 1e-5, "{error:e}");
    let plan = |flags: &[&str]| {
        let plan = fornax(["plan", path.to_str().unwrap(), "--json"].iter().chain(flags)).json();
        let landed = plan["weights"].as_array().unwrap().iter().filter(|some| some["computed"] == "MXFP8");
        let landed: u64 = landed.map(|some| some["values"].as_u64().unwrap()).sum();
        (landed as usize, plan["devices"][0]["bytes"]["weights"].as_u64().unwrap())
    };
    let ((none, before), (all, after)) = (plan(&[]), plan(&["--quant", "fp8"]));
    assert_eq!((none, all), (0, values));
    assert!(after * 100 < before * 29, "{before} bytes and then {after}");
}

/// Keys and values lose more in 8-bit floats than in 8-bit integers, and those more than in f16.
#[test]
fn keys_and_values_are_stored_as_they_are_asked_for() {
    let path = fixtures().join("llama");
    let exact = logits(&path, &[]);
    let errors = ["f16", "q8_0", "fp8"]
        .map(|dtype| distance(&logits(&path, &["--activations", "float", "--kv-dtype", dtype]), &exact, 128));
    assert!(0.0 < errors[0] && errors[0] < errors[1] && errors[1] < errors[2], "{errors:?}");
    // Seven bits of mantissa fewer than f16 has: 2^7 times its error, and the same again for how the largest ones fall.
    assert!(errors[2] < 256.0 * errors[0], "{errors:?}");
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
    with(serde_json::json!({"quant_method": "spqr"})).fails(
        4,
        "MODEL_UNSUPPORTED",
        &["\"spqr\"", "docs/files.md"],
    );
    with(serde_json::json!({"quant_method": "awq", "bits": 3})).fails(
        4,
        "MODEL_UNSUPPORTED",
        &["awq with bits 3"],
    );
}
