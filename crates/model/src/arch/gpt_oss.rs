//! gpt-oss: experts with biases and limits, sinks in attention, a window in every other layer.

use fornax_compute::Glu;

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, QkRows, ShareRule, WindowRule};
use crate::names::{ATTENTION, Dim, ENDS, Name, Owner, Tensor, Transform, When, name};
use crate::relaid::Interleave;

pub(crate) const GPT_OSS: Facts = Facts {
    name: "gpt-oss",
    gguf: Some("gpt-oss"),
    model_types: &["gpt_oss"],
    classes: &["GptOssForCausalLM"],
    names: &[ENDS, ATTENTION, LAYER],
    gguf_qk_rows: QkRows::Halves,
    bias: BiasRule::Always,
    window: WindowRule::AllButEvery(2),
    rope_base: 150_000.0,
    yarn_truncates: false,
    experts: Some(ShareRule::OfChosen),
    glu: Glu::Clamped,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const LAYER: &[Name] = {
    use Dim::{ExpertFfn, Experts, Heads, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::{Alternate, AlternateRows, Keep};
    use When::{Always, Mixture};
    const GATE: Interleave = Interleave { of: 2, at: 0 };
    const UP: Interleave = Interleave { of: 2, at: 1 };
    const ALONE: Interleave = Interleave { of: 1, at: 0 };
    &[
        name(T::AttentionNorm, Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Hidden], Always, Keep)),
        name(T::Sinks, Layer, "attn_sinks.weight", Some("self_attn.sinks"), (&[Heads], Always, Keep)),
        name(T::MlpNorm, Layer, "post_attention_norm.weight", Some("post_attention_layernorm.weight"), (&[Hidden], Always, Keep)),
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("mlp.router.weight"), (&[Experts, Hidden], Mixture, Keep)),
        name(T::RouterBias, Layer, "ffn_gate_inp.bias", Some("mlp.router.bias"), (&[Experts], Mixture, Keep)),
        name(T::ExpertGate, Layer, "ffn_gate_exps.weight", Some("mlp.experts.gate_up_proj"), (&[Experts, ExpertFfn, Hidden], Mixture, AlternateRows(GATE))),
        name(T::ExpertUp, Layer, "ffn_up_exps.weight", Some("mlp.experts.gate_up_proj"), (&[Experts, ExpertFfn, Hidden], Mixture, AlternateRows(UP))),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("mlp.experts.down_proj"), (&[Experts, Hidden, ExpertFfn], Mixture, AlternateRows(ALONE))),
        name(T::ExpertGateBias, Layer, "ffn_gate_exps.bias", Some("mlp.experts.gate_up_proj_bias"), (&[Experts, ExpertFfn], Mixture, Alternate(GATE))),
        name(T::ExpertUpBias, Layer, "ffn_up_exps.bias", Some("mlp.experts.gate_up_proj_bias"), (&[Experts, ExpertFfn], Mixture, Alternate(UP))),
        name(T::ExpertDownBias, Layer, "ffn_down_exps.bias", Some("mlp.experts.down_proj_bias"), (&[Experts, Hidden], Mixture, Keep)),
    ]
};
