//! Rotary frequencies against those of transformers' own functions.

use fornax_model::Config;
use serde::Deserialize;
use serde_json::Value;

use crate::fixture::{folder, open_hugging_face};

#[derive(Deserialize)]
struct Case {
    config: Value,
    frequencies: Vec<f32>,
    magnitude: f32,
}

#[test]
fn frequencies_equal_those_of_transformers() {
    let cases = std::fs::read(folder().join("rope.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_slice(&cases).unwrap();
    assert!(cases.len() >= 48);
    for Case { config, frequencies, magnitude } in cases {
        let change = |written: &mut Value| {
            *written = config.clone();
            // The weights beside it are another model's; only rotation is read here.
            written["vocab_size"] = 128.into();
        };
        let rope = Config::read(&open_hugging_face("llama", change, |_| {})).unwrap().rope;
        let context = config.to_string();
        assert_eq!(rope.frequencies().len(), frequencies.len(), "{context}");
        for (ours, theirs) in rope.frequencies().iter().zip(&frequencies) {
            // Theirs are computed in 32 bits.
            assert!((ours / theirs - 1.0).abs() < 2e-6, "{ours} {theirs}: {context}");
        }
        assert!((rope.magnitude() - magnitude).abs() < 1e-6, "{context}");
    }
}
