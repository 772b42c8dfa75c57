//! Helium: Llama's blocks, whose heads rotate by neighbours in Hugging Face files. llama.cpp does not know it.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, QkRows};

pub(crate) const HELIUM: Facts = Facts {
    name: "helium",
    gguf: None,
    model_types: &["helium"],
    classes: &["HeliumForCausalLM"],
    hugging_face_qk_rows: QkRows::Pairs,
    bias: BiasRule::QkvConfigured,
    rope_base: 100_000.0,
    ..LLAMA
};
