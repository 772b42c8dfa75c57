//! Seed-OSS: biases on Q, K and V.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, QkRows};
use crate::names::Dim::Hidden;
use crate::names::Owner::Layer;
use crate::names::{ATTENTION, ENDS, MLP, Name, Tensor as T, Transform::Keep, When::Always, name};

pub(crate) const SEED_OSS: Facts = Facts {
    name: "seed-oss",
    gguf: Some("seed_oss"),
    model_types: &["seed_oss"],
    classes: &["SeedOssForCausalLM"],
    names: &[ENDS, NORMS, ATTENTION, MLP],
    gguf_qk_rows: QkRows::Halves,
    bias: BiasRule::QkvConfigured,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const NORMS: &[Name] = &[
    name(T::AttentionNorm, Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Hidden], Always, Keep)),
    // The name that others have for a norm behind attention.
    name(T::MlpNorm, Layer, "post_attention_norm.weight", Some("post_attention_layernorm.weight"), (&[Hidden], Always, Keep)),
];
