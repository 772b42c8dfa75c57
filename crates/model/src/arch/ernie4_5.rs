//! ERNIE 4.5, the dense ones: Llama's blocks, whose heads rotate by neighbours in both containers.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::QkRows;

pub(crate) const ERNIE4_5: Facts = Facts {
    name: "ernie4.5",
    gguf: Some("ernie4_5"),
    model_types: &["ernie4_5"],
    classes: &["Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"],
    keys: &[("attention_bias", "use_bias"), ("mlp_bias", "use_bias")],
    hugging_face_qk_rows: QkRows::Pairs,
    rope_base: 500_000.0,
    ..LLAMA
};
