//! StarCoder 2: Llama's attention between layer norms, a feed-forward without gates, biases everywhere.

use fornax_compute::{Glu, NormKind};

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, QkRows, WindowRule};
use crate::names::Dim::{Ffn, Hidden};
use crate::names::Owner::Layer;
use crate::names::Transform::Keep;
use crate::names::When::{Always, MlpBias};
use crate::names::{ATTENTION, ENDS, NORM_BIASES, Name, PRE_NORMS, Tensor as T, name};

pub(crate) const STARCODER2: Facts = Facts {
    name: "starcoder2",
    gguf: Some("starcoder2"),
    model_types: &["starcoder2"],
    classes: &["Starcoder2ForCausalLM"],
    keys: &[("layer_norm_eps", "norm_epsilon")],
    names: &[ENDS, PRE_NORMS, NORM_BIASES, ATTENTION, NAMES],
    gguf_qk_rows: QkRows::Halves,
    norm: NormKind::Layer,
    bias: BiasRule::Always,
    window: WindowRule::EveryLayer(None),
    glu: Glu::GeluTanh,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const NAMES: &[Name] = &[
    name(T::Up, Layer, "ffn_up.weight", Some("mlp.c_fc.weight"), (&[Ffn, Hidden], Always, Keep)),
    name(T::UpBias, Layer, "ffn_up.bias", Some("mlp.c_fc.bias"), (&[Ffn], MlpBias, Keep)),
    name(T::Down, Layer, "ffn_down.weight", Some("mlp.c_proj.weight"), (&[Hidden, Ffn], Always, Keep)),
    name(T::DownBias, Layer, "ffn_down.bias", Some("mlp.c_proj.bias"), (&[Hidden], MlpBias, Keep)),
];
