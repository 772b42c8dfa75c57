//! Nemotron 3 and 4, and Minitron: layer norms, half of a head rotates, a feed-forward of squared ReLU. Hugging Face files hold the
//! weights of norms less one.

use fornax_compute::NormKind;

use super::arcee::ARCEE;
use crate::Facts;
use crate::facts::QkRows;
use crate::names::{ATTENTION, ENDS, NORM_BIASES, PRE_NORMS, UNGATED};

pub(crate) const NEMOTRON: Facts = Facts {
    name: "nemotron",
    gguf: Some("nemotron"),
    model_types: &["nemotron"],
    classes: &["NemotronForCausalLM"],
    keys: &[("layer_norm_eps", "norm_eps")],
    names: &[ENDS, NORM_BIASES, PRE_NORMS, ATTENTION, UNGATED],
    gguf_qk_rows: QkRows::Halves,
    norm: NormKind::Layer,
    norm_less_one: true,
    partial_rotary: Some(0.5),
    ..ARCEE
};
