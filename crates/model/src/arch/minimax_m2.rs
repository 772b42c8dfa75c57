//! MiniMax M2: Mixtral's experts, chosen by sigmoid and a correction; norms of all queries and all keys together; a part of
//! each head rotates.

use fornax_compute::Scores;

use super::llama::LLAMA;
use super::mixtral::EXPERTS;
use super::olmo2::QK_NORMS;
use crate::Facts;
use crate::facts::{BiasRule, QkRows, ShareRule};
use crate::names::{
    ATTENTION, Dim, ENDS, Name, Owner::Layer, PRE_NORMS, Tensor, Transform::Keep, When::Mixture, name,
};

pub(crate) const MINIMAX_M2: Facts = Facts {
    name: "minimax-m2",
    gguf: Some("minimax-m2"),
    model_types: &["minimax_m2"],
    classes: &["MiniMaxM2ForCausalLM"],
    names: &[ENDS, PRE_NORMS, ATTENTION, QK_NORMS, EXPERTS, CORRECTION],
    gguf_qk_rows: QkRows::Halves,
    bias: BiasRule::Never,
    rope_base: 5_000_000.0,
    partial_rotary: Some(1.0),
    experts: Some(ShareRule::OfChosen),
    scores: Scores::Sigmoid,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const CORRECTION: &[Name] = &[
    name(Tensor::RouterCorrection, Layer, "exp_probs_b.bias", Some("block_sparse_moe.e_score_correction_bias"), (&[Dim::Experts], Mixture, Keep)),
];
