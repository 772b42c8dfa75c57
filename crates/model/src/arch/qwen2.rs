//! Qwen2 and Qwen2.5: biases on Q, K and V.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, QkRows, WindowRule};

pub(crate) const QWEN2: Facts = Facts {
    name: "qwen2",
    gguf: Some("qwen2"),
    model_types: &["qwen2"],
    classes: &["Qwen2ForCausalLM"],
    gguf_qk_rows: QkRows::Halves,
    bias: BiasRule::Qkv,
    window: WindowRule::SomeLayers,
    ..LLAMA
};
