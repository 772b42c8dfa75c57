//! Nemotron-H, Nemotron 3: each layer is one branch alone, a selective scan, attention without rotation, or a feed-forward of
//! squared ReLU, which may be a mixture of experts.

use fornax_compute::{GateOrder, Pointwise, Scores, Shares};

use super::llama::LLAMA;
use super::mamba2::{ENDS, SCAN};
use crate::Facts;
use crate::facts::{BiasRule, Floor, Recurrent, RotaryRule, ScanLayers, ShareRule};
use crate::names::{Dim, Name, Owner, Tensor, Transform, When, name};

pub(crate) const NEMOTRON_H: Facts = Facts {
    name: "nemotron_h",
    gguf: Some("nemotron_h"),
    model_types: &["nemotron_h"],
    classes: &["NemotronHForCausalLM"],
    keys: &[
        ("mamba_n_heads", "mamba_num_heads"),
        ("mamba_n_groups", "n_groups"),
        ("mamba_d_state", "ssm_state_size"),
        ("mamba_d_head", "mamba_head_dim"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_expand", "expand"),
        ("mamba_conv_bias", "use_conv_bias"),
        ("rms_norm_eps", "layer_norm_epsilon"),
        ("hidden_act", "mlp_hidden_act"),
        ("num_local_experts", "n_routed_experts"),
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    ],
    layers: "backbone.layers",
    not_text: &["mtp."],
    names: &[ENDS, LAYER, EXPERTS, SCAN],
    bias: BiasRule::Configured,
    rotary: RotaryRule::Never,
    experts: Some(ShareRule::Configured { gguf: Shares::OfAll, hugging_face: Shares::OfChosen }),
    scores: Scores::Sigmoid,
    floor: Floor::Added(1e-20),
    function: Some(Pointwise::ReluSquared),
    recurrent: Some(Recurrent::Scan { gates: GateOrder::GatesFirst, layers: ScanLayers::Alone }),
    ..LLAMA
};

/// What GGUF files with experts say that they are; config.json says no more than which layers have some.
pub(crate) const NEMOTRON_H_MOE: Facts = Facts {
    name: "nemotron_h_moe",
    gguf: Some("nemotron_h_moe"),
    model_types: &[],
    classes: &[],
    ..NEMOTRON_H
};

#[rustfmt::skip] // A table: one line per weight.
const LAYER: &[Name] = {
    use Dim::{Ffn, Hidden, Kv, Query};
    use Owner::Layer;
    use Tensor as T;
    use Transform::{Keep, QkRows};
    use When::{Attends, Dense, Feeds, MlpBias, Mixes, OutputBias, QkvBias};
    &[
        name(T::AttentionNorm, Layer, "attn_norm.weight", Some("norm.weight"), (&[Hidden], Mixes, Keep)),
        name(T::MlpNorm, Layer, "attn_norm.weight", Some("norm.weight"), (&[Hidden], Feeds, Keep)),
        name(T::Query, Layer, "attn_q.weight", Some("mixer.q_proj.weight"), (&[Query, Hidden], Attends, QkRows)),
        name(T::Key, Layer, "attn_k.weight", Some("mixer.k_proj.weight"), (&[Kv, Hidden], Attends, QkRows)),
        name(T::Value, Layer, "attn_v.weight", Some("mixer.v_proj.weight"), (&[Kv, Hidden], Attends, Keep)),
        name(T::AttentionOutput, Layer, "attn_output.weight", Some("mixer.o_proj.weight"), (&[Hidden, Query], Attends, Keep)),
        name(T::QueryBias, Layer, "attn_q.bias", Some("mixer.q_proj.bias"), (&[Query], QkvBias, QkRows)),
        name(T::KeyBias, Layer, "attn_k.bias", Some("mixer.k_proj.bias"), (&[Kv], QkvBias, QkRows)),
        name(T::ValueBias, Layer, "attn_v.bias", Some("mixer.v_proj.bias"), (&[Kv], QkvBias, Keep)),
        name(T::AttentionOutputBias, Layer, "attn_output.bias", Some("mixer.o_proj.bias"), (&[Hidden], OutputBias, Keep)),
        name(T::Up, Layer, "ffn_up.weight", Some("mixer.up_proj.weight"), (&[Ffn, Hidden], Dense, Keep)),
        name(T::Down, Layer, "ffn_down.weight", Some("mixer.down_proj.weight"), (&[Hidden, Ffn], Dense, Keep)),
        name(T::UpBias, Layer, "ffn_up.bias", Some("mixer.up_proj.bias"), (&[Ffn], MlpBias, Keep)),
        name(T::DownBias, Layer, "ffn_down.bias", Some("mixer.down_proj.bias"), (&[Hidden], MlpBias, Keep)),
    ]
};

#[rustfmt::skip]
const EXPERTS: &[Name] = {
    use Dim::{ExpertFfn, ExpertWidth, Experts, Ffn, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::{Mixture, Narrow, Shared};
    &[
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("mixer.gate.weight"), (&[Experts, Hidden], Mixture, Keep)),
        name(T::RouterCorrection, Layer, "exp_probs_b.bias", Some("mixer.gate.e_score_correction_bias"), (&[Experts], Mixture, Keep)),
        name(T::ExpertsNarrow, Layer, "ffn_latent_down.weight", Some("mixer.fc1_latent_proj.weight"), (&[ExpertWidth, Hidden], Narrow, Keep)),
        name(T::ExpertsWiden, Layer, "ffn_latent_up.weight", Some("mixer.fc2_latent_proj.weight"), (&[Hidden, ExpertWidth], Narrow, Keep)),
        name(T::ExpertUp, Layer, "ffn_up_exps.weight", Some("mixer.experts.{}.up_proj.weight"), (&[Experts, ExpertFfn, ExpertWidth], Mixture, Keep)),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("mixer.experts.{}.down_proj.weight"), (&[Experts, ExpertWidth, ExpertFfn], Mixture, Keep)),
        name(T::SharedUp, Layer, "ffn_up_shexp.weight", Some("mixer.shared_experts.up_proj.weight"), (&[Ffn, Hidden], Shared, Keep)),
        name(T::SharedDown, Layer, "ffn_down_shexp.weight", Some("mixer.shared_experts.down_proj.weight"), (&[Hidden, Ffn], Shared, Keep)),
    ]
};
