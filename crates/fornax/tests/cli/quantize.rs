//! `fornax quantize`, beside llama.cpp's own tool (`tests/quantize/make_quantized.py` ran it).

use std::ops::ControlFlow;
use std::path::Path;

use fornax::quantize::{Mix, Quantizing, quantize};
use sha2::{Digest, Sha256};

use crate::fornax;
use crate::tiny::fixtures;

fn hash(path: &Path) -> String {
    Sha256::digest(std::fs::read(path).unwrap()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn files_are_those_of_llama_cpp_to_the_byte() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/quantize/quantized.json");
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut compared = 0;
    for (model, mixes) in golden.as_object().unwrap() {
        for (mix, wanted) in mixes.as_object().unwrap() {
            let out = folder.path().join(format!("{model}-{mix}.gguf"));
            let mix = Mix::named(mix).unwrap();
            let quantizing = Quantizing { mix, importance: None, requantize: false, threads: 2 };
            let path = fixtures().join(format!("{model}.gguf"));
            let made = quantize(&path, &out, &quantizing, &mut |_, _| ControlFlow::Continue(())).unwrap();
            assert_eq!(hash(&out), wanted.as_str().unwrap(), "{model} {}", mix.name());
            assert_eq!(made.bytes, std::fs::metadata(&out).unwrap().len());
            compared += 1;
        }
    }
    assert!(compared > 120, "{compared}");
}

#[test]
fn a_file_is_made_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let (from, out) = (fixtures().join("llama.gguf"), folder.path().join("small.gguf"));
    let args = |extra: &[&str]| -> Vec<String> {
        let words = ["quantize", from.to_str().unwrap(), out.to_str().unwrap()];
        words.iter().chain(extra).map(|word| (*word).to_owned()).collect()
    };
    fornax(args(&["--to", "Q9_K"])).fails(2, "INVALID_INPUT", &["Q9_K", "Q4_K_M, Q4_K_S"]);
    let told = fornax(args(&["--to", "q8_0", "--json"])).json();
    assert_eq!(
        (&told["type"], &told["bytes"]),
        (&"Q8_0".into(), &std::fs::metadata(&out).unwrap().len().into())
    );
    assert!(told["tensors"]["Q8_0"].as_u64().unwrap() > 10, "{told}");
    // What exists stays.
    let before = hash(&out);
    fornax(args(&[])).fails(2, "INVALID_INPUT", &["small.gguf"]);
    assert_eq!(hash(&out), before);
    // What is quantised loses more with each time.
    let again = folder.path().join("again.gguf");
    let words = ["quantize", out.to_str().unwrap(), again.to_str().unwrap(), "--to", "Q4_0"];
    fornax(words).fails(2, "INVALID_INPUT", &["is Q8_0", "--allow-requantize"]);
    assert_eq!(fornax(words.iter().chain(&["--allow-requantize"])).code, Some(0));
    // A caller that stops leaves nothing behind.
    let stopped = folder.path().join("stopped.gguf");
    let mix = Mix::named("Q4_0").unwrap();
    let quantizing = Quantizing { mix, importance: None, requantize: false, threads: 1 };
    let refused = quantize(&from, &stopped, &quantizing, &mut |_, _| ControlFlow::Break(())).unwrap_err();
    assert_eq!(refused.code().name(), "CANCELLED", "{refused}");
    let left: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
    fornax(["quantize", fixtures().join("llama").to_str().unwrap(), again.to_str().unwrap()]).fails(
        2,
        "INVALID_INPUT",
        &["is no GGUF file"],
    );
}

#[test]
fn importance_matrices_hold_what_matrices_are_multiplied_by() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/quantize/imatrix.json");
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    for (case, golden) in golden.as_object().unwrap() {
        std::fs::write(&text, golden["text"].as_str().unwrap()).unwrap();
        let (model, out) =
            (fixtures().join(format!("{case}.gguf")), folder.path().join(format!("{case}.imatrix")));
        let (model, path) = (model.to_str().unwrap(), out.to_str().unwrap());
        let (file, chunk) = (text.to_str().unwrap(), golden["chunk"].to_string());
        let words = ["imatrix", model, path, "--file", file, "--context", &chunk, "--json"];
        let told = fornax(words).json();
        let tensors = golden["tensors"].as_object().unwrap();
        assert_eq!(told["matrices"].as_u64(), Some(tensors.len() as u64), "{told}");
        let made = fornax_format::Gguf::open(&out).unwrap();
        let floats = |name: &str| -> Vec<f32> {
            let view = made.tensor(name).unwrap_or_else(|| panic!("{case} has no {name}"));
            view.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        for (name, wanted) in tensors {
            let counts: Vec<f32> = serde_json::from_value(wanted["counts"].clone()).unwrap();
            assert_eq!(floats(&format!("{name}.counts")), counts, "{case} {name}");
            let sums: Vec<Vec<f32>> = serde_json::from_value(wanted["sums"].clone()).unwrap();
            for (got, wanted) in floats(&format!("{name}.in_sum2")).iter().zip(sums.iter().flatten()) {
                let apart = (got - wanted).abs();
                assert!(apart <= 1e-3 * wanted.abs().max(1e-2), "{case} {name}: {got}, wanted {wanted}");
            }
        }
        // What is made of it reads it, and what is there already stays.
        let small = folder.path().join(format!("{case}.gguf"));
        let small = small.to_str().unwrap();
        let words = ["quantize", model, small, "--to", "Q2_K_S"];
        fornax(words).fails(2, "INVALID_INPUT", &["Q2_K_S needs an importance matrix"]);
        assert_eq!(fornax(words.iter().chain(&["--importance", path])).code, Some(0));
        let words = ["imatrix", model, path, "--file", file, "--context", &chunk];
        fornax(words).fails(2, "INVALID_INPUT", &["cannot write"]);
        let (other, longer) = (folder.path().join("other"), "4096");
        let words = ["imatrix", model, other.to_str().unwrap(), "--file", file, "--context", "200"];
        fornax(words).fails(2, "INVALID_INPUT", &["fill no chunk of 200"]);
        let words = ["imatrix", model, other.to_str().unwrap(), "--file", file, "--context", longer];
        assert_ne!(fornax(words).code, Some(0), "longer than the model's context");
    }
}
