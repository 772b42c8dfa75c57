//! Qwen3-VL: Qwen3 whose positions have three sections. What reads images is a tower beside it.

use super::qwen3::QWEN3;
use crate::Facts;
use crate::facts::{BiasRule, WindowRule};
use crate::tower::facts as tower;

pub(crate) const QWEN3_VL: Facts = Facts {
    name: "qwen3vl",
    gguf: Some("qwen3vl"),
    model_types: &["qwen3_vl", "qwen3_vl_text"],
    classes: &["Qwen3VLForConditionalGeneration"],
    beginnings: &[("model.", "model.language_model.")],
    not_text: &["model.visual.", "visual."],
    bias: BiasRule::Configured,
    window: WindowRule::Never,
    rope_base: 500_000.0,
    sections: Some([24, 20, 20]),
    tower: Some(&tower::QWEN3),
    ..QWEN3
};
