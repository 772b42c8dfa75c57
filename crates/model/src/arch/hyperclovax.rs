//! HyperCLOVA X: Granite's blocks and multipliers, with norms behind the branches, too; what divides logits there multiplies them.

use super::granite::GRANITE;
use crate::Facts;
use crate::facts::LogitScale;
use crate::names::Dim::Hidden;
use crate::names::Owner::Layer;
use crate::names::{ATTENTION, ENDS, MLP, Name, PRE_NORMS, Tensor as T, Transform::Keep, When::Always, name};

pub(crate) const HYPERCLOVAX: Facts = Facts {
    name: "hyperclovax",
    gguf: None,
    model_types: &["hyperclovax"],
    classes: &["HyperCLOVAXForCausalLM"],
    keys: &[("logit_scale", "logits_scaling")],
    names: &[ENDS, PRE_NORMS, POST_NORMS, ATTENTION, MLP],
    logit_scale: LogitScale::Multiplies,
    ..GRANITE
};

#[rustfmt::skip] // A table: one line per weight.
const POST_NORMS: &[Name] = &[
    name(T::AttentionPostNorm, Layer, "", Some("post_norm1.weight"), (&[Hidden], Always, Keep)),
    name(T::MlpPostNorm, Layer, "", Some("post_norm2.weight"), (&[Hidden], Always, Keep)),
];
