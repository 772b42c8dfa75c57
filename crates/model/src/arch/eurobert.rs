//! EuroBERT: Llama's blocks as an encoder.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::QkRows;
use crate::names::Dim::{Hidden, Vocab};
use crate::names::Owner::Model;
use crate::names::{ATTENTION, MLP, Name, PRE_NORMS, Tensor as T, Transform::Keep, When::Always, name};

pub(crate) const EUROBERT: Facts = Facts {
    name: "eurobert",
    gguf: Some("eurobert"),
    model_types: &["eurobert"],
    classes: &["EuroBertModel", "EuroBertForMaskedLM"],
    layers: "layers",
    beginnings: &[("", "model.")],
    // What guesses words that were left out.
    not_text: &["lm_head."],
    names: &[ENDS, PRE_NORMS, ATTENTION, MLP],
    gguf_qk_rows: QkRows::Halves,
    encoder: true,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const ENDS: &[Name] = &[
    name(T::Embedding, Model, "token_embd.weight", Some("embed_tokens.weight"), (&[Vocab, Hidden], Always, Keep)),
    name(T::OutputNorm, Model, "output_norm.weight", Some("norm.weight"), (&[Hidden], Always, Keep)),
];
