//! Granite 4: selective scans in most layers, attention in the others, which mostly does not rotate. Of experts, where there
//! are some, every token takes one more; else it is the feed-forward.

use fornax_compute::GateOrder;

use super::granite::GRANITE;
use crate::Facts;
use crate::facts::{Recurrent, RotaryRule, ScanLayers, ShareRule};
use crate::names::{ATTENTION, Dim, ENDS, Name, Owner, PRE_NORMS, Stretch, Tensor, Transform, When, name};
use crate::relaid::Interleave;

pub(crate) const GRANITE_HYBRID: Facts = Facts {
    name: "granitehybrid",
    gguf: Some("granitehybrid"),
    model_types: &["granitemoehybrid"],
    classes: &["GraniteMoeHybridForCausalLM"],
    keys: &[
        ("intermediate_size", "shared_intermediate_size"),
        ("shared_expert_intermediate_size", "shared_intermediate_size"),
        ("moe_intermediate_size", "intermediate_size"),
    ],
    names: &[ENDS, PRE_NORMS, ATTENTION, SCAN, MLP],
    rotary: RotaryRule::Configured,
    experts: Some(ShareRule::OfChosen),
    recurrent: Some(Recurrent::Scan { gates: GateOrder::GatesFirst, layers: ScanLayers::InPlace }),
    ..GRANITE
};

#[rustfmt::skip] // A table: one line per weight.
pub(super) const SCAN: &[Name] = {
    use Dim::{Hidden, One, ScanChannels, ScanHeads, ScanValues, Taps};
    use Owner::Layer;
    use Tensor as T;
    use Transform::{Groups, Keep, NegativeExp};
    use When::{Scan, ScanConvBias, ScanNorm};
    const CHANNELS: Transform = Transform::Stretch(Stretch::Channels);
    const GATES: Transform = Transform::Stretch(Stretch::Gates);
    const STEPS: Transform = Transform::Stretch(Stretch::Steps);
    &[
        name(T::ScanChannels, Layer, "ssm_in.weight", Some("mamba.in_proj.weight"), (&[ScanChannels, Hidden], Scan, CHANNELS)),
        name(T::ScanGate, Layer, "ssm_in.weight", Some("mamba.in_proj.weight"), (&[ScanValues, Hidden], Scan, GATES)),
        name(T::ScanStep, Layer, "ssm_in.weight", Some("mamba.in_proj.weight"), (&[ScanHeads, Hidden], Scan, STEPS)),
        name(T::Conv, Layer, "ssm_conv1d.weight", Some("mamba.conv1d.weight"), (&[ScanChannels, One, Taps], Scan, Keep)),
        name(T::ConvBias, Layer, "ssm_conv1d.bias", Some("mamba.conv1d.bias"), (&[ScanChannels], ScanConvBias, Keep)),
        name(T::StateRate, Layer, "ssm_a", Some("mamba.A_log"), (&[ScanHeads, One], Scan, NegativeExp)),
        name(T::StateBias, Layer, "ssm_dt.bias", Some("mamba.dt_bias"), (&[ScanHeads], Scan, Keep)),
        name(T::StateSkip, Layer, "ssm_d", Some("mamba.D"), (&[ScanHeads, One], Scan, Keep)),
        name(T::StateNorm, Layer, "ssm_norm.weight", Some("mamba.norm.weight"), (&[ScanValues], ScanNorm, Groups)),
        name(T::StateOutput, Layer, "ssm_out.weight", Some("mamba.out_proj.weight"), (&[Hidden, ScanValues], Scan, Keep)),
    ]
};

#[rustfmt::skip]
const MLP: &[Name] = {
    use Dim::{ExpertFfn, Experts, Ffn, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::{Below, Keep, Stacked};
    use When::{Dense, Mixture};
    const FIRST: Interleave = Interleave { of: 2, at: 0 };
    const SECOND: Interleave = Interleave { of: 2, at: 1 };
    const ALONE: Interleave = Interleave { of: 1, at: 0 };
    const IN: &str = "block_sparse_moe.experts.gate_up_proj";
    const OUT: &str = "block_sparse_moe.experts.down_proj";
    &[
        name(T::Gate, Layer, "ffn_gate.weight", Some("shared_mlp.input_linear.weight"), (&[Ffn, Hidden], Dense, Below(FIRST))),
        name(T::Up, Layer, "ffn_up.weight", Some("shared_mlp.input_linear.weight"), (&[Ffn, Hidden], Dense, Below(SECOND))),
        name(T::Down, Layer, "ffn_down.weight", Some("shared_mlp.output_linear.weight"), (&[Hidden, Ffn], Dense, Keep)),
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("block_sparse_moe.router.layer.weight"), (&[Experts, Hidden], Mixture, Keep)),
        name(T::ExpertGate, Layer, "ffn_gate_exps.weight", Some("block_sparse_moe.input_linear.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Stacked(FIRST, IN))),
        name(T::ExpertUp, Layer, "ffn_up_exps.weight", Some("block_sparse_moe.input_linear.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Stacked(SECOND, IN))),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("block_sparse_moe.output_linear.weight"), (&[Experts, Hidden, ExpertFfn], Mixture, Stacked(ALONE, OUT))),
        name(T::SharedGate, Layer, "ffn_gate_shexp.weight", Some("shared_mlp.input_linear.weight"), (&[Ffn, Hidden], Mixture, Below(FIRST))),
        name(T::SharedUp, Layer, "ffn_up_shexp.weight", Some("shared_mlp.input_linear.weight"), (&[Ffn, Hidden], Mixture, Below(SECOND))),
        name(T::SharedDown, Layer, "ffn_down_shexp.weight", Some("shared_mlp.output_linear.weight"), (&[Hidden, Ffn], Mixture, Keep)),
    ]
};
