//! Jamba: selective scans of Mamba-1 in most layers, attention without rotation in the others, and experts in every so
//! manyth. Mamba and Falcon Mamba: the same scans and nothing else.

use fornax_compute::Shares;

use super::llama::LLAMA;
use super::mamba2;
use crate::Facts;
use crate::facts::{BiasRule, Recurrent, RotaryRule, ShareRule};
use crate::names::{ATTENTION, Dim, Inner, Name, Owner, Tensor, Transform, When, name};

pub(crate) const JAMBA: Facts = Facts {
    name: "jamba",
    gguf: Some("jamba"),
    model_types: &["jamba"],
    classes: &["JambaForCausalLM"],
    names: &[ENDS, NORMS, ATTENTION, SCAN, STEP_NORMS, FEED_FORWARD],
    bias: BiasRule::Never,
    rotary: RotaryRule::Never,
    experts: Some(ShareRule::Configured { gguf: Shares::OfAll, hugging_face: Shares::OfAll }),
    dense_too: true,
    recurrent: Some(Recurrent::ChannelScan),
    ..LLAMA
};

pub(crate) const MAMBA: Facts = Facts {
    name: "mamba",
    gguf: Some("mamba"),
    model_types: &["mamba"],
    classes: &["MambaForCausalLM"],
    keys: &[
        ("mamba_d_state", "state_size"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_expand", "expand"),
        // Published files of Falcon Mamba have both, and this one is right.
        ("mamba_d_ssm", "intermediate_size"),
        ("mamba_dt_rank", "time_step_rank"),
        ("mamba_conv_bias", "use_conv_bias"),
        ("mamba_proj_bias", "use_bias"),
        ("rms_norm_eps", "layer_norm_epsilon"),
    ],
    // No position is told to it, so none is too many.
    defaults: &[("max_position_embeddings", 1_048_576.0)],
    layers: "backbone.layers",
    names: &[mamba2::ENDS, mamba2::NORM, ALONE],
    bias: BiasRule::Never,
    recurrent: Some(Recurrent::ChannelScan),
    ..LLAMA
};

/// In GGUF it says that it is a Mamba.
pub(crate) const FALCON_MAMBA: Facts = Facts {
    name: "falcon-mamba",
    gguf: None,
    model_types: &["falcon_mamba"],
    classes: &["FalconMambaForCausalLM"],
    defaults: &[("max_position_embeddings", 1_048_576.0), ("mixer_rms_eps", 1e-6)],
    ..MAMBA
};

#[rustfmt::skip] // A table: one line per weight.
const ENDS: &[Name] = {
    use Dim::{Hidden, Vocab};
    use Owner::Model;
    use Tensor as T;
    use Transform::Keep;
    use When::{Always, Untied};
    &[
        name(T::Embedding, Model, "token_embd.weight", Some("model.embed_tokens.weight"), (&[Vocab, Hidden], Always, Keep)),
        name(T::OutputNorm, Model, "output_norm.weight", Some("model.final_layernorm.weight"), (&[Hidden], Always, Keep)),
        name(T::Output, Model, "output.weight", Some("lm_head.weight"), (&[Vocab, Hidden], Untied, Keep)),
    ]
};

#[rustfmt::skip]
const NORMS: &[Name] = &[
    name(Tensor::AttentionNorm, Owner::Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Dim::Hidden], When::Always, Transform::Keep)),
    name(Tensor::MlpNorm, Owner::Layer, "ffn_norm.weight", Some("pre_ff_layernorm.weight"), (&[Dim::Hidden], When::Always, Transform::Keep)),
];

