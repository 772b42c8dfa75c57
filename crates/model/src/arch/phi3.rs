//! Phi 3 and 4: Q, K and V are stored as one matrix, gate and up as another, in both containers. Long contexts have their
//! own rotation.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, QkRows, WindowRule};
use crate::names::Dim::{Ffn, Hidden, Pairs, Qkv, Query, TwoFfn, Vocab};
use crate::names::Owner::{Layer, Model};
use crate::names::{Name, PRE_NORMS, Tensor, Transform::Keep, When, name};

pub(crate) const PHI3: Facts = Facts {
    name: "phi3",
    gguf: Some("phi3"),
    model_types: &["phi3"],
    classes: &["Phi3ForCausalLM"],
    names: &[ENDS, PRE_NORMS, BLOCK],
    gguf_qk_rows: QkRows::Halves,
    bias: BiasRule::Never,
    window: WindowRule::EveryLayer(None),
    partial_rotary: Some(1.0),
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const ENDS: &[Name] = &[
    name(Tensor::Embedding, Model, "token_embd.weight", Some("model.embed_tokens.weight"), (&[Vocab, Hidden], When::Always, Keep)),
    name(Tensor::OutputNorm, Model, "output_norm.weight", Some("model.norm.weight"), (&[Hidden], When::Always, Keep)),
    name(Tensor::Output, Model, "output.weight", Some("lm_head.weight"), (&[Vocab, Hidden], When::Untied, Keep)),
    name(Tensor::RopeFactors, Model, "rope_factors_short.weight", None, (&[Pairs], When::LongRopeFactors, Keep)),
    name(Tensor::RopeFactorsLong, Model, "rope_factors_long.weight", None, (&[Pairs], When::LongRopeFactors, Keep)),
];

#[rustfmt::skip]
const BLOCK: &[Name] = &[
    name(Tensor::Qkv, Layer, "attn_qkv.weight", Some("self_attn.qkv_proj.weight"), (&[Qkv, Hidden], When::Always, Keep)),
    name(Tensor::AttentionOutput, Layer, "attn_output.weight", Some("self_attn.o_proj.weight"), (&[Hidden, Query], When::Always, Keep)),
    name(Tensor::GateUp, Layer, "ffn_up.weight", Some("mlp.gate_up_proj.weight"), (&[TwoFfn, Hidden], When::Always, Keep)),
    name(Tensor::Down, Layer, "ffn_down.weight", Some("mlp.down_proj.weight"), (&[Hidden, Ffn], When::Always, Keep)),
];
