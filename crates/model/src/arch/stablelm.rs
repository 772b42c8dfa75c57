//! StableLM: Llama's blocks with layer norms, and a part of each head rotates.

use fornax_compute::NormKind;

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, QkRows};
use crate::names::{ATTENTION, ENDS, MLP, NORM_BIASES, PRE_NORMS};

pub(crate) const STABLELM: Facts = Facts {
    name: "stablelm",
    gguf: Some("stablelm"),
    model_types: &["stablelm", "stablelm_epoch"],
    classes: &["StableLmForCausalLM", "StableLMEpochForCausalLM"],
    keys: &[("attention_bias", "use_qkv_bias")],
    names: &[ENDS, PRE_NORMS, NORM_BIASES, ATTENTION, MLP],
    gguf_qk_rows: QkRows::Halves,
    norm: NormKind::Layer,
    bias: BiasRule::QkvConfigured,
    partial_rotary: Some(0.25),
    ..LLAMA
};
