//! Qwen3: queries and keys are normalised head by head.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{QkRows, WindowRule};
use crate::names::{ATTENTION, ENDS, MLP, PRE_NORMS, QK_NORMS};

pub(crate) const QWEN3: Facts = Facts {
    name: "qwen3",
    gguf: Some("qwen3"),
    model_types: &["qwen3"],
    classes: &["Qwen3ForCausalLM"],
    // The models that embed.
    beginnings: &[("model.", "")],
    names: &[ENDS, PRE_NORMS, ATTENTION, QK_NORMS, MLP],
    gguf_qk_rows: QkRows::Halves,
    window: WindowRule::SomeLayers,
    ..LLAMA
};
