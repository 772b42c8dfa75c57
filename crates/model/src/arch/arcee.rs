//! Arcee's AFM: Llama's blocks with a feed-forward of squared ReLU, without gates.

use fornax_compute::Pointwise;

use super::llama::LLAMA;
use crate::Facts;
use crate::names::{ATTENTION, ENDS, PRE_NORMS, UNGATED};

pub(crate) const ARCEE: Facts = Facts {
    name: "arcee",
    gguf: Some("arcee"),
    model_types: &["arcee"],
    classes: &["ArceeForCausalLM"],
    names: &[ENDS, PRE_NORMS, ATTENTION, UNGATED],
    function: Some(Pointwise::ReluSquared),
    ..LLAMA
};
