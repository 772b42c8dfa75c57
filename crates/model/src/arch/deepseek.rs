//! DeepSeek V2 and V3, and what has their blocks: Kimi K2, GLM-4.7-Flash, Mistral Small 4, Youtu. Attention is latent; but for
//! the last, experts, some that every token takes as they are, and first layers without.

use fornax_compute::{Scores, Shares};

use super::llama::{LLAMA, SEES, WHOLE};
use crate::Facts;
use crate::facts::{AttentionScale, BiasRule, Floor, QkRows, ShareRule, TemperatureRule};
use crate::names::Owner::Layer;
use crate::names::{
    DEEPSEEK_EXPERTS, Dim, ENDS, LATENT, MLP, Name, PRE_NORMS, QWEN_EXPERTS, Tensor as T,
    Transform::{Keep, StackedInBoth},
    When, name,
};
use crate::relaid::Interleave;

/// Its choice of experts has a correction. Files in GGUF of all these models but the last say that they are this one.
pub(crate) const DEEPSEEK_V3: Facts = Facts {
    name: "deepseek-v3",
    gguf: Some("deepseek2"),
    model_types: &["deepseek_v3", "kimi_k2", "kimi_k25"],
    classes: &[
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
    ],
    keys: &[("num_local_experts", "n_routed_experts")],
    defaults: &[
        ("n_group", 8.0),
        ("topk_group", 4.0),
        ("routed_scaling_factor", 2.5),
        ("first_k_dense_replace", 3.0),
    ],
    beginnings: WHOLE,
    not_text: SEES,
    names: &[ENDS, PRE_NORMS, LATENT, MLP, QWEN_EXPERTS, CORRECTION, SHARED],
    gguf_qk_rows: QkRows::Pairs,
    hugging_face_qk_rows: QkRows::Pairs,
    bias: BiasRule::Never,
    attention_scale: AttentionScale::KeySize,
    latent: true,
    temperature: Some(TemperatureRule { gguf_beta: None, unrotated: false }),
    experts: Some(ShareRule::Configured { gguf: Shares::OfAll, hugging_face: Shares::OfChosen }),
    scores: Scores::Sigmoid,
    floor: Floor::Added(1e-20),
    ..LLAMA
};

/// Experts are chosen by their shares of all.
pub(crate) const DEEPSEEK_V2: Facts = Facts {
    name: "deepseek-v2",
    gguf: None,
    model_types: &["deepseek_v2"],
    classes: &["DeepseekV2ForCausalLM"],
    defaults: &[("n_shared_experts", 2.0)],
    beginnings: &[],
    not_text: &[],
    names: &[ENDS, PRE_NORMS, LATENT, MLP, QWEN_EXPERTS, SHARED],
    temperature: None,
    experts: Some(ShareRule::Configured { gguf: Shares::OfAll, hugging_face: Shares::OfAll }),
    scores: Scores::Softmax,
    floor: Floor::None,
    groups_named: true,
    ..DEEPSEEK_V3
};

/// GLM-4.7-Flash.
pub(crate) const GLM4_MOE_LITE: Facts = Facts {
    name: "glm4-moe-lite",
    gguf: None,
    model_types: &["glm4_moe_lite"],
    classes: &["Glm4MoeLiteForCausalLM"],
    defaults: &[("first_k_dense_replace", 1.0), ("routed_scaling_factor", 1.8)],
    beginnings: &[],
    not_text: &[],
    temperature: None,
    ..DEEPSEEK_V3
};

/// Mistral Small 4: queries also grow with their positions, which its files in GGUF leave out.
pub(crate) const MISTRAL4: Facts = Facts {
    name: "mistral4",
    gguf: Some("mistral4"),
    model_types: &["mistral4"],
    classes: &["Mistral4ForCausalLM", "Mistral3ForConditionalGeneration"],
    defaults: &[],
    names: &[ENDS, PRE_NORMS, LATENT, MLP, EXPERTS, SHARED],
    temperature: Some(TemperatureRule { gguf_beta: Some(0.1), unrotated: false }),
    scores: Scores::Softmax,
    groups_by_two: Some(true),
    ..DEEPSEEK_V3
};

/// Without experts.
pub(crate) const YOUTU: Facts = Facts {
    name: "youtu",
    model_types: &["youtu"],
    classes: &["YoutuForCausalLM"],
    keys: &[],
    defaults: &[],
    beginnings: &[],
    not_text: &[],
    names: &[ENDS, PRE_NORMS, LATENT, MLP],
    temperature: None,
    experts: None,
    scores: Scores::Softmax,
    floor: Floor::None,
    ..DEEPSEEK_V3
};

/// The correction of the choice, where files show whether there is one.
const CORRECTION: &[Name] = &[Name { when: When::Corrected, ..DEEPSEEK_EXPERTS[0] }];

/// Experts that every token takes.
const SHARED: &[Name] = {
    let [_, shared @ ..] = DEEPSEEK_EXPERTS else { panic!() };
    shared
};

#[rustfmt::skip] // A table: one line per weight.
const EXPERTS: &[Name] = {
    use Dim::{ExpertFfn, Experts, Hidden};
    use When::Mixture;
    const GATE: Interleave = Interleave { of: 2, at: 0 };
    const UP: Interleave = Interleave { of: 2, at: 1 };
    &[
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("mlp.gate.weight"), (&[Experts, Hidden], Mixture, Keep)),
        name(T::ExpertGate, Layer, "ffn_gate_up_exps.weight", Some("mlp.experts.gate_up_proj"), (&[Experts, ExpertFfn, Hidden], Mixture, StackedInBoth(GATE, "ffn_gate_exps.weight"))),
        name(T::ExpertUp, Layer, "ffn_gate_up_exps.weight", Some("mlp.experts.gate_up_proj"), (&[Experts, ExpertFfn, Hidden], Mixture, StackedInBoth(UP, "ffn_up_exps.weight"))),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("mlp.experts.down_proj"), (&[Experts, Hidden, ExpertFfn], Mixture, Keep)),
    ]
};
