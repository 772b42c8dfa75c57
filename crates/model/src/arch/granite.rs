//! Granite 3: Llama's blocks with multipliers for embedding, branches, attention and logits.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::LogitScale;

pub(crate) const GRANITE: Facts = Facts {
    name: "granite",
    gguf: Some("granite"),
    model_types: &["granite"],
    classes: &["GraniteForCausalLM"],
    multipliers: true,
    logit_scale: LogitScale::Divides,
    ..LLAMA
};
