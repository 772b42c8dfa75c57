//! EXAONE 4: norms behind the branches instead of before them, queries and keys normalised head by head. In the larger ones
//! three of four layers have a window, and the others do not rotate. K-EXAONE has norms before the branches, and experts as
//! DeepSeek V3 chooses them.

use fornax_compute::{Scores, Shares};

use super::llama::LLAMA;
use super::olmo2::POST_NORMS;
use crate::Facts;
use crate::facts::{BiasRule, Floor, QkRows, RotaryRule, ShareRule, WindowRule};
use crate::names::{
    ATTENTION,
    Dim::{Experts, Ffn, Hidden},
    ENDS, MLP, Name,
    Owner::Layer,
    PRE_NORMS, QK_NORMS, QWEN_EXPERTS, Tensor as T,
    Transform::Keep,
    When::{Mixture, Shared},
    name,
};

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

pub(crate) const EXAONE_MOE: Facts = Facts {
    name: "exaone-moe",
    gguf: Some("exaone-moe"),
    model_types: &["exaone_moe"],
    classes: &["ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"],
    keys: &[("n_shared_experts", "num_shared_experts")],
    defaults: &[("first_k_dense_replace", 1.0)],
    not_text: &["mtp."],
    names: &[ENDS, PRE_NORMS, ATTENTION, QK_NORMS, MLP, QWEN_EXPERTS, CHOICE],
    experts: Some(ShareRule::Configured { gguf: Shares::OfAll, hugging_face: Shares::OfChosen }),
    scores: Scores::Sigmoid,
    floor: Floor::Added(1e-20),
    ..EXAONE4
};

#[rustfmt::skip] // A table: one line per weight.
const CHOICE: &[Name] = &[
    name(T::RouterCorrection, Layer, "exp_probs_b.bias", Some("mlp.e_score_correction_bias"), (&[Experts], Mixture, Keep)),
    name(T::SharedGate, Layer, "ffn_gate_shexp.weight", Some("mlp.shared_experts.gate_proj.weight"), (&[Ffn, Hidden], Shared, Keep)),
    name(T::SharedUp, Layer, "ffn_up_shexp.weight", Some("mlp.shared_experts.up_proj.weight"), (&[Ffn, Hidden], Shared, Keep)),
    name(T::SharedDown, Layer, "ffn_down_shexp.weight", Some("mlp.shared_experts.down_proj.weight"), (&[Hidden, Ffn], Shared, Keep)),
];
