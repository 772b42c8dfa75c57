//! OLMoE: Llama's blocks with experts, and norms of all queries and all keys together.

use fornax_compute::Shares;

use super::llama::LLAMA;
use super::olmo2::QK_NORMS;
use crate::Facts;
use crate::facts::{QkRows, ShareRule};
use crate::names::{ATTENTION, ENDS, PRE_NORMS, QWEN_EXPERTS};

pub(crate) const OLMOE: Facts = Facts {
    name: "olmoe",
    gguf: Some("olmoe"),
    model_types: &["olmoe"],
    classes: &["OlmoeForCausalLM"],
    names: &[ENDS, PRE_NORMS, ATTENTION, QK_NORMS, QWEN_EXPERTS],
    gguf_qk_rows: QkRows::Halves,
    experts: Some(ShareRule::Configured { gguf: Shares::OfAll, hugging_face: Shares::OfAll }),
    ..LLAMA
};
