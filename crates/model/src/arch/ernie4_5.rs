//! ERNIE 4.5: Llama's blocks, whose heads rotate by neighbours in both containers. The larger ones have experts: a
//! correction helps to choose, and some every token takes as they are.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{Floor, QkRows, ShareRule};
use crate::names::{
    ATTENTION,
    Dim::{Experts, Ffn, Hidden, One},
    ENDS, MLP, Name,
    Owner::Layer,
    PRE_NORMS, QWEN_EXPERTS, Tensor as T,
    Transform::Keep,
    When::{Mixture, Shared},
    name,
};

pub(crate) const ERNIE4_5: Facts = Facts {
    name: "ernie4.5",
    gguf: Some("ernie4_5"),
    model_types: &["ernie4_5"],
    classes: &["Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"],
    keys: &[("attention_bias", "use_bias"), ("mlp_bias", "use_bias")],
    hugging_face_qk_rows: QkRows::Pairs,
    rope_base: 500_000.0,
    ..LLAMA
};

pub(crate) const ERNIE4_5_MOE: Facts = Facts {
    name: "ernie4.5-moe",
    gguf: Some("ernie4_5-moe"),
    model_types: &["ernie4_5_moe"],
    classes: &["Ernie4_5_MoeForCausalLM"],
    keys: &[
        ("attention_bias", "use_bias"),
        ("mlp_bias", "use_bias"),
        ("num_local_experts", "moe_num_experts"),
        ("num_experts_per_tok", "moe_k"),
        ("n_shared_experts", "moe_num_shared_experts"),
        ("first_k_dense_replace", "moe_layer_start_index"),
        ("decoder_sparse_step", "moe_layer_interval"),
    ],
    defaults: &[("first_k_dense_replace", 1.0)],
    // Layers that guess ahead.
    not_text: &["model.mtp_"],
    names: &[ENDS, PRE_NORMS, ATTENTION, MLP, QWEN_EXPERTS, EXPERTS],
    experts: Some(ShareRule::OfChosen),
    floor: Floor::Least(1e-12),
    ..ERNIE4_5
};

#[rustfmt::skip] // A table: one line per weight.
const EXPERTS: &[Name] = &[
    name(T::RouterCorrection, Layer, "exp_probs_b.bias", Some("mlp.moe_statics.e_score_correction_bias"), (&[One, Experts], Mixture, Keep)),
    name(T::SharedGate, Layer, "ffn_gate_shexp.weight", Some("mlp.shared_experts.gate_proj.weight"), (&[Ffn, Hidden], Shared, Keep)),
    name(T::SharedUp, Layer, "ffn_up_shexp.weight", Some("mlp.shared_experts.up_proj.weight"), (&[Ffn, Hidden], Shared, Keep)),
    name(T::SharedDown, Layer, "ffn_down_shexp.weight", Some("mlp.shared_experts.down_proj.weight"), (&[Hidden, Ffn], Shared, Keep)),
];
