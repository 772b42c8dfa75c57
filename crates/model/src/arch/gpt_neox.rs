//! GPT-NeoX and Pythia: both branches of a layer read the residual stream as it was, each its own norm of it; a part of each
//! head rotates. Hugging Face files have Q, K and V head by head in one matrix.

use fornax_compute::{Glu, NormKind};

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, ParallelRule, QkRows};
use crate::names::Dim::{Ffn, Hidden, Qkv, Query, Vocab};
use crate::names::Owner::{Layer, Model};
use crate::names::Transform::{Keep, Ungrouped};
use crate::names::When::{Always, MlpBias, OutputBias, QkvBias, Untied};
use crate::names::{Name, Tensor as T, name};

pub(crate) const GPT_NEOX: Facts = Facts {
    name: "gptneox",
    gguf: Some("gptneox"),
    model_types: &["gpt_neox"],
    classes: &["GPTNeoXForCausalLM"],
    keys: &[("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")],
    layers: "gpt_neox.layers",
    names: &[NAMES],
    gguf_qk_rows: QkRows::Halves,
    norm: NormKind::Layer,
    bias: BiasRule::Always,
    partial_rotary: Some(0.25),
    parallel: ParallelRule::Configured,
    glu: Glu::Gelu,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const NAMES: &[Name] = &[
    name(T::Embedding, Model, "token_embd.weight", Some("gpt_neox.embed_in.weight"), (&[Vocab, Hidden], Always, Keep)),
    name(T::OutputNorm, Model, "output_norm.weight", Some("gpt_neox.final_layer_norm.weight"), (&[Hidden], Always, Keep)),
    name(T::OutputNormBias, Model, "output_norm.bias", Some("gpt_neox.final_layer_norm.bias"), (&[Hidden], Always, Keep)),
    name(T::Output, Model, "output.weight", Some("embed_out.weight"), (&[Vocab, Hidden], Untied, Keep)),
    name(T::AttentionNorm, Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(T::AttentionNormBias, Layer, "attn_norm.bias", Some("input_layernorm.bias"), (&[Hidden], Always, Keep)),
    name(T::Qkv, Layer, "attn_qkv.weight", Some("attention.query_key_value.weight"), (&[Qkv, Hidden], Always, Ungrouped)),
    name(T::QkvBias, Layer, "attn_qkv.bias", Some("attention.query_key_value.bias"), (&[Qkv], QkvBias, Ungrouped)),
    name(T::AttentionOutput, Layer, "attn_output.weight", Some("attention.dense.weight"), (&[Hidden, Query], Always, Keep)),
    name(T::AttentionOutputBias, Layer, "attn_output.bias", Some("attention.dense.bias"), (&[Hidden], OutputBias, Keep)),
    name(T::MlpNorm, Layer, "ffn_norm.weight", Some("post_attention_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(T::MlpNormBias, Layer, "ffn_norm.bias", Some("post_attention_layernorm.bias"), (&[Hidden], Always, Keep)),
    name(T::Up, Layer, "ffn_up.weight", Some("mlp.dense_h_to_4h.weight"), (&[Ffn, Hidden], Always, Keep)),
    name(T::UpBias, Layer, "ffn_up.bias", Some("mlp.dense_h_to_4h.bias"), (&[Ffn], MlpBias, Keep)),
    name(T::Down, Layer, "ffn_down.weight", Some("mlp.dense_4h_to_h.weight"), (&[Hidden, Ffn], Always, Keep)),
    name(T::DownBias, Layer, "ffn_down.bias", Some("mlp.dense_4h_to_h.bias"), (&[Hidden], MlpBias, Keep)),
];
