//! Llama 4, the part that reads text: three layers of four attend within chunks, the others do not rotate and their queries
//! grow with their positions; one expert a token, whose input is weighed, beside one that every token takes.

use fornax_compute::{Scores, Shares};

use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{QkRows, RotaryRule, ShareRule, TemperatureRule, WindowRule};
use crate::names::{ATTENTION, Dim, ENDS, Name, Owner, PRE_NORMS, Tensor, Transform, When, name};
use crate::relaid::Interleave;

pub(crate) const LLAMA4: Facts = Facts {
    name: "llama4",
    gguf: Some("llama4"),
    model_types: &["llama4_text", "llama4"],
    classes: &["Llama4ForCausalLM", "Llama4ForConditionalGeneration"],
    keys: &[
        ("intermediate_size", "intermediate_size_mlp"),
        ("moe_intermediate_size", "intermediate_size"),
        ("decoder_sparse_step", "interleave_moe_layer_step"),
        ("sliding_window", "attention_chunk_size"),
    ],
    defaults: &[("n_shared_experts", 1.0), ("sliding_window", 8192.0)],
    beginnings: &[("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")],
    not_text: &["vision_model.", "multi_modal_projector."],
    names: &[ENDS, PRE_NORMS, ATTENTION, FEED_FORWARD],
    hugging_face_qk_rows: QkRows::Pairs,
    window: WindowRule::AllButEvery(4),
    chunks: true,
    rope_base: 500_000.0,
    rotary: RotaryRule::AllButEvery(4),
    // Before they are rotated or after it: rotation changes no lengths.
    unit_norms: true,
    temperature: Some(TemperatureRule { gguf_beta: Some(0.1), unrotated: true }),
    experts: Some(ShareRule::Configured { gguf: Shares::OfAll, hugging_face: Shares::OfAll }),
    scores: Scores::Sigmoid,
    weighs_inputs: true,
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const FEED_FORWARD: &[Name] = {
    use Dim::{ExpertFfn, Experts, Ffn, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::{AlternateRows, Keep, TransposedRows};
    use When::{Dense, Mixture, Shared};
    const GATE: Interleave = Interleave { of: 2, at: 0 };
    const UP: Interleave = Interleave { of: 2, at: 1 };
    const ALONE: Interleave = Interleave { of: 1, at: 0 };
    &[
        name(T::Gate, Layer, "ffn_gate.weight", Some("feed_forward.gate_proj.weight"), (&[Ffn, Hidden], Dense, Keep)),
        name(T::Up, Layer, "ffn_up.weight", Some("feed_forward.up_proj.weight"), (&[Ffn, Hidden], Dense, Keep)),
        name(T::Down, Layer, "ffn_down.weight", Some("feed_forward.down_proj.weight"), (&[Hidden, Ffn], Dense, Keep)),
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("feed_forward.router.weight"), (&[Experts, Hidden], Mixture, Keep)),
        name(T::ExpertGate, Layer, "ffn_gate_exps.weight", Some("feed_forward.experts.gate_up_proj"), (&[Experts, ExpertFfn, Hidden], Mixture, TransposedRows(GATE))),
        name(T::ExpertUp, Layer, "ffn_up_exps.weight", Some("feed_forward.experts.gate_up_proj"), (&[Experts, ExpertFfn, Hidden], Mixture, TransposedRows(UP))),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("feed_forward.experts.down_proj"), (&[Experts, Hidden, ExpertFfn], Mixture, AlternateRows(ALONE))),
        name(T::SharedGate, Layer, "ffn_gate_shexp.weight", Some("feed_forward.shared_expert.gate_proj.weight"), (&[Ffn, Hidden], Shared, Keep)),
        name(T::SharedUp, Layer, "ffn_up_shexp.weight", Some("feed_forward.shared_expert.up_proj.weight"), (&[Ffn, Hidden], Shared, Keep)),
        name(T::SharedDown, Layer, "ffn_down_shexp.weight", Some("feed_forward.shared_expert.down_proj.weight"), (&[Hidden, Ffn], Shared, Keep)),
    ]
};
