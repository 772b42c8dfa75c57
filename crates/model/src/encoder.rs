//! The encoder: a text becomes one vector. Positions see each other in both directions, so a sequence is computed whole,
//! and what its pages hold is nobody else's.

use fornax_compute::{Backend, Error, Memory, Norm, Pooling, Purpose, Rows};

use crate::attention::Attention;
use crate::decoder::{Activations, norm};
use crate::loader::Loader;
use crate::mlp::Mlp;
use crate::names::Tensor;
use crate::{Limits, Model};

/// Weights and activations.
pub(crate) struct Encoder<M: Memory> {
    embedding: M::Weight,         // (vocab, hidden)
    positions: M::Weight,         // (context, hidden)
    token_type: M::Buf,           // (hidden): of texts that are no pair
    embedding_norm: Norm<M::Buf>, // (hidden)
    layers: Vec<Layer<M>>,
    pooling: Pooling,
    activations: Activations<M>,
    /// (tokens, hidden): a sum before its norm, or the norm of a sum.
    other: M::Buf,
}

struct Layer<M: Memory> {
    attention: Attention<M>,
    attention_norm: Norm<M::Buf>, // (hidden)
    mlp: Mlp<M>,
    mlp_norm: Norm<M::Buf>, // (hidden)
}

impl<M: Memory> Encoder<M> {
    pub(crate) fn load(
        loader: &mut Loader<'_, M>,
        pooling: Pooling,
        limits: Limits,
    ) -> Result<Encoder<M>, crate::Error> {
        let config = loader.config;
        Ok(Encoder {
            embedding: loader.table(Tensor::Embedding)?,
            positions: loader.table(Tensor::Positions)?,
            token_type: loader.first_row(Tensor::TokenTypes)?,
            embedding_norm: required(loader, Tensor::EmbeddingNorm, Tensor::EmbeddingNormBias, 0)?,
            layers: (0..config.layers).map(|layer| Layer::load(loader, layer)).collect::<Result<_, _>>()?,
            pooling,
            activations: Activations::alloc(loader.memory, config, limits)?,
            other: loader.memory.alloc(Purpose::Residual, limits.tokens_max, config.hidden)?,
        })
    }
}

impl<M: Memory> Layer<M> {
    fn load(loader: &mut Loader<'_, M>, layer: usize) -> Result<Layer<M>, crate::Error> {
        Ok(Layer {
            attention: Attention::load(loader, layer)?,
            attention_norm: required(loader, Tensor::AttentionSumNorm, Tensor::AttentionSumNormBias, layer)?,
            mlp: Mlp::load(loader, layer)?,
            mlp_norm: required(loader, Tensor::MlpSumNorm, Tensor::MlpSumNormBias, layer)?,
        })
    }
}

fn required<M: Memory>(
    loader: &mut Loader<'_, M>,
    weight: Tensor,
    bias: Tensor,
    layer: usize,
) -> Result<Norm<M::Buf>, crate::Error> {
    let missing = || crate::Error::MissingTensor { tensor: format!("{weight:?}") };
    norm(loader, weight, Some(bias), layer)?.ok_or_else(missing)
}

impl<B: Backend> Model<B> for Encoder<B> {
    fn forward(&mut self, backend: &B, kv: &mut B::Kv, step: &B::Step) -> Result<(), Error> {
        let Encoder { layers, activations: a, other, .. } = self;
        backend.embed(step, &self.embedding, other)?;
        backend.add_positions(step, &self.positions, other)?;
        backend.add_vector(step, Rows::Tokens, &self.token_type, other)?;
        backend.norm(step, Rows::Tokens, &self.embedding_norm, other, &mut a.residual)?;
        for layer in layers {
            // Twice a layer, so that a step ends in the buffer where it began, and can be recorded.
            layer.attention.forward(backend, step, None, kv, a)?;
            backend.norm(step, Rows::Tokens, &layer.attention_norm, &a.residual, other)?;
            std::mem::swap(&mut a.residual, other);

            layer.mlp.forward(backend, step, a)?;
            backend.norm(step, Rows::Tokens, &layer.mlp_norm, &a.residual, other)?;
            std::mem::swap(&mut a.residual, other);
        }
        backend.pool(step, self.pooling, &a.residual, &mut a.wanted_normed)
    }

    fn hidden(&mut self, backend: &B, step: &B::Step) -> Result<&B::Buf, Error> {
        let a = &mut self.activations;
        backend.pool(step, self.pooling, &a.residual, &mut a.wanted_normed)?;
        Ok(&a.wanted_normed)
    }

    fn logits(&self) -> &B::Buf {
        &self.activations.logits
    }

    fn encodes(&self) -> bool {
        true
    }
}
