//! Hunyuan: queries and keys are normalised head by head after they are rotated. The larger ones have experts, and one that
//! every token takes as it is. Version 3 normalises before it rotates, and chooses by sigmoid and a correction.

use fornax_compute::{Scores, Shares};

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{Floor, QkRows, ShareRule};
use crate::names::Owner::Layer;
use crate::names::{
    ATTENTION, Dim, ENDS, MLP, Name, PRE_NORMS, Tensor as T, Transform::Keep, When, When::Always, name,
};

pub(crate) const HUNYUAN_DENSE: Facts = Facts {
    name: "hunyuan-dense",
    gguf: Some("hunyuan-dense"),
    model_types: &["hunyuan_v1_dense"],
    classes: &["HunYuanDenseV1ForCausalLM"],
    names: &[ENDS, PRE_NORMS, ATTENTION, QK_NORMS, MLP],
    gguf_qk_rows: QkRows::Halves,
    norms_rotated: true,
    ..LLAMA
};

pub(crate) const HUNYUAN_MOE: Facts = Facts {
    name: "hunyuan-moe",
    gguf: Some("hunyuan-moe"),
    model_types: &["hunyuan_v1_moe"],
    classes: &["HunYuanMoEV1ForCausalLM"],
    keys: &[("num_experts_per_tok", "moe_topk")],
    names: &[ENDS, PRE_NORMS, ATTENTION, QK_NORMS, EXPERTS],
    experts: Some(ShareRule::OfChosen),
    ..HUNYUAN_DENSE
};

pub(crate) const HY_V3: Facts = Facts {
    name: "hy-v3",
    gguf: Some("hy_v3"),
    model_types: &["hy_v3"],
    classes: &["HYV3ForCausalLM"],
    keys: &[("n_shared_experts", "num_shared_experts"), ("routed_scaling_factor", "router_scaling_factor")],
    defaults: &[("first_k_dense_replace", 1.0)],
    names: &[ENDS, PRE_NORMS, ATTENTION, crate::names::QK_NORMS, MLP, V3_EXPERTS],
    gguf_qk_rows: QkRows::Halves,
    rope_base: 11_158_840.0,
    experts: Some(ShareRule::Configured { gguf: Shares::OfChosen, hugging_face: Shares::OfChosen }),
    scores: Scores::Sigmoid,
    floor: Floor::Added(1e-20),
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const V3_EXPERTS: &[Name] = {
    use Dim::{ExpertFfn, Experts, Ffn, Hidden};
    use When::{Mixture, Shared};
    &[
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("mlp.router.gate.weight"), (&[Experts, Hidden], Mixture, Keep)),
        name(T::RouterCorrection, Layer, "exp_probs_b", Some("mlp.expert_bias"), (&[Experts], Mixture, Keep)),
        name(T::ExpertGate, Layer, "ffn_gate_exps.weight", Some("mlp.experts.{}.gate_proj.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Keep)),
        name(T::ExpertUp, Layer, "ffn_up_exps.weight", Some("mlp.experts.{}.up_proj.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Keep)),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("mlp.experts.{}.down_proj.weight"), (&[Experts, Hidden, ExpertFfn], Mixture, Keep)),
        name(T::SharedGate, Layer, "ffn_gate_shexp.weight", Some("mlp.shared_mlp.gate_proj.weight"), (&[Ffn, Hidden], Shared, Keep)),
        name(T::SharedUp, Layer, "ffn_up_shexp.weight", Some("mlp.shared_mlp.up_proj.weight"), (&[Ffn, Hidden], Shared, Keep)),
        name(T::SharedDown, Layer, "ffn_down_shexp.weight", Some("mlp.shared_mlp.down_proj.weight"), (&[Hidden, Ffn], Shared, Keep)),
    ]
};

#[rustfmt::skip] // A table: one line per weight.
const EXPERTS: &[Name] = {
    use Dim::{ExpertFfn, Experts, Ffn, Hidden};
    use When::Mixture;
    &[
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("mlp.gate.wg.weight"), (&[Experts, Hidden], Mixture, Keep)),
        name(T::ExpertGate, Layer, "ffn_gate_exps.weight", Some("mlp.experts.{}.gate_proj.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Keep)),
        name(T::ExpertUp, Layer, "ffn_up_exps.weight", Some("mlp.experts.{}.up_proj.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Keep)),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("mlp.experts.{}.down_proj.weight"), (&[Experts, Hidden, ExpertFfn], Mixture, Keep)),
        name(T::SharedGate, Layer, "ffn_gate_shexp.weight", Some("mlp.shared_mlp.gate_proj.weight"), (&[Ffn, Hidden], Mixture, Keep)),
        name(T::SharedUp, Layer, "ffn_up_shexp.weight", Some("mlp.shared_mlp.up_proj.weight"), (&[Ffn, Hidden], Mixture, Keep)),
        name(T::SharedDown, Layer, "ffn_down_shexp.weight", Some("mlp.shared_mlp.down_proj.weight"), (&[Hidden, Ffn], Mixture, Keep)),
    ]
};

#[rustfmt::skip]
const QK_NORMS: &[Name] = &[
    name(T::QueryNorm, Layer, "attn_q_norm.weight", Some("self_attn.query_layernorm.weight"), (&[Dim::Head], Always, Keep)),
    name(T::KeyNorm, Layer, "attn_k_norm.weight", Some("self_attn.key_layernorm.weight"), (&[Dim::Head], Always, Keep)),
];
