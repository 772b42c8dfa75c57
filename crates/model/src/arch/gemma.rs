//! Gemma: scaled embeddings. Gemma 2 and 3 have norms around each branch and windows on most layers. Gemma 2 bends scores
//! and logits; Gemma 3 normalises queries and keys instead, and its layers with a window rotate by themselves. In Gemma 4 these
//! have heads of their own, too, and values are normalised.

use fornax_compute::Glu;

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{AttentionScale, EmbeddingScale, LookAhead, QkRows, ShareRule, SoftCaps, WindowRule};
use crate::names::Dim::{Dense, ExpertFfn, Ffn, Head, Hidden, Kv, One, Query, Vocab};
use crate::names::Owner::{Layer, Model};
use crate::names::Transform::{Keep, QkRows as Rotated, StackedInBoth};
use crate::names::When::{Always, Attends, DenseLayers, Mixture, Values};
use crate::names::{ATTENTION, Dim, ENDS, MLP, Name, QK_NORMS, Tensor, When, name};
use crate::relaid::Interleave;
use crate::tower::facts as tower;

/// Its files say "gelu" under another key and mean the approximation.
pub(crate) const GEMMA: Facts = Facts {
    name: "gemma",
    gguf: Some("gemma"),
    model_types: &["gemma"],
    classes: &["GemmaForCausalLM"],
    keys: &[("hidden_act", "hidden_activation")],
    gguf_qk_rows: QkRows::Halves,
    norm_less_one: true,
    embedding_scale: EmbeddingScale::RootOfHidden,
    glu: Glu::GeluTanh,
    ..LLAMA
};

pub(crate) const GEMMA2: Facts = Facts {
    name: "gemma2",
    gguf: Some("gemma2"),
    model_types: &["gemma2"],
    classes: &["Gemma2ForCausalLM"],
    defaults: &[("sliding_window", 4096.0)],
    names: &[ENDS, NORMS, ATTENTION, MLP],
    window: WindowRule::AllButEvery(2),
    attention_scale: AttentionScale::PreAttentionScalar { layers: 46 },
    soft_caps: Some(SoftCaps { attention: Some(50.0), logits: Some(30.0) }),
    ..GEMMA
};

/// Gemma 2 without norms behind the branches. No GGUF file has it.
pub(crate) const VAULTGEMMA: Facts = Facts {
    name: "vaultgemma",
    gguf: None,
    model_types: &["vaultgemma"],
    classes: &["VaultGemmaForCausalLM"],
    names: &[ENDS, VAULT_NORMS, ATTENTION, MLP],
    ..GEMMA2
};

/// Of the models that see images, what reads text; the tower is beside it.
pub(crate) const GEMMA3: Facts = Facts {
    name: "gemma3",
    gguf: Some("gemma3"),
    model_types: &["gemma3_text", "gemma3"],
    classes: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
    defaults: &[
        ("num_attention_heads", 8.0),
        ("num_key_value_heads", 4.0),
        ("head_dim", 256.0),
        ("max_position_embeddings", 131072.0),
        ("rms_norm_eps", 1e-6),
        ("query_pre_attn_scalar", 256.0),
        ("sliding_window", 4096.0),
    ],
    beginnings: &[("model.", "language_model.model."), ("model.", "model.language_model.")],
    not_text: &[
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ],
    names: &[ENDS, NORMS, ATTENTION, QK_NORMS, MLP],
    window: WindowRule::AllButEvery(6),
    rope_base: 1000000.0,
    window_rope_base: Some(10000.0),
    attention_scale: AttentionScale::PreAttentionScalar { layers: 62 },
    soft_caps: Some(SoftCaps { attention: None, logits: None }),
    tower: Some(&tower::GEMMA3),
    looks_ahead: LookAhead::Everywhere,
    ..GEMMA2
};

/// Gemma 3 as an encoder. In Hugging Face files only the class tells it apart; two dense layers behind the pooled vector are
/// modules of their own there.
pub(crate) const EMBEDDING_GEMMA: Facts = Facts {
    name: "gemma-embedding",
    gguf: Some("gemma-embedding"),
    model_types: &[],
    classes: &["Gemma3TextModel"],
    layers: "layers",
    beginnings: &[("", "model.")],
    not_text: &[],
    tower: None,
    looks_ahead: LookAhead::Never,
    names: &[ENCODER_ENDS, NORMS, ATTENTION, QK_NORMS, MLP],
    encoder: true,
    ..GEMMA3
};

