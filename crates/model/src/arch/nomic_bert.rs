//! Nomic's BERT: rotates where BERT has a table of positions, and its feed-forward has gates.

use fornax_compute::{Glu, NormKind};

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, QkRows};
use crate::names::Dim::{Ffn, Hidden, Qkv, Query, TokenTypes, Vocab};
use crate::names::Owner::{Layer, Model};
use crate::names::{Name, Tensor as T, Transform::Keep, When::Always, name};

pub(crate) const NOMIC_BERT: Facts = Facts {
    name: "nomic-bert",
    gguf: Some("nomic-bert"),
    model_types: &["nomic_bert"],
    classes: &["NomicBertModel"],
    keys: &[
        ("num_hidden_layers", "n_layer"),
        ("hidden_size", "n_embd"),
        ("intermediate_size", "n_inner"),
        ("num_attention_heads", "n_head"),
        ("max_position_embeddings", "n_positions"),
        ("layer_norm_eps", "layer_norm_epsilon"),
        ("hidden_act", "activation_function"),
        ("rope_theta", "rotary_emb_base"),
        ("partial_rotary_factor", "rotary_emb_fraction"),
    ],
    layers: "encoder.layers",
    beginnings: &[("", "nomic_bert.")],
    not_text: &["pooler."],
    names: &[NAMES],
    gguf_qk_rows: QkRows::Halves,
    norm: NormKind::Layer,
    encoder: true,
    bias: BiasRule::Never,
    rope_base: 1000.0,
    glu: Glu::Silu,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const NAMES: &[Name] = &[
    name(T::Embedding, Model, "token_embd.weight", Some("embeddings.word_embeddings.weight"), (&[Vocab, Hidden], Always, Keep)),
    name(T::TokenTypes, Model, "token_types.weight", Some("embeddings.token_type_embeddings.weight"), (&[TokenTypes, Hidden], Always, Keep)),
    name(T::EmbeddingNorm, Model, "token_embd_norm.weight", Some("emb_ln.weight"), (&[Hidden], Always, Keep)),
    name(T::EmbeddingNormBias, Model, "token_embd_norm.bias", Some("emb_ln.bias"), (&[Hidden], Always, Keep)),
    name(T::Qkv, Layer, "attn_qkv.weight", Some("attn.Wqkv.weight"), (&[Qkv, Hidden], Always, Keep)),
    name(T::AttentionOutput, Layer, "attn_output.weight", Some("attn.out_proj.weight"), (&[Hidden, Query], Always, Keep)),
    name(T::AttentionSumNorm, Layer, "attn_output_norm.weight", Some("norm1.weight"), (&[Hidden], Always, Keep)),
    name(T::AttentionSumNormBias, Layer, "attn_output_norm.bias", Some("norm1.bias"), (&[Hidden], Always, Keep)),
    name(T::Gate, Layer, "ffn_gate.weight", Some("mlp.fc12.weight"), (&[Ffn, Hidden], Always, Keep)),
    name(T::Up, Layer, "ffn_up.weight", Some("mlp.fc11.weight"), (&[Ffn, Hidden], Always, Keep)),
    name(T::Down, Layer, "ffn_down.weight", Some("mlp.fc2.weight"), (&[Hidden, Ffn], Always, Keep)),
    name(T::MlpSumNorm, Layer, "layer_output_norm.weight", Some("norm2.weight"), (&[Hidden], Always, Keep)),
    name(T::MlpSumNormBias, Layer, "layer_output_norm.bias", Some("norm2.bias"), (&[Hidden], Always, Keep)),
];
