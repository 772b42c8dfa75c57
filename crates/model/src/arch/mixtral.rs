//! Mixtral: Mistral's blocks with experts. In GGUF it says that it is a llama.

use super::llama::{LLAMA, MISTRAL};
use crate::Facts;
use crate::facts::{ShareRule, WindowRule};
use crate::names::{ATTENTION, Dim, ENDS, Name, Owner, PRE_NORMS, Tensor, Transform, When, name};

pub(crate) const MIXTRAL: Facts = Facts {
    name: "mixtral",
    gguf: LLAMA.gguf,
    model_types: &["mixtral"],
    classes: &["MixtralForCausalLM"],
    names: &[ENDS, PRE_NORMS, ATTENTION, EXPERTS],
    window: WindowRule::EveryLayer(None),
    experts: Some(ShareRule::OfChosen),
    ..MISTRAL
};

#[rustfmt::skip] // A table: one line per weight.
pub(super) const EXPERTS: &[Name] = {
    use Dim::{ExpertFfn, Experts, Hidden};
    use Owner::Layer;
    use Tensor as T;
    use Transform::Keep;
    use When::Mixture;
    &[
        name(T::Router, Layer, "ffn_gate_inp.weight", Some("block_sparse_moe.gate.weight"), (&[Experts, Hidden], Mixture, Keep)),
        name(T::ExpertGate, Layer, "ffn_gate_exps.weight", Some("block_sparse_moe.experts.{}.w1.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Keep)),
        name(T::ExpertUp, Layer, "ffn_up_exps.weight", Some("block_sparse_moe.experts.{}.w3.weight"), (&[Experts, ExpertFfn, Hidden], Mixture, Keep)),
        name(T::ExpertDown, Layer, "ffn_down_exps.weight", Some("block_sparse_moe.experts.{}.w2.weight"), (&[Experts, Hidden, ExpertFfn], Mixture, Keep)),
    ]
};
