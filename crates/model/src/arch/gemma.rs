//! Gemma: scaled embeddings. Gemma 2 and 3 have norms around each branch and windows on most layers. Gemma 2 bends scores
//! and logits; Gemma 3 normalises queries and keys instead, and its layers with a window rotate by themselves.

use fornax_compute::Glu;

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{AttentionScale, EmbeddingScale, QkRows, SoftCaps, WindowRule};
use crate::names::Dim::{Dense, Hidden, Vocab};
use crate::names::Owner::{Layer, Model};
use crate::names::When::{Always, DenseLayers};
use crate::names::{ATTENTION, ENDS, MLP, Name, QK_NORMS, Tensor, Transform::Keep, name};

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

/// Of the models that see images only the part that reads text.
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
    names: &[ENCODER_ENDS, NORMS, ATTENTION, QK_NORMS, MLP],
    encoder: true,
    ..GEMMA3
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
