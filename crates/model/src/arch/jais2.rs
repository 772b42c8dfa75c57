//! Jais 2: layer norms, biases, a feed-forward of squared ReLU.

use fornax_compute::NormKind;

use super::arcee::ARCEE;
use crate::Facts;
use crate::facts::QkRows;
use crate::names::{ATTENTION, ENDS, NORM_BIASES, PRE_NORMS, UNGATED};

pub(crate) const JAIS2: Facts = Facts {
    name: "jais2",
    gguf: Some("jais2"),
    model_types: &["jais2"],
    classes: &["Jais2ForCausalLM"],
    names: &[ENDS, NORM_BIASES, PRE_NORMS, ATTENTION, UNGATED],
    gguf_qk_rows: QkRows::Halves,
    norm: NormKind::Layer,
    ..ARCEE
};
