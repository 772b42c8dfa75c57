//! GPT-2: learned positions, layer norm, a feed-forward without gates, biases everywhere. Hugging Face files hold its
//! matrices with rows and columns exchanged. StarCoder 1 has its blocks; there one head of keys and values may serve all
//! queries, and matrices lie as elsewhere.

use fornax_compute::{Glu, NormKind};

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, QkRows};
use crate::names::Dim::{Context, Ffn, Hidden, Qkv, Query, Vocab};
use crate::names::Owner::{Layer, Model};
use crate::names::Transform::{Keep, Transposed, Ungrouped};
use crate::names::When::{Always, MlpBias, OutputBias, QkvBias, Untied};
use crate::names::{Name, Tensor as T, name};

pub(crate) const GPT2: Facts = Facts {
    name: "gpt2",
    gguf: Some("gpt2"),
    model_types: &["gpt2"],
    classes: &["GPT2LMHeadModel"],
    keys: &[
        ("num_hidden_layers", "n_layer"),
        ("hidden_size", "n_embd"),
        ("intermediate_size", "n_inner"),
        ("num_attention_heads", "n_head"),
        ("max_position_embeddings", "n_positions"),
        ("layer_norm_eps", "layer_norm_epsilon"),
        ("hidden_act", "activation_function"),
    ],
    layers: "h",
    beginnings: &[("", "transformer.")],
    names: &[ENDS, NORMS, BIASES, TRANSPOSED],
    gguf_qk_rows: QkRows::Halves,
    norm: NormKind::Layer,
    bias: BiasRule::Always,
    ffn_of_hidden: Some(4),
    glu: Glu::GeluTanh,
    ..LLAMA
};

pub(crate) const STARCODER: Facts = Facts {
    name: "starcoder",
    gguf: Some("starcoder"),
    model_types: &["gpt_bigcode"],
    classes: &["GPTBigCodeForCausalLM"],
    names: &[ENDS, NORMS, BIASES, MATRICES],
    ..GPT2
};

#[rustfmt::skip] // A table: one line per weight.
const ENDS: &[Name] = &[
    name(T::Embedding, Model, "token_embd.weight", Some("wte.weight"), (&[Vocab, Hidden], Always, Keep)),
    name(T::Positions, Model, "position_embd.weight", Some("wpe.weight"), (&[Context, Hidden], Always, Keep)),
    name(T::OutputNorm, Model, "output_norm.weight", Some("ln_f.weight"), (&[Hidden], Always, Keep)),
    name(T::OutputNormBias, Model, "output_norm.bias", Some("ln_f.bias"), (&[Hidden], Always, Keep)),
    name(T::Output, Model, "output.weight", Some("lm_head.weight"), (&[Vocab, Hidden], Untied, Keep)),
];

#[rustfmt::skip]
const NORMS: &[Name] = &[
    name(T::AttentionNorm, Layer, "attn_norm.weight", Some("ln_1.weight"), (&[Hidden], Always, Keep)),
    name(T::AttentionNormBias, Layer, "attn_norm.bias", Some("ln_1.bias"), (&[Hidden], Always, Keep)),
    name(T::MlpNorm, Layer, "ffn_norm.weight", Some("ln_2.weight"), (&[Hidden], Always, Keep)),
    name(T::MlpNormBias, Layer, "ffn_norm.bias", Some("ln_2.bias"), (&[Hidden], Always, Keep)),
];

#[rustfmt::skip]
const BIASES: &[Name] = &[
    name(T::AttentionOutputBias, Layer, "attn_output.bias", Some("attn.c_proj.bias"), (&[Hidden], OutputBias, Keep)),
    name(T::UpBias, Layer, "ffn_up.bias", Some("mlp.c_fc.bias"), (&[Ffn], MlpBias, Keep)),
    name(T::DownBias, Layer, "ffn_down.bias", Some("mlp.c_proj.bias"), (&[Hidden], MlpBias, Keep)),
];

/// Rows and columns exchanged.
#[rustfmt::skip]
const TRANSPOSED: &[Name] = &[
    name(T::Qkv, Layer, "attn_qkv.weight", Some("attn.c_attn.weight"), (&[Qkv, Hidden], Always, Transposed)),
    name(T::AttentionOutput, Layer, "attn_output.weight", Some("attn.c_proj.weight"), (&[Hidden, Query], Always, Transposed)),
    name(T::Up, Layer, "ffn_up.weight", Some("mlp.c_fc.weight"), (&[Ffn, Hidden], Always, Transposed)),
    name(T::Down, Layer, "ffn_down.weight", Some("mlp.c_proj.weight"), (&[Hidden, Ffn], Always, Transposed)),
    name(T::QkvBias, Layer, "attn_qkv.bias", Some("attn.c_attn.bias"), (&[Qkv], QkvBias, Keep)),
];

/// As elsewhere; Q, K and V lie by heads of keys and values.
#[rustfmt::skip]
const MATRICES: &[Name] = &[
    name(T::Qkv, Layer, "attn_qkv.weight", Some("attn.c_attn.weight"), (&[Qkv, Hidden], Always, Ungrouped)),
    name(T::AttentionOutput, Layer, "attn_output.weight", Some("attn.c_proj.weight"), (&[Hidden, Query], Always, Keep)),
    name(T::Up, Layer, "ffn_up.weight", Some("mlp.c_fc.weight"), (&[Ffn, Hidden], Always, Keep)),
    name(T::Down, Layer, "ffn_down.weight", Some("mlp.c_proj.weight"), (&[Hidden, Ffn], Always, Keep)),
    name(T::QkvBias, Layer, "attn_qkv.bias", Some("attn.c_attn.bias"), (&[Qkv], QkvBias, Ungrouped)),
];
