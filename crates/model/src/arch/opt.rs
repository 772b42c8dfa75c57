//! OPT: learned positions behind two rows that are no position's, layer norm, a feed-forward of ReLU, biases everywhere.

use fornax_compute::{NormKind, Pointwise};

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, FirstPosition};
use crate::names::Dim::{Ffn, Hidden, Kv, Positions, Query, Vocab};
use crate::names::Owner::{Layer, Model};
use crate::names::Transform::{FromFirst, Keep};
use crate::names::When::{Always, MlpBias, OutputBias, QkvBias, Untied};
use crate::names::{Name, Tensor as T, name};

pub(crate) const OPT: Facts = Facts {
    name: "opt",
    gguf: None,
    model_types: &["opt"],
    classes: &["OPTForCausalLM"],
    keys: &[("hidden_act", "activation_function"), ("intermediate_size", "ffn_dim")],
    // The model's own, which no file says.
    defaults: &[("layer_norm_eps", 1e-5)],
    layers: "model.decoder.layers",
    beginnings: &[("model.decoder.", "decoder.")],
    names: &[NAMES],
    norm: NormKind::Layer,
    bias: BiasRule::Always,
    first_position: FirstPosition::Third,
    function: Some(Pointwise::Relu),
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const NAMES: &[Name] = &[
    name(T::Embedding, Model, "", Some("model.decoder.embed_tokens.weight"), (&[Vocab, Hidden], Always, Keep)),
    name(T::Positions, Model, "", Some("model.decoder.embed_positions.weight"), (&[Positions, Hidden], Always, FromFirst)),
    name(T::OutputNorm, Model, "", Some("model.decoder.final_layer_norm.weight"), (&[Hidden], Always, Keep)),
    name(T::OutputNormBias, Model, "", Some("model.decoder.final_layer_norm.bias"), (&[Hidden], Always, Keep)),
    name(T::Output, Model, "", Some("lm_head.weight"), (&[Vocab, Hidden], Untied, Keep)),
    name(T::AttentionNorm, Layer, "", Some("self_attn_layer_norm.weight"), (&[Hidden], Always, Keep)),
    name(T::AttentionNormBias, Layer, "", Some("self_attn_layer_norm.bias"), (&[Hidden], Always, Keep)),
    name(T::Query, Layer, "", Some("self_attn.q_proj.weight"), (&[Query, Hidden], Always, Keep)),
    name(T::Key, Layer, "", Some("self_attn.k_proj.weight"), (&[Kv, Hidden], Always, Keep)),
    name(T::Value, Layer, "", Some("self_attn.v_proj.weight"), (&[Kv, Hidden], Always, Keep)),
    name(T::AttentionOutput, Layer, "", Some("self_attn.out_proj.weight"), (&[Hidden, Query], Always, Keep)),
    name(T::QueryBias, Layer, "", Some("self_attn.q_proj.bias"), (&[Query], QkvBias, Keep)),
    name(T::KeyBias, Layer, "", Some("self_attn.k_proj.bias"), (&[Kv], QkvBias, Keep)),
    name(T::ValueBias, Layer, "", Some("self_attn.v_proj.bias"), (&[Kv], QkvBias, Keep)),
    name(T::AttentionOutputBias, Layer, "", Some("self_attn.out_proj.bias"), (&[Hidden], OutputBias, Keep)),
    name(T::MlpNorm, Layer, "", Some("final_layer_norm.weight"), (&[Hidden], Always, Keep)),
    name(T::MlpNormBias, Layer, "", Some("final_layer_norm.bias"), (&[Hidden], Always, Keep)),
    name(T::Up, Layer, "", Some("fc1.weight"), (&[Ffn, Hidden], Always, Keep)),
    name(T::Down, Layer, "", Some("fc2.weight"), (&[Hidden, Ffn], Always, Keep)),
    name(T::UpBias, Layer, "", Some("fc1.bias"), (&[Ffn], MlpBias, Keep)),
    name(T::DownBias, Layer, "", Some("fc2.bias"), (&[Hidden], MlpBias, Keep)),
];
