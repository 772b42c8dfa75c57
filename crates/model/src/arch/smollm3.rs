//! SmolLM3: Llama's blocks, of which every fourth does not rotate.

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{RotaryRule, WindowRule};

pub(crate) const SMOLLM3: Facts = Facts {
    name: "smollm3",
    gguf: Some("smollm3"),
    model_types: &["smollm3"],
    classes: &["SmolLM3ForCausalLM"],
    window: WindowRule::SomeLayers,
    rotary: RotaryRule::AllButEvery(4),
    rope_base: 2_000_000.0,
    ..LLAMA
};
