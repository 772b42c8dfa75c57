//! BERT as sentence-transformers uses it, and what has its blocks (MiniLM, E5, BGE); also those that read two texts together
//! and tell how well they fit (cross-encoders).

use fornax_compute::{Glu, NormKind};

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, QkRows};
use crate::names::Dim::{Ffn, Hidden, Kv, One, Positions, Query, TokenTypes, Vocab};
use crate::names::Owner::{Layer, Model};
use crate::names::Transform::{FromFirst, Keep};
use crate::names::When::{Always, MlpBias, OutputBias, QkvBias, Ranks};
use crate::names::{Name, Tensor as T, name};

pub(crate) const BERT: Facts = Facts {
    name: "bert",
    gguf: Some("bert"),
    model_types: &["bert"],
    classes: &["BertModel", "BertForSequenceClassification"],
    layers: "encoder.layer",
    beginnings: &[("", "bert.")],
    not_text: &["pooler.", "bert.pooler."],
    names: &[BODY, HEAD],
    gguf_qk_rows: QkRows::Halves,
    norm: NormKind::Layer,
    encoder: true,
    bias: BiasRule::Always,
    glu: Glu::Gelu,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
pub(crate) const BODY: &[Name] = &[
    name(T::Embedding, Model, "token_embd.weight", Some("embeddings.word_embeddings.weight"), (&[Vocab, Hidden], Always, Keep)),
    name(T::Positions, Model, "position_embd.weight", Some("embeddings.position_embeddings.weight"), (&[Positions, Hidden], Always, FromFirst)),
    name(T::TokenTypes, Model, "token_types.weight", Some("embeddings.token_type_embeddings.weight"), (&[TokenTypes, Hidden], Always, Keep)),
    name(T::EmbeddingNorm, Model, "token_embd_norm.weight", Some("embeddings.LayerNorm.weight"), (&[Hidden], Always, Keep)),
    name(T::EmbeddingNormBias, Model, "token_embd_norm.bias", Some("embeddings.LayerNorm.bias"), (&[Hidden], Always, Keep)),
    name(T::Query, Layer, "attn_q.weight", Some("attention.self.query.weight"), (&[Query, Hidden], Always, Keep)),
    name(T::Key, Layer, "attn_k.weight", Some("attention.self.key.weight"), (&[Kv, Hidden], Always, Keep)),
    name(T::Value, Layer, "attn_v.weight", Some("attention.self.value.weight"), (&[Kv, Hidden], Always, Keep)),
    name(T::QueryBias, Layer, "attn_q.bias", Some("attention.self.query.bias"), (&[Query], QkvBias, Keep)),
    name(T::KeyBias, Layer, "attn_k.bias", Some("attention.self.key.bias"), (&[Kv], QkvBias, Keep)),
    name(T::ValueBias, Layer, "attn_v.bias", Some("attention.self.value.bias"), (&[Kv], QkvBias, Keep)),
    name(T::AttentionOutput, Layer, "attn_output.weight", Some("attention.output.dense.weight"), (&[Hidden, Query], Always, Keep)),
    name(T::AttentionOutputBias, Layer, "attn_output.bias", Some("attention.output.dense.bias"), (&[Hidden], OutputBias, Keep)),
    name(T::AttentionSumNorm, Layer, "attn_output_norm.weight", Some("attention.output.LayerNorm.weight"), (&[Hidden], Always, Keep)),
    name(T::AttentionSumNormBias, Layer, "attn_output_norm.bias", Some("attention.output.LayerNorm.bias"), (&[Hidden], Always, Keep)),
    name(T::Up, Layer, "ffn_up.weight", Some("intermediate.dense.weight"), (&[Ffn, Hidden], Always, Keep)),
    name(T::UpBias, Layer, "ffn_up.bias", Some("intermediate.dense.bias"), (&[Ffn], MlpBias, Keep)),
    name(T::Down, Layer, "ffn_down.weight", Some("output.dense.weight"), (&[Hidden, Ffn], Always, Keep)),
    name(T::DownBias, Layer, "ffn_down.bias", Some("output.dense.bias"), (&[Hidden], MlpBias, Keep)),
    name(T::MlpSumNorm, Layer, "layer_output_norm.weight", Some("output.LayerNorm.weight"), (&[Hidden], Always, Keep)),
    name(T::MlpSumNormBias, Layer, "layer_output_norm.bias", Some("output.LayerNorm.bias"), (&[Hidden], Always, Keep)),
];

#[rustfmt::skip]
const HEAD: &[Name] = &[
    name(T::Pooler, Model, "cls.weight", Some("pooler.dense.weight"), (&[Hidden, Hidden], Ranks, Keep)),
    name(T::PoolerBias, Model, "cls.bias", Some("pooler.dense.bias"), (&[Hidden], Ranks, Keep)),
    name(T::Classifier, Model, "cls.output.weight", Some("classifier.weight"), (&[One, Hidden], Ranks, Keep)),
    name(T::ClassifierBias, Model, "cls.output.bias", Some("classifier.bias"), (&[One], Ranks, Keep)),
];
