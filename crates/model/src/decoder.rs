//! The decoder: blocks of attention and feed-forward around a residual stream. What an architecture does not have its
//! tables of names do not have, and it is left out here.

use fornax_compute::{Backend, Error, Heads, Memory, Norm, Pointwise, Purpose, Role, Rope, Rows};

use crate::attention::Attention;
use crate::experts::{ExpertActivations, Experts};
use crate::loader::Loader;
use crate::mlp::Mlp;
use crate::names::Tensor;
use crate::{Config, Limits, Model, Rotary};

/// Weights and activations.
pub(crate) struct Decoder<M: Memory> {
    ends: Ends<M>,
    layers: Vec<Layer<M>>,
    adapters: u32,
    activations: Activations<M>,
}

struct Layer<M: Memory> {
    attention: Attention<M>,
    rotary: Rotary,
    feed_forward: FeedForward<M>,
}

enum FeedForward<M: Memory> {
    Dense(Mlp<M>),
    Experts(Experts<M>),
}

impl<M: Memory> Decoder<M> {
    pub(crate) fn load(loader: &mut Loader<'_, M>, limits: Limits) -> Result<Decoder<M>, crate::Error> {
        let ends = Ends::load(loader)?;
        let layers = (0..loader.config.layers.len())
            .map(|layer| Layer::load(loader, layer))
            .collect::<Result<_, _>>()?;
        let adapters = loader.adapters();
        let activations = Activations::alloc(loader.memory, loader.config, limits)?;
        Ok(Decoder { ends, layers, adapters, activations })
    }
}

impl<M: Memory> Layer<M> {
    fn load(loader: &mut Loader<'_, M>, layer: usize) -> Result<Layer<M>, crate::Error> {
        Ok(Layer {
            attention: Attention::load(loader, layer)?,
            rotary: loader.config.layers[layer].attention().rotary,
            feed_forward: match loader.config.layers[layer].feed_forward.mixture() {
                None => FeedForward::Dense(Mlp::load(loader, layer)?),
                Some(mixture) => FeedForward::Experts(Experts::load(loader, &mixture, layer)?),
            },
        })
    }
}

impl<B: Backend> Model<B> for Decoder<B> {
    fn forward(&mut self, backend: &B, kv: &mut B::Kv, step: &B::Step) -> Result<(), Error> {
        let Decoder { ends, layers, activations: a, .. } = self;
        ends.embed(backend, step, a)?;
        for layer in layers {
            let rope = match layer.rotary {
                Rotary::Model => ends.rope.as_ref(),
                Rotary::Window => ends.window_rope.as_ref(),
            };
            layer.attention.forward(backend, step, rope, kv, a)?;
            match &layer.feed_forward {
                FeedForward::Dense(mlp) => mlp.forward(backend, step, a)?,
                FeedForward::Experts(experts) => experts.forward(backend, step, a)?,
            }
        }
        ends.logits(backend, step, a)
    }

    fn hidden(&mut self, backend: &B, step: &B::Step) -> Result<&B::Buf, Error> {
        self.ends.hidden(backend, step, &mut self.activations)?;
        Ok(&self.activations.wanted_normed)
    }

    fn logits(&self) -> &B::Buf {
        &self.activations.logits
    }

    fn adapters(&self) -> u32 {
        self.adapters
    }
}

/// Where tokens come in and logits go out.
struct Ends<M: Memory> {
    embedding: M::Weight, // (vocab, hidden)
    embedding_scale: f32,
    positions: Option<M::Weight>,      // (context, hidden)
    rope: Option<Rope<M::Buf>>,        // (rotating pairs of a head)
    window_rope: Option<Rope<M::Buf>>, // (rotating pairs of a head): layers with `Rotary::Window`
    norm: Norm<M::Buf>,                // (hidden)
    head: Option<M::Weight>,           // (vocab, hidden); tied models multiply by the embedding
    logit_scale: f32,
    logit_cap: Option<f32>,
}

