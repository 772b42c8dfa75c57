//! The encoder: a text becomes one vector, or two texts one number. Positions see each other in both directions, so a sequence
//! is computed whole, and what its pages hold is nobody else's.

use fornax_compute::{Backend, Error, Memory, Norm, Pointwise, Pooling, Purpose, Rows};

use crate::attention::Attention;
use crate::decoder::{Activations, Rotation, norm};
use crate::loader::Loader;
use crate::mlp::Mlp;
use crate::names::Tensor;
use crate::{Limits, Model, Rotary, Stage};

/// Weights and activations. What an architecture does not have its tables of names do not have.
pub(crate) struct Encoder<M: Memory> {
    rotation: Rotation<M>,
    embedding: M::Weight, // (vocab, hidden)
    embedding_scale: f32,
    positions: Option<M::Weight>, // (context, hidden), or with the kinds of token (kinds x context, hidden)
    token_type: Option<M::Buf>,   // (hidden): of texts that are no pair, where positions do not have it
    embedding_norm: Option<Norm<M::Buf>>, // (hidden)
    layers: Vec<Layer<M>>,
    norm: Option<Norm<M::Buf>>, // (hidden): of the last layer's sums
    pooling: Pooling,
    dense: Option<Dense<M>>,
    head: Option<Head<M>>,
    /// Behind the positions of a first text those of a second.
    pairs: Option<u32>,
    activations: Activations<M>,
    /// (tokens, hidden): a sum before its norm, or the norm of a sum.
    other: M::Buf,
}

/// Two layers behind the pooled vector.
struct Dense<M: Memory> {
    up: M::Weight,   // (dense, hidden)
    down: M::Weight, // (hidden, dense)
    inner: M::Buf,   // (wanted, dense)
}

/// What tells of two texts how well they fit.
struct Head<M: Memory> {
    pooler: M::Weight,           // (hidden, hidden)
    pooler_bias: Option<M::Buf>, // (hidden)
    function: Pointwise,
    norm: Option<Norm<M::Buf>>,      // (hidden)
    classifier: M::Weight,           // (1, hidden)
    classifier_bias: Option<M::Buf>, // (1)
}

impl<M: Memory> Head<M> {
    fn load(loader: &mut Loader<'_, M>) -> Result<Head<M>, crate::Error> {
        Ok(Head {
            pooler: loader.weight(&[Tensor::Pooler], 0)?,
            pooler_bias: loader.opt_vector(&[Tensor::PoolerBias], 0)?,
            function: loader.config.facts.head_function,
            norm: norm(loader, Tensor::PoolerNorm, None, 0)?,
            classifier: loader.weight(&[Tensor::Classifier], 0)?,
            classifier_bias: loader.opt_vector(&[Tensor::ClassifierBias], 0)?,
        })
    }
}

impl<M: Memory> Dense<M> {
    fn load(loader: &mut Loader<'_, M>, limits: Limits) -> Result<Dense<M>, crate::Error> {
        Ok(Dense {
            up: loader.weight(&[Tensor::DenseUp], 0)?,
            down: loader.weight(&[Tensor::DenseDown], 0)?,
            inner: loader.memory.alloc(Purpose::Activations, limits.wanted_max, loader.config.dense)?,
        })
    }
}

struct Layer<M: Memory> {
    attention: Attention<M>,
    rotary: Rotary,
    attention_norm: Option<Norm<M::Buf>>, // (hidden): of the sum
    mlp: Mlp<M>,
    mlp_norm: Option<Norm<M::Buf>>, // (hidden): of the sum
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
        let (learned, kinds) = (loader.has(Tensor::Positions, 0), loader.has(Tensor::TokenTypes, 0));
        Ok(Encoder {
            rotation: Rotation::load(loader)?,
            embedding: loader.table(Tensor::Embedding)?,
            embedding_scale: config.embedding_scale,
            positions: match learned {
                true if ranks => Some(loader.typed_positions()?),
                true => Some(loader.table(Tensor::Positions)?),
                false => None,
            },
            token_type: if kinds && !(ranks && learned) {
                Some(loader.first_row(Tensor::TokenTypes)?)
            } else {
                None
            },
            embedding_norm: norm(loader, Tensor::EmbeddingNorm, Some(Tensor::EmbeddingNormBias), 0)?,
            layers: (0..config.layers.len())
                .map(|layer| Layer::load(loader, layer))
                .collect::<Result<_, _>>()?,
            norm: norm(loader, Tensor::OutputNorm, None, 0)?,
            pooling,
            dense: if config.dense > 0 { Some(Dense::load(loader, limits)?) } else { None },
            head: if ranks { Some(Head::load(loader)?) } else { None },
            // Where tokens are of one kind, positions alone tell the texts apart.
            pairs: ranks.then_some(if config.token_types > 1 { config.context } else { 0 }),
            activations: Activations::alloc(loader, limits)?,
            other: loader.memory.alloc(Purpose::Residual, limits.tokens_max, config.hidden)?,
        })
    }
}

