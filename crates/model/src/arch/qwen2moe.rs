//! Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, experts, and one that every token takes. Some layers may be dense.

use fornax_compute::Shares;

use super::qwen2::QWEN2;
use crate::Facts;
use crate::facts::ShareRule;
use crate::names::{
    ATTENTION, Dim, ENDS, MLP, Name, Owner, PRE_NORMS, QWEN_EXPERTS, Tensor, Transform, When, name,
};

pub(crate) const QWEN2_MOE: Facts = Facts {
    name: "qwen2moe",
    gguf: Some("qwen2moe"),
    model_types: &["qwen2_moe"],
    classes: &["Qwen2MoeForCausalLM"],
    names: &[ENDS, PRE_NORMS, ATTENTION, MLP, QWEN_EXPERTS, SHARED],
    experts: Some(ShareRule::Configured { gguf: Shares::OfAll, hugging_face: Shares::OfAll }),
    ..QWEN2
};

#[rustfmt::skip] // A table: one line per weight.
pub(super) const SHARED: &[Name] = {
    use Dim::{Ffn, Hidden, One};
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::Mixture;
    &[
        name(T::SharedRouter, Layer, "ffn_gate_inp_shexp.weight", Some("mlp.shared_expert_gate.weight"), (&[One, Hidden], Mixture, Keep)),
        name(T::SharedGate, Layer, "ffn_gate_shexp.weight", Some("mlp.shared_expert.gate_proj.weight"), (&[Ffn, Hidden], Mixture, Keep)),
        name(T::SharedUp, Layer, "ffn_up_shexp.weight", Some("mlp.shared_expert.up_proj.weight"), (&[Ffn, Hidden], Mixture, Keep)),
        name(T::SharedDown, Layer, "ffn_down_shexp.weight", Some("mlp.shared_expert.down_proj.weight"), (&[Hidden, Ffn], Mixture, Keep)),
    ]
};
