//! Falcon 7B: all queries share one head of keys and values, both branches of a layer read one layer norm, and the
//! feed-forward has no gates.

use fornax_compute::{Glu, NormKind};

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, ParallelRule, QkRows};
use crate::names::Dim::{Ffn, Hidden, Qkv, Query, Vocab};
use crate::names::Owner::{Layer, Model};
use crate::names::Transform::{Keep, Ungrouped};
use crate::names::When::{Always, Untied};
use crate::names::{Name, Tensor as T, name};

pub(crate) const FALCON: Facts = Facts {
    name: "falcon",
    gguf: Some("falcon"),
    model_types: &["falcon"],
    classes: &["FalconForCausalLM"],
    keys: &[
        ("intermediate_size", "ffn_hidden_size"),
        ("layer_norm_eps", "layer_norm_epsilon"),
        ("hidden_act", "activation"),
    ],
    defaults: &[("max_position_embeddings", 2048.0)],
    layers: "transformer.h",
    names: &[NAMES],
    gguf_qk_rows: QkRows::Halves,
    norm: NormKind::Layer,
    bias: BiasRule::Never,
    parallel: ParallelRule::Always,
    ffn_of_hidden: Some(4),
    glu: Glu::Gelu,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const NAMES: &[Name] = &[
    name(T::Embedding, Model, "token_embd.weight", Some("transformer.word_embeddings.weight"), (&[Vocab, Hidden], Always, Keep)),
    name(T::OutputNorm, Model, "output_norm.weight", Some("transformer.ln_f.weight"), (&[Hidden], Always, Keep)),
    name(T::OutputNormBias, Model, "output_norm.bias", Some("transformer.ln_f.bias"), (&[Hidden], Always, Keep)),
    name(T::Output, Model, "output.weight", Some("lm_head.weight"), (&[Vocab, Hidden], Untied, Keep)),
    name(T::AttentionNorm, Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(T::AttentionNormBias, Layer, "attn_norm.bias", Some("input_layernorm.bias"), (&[Hidden], Always, Keep)),
    name(T::Qkv, Layer, "attn_qkv.weight", Some("self_attention.query_key_value.weight"), (&[Qkv, Hidden], Always, Ungrouped)),
    name(T::AttentionOutput, Layer, "attn_output.weight", Some("self_attention.dense.weight"), (&[Hidden, Query], Always, Keep)),
    name(T::Up, Layer, "ffn_up.weight", Some("mlp.dense_h_to_4h.weight"), (&[Ffn, Hidden], Always, Keep)),
    name(T::Down, Layer, "ffn_down.weight", Some("mlp.dense_4h_to_h.weight"), (&[Hidden, Ffn], Always, Keep)),
];
