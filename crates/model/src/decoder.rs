//! The decoder: blocks of attention and feed-forward around a residual stream. What an architecture does not have its
//! tables of names do not have, and it is left out here.

use fornax_compute::{Backend, Error, Memory, Norm, Pointwise, Purpose, Role, Rope, Rows};

use crate::attention::Attention;
use crate::experts::{ExpertActivations, Experts};
use crate::join::Meeting;
use crate::loader::Loader;
use crate::mlp::Mlp;
use crate::names::Tensor;
use crate::{Config, Limits, Model};

/// Weights and activations.
pub(crate) struct Decoder<M: Memory> {
    ends: Ends<M>,
    layers: Vec<Layer<M>>,
    adapters: u32,
    activations: Activations<M>,
}

struct Layer<M: Memory> {
    attention: Attention<M>,
    /// Whether it rotates as layers with a window do.
    windowed: bool,
    feed_forward: FeedForward<M>,
}

enum FeedForward<M: Memory> {
    Dense(Mlp<M>),
    Experts(Experts<M>),
}

impl<M: Memory> Decoder<M> {
    pub(crate) fn load(loader: &mut Loader<'_, M>, limits: Limits) -> Result<Decoder<M>, crate::Error> {
        let ends = Ends::load(loader)?;
        let layers =
            (0..loader.config.layers).map(|layer| Layer::load(loader, layer)).collect::<Result<_, _>>()?;
        let adapters = loader.adapters();
        let activations = Activations::alloc(loader.memory, loader.config, limits)?;
        Ok(Decoder { ends, layers, adapters, activations })
    }
}

impl<M: Memory> Layer<M> {
    fn load(loader: &mut Loader<'_, M>, layer: usize) -> Result<Layer<M>, crate::Error> {
        Ok(Layer {
            attention: Attention::load(loader, layer)?,
            windowed: loader.config.windows[layer].is_some(),
            feed_forward: match &loader.config.mixture {
                None => FeedForward::Dense(Mlp::load(loader, layer)?),
                Some(mixture) => FeedForward::Experts(Experts::load(loader, mixture, layer)?),
            },
        })
    }
}

impl<B: Backend> Model<B> for Decoder<B> {
    fn forward(&mut self, backend: &B, kv: &mut B::Kv, step: &B::Step) -> Result<(), Error> {
        let Decoder { ends, layers, activations: a, .. } = self;
        ends.embed(backend, step, a)?;
        for layer in layers {
            let rope = if layer.windowed { ends.window_rope.as_ref() } else { None };
            layer.attention.forward(backend, step, rope.or(ends.rope.as_ref()), kv, a)?;
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
    window_rope: Option<Rope<M::Buf>>, // (rotating pairs of a head): layers with a window
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
            positions: match loader.has(Tensor::Positions) {
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
    pub(crate) residual: M::Buf,      // (tokens, hidden)
    pub(crate) branch: M::Buf,        // (tokens, hidden): what a branch reads, then what it adds
    pub(crate) room: Option<M::Buf>,  // (tokens, hidden): what it adds, where that is normalised
    pub(crate) qkv: M::Buf,           // (tokens, (query + 2 kv heads) x head size)
    pub(crate) attended: M::Buf,      // (tokens, query heads x head size)
    pub(crate) gate_up: M::Buf,       // (tokens, 2 ffn), or (tokens, ffn) without gates
    pub(crate) gated: Option<M::Buf>, // (tokens, ffn)
    pub(crate) experts: Option<ExpertActivations<M>>,
    pub(crate) wanted: M::Buf,        // (wanted, hidden)
    pub(crate) wanted_normed: M::Buf, // (wanted, hidden)
    pub(crate) logits: M::Buf,        // (wanted, vocab); nothing of an encoder
}

impl<M: Memory> Activations<M> {
    pub(crate) fn alloc(memory: &M, config: &Config, limits: Limits) -> Result<Activations<M>, Error> {
        let Limits { tokens_max, wanted_max } = limits;
        let tokens = |columns| memory.alloc(Purpose::Activations, tokens_max, columns);
        let post_norms = config.facts.has(Tensor::AttentionPostNorm) || config.facts.has(Tensor::MlpPostNorm);
        let gated = config.gated();
        Ok(Activations {
            residual: memory.alloc(Purpose::Residual, tokens_max, config.hidden)?,
            branch: tokens(config.hidden)?,
            room: if post_norms { Some(tokens(config.hidden)?) } else { None },
            qkv: tokens(config.heads.qkv_columns())?,
            attended: tokens(config.heads.query * config.heads.dim)?,
            gate_up: tokens(if gated { 2 * config.ffn } else { config.ffn })?,
            gated: if gated { Some(tokens(config.ffn)?) } else { None },
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

    /// What attention read, and where its result goes.
    pub(crate) fn attended_meeting(&mut self) -> (&M::Buf, Meeting<'_, M>) {
        let Activations { residual, branch, room, attended, .. } = self;
        (attended, Meeting { branch, room, residual })
    }

    /// The inner values of the feed-forward, and where its result goes.
    pub(crate) fn inner_meeting(&mut self) -> (&M::Buf, Meeting<'_, M>) {
        let Activations { residual, branch, room, gate_up, gated, .. } = self;
        (gated.as_ref().unwrap_or(gate_up), Meeting { branch, room, residual })
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
