//! dots.llm1: Qwen3's attention, experts as DeepSeek V3 chooses them.

use fornax_compute::{Scores, Shares};

use super::qwen3::QWEN3;
use crate::Facts;
use crate::facts::{Floor, ShareRule};
use crate::names::{ATTENTION, DEEPSEEK_EXPERTS, ENDS, MLP, PRE_NORMS, QK_NORMS, QWEN_EXPERTS};

pub(crate) const DOTS1: Facts = Facts {
    name: "dots1",
    gguf: Some("dots1"),
    model_types: &["dots1"],
    classes: &["Dots1ForCausalLM"],
    keys: &[("num_local_experts", "n_routed_experts")],
    names: &[ENDS, PRE_NORMS, ATTENTION, QK_NORMS, MLP, QWEN_EXPERTS, DEEPSEEK_EXPERTS],
    experts: Some(ShareRule::Configured { gguf: Shares::OfAll, hugging_face: Shares::OfAll }),
    scores: Scores::Sigmoid,
    floor: Floor::Added(1e-20),
    ..QWEN3
};
