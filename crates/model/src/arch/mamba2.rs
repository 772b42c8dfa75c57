//! Mamba-2: selective scans and nothing else.

use fornax_compute::GateOrder;

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, Recurrent, ScanLayers};
use crate::names::{Dim, Name, Owner, Stretch, Tensor, Transform, When, name};

pub(crate) const MAMBA2: Facts = Facts {
    name: "mamba2",
    gguf: Some("mamba2"),
    model_types: &["mamba2"],
    classes: &["Mamba2ForCausalLM"],
    keys: &[
        ("mamba_n_heads", "num_heads"),
        ("mamba_n_groups", "n_groups"),
        ("mamba_d_state", "state_size"),
        ("mamba_d_head", "head_dim"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_expand", "expand"),
        ("mamba_conv_bias", "use_conv_bias"),
        ("mamba_proj_bias", "use_bias"),
        ("rms_norm_eps", "layer_norm_epsilon"),
    ],
    // No position is told to it, so none is too many.
    defaults: &[("max_position_embeddings", 1_048_576.0)],
    layers: "backbone.layers",
    names: &[ENDS, NORM, SCAN],
    bias: BiasRule::Never,
    recurrent: Some(Recurrent::Scan { gates: GateOrder::GatesFirst, layers: ScanLayers::InPlace }),
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
pub(super) const ENDS: &[Name] = {
    use Dim::{Hidden, Vocab};
    use Owner::Model;
    use Tensor as T;
    use Transform::Keep;
    use When::{Always, Untied};
    &[
        name(T::Embedding, Model, "token_embd.weight", Some("backbone.embeddings.weight"), (&[Vocab, Hidden], Always, Keep)),
        name(T::OutputNorm, Model, "output_norm.weight", Some("backbone.norm_f.weight"), (&[Hidden], Always, Keep)),
        name(T::Output, Model, "output.weight", Some("lm_head.weight"), (&[Vocab, Hidden], Untied, Keep)),
    ]
};

#[rustfmt::skip]
pub(super) const NORM: &[Name] =
    &[name(Tensor::AttentionNorm, Owner::Layer, "attn_norm.weight", Some("norm.weight"), (&[Dim::Hidden], When::Always, Transform::Keep))];

#[rustfmt::skip]
pub(super) const SCAN: &[Name] = {
    use Dim::{Hidden, One, ScanChannels, ScanHeads, ScanValues, Taps};
    use Owner::Layer;
    use Tensor as T;
    use Transform::{Groups, Keep, NegativeExp};
    use When::{Scan, ScanConvBias};
    const CHANNELS: Transform = Transform::Stretch(Stretch::Channels);
    const GATES: Transform = Transform::Stretch(Stretch::Gates);
    const STEPS: Transform = Transform::Stretch(Stretch::Steps);
    &[
        name(T::ScanChannels, Layer, "ssm_in.weight", Some("mixer.in_proj.weight"), (&[ScanChannels, Hidden], Scan, CHANNELS)),
        name(T::ScanGate, Layer, "ssm_in.weight", Some("mixer.in_proj.weight"), (&[ScanValues, Hidden], Scan, GATES)),
        name(T::ScanStep, Layer, "ssm_in.weight", Some("mixer.in_proj.weight"), (&[ScanHeads, Hidden], Scan, STEPS)),
        name(T::Conv, Layer, "ssm_conv1d.weight", Some("mixer.conv1d.weight"), (&[ScanChannels, One, Taps], Scan, Keep)),
        name(T::ConvBias, Layer, "ssm_conv1d.bias", Some("mixer.conv1d.bias"), (&[ScanChannels], ScanConvBias, Keep)),
        name(T::StateRate, Layer, "ssm_a", Some("mixer.A_log"), (&[ScanHeads, One], Scan, NegativeExp)),
        name(T::StateBias, Layer, "ssm_dt.bias", Some("mixer.dt_bias"), (&[ScanHeads], Scan, Keep)),
        name(T::StateSkip, Layer, "ssm_d", Some("mixer.D"), (&[ScanHeads, One], Scan, Keep)),
        name(T::StateNorm, Layer, "ssm_norm.weight", Some("mixer.norm.weight"), (&[ScanValues], Scan, Groups)),
        name(T::StateOutput, Layer, "ssm_out.weight", Some("mixer.out_proj.weight"), (&[Hidden, ScanValues], Scan, Keep)),
    ]
};