/// The weights of a scan, whose names in Hugging Face files have this beginning.
macro_rules! scan {
    ($beginning:literal) => {{
        use Dim::{Hidden, Inner as Channels, InnerRank, InnerState, One, Taps};
        use Owner::Layer;
        use Tensor as T;
        use Transform::{Keep, NegativeExp};
        use When::{ChannelConvBias, ChannelScan};
        const VALUES: Transform = Transform::Inner(Inner::Values);
        const GATES: Transform = Transform::Inner(Inner::Gates);
        const STEPS: Transform = Transform::Inner(Inner::Steps);
        const KEYS: Transform = Transform::Inner(Inner::Keys);
        const QUERIES: Transform = Transform::Inner(Inner::Queries);
        &[
            name(
                T::ScanChannels,
                Layer,
                "ssm_in.weight",
                Some(concat!($beginning, ".in_proj.weight")),
                (&[Channels, Hidden], ChannelScan, VALUES),
            ),
            name(
                T::ScanGate,
                Layer,
                "ssm_in.weight",
                Some(concat!($beginning, ".in_proj.weight")),
                (&[Channels, Hidden], ChannelScan, GATES),
            ),
            name(
                T::Conv,
                Layer,
                "ssm_conv1d.weight",
                Some(concat!($beginning, ".conv1d.weight")),
                (&[Channels, One, Taps], ChannelScan, Keep),
            ),
            name(
                T::ConvBias,
                Layer,
                "ssm_conv1d.bias",
                Some(concat!($beginning, ".conv1d.bias")),
                (&[Channels], ChannelConvBias, Keep),
            ),
            name(
                T::StepIn,
                Layer,
                "ssm_x.weight",
                Some(concat!($beginning, ".x_proj.weight")),
                (&[InnerRank, Channels], ChannelScan, STEPS),
            ),
            name(
                T::ScanKeys,
                Layer,
                "ssm_x.weight",
                Some(concat!($beginning, ".x_proj.weight")),
                (&[InnerState, Channels], ChannelScan, KEYS),
            ),
            name(
                T::ScanQueries,
                Layer,
                "ssm_x.weight",
                Some(concat!($beginning, ".x_proj.weight")),
                (&[InnerState, Channels], ChannelScan, QUERIES),
            ),
            name(
                T::StepOut,
                Layer,
                "ssm_dt.weight",
                Some(concat!($beginning, ".dt_proj.weight")),
                (&[Channels, InnerRank], ChannelScan, Keep),
            ),
            name(
                T::StateBias,
                Layer,
                "ssm_dt.bias",
                Some(concat!($beginning, ".dt_proj.bias")),
                (&[Channels], ChannelScan, Keep),
            ),
            name(
                T::StateRates,
                Layer,
                "ssm_a",
                Some(concat!($beginning, ".A_log")),
                (&[Channels, InnerState], ChannelScan, NegativeExp),
            ),
            name(
                T::StateSkip,
                Layer,
                "ssm_d",
                Some(concat!($beginning, ".D")),
                (&[Channels], ChannelScan, Keep),
            ),
            name(
                T::StateOutput,
                Layer,
                "ssm_out.weight",
                Some(concat!($beginning, ".out_proj.weight")),
                (&[Hidden, Channels], ChannelScan, Keep),
            ),
        ]
    }};
}

#[rustfmt::skip]
const SCAN: &[Name] = scan!("mamba");

#[rustfmt::skip]
const ALONE: &[Name] = scan!("mixer");

#[rustfmt::skip]
const STEP_NORMS: &[Name] = {
    use Dim::{InnerRank, InnerState};
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::ChannelScan;
    &[
        name(T::StepNorm, Layer, "ssm_dt_norm.weight", Some("mamba.dt_layernorm.weight"), (&[InnerRank], ChannelScan, Keep)),
        name(T::ScanKeyNorm, Layer, "ssm_b_norm.weight", Some("mamba.b_layernorm.weight"), (&[InnerState], ChannelScan, Keep)),
        name(T::ScanQueryNorm, Layer, "ssm_c_norm.weight", Some("mamba.c_layernorm.weight"), (&[InnerState], ChannelScan, Keep)),
    ]
};

#[rustfmt::skip]
const FEED_FORWARD: &[Name] = {
    use Dim::{ExpertFfn, Experts, Ffn, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::{Dense, Mixture};
    &[
        name(T::Gate, Layer, "ffn_gate.weight", Some("feed_forward.gate_proj.weight"), (&[Ffn, Hidden], Dense, Keep)),
        name(T::Up, Layer, "ffn_up.weight", Some("feed_forward.up_proj.weight"), (&[Ffn, Hidden], Dense, Keep)),
        name(T::Down, Layer, "ffn_down.weight", Some("feed_forward.down_proj.weight"), (&[Hidden, Ffn], Dense, Keep)),
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("feed_forward.router.weight"), (&[Experts, Hidden], Mixture, Keep)),
        name(T::ExpertGate, Layer, "ffn_gate_exps.weight", Some("feed_forward.experts.{}.gate_proj.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Keep)),
        name(T::ExpertUp, Layer, "ffn_up_exps.weight", Some("feed_forward.experts.{}.up_proj.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Keep)),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("feed_forward.experts.{}.down_proj.weight"), (&[Experts, Hidden, ExpertFfn], Mixture, Keep)),
    ]
};
