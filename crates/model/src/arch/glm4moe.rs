//! GLM-4.5 to 4.7, and Solar Open: experts chosen by sigmoid and a correction, and some that every token takes as they are.
//! Half of a head rotates; the largest ones normalise queries and keys.

use fornax_compute::{Scores, Shares};

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, Floor, QkRows, ShareRule};
use crate::names::Dim::{Head, Hidden};
use crate::names::Owner::Layer;
use crate::names::{
    ATTENTION, DEEPSEEK_EXPERTS, ENDS, MLP, Name, QWEN_EXPERTS, Tensor as T,
    Transform::Keep,
    When::{Always, QkNorm},
    name,
};

pub(crate) const GLM4_MOE: Facts = Facts {
    name: "glm4moe",
    gguf: Some("glm4moe"),
    model_types: &["glm4_moe"],
    classes: &["Glm4MoeForCausalLM"],
    keys: &[("num_local_experts", "n_routed_experts")],
    defaults: &[("first_k_dense_replace", 1.0)],
    names: &[ENDS, NORMS, ATTENTION, MLP, QWEN_EXPERTS, DEEPSEEK_EXPERTS],
    gguf_qk_rows: QkRows::Halves,
    bias: BiasRule::QkvConfigured,
    partial_rotary: Some(0.5),
    experts: Some(ShareRule::Configured { gguf: Shares::OfAll, hugging_face: Shares::OfChosen }),
    scores: Scores::Sigmoid,
    floor: Floor::Added(1e-20),
    ..LLAMA
};

/// In GGUF it says that it is a GLM.
pub(crate) const SOLAR_OPEN: Facts = Facts {
    name: "solar-open",
    gguf: None,
    model_types: &["solar_open"],
    classes: &["SolarOpenForCausalLM"],
    defaults: &[],
    rope_base: 1_000_000.0,
    partial_rotary: None,
    ..GLM4_MOE
};

#[rustfmt::skip] // A table: one line per weight.
const NORMS: &[Name] = &[
    name(T::AttentionNorm, Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(T::MlpNorm, Layer, "post_attention_norm.weight", Some("post_attention_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(T::QueryNorm, Layer, "attn_q_norm.weight", Some("self_attn.q_norm.weight"), (&[Head], QkNorm, Keep)),
    name(T::KeyNorm, Layer, "attn_k_norm.weight", Some("self_attn.k_norm.weight"), (&[Head], QkNorm, Keep)),
];
