//! The encoder: a text becomes one vector, or two texts one number. Positions see each other in both directions, so a sequence
//! is computed whole, and what its pages hold is nobody else's.

use fornax_compute::{Backend, Error, Memory, Norm, Pointwise, Pooling, Purpose, Rows};

use crate::attention::Attention;
use crate::decoder::{Activations, norm};
use crate::loader::Loader;
use crate::mlp::Mlp;
use crate::names::Tensor;
use crate::{Limits, Model, Stage};

/// Weights and activations.
pub(crate) struct Encoder<M: Memory> {
    embedding: M::Weight,         // (vocab, hidden)
    positions: M::Weight,         // (context, hidden), or with the kinds of token (2 context, hidden)
    token_type: Option<M::Buf>,   // (hidden): of texts that are no pair, where positions do not have it
    embedding_norm: Norm<M::Buf>, // (hidden)
    layers: Vec<Layer<M>>,
    pooling: Pooling,
    head: Option<Head<M>>,
    /// Behind the positions of a first text those of a second.
    pairs: Option<u32>,
    activations: Activations<M>,
    /// (tokens, hidden): a sum before its norm, or the norm of a sum.
    other: M::Buf,
}

/// What tells of two texts how well they fit.
struct Head<M: Memory> {
    pooler: M::Weight,       // (hidden, hidden)
    pooler_bias: M::Buf,     // (hidden)
    classifier: M::Weight,   // (1, hidden)
    classifier_bias: M::Buf, // (1)
}

impl<M: Memory> Head<M> {
    fn load(loader: &mut Loader<'_, M>) -> Result<Head<M>, crate::Error> {
        Ok(Head {
            pooler: loader.weight(&[Tensor::Pooler], 0)?,
            pooler_bias: loader.vector(&[Tensor::PoolerBias], 0)?,
            classifier: loader.weight(&[Tensor::Classifier], 0)?,
            classifier_bias: loader.vector(&[Tensor::ClassifierBias], 0)?,
        })
    }
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
        if *loader.stage != Stage::whole(config) {
            let what = format!("a part of an encoder, {:?}", loader.stage);
            return Err(crate::Error::Unsupported { what, supported: "the whole".to_owned() });
        }
        let ranks = config.ranks;
        Ok(Encoder {
            embedding: loader.table(Tensor::Embedding)?,
            positions: if ranks { loader.typed_positions()? } else { loader.table(Tensor::Positions)? },
            token_type: if ranks { None } else { Some(loader.first_row(Tensor::TokenTypes)?) },
            embedding_norm: required(loader, Tensor::EmbeddingNorm, Tensor::EmbeddingNormBias, 0)?,
            layers: (0..config.layers.len())
                .map(|layer| Layer::load(loader, layer))
                .collect::<Result<_, _>>()?,
            pooling,
            head: if ranks { Some(Head::load(loader)?) } else { None },
            pairs: ranks.then_some(config.context),
            activations: Activations::alloc(loader, limits)?,
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
        if let Some(token_type) = &self.token_type {
            backend.add_vector(step, Rows::Tokens, token_type, other)?;
        }
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
        self.read(backend, step).map(|_| ())
    }

    fn hidden(&mut self, backend: &B, step: &B::Step) -> Result<&B::Buf, Error> {
        self.read(backend, step)
    }

    fn logits(&self) -> &B::Buf {
        &self.activations.logits
    }

    fn residual(&mut self) -> &mut B::Buf {
        &mut self.activations.residual
    }

    fn encodes(&self) -> bool {
        true
    }

    fn pairs(&self) -> Option<u32> {
        self.pairs
    }
}

impl<M: Memory> Encoder<M> {
    /// What becomes of the last layer: (wanted, hidden), or with a head (wanted, 1).
    fn read<B>(&mut self, backend: &B, step: &B::Step) -> Result<&M::Buf, Error>
    where
        B: Backend<Weight = M::Weight, Buf = M::Buf>,
    {
        let (a, wanted) = (&mut self.activations, Rows::Wanted);
        backend.pool(step, self.pooling, &a.residual, &mut a.wanted_normed)?;
        let Some(head) = &self.head else { return Ok(&a.wanted_normed) };
        backend.linear(
            step,
            wanted,
            &head.pooler,
            Some(&head.pooler_bias),
            &a.wanted_normed,
            &mut a.wanted,
        )?;
        // A cap of one is the hyperbolic tangent.
        backend.pointwise(step, wanted, Pointwise::SoftCap(1.0), &mut a.wanted)?;
        let (weight, bias) = (&head.classifier, Some(&head.classifier_bias));
        backend.linear(step, wanted, weight, bias, &a.wanted, &mut a.logits)?;
        Ok(&a.logits)
    }
}
