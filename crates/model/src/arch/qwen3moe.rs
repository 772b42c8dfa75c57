//! Qwen3-MoE: Qwen3's attention, and experts. Some layers may be dense.

use fornax_compute::Shares;

use super::qwen3::QWEN3;
use crate::Facts;
use crate::facts::ShareRule;
use crate::names::{ATTENTION, ENDS, MLP, PRE_NORMS, QK_NORMS, QWEN_EXPERTS};

pub(crate) const QWEN3_MOE: Facts = Facts {
    name: "qwen3moe",
    gguf: Some("qwen3moe"),
    model_types: &["qwen3_moe"],
    classes: &["Qwen3MoeForCausalLM"],
    names: &[ENDS, PRE_NORMS, ATTENTION, QK_NORMS, MLP, QWEN_EXPERTS],
    experts: Some(ShareRule::Configured { gguf: Shares::OfChosen, hugging_face: Shares::OfAll }),
    ..QWEN3
};
