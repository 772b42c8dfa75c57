//! OLMo 2 and 3: norms behind the branches instead of before them, and of all queries and all keys together. In OLMo 3, whose
//! GGUF files say that they are an OLMo 2, three of four layers have a window and do not know of a longer context.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{QkRows, WindowRule};
use crate::names::Dim::{Hidden, Kv, Query};
use crate::names::Owner::Layer;
use crate::names::{ATTENTION, ENDS, MLP, Name, Tensor, Transform::Keep, When::Always, name};

pub(crate) const OLMO2: Facts = Facts {
    name: "olmo2",
    gguf: Some("olmo2"),
    model_types: &["olmo2", "olmo3"],
    classes: &["Olmo2ForCausalLM", "Olmo3ForCausalLM"],
    names: &[ENDS, ATTENTION, QK_NORMS, POST_NORMS, MLP],
    gguf_qk_rows: QkRows::Halves,
    window: WindowRule::AllButEvery(4),
    rope_base: 500000.0,
    window_rope_base: Some(500000.0),
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
pub(crate) const QK_NORMS: &[Name] = &[
    name(Tensor::QueryNorm, Layer, "attn_q_norm.weight", Some("self_attn.q_norm.weight"), (&[Query], Always, Keep)),
    name(Tensor::KeyNorm, Layer, "attn_k_norm.weight", Some("self_attn.k_norm.weight"), (&[Kv], Always, Keep)),
];

#[rustfmt::skip]
pub(crate) const POST_NORMS: &[Name] = &[
    name(Tensor::AttentionPostNorm, Layer, "post_attention_norm.weight", Some("post_attention_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(Tensor::MlpPostNorm, Layer, "post_ffw_norm.weight", Some("post_feedforward_layernorm.weight"), (&[Hidden], Always, Keep)),
];
