//! GLM-4: gate and up in one matrix, and half of a head rotates, by neighbours in both containers. The later ones have norms
//! behind each branch, too.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, QkRows};
use crate::names::Dim::{Ffn, Hidden, TwoFfn};
use crate::names::Owner::Layer;
use crate::names::{ATTENTION, ENDS, Name, PRE_NORMS, Tensor as T, Transform::Keep, When::Always, name};

/// The first ones, whose GGUF files say that they are a ChatGLM.
pub(crate) const GLM: Facts = Facts {
    name: "glm",
    gguf: Some("chatglm"),
    model_types: &["glm"],
    classes: &["GlmForCausalLM"],
    names: &[ENDS, PRE_NORMS, ATTENTION, MLP],
    hugging_face_qk_rows: QkRows::Pairs,
    bias: BiasRule::QkvConfigured,
    partial_rotary: Some(0.5),
    ..LLAMA
};

pub(crate) const GLM4: Facts = Facts {
    name: "glm4",
    gguf: Some("glm4"),
    model_types: &["glm4"],
    classes: &["Glm4ForCausalLM"],
    names: &[ENDS, ATTENTION, NORMS, MLP],
    ..GLM
};

#[rustfmt::skip] // A table: one line per weight.
const NORMS: &[Name] = &[
    name(T::AttentionNorm, Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(T::AttentionPostNorm, Layer, "post_attention_norm.weight", Some("post_self_attn_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(T::MlpNorm, Layer, "ffn_norm.weight", Some("post_attention_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(T::MlpPostNorm, Layer, "post_ffw_norm.weight", Some("post_mlp_layernorm.weight"), (&[Hidden], Always, Keep)),
];

#[rustfmt::skip]
const MLP: &[Name] = &[
    name(T::GateUp, Layer, "ffn_up.weight", Some("mlp.gate_up_proj.weight"), (&[TwoFfn, Hidden], Always, Keep)),
    name(T::Down, Layer, "ffn_down.weight", Some("mlp.down_proj.weight"), (&[Hidden, Ffn], Always, Keep)),
];