/// Of the models that see images and hear sounds, what reads text; the tower of images is beside it.
pub(crate) const GEMMA4: Facts = Facts {
    name: "gemma4",
    gguf: Some("gemma4"),
    model_types: &["gemma4_text", "gemma4"],
    classes: &["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"],
    defaults: &[
        ("num_attention_heads", 8.0),
        ("num_key_value_heads", 4.0),
        ("head_dim", 256.0),
        ("max_position_embeddings", 131072.0),
        ("rms_norm_eps", 1e-6),
        ("sliding_window", 512.0),
        ("hidden_size_per_layer_input", 256.0),
    ],
    not_text: &[
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
        "model.vision_embedder.",
    ],
    keys: &[("hidden_act", "hidden_activation"), ("num_experts_per_tok", "top_k_experts")],
    names: &[ENDS, NORMS, SHARED_ATTENTION, MLP, EXPERTS, LAYER, INPUTS],
    norm_less_one: false,
    proportional_rotary: Some(0.25),
    full_head_dim: Some(512),
    norms_values: true,
    attention_scale: AttentionScale::One,
    experts: Some(ShareRule::OfChosen),
    dense_too: true,
    tower: Some(&tower::GEMMA4),
    looks_ahead: LookAhead::InWindows,
    ..GEMMA3
};

/// Of the model whose images and sounds have no tower of their own. In GGUF it says that it is a gemma4.
pub(crate) const GEMMA4_UNIFIED: Facts = Facts {
    name: "gemma4-unified",
    gguf: None,
    model_types: &["gemma4_unified_text", "gemma4_unified"],
    classes: &["Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"],
    defaults: &[
        ("num_attention_heads", 8.0),
        ("num_key_value_heads", 4.0),
        ("head_dim", 256.0),
        ("max_position_embeddings", 262144.0),
        ("rms_norm_eps", 1e-6),
        ("sliding_window", 1024.0),
    ],
    names: &[ENDS, NORMS, SHARED_ATTENTION, MLP, LAYER],
    experts: None,
    dense_too: false,
    tower: None,
    ..GEMMA4
};

#[rustfmt::skip] // A table: one line per weight.
const ENCODER_ENDS: &[Name] = &[
    name(Tensor::Embedding, Model, "token_embd.weight", Some("embed_tokens.weight"), (&[Vocab, Hidden], Always, Keep)),
    name(Tensor::OutputNorm, Model, "output_norm.weight", Some("norm.weight"), (&[Hidden], Always, Keep)),
    name(Tensor::DenseUp, Model, "dense_2.weight", Some("2_Dense.linear.weight"), (&[Dense, Hidden], DenseLayers, Keep)),
    name(Tensor::DenseDown, Model, "dense_3.weight", Some("3_Dense.linear.weight"), (&[Hidden, Dense], DenseLayers, Keep)),
];

