//! Nemotron-H: each layer is one branch alone, a selective scan, attention without rotation, or a feed-forward of squared
//! ReLU.

use fornax_compute::{GateOrder, Pointwise};

use super::llama::LLAMA;
use super::mamba2::{ENDS, SCAN};
use crate::Facts;
use crate::facts::{BiasRule, Recurrent, RotaryRule, ScanLayers};
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
    ],
    layers: "backbone.layers",
    names: &[ENDS, LAYER, SCAN],
    bias: BiasRule::Configured,
    rotary: RotaryRule::Never,
    function: Some(Pointwise::ReluSquared),
    recurrent: Some(Recurrent::Scan { gates: GateOrder::GatesFirst, layers: ScanLayers::Alone }),
    ..LLAMA
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
