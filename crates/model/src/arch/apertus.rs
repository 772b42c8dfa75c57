//! Apertus: Llama's blocks with norms of queries and keys and a feed-forward of xIELU, without gates.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::QkRows;
use crate::names::{
    ATTENTION, Dim, ENDS, Name, Owner, QK_NORMS, Tensor as T, Transform, UNGATED, When, name,
};

pub(crate) const APERTUS: Facts = Facts {
    name: "apertus",
    gguf: Some("apertus"),
    model_types: &["apertus"],
    classes: &["ApertusForCausalLM"],
    names: &[ENDS, LAYER, ATTENTION, QK_NORMS, UNGATED],
    gguf_qk_rows: QkRows::Halves,
    rope_base: 12_000_000.0,
    xielu: true,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const LAYER: &[Name] = {
    use Dim::{Hidden, One};
    use Owner::Layer;
    use Transform::Keep;
    use When::Always;
    &[
        name(T::AttentionNorm, Layer, "attn_norm.weight", Some("attention_layernorm.weight"), (&[Hidden], Always, Keep)),
        name(T::MlpNorm, Layer, "ffn_norm.weight", Some("feedforward_layernorm.weight"), (&[Hidden], Always, Keep)),
        // GGUF has these with its metadata.
        name(T::XieluPositive, Layer, "", Some("mlp.act_fn.alpha_p"), (&[One], Always, Keep)),
        name(T::XieluNegative, Layer, "", Some("mlp.act_fn.alpha_n"), (&[One], Always, Keep)),
        name(T::XieluBeta, Layer, "", Some("mlp.act_fn.beta"), (&[One], Always, Keep)),
        name(T::XieluEps, Layer, "", Some("mlp.act_fn.eps"), (&[One], Always, Keep)),
    ]
};
