//! EXAONE 4: norms behind the branches instead of before them, queries and keys normalised head by head. In the larger ones
//! three of four layers have a window, and the others do not rotate.

use super::llama::LLAMA;
use super::olmo2::POST_NORMS;
use crate::Facts;
use crate::facts::{BiasRule, QkRows, RotaryRule, WindowRule};
use crate::names::{ATTENTION, ENDS, MLP, QK_NORMS};

pub(crate) const EXAONE4: Facts = Facts {
    name: "exaone4",
    gguf: Some("exaone4"),
    model_types: &["exaone4"],
    classes: &["Exaone4ForCausalLM"],
    names: &[ENDS, ATTENTION, QK_NORMS, POST_NORMS, MLP],
    gguf_qk_rows: QkRows::Halves,
    bias: BiasRule::Never,
    window: WindowRule::AllButEvery(4),
    rotary: RotaryRule::Windows,
    ..LLAMA
};
