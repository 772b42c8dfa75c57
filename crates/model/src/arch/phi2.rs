//! Phi 1 and 2: both branches of a layer read one layer norm, a part of each head rotates, a feed-forward without gates, and
//! biases everywhere, on logits too.

use fornax_compute::{Glu, NormKind};

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, ParallelRule, QkRows};
use crate::names::Dim::{Ffn, Hidden, Kv, Query, Vocab};
use crate::names::Owner::{Layer, Model};
use crate::names::Transform::{Keep, QkRows as Rows};
use crate::names::When::{Always, MlpBias, OutputBias, QkvBias};
use crate::names::{Name, Tensor as T, name};

pub(crate) const PHI2: Facts = Facts {
    name: "phi2",
    gguf: Some("phi2"),
    model_types: &["phi"],
    classes: &["PhiForCausalLM"],
    names: &[NAMES],
    gguf_qk_rows: QkRows::Halves,
    norm: NormKind::Layer,
    bias: BiasRule::Always,
    partial_rotary: Some(0.5),
    parallel: ParallelRule::Always,
    glu: Glu::GeluTanh,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const NAMES: &[Name] = &[
    name(T::Embedding, Model, "token_embd.weight", Some("model.embed_tokens.weight"), (&[Vocab, Hidden], Always, Keep)),
    name(T::OutputNorm, Model, "output_norm.weight", Some("model.final_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(T::OutputNormBias, Model, "output_norm.bias", Some("model.final_layernorm.bias"), (&[Hidden], Always, Keep)),
    name(T::Output, Model, "output.weight", Some("lm_head.weight"), (&[Vocab, Hidden], Always, Keep)),
    name(T::OutputBias, Model, "output.bias", Some("lm_head.bias"), (&[Vocab], Always, Keep)),
    name(T::AttentionNorm, Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(T::AttentionNormBias, Layer, "attn_norm.bias", Some("input_layernorm.bias"), (&[Hidden], Always, Keep)),
    name(T::Query, Layer, "attn_q.weight", Some("self_attn.q_proj.weight"), (&[Query, Hidden], Always, Rows)),
    name(T::Key, Layer, "attn_k.weight", Some("self_attn.k_proj.weight"), (&[Kv, Hidden], Always, Rows)),
    name(T::Value, Layer, "attn_v.weight", Some("self_attn.v_proj.weight"), (&[Kv, Hidden], Always, Keep)),
    name(T::QueryBias, Layer, "attn_q.bias", Some("self_attn.q_proj.bias"), (&[Query], QkvBias, Rows)),
    name(T::KeyBias, Layer, "attn_k.bias", Some("self_attn.k_proj.bias"), (&[Kv], QkvBias, Rows)),
    name(T::ValueBias, Layer, "attn_v.bias", Some("self_attn.v_proj.bias"), (&[Kv], QkvBias, Keep)),
    name(T::AttentionOutput, Layer, "attn_output.weight", Some("self_attn.dense.weight"), (&[Hidden, Query], Always, Keep)),
    name(T::AttentionOutputBias, Layer, "attn_output.bias", Some("self_attn.dense.bias"), (&[Hidden], OutputBias, Keep)),
    name(T::Up, Layer, "ffn_up.weight", Some("mlp.fc1.weight"), (&[Ffn, Hidden], Always, Keep)),
    name(T::UpBias, Layer, "ffn_up.bias", Some("mlp.fc1.bias"), (&[Ffn], MlpBias, Keep)),
    name(T::Down, Layer, "ffn_down.weight", Some("mlp.fc2.weight"), (&[Hidden, Ffn], Always, Keep)),
    name(T::DownBias, Layer, "ffn_down.bias", Some("mlp.fc2.bias"), (&[Hidden], MlpBias, Keep)),
];
