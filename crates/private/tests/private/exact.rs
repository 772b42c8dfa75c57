//! The numbers: private inference is the integer reference to the bit, and the integer model is near the float model.

use fornax_private::Snapshot;

use crate::rig::{ANSWER, PROMPT, Rig, bits, options, serve};

/// Untied and tied heads, biases, fused parts of both containers, a window.
const CASES: &[&str] = &["llama.gguf", "llama", "llama-bias.gguf", "qwen2.gguf", "qwen2-window"];

#[test]
fn logits_are_bit_equal_to_the_integer_reference() {
    for &case in CASES {
        let servers = serve(case);
        let mut private = Rig::private(case, options(&servers)).unwrap();
        let mut reference = Rig::reference(case);
        let (got, wanted) = (private.talk(PROMPT, ANSWER).unwrap(), reference.talk(PROMPT, ANSWER).unwrap());
        assert_eq!(bits(&got), bits(&wanted), "{case}");
    }
}

#[test]
fn a_step_costs_four_rounds_a_layer_and_one_for_the_logits() {
    let servers = serve("llama.gguf");
    let mut private = Rig::private("llama.gguf", options(&servers)).unwrap();
    private.talk(PROMPT, &ANSWER[..2]).unwrap();
    let products = crate::rig::rounds("llama.gguf") as u64;
    assert!(products % 4 == 1, "{products} products");
    let stats = private.backend.with_products(|client| client.stats());
    let before = stats.snapshot();
    private.step(&[9]).unwrap();
    let Snapshot { rounds, sessions, sent, received, .. } = stats.snapshot().since(&before);
    assert_eq!((rounds, sessions), (products, 0));
    // Heads of 21 bytes for each product and one frame of 16 bytes a product for party 1; words of 4 bytes.
    let (inputs, outputs) = shape_sums();
    assert_eq!(sent, [products * 21 + 4 * inputs, 5 + products * 16]);
    assert_eq!(received, [products * 13 + 4 * outputs; 2]);
}

/// Columns and rows of all matrices of the tiny llama.
fn shape_sums() -> (u64, u64) {
    let matrices = crate::rig::matrices("llama.gguf");
    let sum = |size: fn(&fornax_private::Matrix) -> usize| matrices.iter().map(size).sum::<usize>() as u64;
    (sum(|matrix| matrix.columns), sum(|matrix| matrix.rows))
}

/// Independent figures: transformers' logits of the fixture. Bytes per row cost little on spread weights.
#[test]
fn the_integer_model_is_near_the_float_model() {
    let folder = crate::rig::fixture("llama");
    let golden: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("golden.json")).unwrap()).unwrap();
    let tokens: Vec<u32> = serde_json::from_value(golden["tokens"].clone()).unwrap();
    let bytes = std::fs::read(folder.join("golden.bin")).unwrap();
    let values: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let tokens = &tokens[..tokens.len().min(crate::rig::CONTEXT)];
    let got = Rig::reference("llama").step(tokens).unwrap();
    let (mut error, mut power) = (0.0, 0.0);
    for (got, wanted) in got.iter().flatten().zip(&values) {
        error += f64::from(got - wanted).powi(2);
        power += f64::from(*wanted).powi(2);
    }
    assert!(error / power < 2e-3, "NMSE {:e}", error / power);
    assert!(error > 0.0, "a quantised model that is exact is not quantised");
}