impl<M: Memory> Ends<M> {
    fn load(loader: &mut Loader<'_, M>) -> Result<Ends<M>, crate::Error> {
        let config = loader.config;
        let rope = |rope: &crate::Rope| -> Result<_, Error> {
            Ok(Rope {
                frequencies: loader.memory.upload_values(&rope.frequencies())?,
                pairs: rope.dims / 2,
                magnitude: rope.magnitude(),
            })
        };
        let rotates = |rope: &&crate::Rope| rope.dims > 0;
        let window_rope = config.window_rope.as_ref().filter(rotates).map(rope).transpose()?;
        let rope = Some(&config.rope).filter(rotates).map(rope).transpose()?;
        let missing = || crate::Error::MissingTensor { tensor: format!("{:?}", Tensor::OutputNorm) };
        Ok(Ends {
            embedding: loader.table(Tensor::Embedding)?,
            embedding_scale: config.embedding_scale,
            positions: match loader.has(Tensor::Positions, 0) {
                true => Some(loader.table(Tensor::Positions)?),
                false => None,
            },
            rope,
            window_rope,
            norm: norm(loader, Tensor::OutputNorm, Some(Tensor::OutputNormBias), 0)?.ok_or_else(missing)?,
            head: if config.tied {
                None
            } else {
                Some(loader.weight_for(Role::Head, &[Tensor::Output], 0)?)
            },
            logit_scale: config.logit_scale,
            logit_cap: config.logit_cap,
        })
    }
}

impl<B: Backend> Ends<B> {
    /// `residual` = the embedding.
    fn embed(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        backend.embed(step, &self.embedding, &mut a.residual)?;
        if self.embedding_scale != 1.0 {
            let scale = Pointwise::Scale(self.embedding_scale);
            backend.pointwise(step, Rows::Tokens, scale, &mut a.residual)?;
        }
        match &self.positions {
            Some(positions) => backend.add_positions(step, positions, &mut a.residual),
            None => Ok(()),
        }
    }

    /// `wanted_normed` = the last norm of the rows that want logits. Of a recorded step too, whose operations may have
    /// been done at once without leaving it.
    fn hidden(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        backend.gather_wanted(step, &a.residual, &mut a.wanted)?;
        backend.norm(step, Rows::Wanted, &self.norm, &a.wanted, &mut a.wanted_normed)
    }

    /// `logits` = head of the last norm of the rows that want logits: only they are worth a vocabulary.
    fn logits(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        self.hidden(backend, step, a)?;
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        backend.matmul(step, Rows::Wanted, head, &a.wanted_normed, &mut a.logits)?;
        if self.logit_scale != 1.0 {
            backend.pointwise(step, Rows::Wanted, Pointwise::Scale(self.logit_scale), &mut a.logits)?;
        }
        match self.logit_cap {
            Some(cap) => backend.pointwise(step, Rows::Wanted, Pointwise::SoftCap(cap), &mut a.logits),
            None => Ok(()),
        }
    }
}

/// Buffers of one step, allocated once and written anew in every step.
pub(crate) struct Activations<M: Memory> {
    pub(crate) residual: M::Buf,                 // (tokens, hidden)
    pub(crate) branch: M::Buf,                   // (tokens, hidden): what a branch reads, then what it adds
    pub(crate) room: Option<M::Buf>,             // (tokens, hidden): what it adds, where that is normalised
    pub(crate) attention: Vec<AttentionRoom<M>>, // by `Config::heads`
    pub(crate) inner: Vec<InnerRoom<M>>,         // by `Config::ffns`
    pub(crate) experts: Option<ExpertActivations<M>>,
    pub(crate) wanted: M::Buf,        // (wanted, hidden)
    pub(crate) wanted_normed: M::Buf, // (wanted, hidden)
    pub(crate) logits: M::Buf,        // (wanted, vocab); nothing of an encoder
}