impl<M: Memory> Layer<M> {
    fn load(loader: &mut Loader<'_, M>, layer: usize) -> Result<Layer<M>, crate::Error> {
        let attention = loader.config.layers[layer].attention();
        let rotary = attention.map_or(Rotary::None, |attention| attention.rotary);
        let (attention_bias, mlp_bias) = (Some(Tensor::AttentionSumNormBias), Some(Tensor::MlpSumNormBias));
        Ok(Layer {
            attention: Attention::load(loader, layer)?,
            rotary,
            attention_norm: norm(loader, Tensor::AttentionSumNorm, attention_bias, layer)?,
            mlp: Mlp::load(loader, layer)?,
            mlp_norm: norm(loader, Tensor::MlpSumNorm, mlp_bias, layer)?,
        })
    }
}

impl<B: Backend> Model<B> for Encoder<B> {
    fn forward(&mut self, backend: &B, kv: &mut B::Kv, step: &B::Step) -> Result<(), Error> {
        self.embed(backend, step)?;
        let Encoder { rotation, layers, activations: a, other, .. } = self;
        for layer in layers {
            layer.attention.forward(backend, step, rotation.of(layer.rotary), kv, a)?;
            normalise(backend, step, layer.attention_norm.as_ref(), &mut a.residual, other)?;
            layer.mlp.forward(backend, step, a)?;
            normalise(backend, step, layer.mlp_norm.as_ref(), &mut a.residual, other)?;
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

/// `residual` = its norm. Both norms of a layer exchange the buffers, so that a step ends in the buffer where it began, and can
/// be recorded.
fn normalise<B: Backend>(
    backend: &B,
    step: &B::Step,
    norm: Option<&Norm<B::Buf>>,
    residual: &mut B::Buf,
    other: &mut B::Buf,
) -> Result<(), Error> {
    let Some(norm) = norm else { return Ok(()) };
    backend.norm(step, Rows::Tokens, norm, residual, other)?;
    std::mem::swap(residual, other);
    Ok(())
}

impl<M: Memory> Encoder<M> {
    /// `residual` = the embedding.
    fn embed<B>(&mut self, backend: &B, step: &B::Step) -> Result<(), Error>
    where
        B: Backend<Weight = M::Weight, Buf = M::Buf>,
    {
        let (residual, other) = (&mut self.activations.residual, &mut self.other);
        let to = if self.embedding_norm.is_some() { &mut *other } else { &mut *residual };
        backend.embed(step, &self.embedding, to)?;
        if self.embedding_scale != 1.0 {
            backend.pointwise(step, Rows::Tokens, Pointwise::Scale(self.embedding_scale), to)?;
        }
        if let Some(positions) = &self.positions {
            backend.add_positions(step, positions, to)?;
        }
        if let Some(token_type) = &self.token_type {
            backend.add_vector(step, Rows::Tokens, token_type, to)?;
        }
        match &self.embedding_norm {
            Some(norm) => backend.norm(step, Rows::Tokens, norm, other, residual),
            None => Ok(()),
        }
    }

    /// What becomes of the last layer: (wanted, hidden), or with a head (wanted, 1).
    fn read<B>(&mut self, backend: &B, step: &B::Step) -> Result<&M::Buf, Error>
    where
        B: Backend<Weight = M::Weight, Buf = M::Buf>,
    {
        let (a, wanted) = (&mut self.activations, Rows::Wanted);
        let rows = match &self.norm {
            Some(norm) => {
                backend.norm(step, Rows::Tokens, norm, &a.residual, &mut self.other)?;
                &self.other
            }
            None => &a.residual,
        };
        backend.pool(step, self.pooling, rows, &mut a.wanted_normed)?;
        if let Some(Dense { up, down, inner }) = &mut self.dense {
            backend.linear(step, wanted, up, None, &a.wanted_normed, inner)?;
            backend.linear(step, wanted, down, None, inner, &mut a.wanted)?;
            return Ok(&a.wanted);
        }
        let Some(head) = &self.head else { return Ok(&a.wanted_normed) };
        let bias = head.pooler_bias.as_ref();
        backend.linear(step, wanted, &head.pooler, bias, &a.wanted_normed, &mut a.wanted)?;
        backend.pointwise(step, wanted, head.function, &mut a.wanted)?;
        let read = match &head.norm {
            Some(norm) => {
                backend.norm(step, wanted, norm, &a.wanted, &mut a.wanted_normed)?;
                &a.wanted_normed
            }
            None => &a.wanted,
        };
        let (weight, bias) = (&head.classifier, head.classifier_bias.as_ref());
        backend.linear(step, wanted, weight, bias, read, &mut a.logits)?;
        Ok(&a.logits)
    }
}
