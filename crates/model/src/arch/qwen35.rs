//! Qwen3.5 and 3.6, dense and mixtures, and Qwen3-Next: three of four layers are gated delta nets, the fourth attends with
//! gates. Of the models that see images only the part that reads text; layers that guess ahead are left out.

use fornax_compute::{KeySharing, Shares};

use super::qwen2moe::SHARED;
use super::qwen3::QWEN3;
use crate::Facts;
use crate::facts::{BiasRule, Recurrent, ShareRule, WindowRule};
use crate::names::{
    Dim, ENDS, MLP, Name, Owner, Portion, QK_NORMS, QWEN_EXPERTS, Tensor, Transform, When, name,
};
use crate::relaid::Interleave;
use crate::tower::facts as tower;

pub(crate) const QWEN35: Facts = Facts {
    name: "qwen35",
    gguf: Some("qwen35"),
    model_types: &["qwen3_5", "qwen3_5_text"],
    classes: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
    beginnings: &[("model.", "model.language_model.")],
    not_text: &["model.visual.", "visual.", "mtp.", "model.mtp."],
    names: &[ENDS, NORMS, ATTENTION, QK_NORMS, DELTA, INPUTS, MLP],
    norm_less_one: true,
    bias: BiasRule::Never,
    window: WindowRule::Never,
    partial_rotary: Some(0.25),
    sections: Some([11, 11, 10]),
    tower: Some(&tower::QWEN3),
    recurrent: Some(Recurrent::DeltaRule { gguf: KeySharing::Turns }),
    ..QWEN3
};

/// Their experts are stacked in one tensor, or lie apart where they are quantised.
pub(crate) const QWEN35_MOE: Facts = Facts {
    name: "qwen35moe",
    gguf: Some("qwen35moe"),
    model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
    classes: &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
    names: &[ENDS, NORMS, ATTENTION, QK_NORMS, DELTA, INPUTS, EXPERTS, SHARED],
    experts: Some(ShareRule::OfChosen),
    ..QWEN35
};

pub(crate) const QWEN3_NEXT: Facts = Facts {
    name: "qwen3next",
    gguf: Some("qwen3next"),
    model_types: &["qwen3_next"],
    classes: &["Qwen3NextForCausalLM"],
    beginnings: &[],
    not_text: &["mtp.", "model.mtp."],
    sections: None,
    tower: None,
    names: &[ENDS, NORMS, ATTENTION, QK_NORMS, DELTA, INPUTS_BY_KEY_HEAD, MLP, QWEN_EXPERTS, SHARED],
    experts: Some(ShareRule::Configured { gguf: Shares::OfChosen, hugging_face: Shares::OfAll }),
    recurrent: Some(Recurrent::DeltaRule { gguf: KeySharing::Neighbours }),
    ..QWEN35
};

#[rustfmt::skip] // A table: one line per weight.
const NORMS: &[Name] = &[
    name(Tensor::AttentionNorm, Owner::Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Dim::Hidden], When::Always, Transform::Keep)),
    name(Tensor::MlpNorm, Owner::Layer, "post_attention_norm.weight", Some("post_attention_layernorm.weight"), (&[Dim::Hidden], When::Always, Transform::Keep)),
];

/// Of each head's rows in Q the second half are gates.
#[rustfmt::skip]
const ATTENTION: &[Name] = {
    use Dim::{Hidden, Kv, Query};
    use Owner::Layer;
    use Tensor as T;
    use Transform::{HeadShare, Keep};
    use When::Attends;
    const QUERIES: Interleave = Interleave { of: 2, at: 0 };
    const GATES: Interleave = Interleave { of: 2, at: 1 };
    &[
        name(T::Query, Layer, "attn_q.weight", Some("self_attn.q_proj.weight"), (&[Query, Hidden], Attends, HeadShare(QUERIES))),
        name(T::AttentionGate, Layer, "attn_q.weight", Some("self_attn.q_proj.weight"), (&[Query, Hidden], Attends, HeadShare(GATES))),
        name(T::Key, Layer, "attn_k.weight", Some("self_attn.k_proj.weight"), (&[Kv, Hidden], Attends, Keep)),
        name(T::Value, Layer, "attn_v.weight", Some("self_attn.v_proj.weight"), (&[Kv, Hidden], Attends, Keep)),
        name(T::AttentionOutput, Layer, "attn_output.weight", Some("self_attn.o_proj.weight"), (&[Hidden, Query], Attends, Keep)),
    ]
};

