//! ModernBERT: an encoder whose branches are normalised before they read, as a decoder's are. The first of every three layers
//! sees all of a text, the others what is near, with a rotation of their own.

use fornax_compute::{Glu, NormKind, Pointwise};

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, QkRows, WindowRule};
use crate::names::Dim::{Ffn, Hidden, One, Qkv, Query, TwoFfn, Vocab};
use crate::names::Owner::{Layer, Model};
use crate::names::When::{Always, BehindFirst, Ranks};
use crate::names::{Name, Tensor as T, Transform::Keep, name};

pub(crate) const MODERNBERT: Facts = Facts {
    name: "modernbert",
    gguf: Some("modern-bert"),
    model_types: &["modernbert"],
    classes: &["ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"],
    keys: &[
        ("hidden_act", "hidden_activation"),
        ("layer_norm_eps", "norm_eps"),
        ("sliding_window", "local_attention"),
        ("sliding_window_pattern", "global_attn_every_n_layers"),
        ("rope_theta", "global_rope_theta"),
        ("rope_local_base_freq", "local_rope_theta"),
    ],
    defaults: &[("layer_norm_eps", 1e-5), ("sliding_window", 128.0), ("max_position_embeddings", 8192.0)],
    layers: "layers",
    beginnings: &[("", "model.")],
    // What guesses words that were left out. A head that ranks has the same beginning, and is read.
    not_text: &["decoder.", "head."],
    names: &[NAMES, HEAD],
    gguf_qk_rows: QkRows::Halves,
    norm: NormKind::Layer,
    encoder: true,
    bias: BiasRule::Never,
    window: WindowRule::AllButFirstOf(3),
    rope_base: 160000.0,
    window_rope_base: Some(10000.0),
    head_function: Pointwise::Gelu,
    glu: Glu::Gelu,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const NAMES: &[Name] = &[
    name(T::Embedding, Model, "token_embd.weight", Some("embeddings.tok_embeddings.weight"), (&[Vocab, Hidden], Always, Keep)),
    name(T::EmbeddingNorm, Model, "token_embd_norm.weight", Some("embeddings.norm.weight"), (&[Hidden], Always, Keep)),
    name(T::AttentionNorm, Layer, "attn_norm.weight", Some("attn_norm.weight"), (&[Hidden], BehindFirst, Keep)),
    name(T::Qkv, Layer, "attn_qkv.weight", Some("attn.Wqkv.weight"), (&[Qkv, Hidden], Always, Keep)),
    name(T::AttentionOutput, Layer, "attn_output.weight", Some("attn.Wo.weight"), (&[Hidden, Query], Always, Keep)),
    name(T::MlpNorm, Layer, "ffn_norm.weight", Some("mlp_norm.weight"), (&[Hidden], Always, Keep)),
    name(T::GateUp, Layer, "ffn_up.weight", Some("mlp.Wi.weight"), (&[TwoFfn, Hidden], Always, Keep)),
    name(T::Down, Layer, "ffn_down.weight", Some("mlp.Wo.weight"), (&[Hidden, Ffn], Always, Keep)),
    name(T::OutputNorm, Model, "output_norm.weight", Some("final_norm.weight"), (&[Hidden], Always, Keep)),
];

#[rustfmt::skip]
const HEAD: &[Name] = &[
    name(T::Pooler, Model, "cls.weight", Some("head.dense.weight"), (&[Hidden, Hidden], Ranks, Keep)),
    name(T::PoolerNorm, Model, "cls.norm.weight", Some("head.norm.weight"), (&[Hidden], Ranks, Keep)),
    name(T::Classifier, Model, "cls.output.weight", Some("classifier.weight"), (&[One, Hidden], Ranks, Keep)),
    name(T::ClassifierBias, Model, "cls.output.bias", Some("classifier.bias"), (&[One], Ranks, Keep)),
];
