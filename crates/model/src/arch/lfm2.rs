//! LFM2: gated short convolutions in most layers, attention in the others. Some have experts behind the first layers, chosen
//! by sigmoid and a correction.

use fornax_compute::{Scores, Shares};

use super::qwen3::QWEN3;
use crate::Facts;
use crate::facts::{BiasRule, Floor, Recurrent, ShareRule, WindowRule};
use crate::names::{Dim, Name, Owner, Tensor, Transform, When, name};

pub(crate) const LFM2: Facts = Facts {
    name: "lfm2",
    gguf: Some("lfm2"),
    model_types: &["lfm2"],
    classes: &["Lfm2ForCausalLM", "LFM2ForCausalLM"],
    keys: &[("rms_norm_eps", "norm_eps")],
    names: &[ENDS, LAYER],
    bias: BiasRule::Never,
    window: WindowRule::Never,
    rope_base: 1_000_000.0,
    recurrent: Some(Recurrent::ShortConv),
    ..QWEN3
};

pub(crate) const LFM2_MOE: Facts = Facts {
    name: "lfm2moe",
    gguf: Some("lfm2moe"),
    model_types: &["lfm2_moe"],
    classes: &["Lfm2MoeForCausalLM"],
    keys: &[("rms_norm_eps", "norm_eps"), ("first_k_dense_replace", "num_dense_layers")],
    names: &[ENDS, LAYER, EXPERTS],
    experts: Some(ShareRule::Configured { gguf: Shares::OfChosen, hugging_face: Shares::OfChosen }),
    scores: Scores::Sigmoid,
    floor: Floor::Added(1e-6),
    ..LFM2
};

#[rustfmt::skip] // A table: one line per weight.
const EXPERTS: &[Name] = {
    use Dim::{ExpertFfn, Experts, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::Mixture;
    &[
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("feed_forward.gate.weight"), (&[Experts, Hidden], Mixture, Keep)),
        name(T::RouterCorrection, Layer, "exp_probs_b.bias", Some("feed_forward.expert_bias"), (&[Experts], Mixture, Keep)),
        name(T::ExpertGate, Layer, "ffn_gate_exps.weight", Some("feed_forward.experts.{}.w1.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Keep)),
        name(T::ExpertUp, Layer, "ffn_up_exps.weight", Some("feed_forward.experts.{}.w3.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Keep)),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("feed_forward.experts.{}.w2.weight"), (&[Experts, Hidden, ExpertFfn], Mixture, Keep)),
    ]
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
        name(T::OutputNorm, Model, "token_embd_norm.weight", Some("model.embedding_norm.weight"), (&[Hidden], Always, Keep)),
        name(T::Output, Model, "output.weight", Some("lm_head.weight"), (&[Vocab, Hidden], Untied, Keep)),
    ]
};

#[rustfmt::skip]
const LAYER: &[Name] = {
    use Dim::{ConvChannels, ConvMixed, Ffn, Head, Hidden, Kv, One, Query, Taps};
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::{Always, Attends, Conv, Dense};
    &[
        name(T::AttentionNorm, Layer, "attn_norm.weight", Some("operator_norm.weight"), (&[Hidden], Always, Keep)),
        name(T::MlpNorm, Layer, "ffn_norm.weight", Some("ffn_norm.weight"), (&[Hidden], Always, Keep)),
        name(T::Query, Layer, "attn_q.weight", Some("self_attn.q_proj.weight"), (&[Query, Hidden], Attends, Keep)),
        name(T::Key, Layer, "attn_k.weight", Some("self_attn.k_proj.weight"), (&[Kv, Hidden], Attends, Keep)),
        name(T::Value, Layer, "attn_v.weight", Some("self_attn.v_proj.weight"), (&[Kv, Hidden], Attends, Keep)),
        name(T::AttentionOutput, Layer, "attn_output.weight", Some("self_attn.out_proj.weight"), (&[Hidden, Query], Attends, Keep)),
        name(T::QueryNorm, Layer, "attn_q_norm.weight", Some("self_attn.q_layernorm.weight"), (&[Head], Attends, Keep)),
        name(T::KeyNorm, Layer, "attn_k_norm.weight", Some("self_attn.k_layernorm.weight"), (&[Head], Attends, Keep)),
        name(T::ConvMixed, Layer, "shortconv.in_proj.weight", Some("conv.in_proj.weight"), (&[ConvMixed, Hidden], Conv, Keep)),
        name(T::Conv, Layer, "shortconv.conv.weight", Some("conv.conv.weight"), (&[ConvChannels, One, Taps], Conv, Keep)),
        name(T::ConvOutput, Layer, "shortconv.out_proj.weight", Some("conv.out_proj.weight"), (&[Hidden, ConvChannels], Conv, Keep)),
        name(T::Gate, Layer, "ffn_gate.weight", Some("feed_forward.w1.weight"), (&[Ffn, Hidden], Dense, Keep)),
        name(T::Up, Layer, "ffn_up.weight", Some("feed_forward.w3.weight"), (&[Ffn, Hidden], Dense, Keep)),
        name(T::Down, Layer, "ffn_down.weight", Some("feed_forward.w2.weight"), (&[Hidden, Ffn], Dense, Keep)),
    ]
};
