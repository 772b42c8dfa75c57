//! Command R and Aya: both branches of a layer read one layer norm without a bias, heads rotate by neighbours in both
//! containers, and logits are scaled. Of Command R7B and A three of four layers have a window, and the others do not rotate.

use fornax_compute::NormKind;

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{LogitScale, ParallelRule, QkRows, RotaryRule, WindowRule};
use crate::names::Dim::Hidden;
use crate::names::Owner::Layer;
use crate::names::{ATTENTION, ENDS, MLP, Name, Tensor as T, Transform::Keep, When::Always, name};

pub(crate) const COHERE: Facts = Facts {
    name: "command-r",
    gguf: Some("command-r"),
    model_types: &["cohere"],
    classes: &["CohereForCausalLM"],
    defaults: &[("logit_scale", 0.0625)],
    names: &[ENDS, NORM, ATTENTION, MLP],
    hugging_face_qk_rows: QkRows::Pairs,
    norm: NormKind::Layer,
    parallel: ParallelRule::Always,
    logit_scale: LogitScale::Multiplies,
    ..LLAMA
};

pub(crate) const COHERE2: Facts = Facts {
    name: "cohere2",
    gguf: Some("cohere2"),
    model_types: &["cohere2"],
    classes: &["Cohere2ForCausalLM"],
    defaults: &[("logit_scale", 0.0625), ("sliding_window", 4096.0)],
    window: WindowRule::AllButEvery(4),
    rotary: RotaryRule::Windows,
    ..COHERE
};

#[rustfmt::skip] // A table: one line per weight.
const NORM: &[Name] = &[
    name(T::AttentionNorm, Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Hidden], Always, Keep)),
];
