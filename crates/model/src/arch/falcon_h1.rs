//! Falcon-H1: every layer attends and has a selective scan beside it; a multiplier for everything.

use fornax_compute::GateOrder;

use super::granite_hybrid::SCAN;
use super::llama::LLAMA;
use crate::Facts;
use crate::facts::{BiasRule, LogitScale, QkRows, Recurrent, ScanLayers};
use crate::names::{ATTENTION, Dim, Name, Owner, Tensor, Transform, When, name};

pub(crate) const FALCON_H1: Facts = Facts {
    name: "falcon-h1",
    gguf: Some("falcon-h1"),
    model_types: &["falcon_h1"],
    classes: &["FalconH1ForCausalLM"],
    keys: &[("logit_scale", "lm_head_multiplier")],
    names: &[ENDS, ATTENTION, SCAN, LAYER],
    gguf_qk_rows: QkRows::Halves,
    bias: BiasRule::Configured,
    multipliers: true,
    part_multipliers: true,
    logit_scale: LogitScale::Multiplies,
    recurrent: Some(Recurrent::Scan { gates: GateOrder::GatesFirst, layers: ScanLayers::Beside }),
    ..LLAMA
};

#[rustfmt::skip] // A table: one line per weight.
const ENDS: &[Name] = {
    use Dim::{Hidden, Vocab};
    use Owner::Model;
    use Tensor as T;
    use Transform::Keep;
    use When::{Always, Untied};
    &[
        name(T::Embedding, Model, "token_embd.weight", Some("model.embed_tokens.weight"), (&[Vocab, Hidden], Always, Keep)),
        name(T::OutputNorm, Model, "output_norm.weight", Some("model.final_layernorm.weight"), (&[Hidden], Always, Keep)),
        name(T::Output, Model, "output.weight", Some("lm_head.weight"), (&[Vocab, Hidden], Untied, Keep)),
    ]
};

#[rustfmt::skip]
const LAYER: &[Name] = {
    use Dim::{Ffn, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::{Always, Dense};
    &[
        name(T::AttentionNorm, Layer, "attn_norm.weight", Some("input_layernorm.weight"), (&[Hidden], Always, Keep)),
        name(T::MlpNorm, Layer, "ffn_norm", Some("pre_ff_layernorm.weight"), (&[Hidden], Always, Keep)),
        name(T::Gate, Layer, "ffn_gate.weight", Some("feed_forward.gate_proj.weight"), (&[Ffn, Hidden], Dense, Keep)),
        name(T::Up, Layer, "ffn_up.weight", Some("feed_forward.up_proj.weight"), (&[Ffn, Hidden], Dense, Keep)),
        name(T::Down, Layer, "ffn_down.weight", Some("feed_forward.down_proj.weight"), (&[Hidden, Ffn], Dense, Keep)),
    ]
};
