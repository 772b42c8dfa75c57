//! The gated feed-forward.

use fornax_compute::{Backend, Error, Glu, Linear, Memory, Rows};

use crate::decoder::Activations;
use crate::loader::Loader;
use crate::names::Tensor;

pub(crate) struct Mlp<M: Memory> {
    gate_up: M::Weight,           // (2 ffn, hidden): gate, then up
    gate_up_bias: Option<M::Buf>, // (2 ffn)
    down: M::Weight,              // (hidden, ffn)
    down_bias: Option<M::Buf>,    // (hidden)
    glu: Glu,
}

impl<M: Memory> Mlp<M> {
    pub(crate) fn load(loader: &mut Loader<'_, M>, layer: usize) -> Result<Mlp<M>, crate::Error> {
        Ok(Mlp {
            gate_up: loader.weight(&[Tensor::Gate, Tensor::Up], layer)?,
            gate_up_bias: loader.bias(&[Tensor::GateBias, Tensor::UpBias], layer)?,
            down: loader.weight(&[Tensor::Down], layer)?,
            down_bias: loader.bias(&[Tensor::DownBias], layer)?,
            glu: loader.config.glu,
        })
    }
}

impl<B: Backend> Mlp<B> {
    /// `residual` += feed-forward of `branch`, which is used up.
    pub(crate) fn forward(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        let bias = self.gate_up_bias.as_ref();
        backend.linear(step, Rows::Tokens, &self.gate_up, bias, &a.branch, &mut a.gate_up)?;
        backend.glu(step, self.glu, &a.gate_up, &mut a.gated)?;
        let down = Linear { weight: &self.down, bias: self.down_bias.as_ref() };
        backend.linear_add(step, Rows::Tokens, down, &a.gated, &mut a.branch, &mut a.residual)
    }
}
