//! Self-attention with grouped key/value heads, rotary positions and paged keys and values.

use fornax_compute::{Backend, Error, Linear, Memory, Rope, Rows};

use crate::decoder::Activations;
use crate::loader::Loader;
use crate::names::Tensor;

pub(crate) struct Attention<M: Memory> {
    qkv: M::Weight, // (query + 2 kv heads, head size) x (hidden): Q, K and V stacked by rows
    qkv_bias: Option<M::Buf>, // (query + 2 kv heads, head size)
    output: M::Weight, // (hidden, query heads x head size)
    output_bias: Option<M::Buf>, // (hidden)
    shape: fornax_compute::Attention,
}

impl<M: Memory> Attention<M> {
    pub(crate) fn load(loader: &mut Loader<'_, M>, layer: usize) -> Result<Attention<M>, crate::Error> {
        let config = loader.config;
        Ok(Attention {
            qkv: loader.weight(&[Tensor::Query, Tensor::Key, Tensor::Value], layer)?,
            qkv_bias: loader.bias(&[Tensor::QueryBias, Tensor::KeyBias, Tensor::ValueBias], layer)?,
            output: loader.weight(&[Tensor::AttentionOutput], layer)?,
            output_bias: loader.bias(&[Tensor::AttentionOutputBias], layer)?,
            shape: fornax_compute::Attention {
                heads: config.heads,
                layer: config.kv_layer(layer),
                scale: config.attention_scale,
            },
        })
    }
}

impl<B: Backend> Attention<B> {
    /// `residual` += attention of `branch`, which is used up.
    pub(crate) fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        rope: &Rope<B::Buf>,
        kv: &mut B::Kv,
        a: &mut Activations<B>,
    ) -> Result<(), Error> {
        backend.linear(step, Rows::Tokens, &self.qkv, self.qkv_bias.as_ref(), &a.branch, &mut a.qkv)?;
        backend.attend(step, &self.shape, rope, &mut a.qkv, kv, &mut a.attended)?;
        let output = Linear { weight: &self.output, bias: self.output_bias.as_ref() };
        backend.linear_add(step, Rows::Tokens, output, &a.attended, &mut a.branch, &mut a.residual)
    }
}