#[rustfmt::skip]
const DELTA: &[Name] = {
    use Dim::{DeltaChannels, DeltaHead, DeltaHeads, DeltaValues, Hidden, One, Taps};
    use Owner::Layer;
    use Tensor as T;
    use Transform::{Keep, NegativeExp};
    use When::Delta;
    &[
        name(T::Conv, Layer, "ssm_conv1d.weight", Some("linear_attn.conv1d.weight"), (&[DeltaChannels, One, Taps], Delta, Keep)),
        name(T::StateRate, Layer, "ssm_a", Some("linear_attn.A_log"), (&[DeltaHeads], Delta, NegativeExp)),
        name(T::StateBias, Layer, "ssm_dt.bias", Some("linear_attn.dt_bias"), (&[DeltaHeads], Delta, Keep)),
        name(T::StateNorm, Layer, "ssm_norm.weight", Some("linear_attn.norm.weight"), (&[DeltaHead], Delta, Keep)),
        name(T::StateOutput, Layer, "ssm_out.weight", Some("linear_attn.out_proj.weight"), (&[Hidden, DeltaValues], Delta, Keep)),
    ]
};

#[rustfmt::skip]
const INPUTS: &[Name] = {
    use Dim::{DeltaChannels, DeltaHeads, DeltaValues, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::Delta;
    &[
        name(T::DeltaQkv, Layer, "attn_qkv.weight", Some("linear_attn.in_proj_qkv.weight"), (&[DeltaChannels, Hidden], Delta, Keep)),
        name(T::DeltaGate, Layer, "attn_gate.weight", Some("linear_attn.in_proj_z.weight"), (&[DeltaValues, Hidden], Delta, Keep)),
        name(T::DeltaBeta, Layer, "ssm_beta.weight", Some("linear_attn.in_proj_b.weight"), (&[DeltaHeads, Hidden], Delta, Keep)),
        name(T::DeltaDecay, Layer, "ssm_alpha.weight", Some("linear_attn.in_proj_a.weight"), (&[DeltaHeads, Hidden], Delta, Keep)),
    ]
};

/// The same where rows lie key head by key head.
#[rustfmt::skip]
const INPUTS_BY_KEY_HEAD: &[Name] = {
    use Dim::{DeltaChannels, DeltaHeads, DeltaValues, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::KeyHeads;
    use When::Delta;
    &[
        name(T::DeltaQkv, Layer, "attn_qkv.weight", Some("linear_attn.in_proj_qkvz.weight"), (&[DeltaChannels, Hidden], Delta, KeyHeads(Portion::Qkv))),
        name(T::DeltaGate, Layer, "attn_gate.weight", Some("linear_attn.in_proj_qkvz.weight"), (&[DeltaValues, Hidden], Delta, KeyHeads(Portion::Gates))),
        name(T::DeltaBeta, Layer, "ssm_ba.weight", Some("linear_attn.in_proj_ba.weight"), (&[DeltaHeads, Hidden], Delta, KeyHeads(Portion::Betas))),
        name(T::DeltaDecay, Layer, "ssm_ba.weight", Some("linear_attn.in_proj_ba.weight"), (&[DeltaHeads, Hidden], Delta, KeyHeads(Portion::Decays))),
    ]
};

#[rustfmt::skip]
const EXPERTS: &[Name] = {
    use Dim::{ExpertFfn, Experts, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::{Keep, Stacked};
    use When::Mixture;
    const GATE: Interleave = Interleave { of: 2, at: 0 };
    const UP: Interleave = Interleave { of: 2, at: 1 };
    const DOWN: Interleave = Interleave { of: 1, at: 0 };
    &[
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("mlp.gate.weight"), (&[Experts, Hidden], Mixture, Keep)),
        name(T::ExpertGate, Layer, "ffn_gate_exps.weight", Some("mlp.experts.gate_up_proj"), (&[Experts, ExpertFfn, Hidden], Mixture, Stacked(GATE, "mlp.experts.{}.gate_proj.weight"))),
        name(T::ExpertUp, Layer, "ffn_up_exps.weight", Some("mlp.experts.gate_up_proj"), (&[Experts, ExpertFfn, Hidden], Mixture, Stacked(UP, "mlp.experts.{}.up_proj.weight"))),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("mlp.experts.down_proj"), (&[Experts, Hidden, ExpertFfn], Mixture, Stacked(DOWN, "mlp.experts.{}.down_proj.weight"))),
    ]
};
