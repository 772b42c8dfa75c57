//! CWM: Llama's blocks, with windows on all layers but the first of every four.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::WindowRule;

pub(crate) const CWM: Facts = Facts {
    name: "cwm",
    gguf: None,
    model_types: &["cwm"],
    classes: &["CwmForCausalLM"],
    defaults: &[("sliding_window", 8192.0)],
    window: WindowRule::AllButFirstOf(4),
    ..LLAMA
};
