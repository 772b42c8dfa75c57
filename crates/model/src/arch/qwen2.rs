//! Qwen2 and Qwen2.5: Llama's blocks with biases on Q, K and V, which its facts say; so its blocks are
//! [`Llama`](super::Llama)'s.

use fornax_compute::Glu;

use crate::facts::{BiasRule, QkRows, WindowRule};
use crate::{Facts, names};

pub(crate) const QWEN2: Facts = Facts {
    name: "qwen2",
    gguf: Some("qwen2"),
    model_types: &["qwen2"],
    classes: &["Qwen2ForCausalLM"],
    names: names::DECODER,
    gguf_qk_rows: QkRows::Halves,
    bias: BiasRule::Qkv,
    window: WindowRule::SomeLayers,
    rope_base: 10000.0,
    glu: Glu::Silu,
};
