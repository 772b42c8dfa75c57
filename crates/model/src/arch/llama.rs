//! Llama 2 and 3, and what has its blocks: Mistral, SmolLM, TinyLlama.

use fornax_compute::{Glu, NormKind, Pointwise, Scores};

use crate::facts::{
    AttentionScale, BiasRule, EmbeddingScale, FirstPosition, Floor, LogitScale, LookAhead, ParallelRule,
    QkRows, RotaryRule, TemperatureRule, WindowRule,
};
use crate::{Facts, names};

pub(crate) const LLAMA: Facts = Facts {
    name: "llama",
    gguf: Some("llama"),
    model_types: &["llama"],
    classes: &["LlamaForCausalLM", "LLaMAForCausalLM"],
    keys: &[],
    defaults: &[],
    layers: "model.layers",
    beginnings: &[],
    not_text: &[],
    names: names::DECODER,
    gguf_qk_rows: QkRows::Pairs,
    hugging_face_qk_rows: QkRows::Halves,
    norm: NormKind::Rms,
    norm_less_one: false,
    encoder: false,
    first_position: FirstPosition::Zero,
    head_function: Pointwise::SoftCap(1.0),
    bias: BiasRule::Configured,
    window: WindowRule::Never,
    rope_base: 10000.0,
    yarn_truncates: true,
    partial_rotary: None,
    proportional_rotary: None,
    sections: None,
    tower: None,
    looks_ahead: LookAhead::Never,
    rotary: RotaryRule::EveryLayer,
    window_rope_base: None,
    full_head_dim: None,
    norms_rotated: false,
    norms_values: false,
    parallel: ParallelRule::Never,
    attention_scale: AttentionScale::HeadSize,
    soft_caps: None,
    embedding_scale: EmbeddingScale::One,
    multipliers: false,
    part_multipliers: false,
    logit_scale: LogitScale::None,
    ffn_of_hidden: None,
    experts: None,
    scores: Scores::Softmax,
    floor: Floor::None,
    dense_too: false,
    glu: Glu::Silu,
    function: None,
    recurrent: None,
    chunks: false,
    unit_norms: false,
    weighs_inputs: false,
    xielu: false,
    latent: false,
    temperature: None,
    groups_by_two: None,
    groups_named: false,
};

/// In GGUF a Mistral says that it is a llama.
pub(crate) const MISTRAL: Facts = Facts {
    name: "mistral",
    gguf: None,
    model_types: &["mistral"],
    classes: &["MistralForCausalLM", "Mistral3ForConditionalGeneration"],
    beginnings: WHOLE,
    not_text: SEES,
    bias: BiasRule::Never,
    window: WindowRule::EveryLayer(Some(4096)),
    ..LLAMA
};

/// Ministral 3: queries grow with their positions. Mistral Small 3 says in GGUF that it is one, too.
pub(crate) const MINISTRAL3: Facts = Facts {
    name: "ministral3",
    gguf: Some("mistral3"),
    model_types: &["ministral3"],
    classes: &["Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"],
    window: WindowRule::EveryLayer(None),
    temperature: Some(TemperatureRule { gguf_beta: None, unrotated: false }),
    ..MISTRAL
};

/// How names begin in files of models that see images, too, as others and transformers write them.
pub(super) const WHOLE: &[(&str, &str)] = &[
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", "model.language_model."),
];

/// What sees images there.
pub(super) const SEES: &[&str] = &[
    "vision_tower.",
    "mm_projector.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.mm_projector.",
    "model.multi_modal_projector.",
];