#[rustfmt::skip]
const NORMS: &[Name] = &[
    name(Tensor::AttentionNorm, Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(Tensor::AttentionPostNorm, Layer, "post_attention_norm.weight", Some("post_attention_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(Tensor::MlpNorm, Layer, "ffn_norm.weight", Some("pre_feedforward_layernorm.weight"), (&[Hidden], Always, Keep)),
    name(Tensor::MlpPostNorm, Layer, "post_ffw_norm.weight", Some("post_feedforward_layernorm.weight"), (&[Hidden], Always, Keep)),
];

#[rustfmt::skip]
const VAULT_NORMS: &[Name] = {
    let [before_attention, _, before_mlp, _] = NORMS else { panic!() };
    &[*before_attention, *before_mlp]
};

/// Projections of attention, where a weight may be that of keys and values.
#[rustfmt::skip]
const SHARED_ATTENTION: &[Name] = &[
    name(Tensor::Query, Layer, "attn_q.weight", Some("self_attn.q_proj.weight"), (&[Query, Hidden], Attends, Rotated)),
    name(Tensor::Key, Layer, "attn_k.weight", Some("self_attn.k_proj.weight"), (&[Kv, Hidden], Attends, Rotated)),
    name(Tensor::Value, Layer, "attn_v.weight", Some("self_attn.v_proj.weight"), (&[Kv, Hidden], Values, Keep)),
    name(Tensor::AttentionOutput, Layer, "attn_output.weight", Some("self_attn.o_proj.weight"), (&[Hidden, Query], Attends, Keep)),
    name(Tensor::QueryNorm, Layer, "attn_q_norm.weight", Some("self_attn.q_norm.weight"), (&[Head], Attends, Keep)),
    name(Tensor::KeyNorm, Layer, "attn_k_norm.weight", Some("self_attn.k_norm.weight"), (&[Head], Attends, Keep)),
];

#[rustfmt::skip]
const LAYER: &[Name] = &[
    name(Tensor::LayerScale, Layer, "layer_output_scale.weight", Some("layer_scalar"), (&[One], Always, Keep)),
];

/// Experts, and beside them what every token takes, each with norms of its own.
#[rustfmt::skip]
const EXPERTS: &[Name] = {
    use Tensor as T;
    const GATE: Interleave = Interleave { of: 2, at: 0 };
    const UP: Interleave = Interleave { of: 2, at: 1 };
    &[
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("router.proj.weight"), (&[Dim::Experts, Hidden], Mixture, Keep)),
        name(T::RouterScale, Layer, "ffn_gate_inp.scale", Some("router.scale"), (&[Hidden], Mixture, Keep)),
        name(T::ExpertScales, Layer, "ffn_down_exps.scale", Some("router.per_expert_scale"), (&[Dim::Experts], Mixture, Keep)),
        name(T::ExpertGate, Layer, "ffn_gate_up_exps.weight", Some("experts.gate_up_proj"), (&[Dim::Experts, ExpertFfn, Hidden], Mixture, StackedInBoth(GATE, "ffn_gate_exps.weight"))),
        name(T::ExpertUp, Layer, "ffn_gate_up_exps.weight", Some("experts.gate_up_proj"), (&[Dim::Experts, ExpertFfn, Hidden], Mixture, StackedInBoth(UP, "ffn_up_exps.weight"))),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("experts.down_proj"), (&[Dim::Experts, Hidden, ExpertFfn], Mixture, Keep)),
        name(T::SharedGate, Layer, "ffn_gate.weight", Some("mlp.gate_proj.weight"), (&[Ffn, Hidden], Mixture, Keep)),
        name(T::SharedUp, Layer, "ffn_up.weight", Some("mlp.up_proj.weight"), (&[Ffn, Hidden], Mixture, Keep)),
        name(T::SharedDown, Layer, "ffn_down.weight", Some("mlp.down_proj.weight"), (&[Hidden, Ffn], Mixture, Keep)),
        name(T::ExpertsNorm, Layer, "pre_ffw_norm_2.weight", Some("pre_feedforward_layernorm_2.weight"), (&[Hidden], Mixture, Keep)),
        name(T::SharedPostNorm, Layer, "post_ffw_norm_1.weight", Some("post_feedforward_layernorm_1.weight"), (&[Hidden], Mixture, Keep)),
        name(T::ExpertsPostNorm, Layer, "post_ffw_norm_2.weight", Some("post_feedforward_layernorm_2.weight"), (&[Hidden], Mixture, Keep)),
    ]
};

/// Embeddings that layers have of their own.
#[rustfmt::skip]
const INPUTS: &[Name] = {
    use Dim::{LayerInput, LayerInputs, Vocab};
    use Tensor as T;
    const HAVE: When = When::LayerInputs;
    &[
        name(T::LayerTable, Model, "per_layer_token_embd.weight", Some("model.embed_tokens_per_layer.weight"), (&[Vocab, LayerInputs], HAVE, Keep)),
        name(T::LayerProjection, Model, "per_layer_model_proj.weight", Some("model.per_layer_model_projection.weight"), (&[LayerInputs, Hidden], HAVE, Keep)),
        name(T::LayerProjectionNorm, Model, "per_layer_proj_norm.weight", Some("model.per_layer_projection_norm.weight"), (&[LayerInput], HAVE, Keep)),
        name(T::LayerGate, Layer, "inp_gate.weight", Some("per_layer_input_gate.weight"), (&[LayerInput, Hidden], HAVE, Keep)),
        name(T::LayerUp, Layer, "proj.weight", Some("per_layer_projection.weight"), (&[Hidden, LayerInput], HAVE, Keep)),
        name(T::LayerPostNorm, Layer, "post_norm.weight", Some("post_per_layer_input_norm.weight"), (&[Hidden], HAVE, Keep)),
    ]
};