/// What attention with some heads is computed in.
pub(crate) struct AttentionRoom<M: Memory> {
    pub(crate) qkv: M::Buf,      // (tokens, (query + 2 kv heads) x head size)
    pub(crate) attended: M::Buf, // (tokens, query heads x head size)
}

/// What a feed-forward of some inner width is computed in.
pub(crate) struct InnerRoom<M: Memory> {
    pub(crate) gate_up: M::Buf,       // (tokens, 2 ffn), or (tokens, ffn) without gates
    pub(crate) gated: Option<M::Buf>, // (tokens, ffn)
}

/// Which of [`Activations::inner`] a layer computes in.
pub(crate) fn inner_room(config: &Config, layer: usize) -> usize {
    let ffn = config.layers[layer].feed_forward.ffn();
    config.ffns().iter().position(|other| *other == ffn).expect("the layer's own is there")
}

impl<M: Memory> Activations<M> {
    pub(crate) fn alloc(memory: &M, config: &Config, limits: Limits) -> Result<Activations<M>, Error> {
        let Limits { tokens_max, wanted_max } = limits;
        let tokens = |columns| memory.alloc(Purpose::Activations, tokens_max, columns);
        let post_norms = config.facts.has(Tensor::AttentionPostNorm) || config.facts.has(Tensor::MlpPostNorm);
        let attention = |heads: &Heads| -> Result<_, Error> {
            let attended = heads.query * heads.dim;
            Ok(AttentionRoom { qkv: tokens(heads.qkv_columns())?, attended: tokens(attended)? })
        };
        let inner = |ffn| -> Result<_, Error> {
            Ok(match config.gated() {
                true => InnerRoom { gate_up: tokens(2 * ffn)?, gated: Some(tokens(ffn)?) },
                false => InnerRoom { gate_up: tokens(ffn)?, gated: None },
            })
        };
        Ok(Activations {
            residual: memory.alloc(Purpose::Residual, tokens_max, config.hidden)?,
            branch: tokens(config.hidden)?,
            room: if post_norms { Some(tokens(config.hidden)?) } else { None },
            attention: config.heads().iter().map(attention).collect::<Result<_, _>>()?,
            inner: config.ffns().into_iter().map(inner).collect::<Result<_, _>>()?,
            experts: ExpertActivations::alloc(memory, config, limits)?,
            wanted: memory.alloc(Purpose::Residual, wanted_max, config.hidden)?,
            wanted_normed: memory.alloc(Purpose::Activations, wanted_max, config.hidden)?,
            logits: memory.alloc(
                Purpose::Logits,
                wanted_max,
                if config.pooling.is_some() { 1 } else { config.vocab },
            )?,
        })
    }
}

/// What a branch reads: the norm of the residual stream, or the stream itself where nothing is normalised before it.
pub(crate) fn branch_off<'a, B: Backend>(
    backend: &B,
    step: &B::Step,
    norm: Option<&Norm<B::Buf>>,
    residual: &'a B::Buf,
    branch: &'a mut B::Buf,
) -> Result<&'a B::Buf, Error> {
    let Some(norm) = norm else { return Ok(residual) };
    backend.norm(step, Rows::Tokens, norm, residual, branch)?;
    Ok(branch)
}

/// A norm with the configuration's epsilon; `None` where the model does not have it.
pub(crate) fn norm<M: Memory>(
    loader: &mut Loader<'_, M>,
    weight: Tensor,
    bias: Option<Tensor>,
    layer: usize,
) -> Result<Option<Norm<M::Buf>>, crate::Error> {
    let Some(weight) = loader.opt_vector(&[weight], layer)? else { return Ok(None) };
    let bias = match bias {
        Some(bias) => loader.opt_vector(&[bias], layer)?,
        None => None,
    };
    Ok(Some(Norm { kind: loader.config.facts.norm, weight, bias, eps: loader.config.norm_eps }))
}
