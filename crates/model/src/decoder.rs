//! The decoder: blocks of attention and feed-forward around a residual stream, or a stage of it. What an architecture does not
//! have its tables of names do not have, and it is left out here.

use fornax_compute::{Backend, Error, Heads, Memory, Norm, Pointwise, Purpose, Role, Rope, Rows};

use crate::adapter::Later;
use crate::attention::Attention;
use crate::channels::ByChannel;
use crate::conv::Convolution;
use crate::delta::DeltaNet;
use crate::experts::{ExpertActivations, Experts};
use crate::latent::{Latent, LatentRoom};
use crate::layer_inputs::{Input, InputRoom, Table};
use crate::loader::{Changes, Loader};
use crate::mlp::Mlp;
use crate::names::Tensor;
use crate::recurrent::StateRoom;
use crate::scan::Scan;
use crate::{Adapter, AdapterRoom, Limits, Mixer, Model, Rotary, Stage, no_room};

/// Weights and activations.
pub(crate) struct Decoder<M: Memory> {
    rotation: Rotation<M>,
    entry: Option<Entry<M>>,
    layers: Vec<Layer<M>>,
    exit: Option<Exit<M>>,
    /// Width of the residual stream.
    hidden: usize,
    /// How many of the first layers add what lies behind the values of given rows.
    levels: usize,
    adapters: u32,
    later: Option<Later>,
    activations: Activations<M>,
}

struct Layer<M: Memory> {
    mixer: LayerMixer<M>,
    feed_forward: FeedForward<M>,
    input: Option<Input<M>>,
    /// Multiplies the residual stream behind the layer.
    scale: Option<f32>,
}

enum LayerMixer<M: Memory> {
    Attention(Box<Attention<M>>, Rotary),
    Latent(Box<Latent<M>>),
    Delta(Box<DeltaNet<M>>),
    Conv(Box<Convolution<M>>),
    Scan(Box<Scan<M>>),
    ChannelScan(Box<ByChannel<M>>),
    Beside(Box<Scan<M>>, Box<Attention<M>>, Rotary),
    None,
}

enum FeedForward<M: Memory> {
    Dense(Mlp<M>),
    Experts(Experts<M>),
    None,
}

impl<M: Memory> Decoder<M> {
    pub(crate) fn load(loader: &mut Loader<'_, M>, limits: Limits) -> Result<Decoder<M>, crate::Error> {
        let stage = loader.stage;
        if !stage.embeds && loader.config.layer_inputs.is_some() {
            return Err(crate::Error::Unsupported {
                what: "layers with embeddings of their own without the model's".to_owned(),
                supported: "all layers on one device".to_owned(),
            });
        }
        let rotation = Rotation::load(loader)?;
        let entry = if stage.embeds { Some(Entry::load(loader)?) } else { None };
        let exit = if stage.heads { Some(Exit::load(loader)?) } else { None };
        let layers =
            stage.layers.clone().map(|layer| Layer::load(loader, layer)).collect::<Result<_, _>>()?;
        let (adapters, later) = (loader.adapters(), loader.later());
        let activations = Activations::alloc(loader, limits)?;
        let levels = loader.config.levels.unwrap_or(0);
        if levels > 0 && *stage != Stage::whole(loader.config) {
            return Err(crate::Error::Unsupported {
                what: format!("{levels} layers that add to given rows, in a part of a model"),
                supported: "all layers on one device".to_owned(),
            });
        }
        let hidden = loader.config.hidden;
        Ok(Decoder { rotation, entry, layers, exit, hidden, levels, adapters, later, activations })
    }
}

impl<M: Memory> Layer<M> {
    fn load(loader: &mut Loader<'_, M>, layer: usize) -> Result<Layer<M>, crate::Error> {
        Ok(Layer {
            mixer: match &loader.config.layers[layer].mixer {
                Mixer::Attention(attention) => {
                    LayerMixer::Attention(Box::new(Attention::load(loader, layer)?), attention.rotary)
                }
                Mixer::Latent(latent) => LayerMixer::Latent(Box::new(Latent::load(loader, layer, latent)?)),
                Mixer::Delta(delta) => LayerMixer::Delta(Box::new(DeltaNet::load(loader, layer, delta)?)),
                Mixer::Conv(conv) => LayerMixer::Conv(Box::new(Convolution::load(loader, layer, conv)?)),
                Mixer::Scan(scan) => LayerMixer::Scan(Box::new(Scan::load(loader, layer, scan)?)),
                Mixer::ChannelScan(scan) => {
                    LayerMixer::ChannelScan(Box::new(ByChannel::load(loader, layer, scan)?))
                }
                Mixer::Beside(attention, scan) => LayerMixer::Beside(
                    Box::new(Scan::load(loader, layer, scan)?),
                    Box::new(Attention::load(loader, layer)?),
                    attention.rotary,
                ),
                Mixer::None => LayerMixer::None,
            },
            feed_forward: match &loader.config.layers[layer].feed_forward {
                crate::FeedForward::Dense { .. } => FeedForward::Dense(Mlp::load(loader, layer)?),
                crate::FeedForward::Mixture(mixture) => {
                    FeedForward::Experts(Experts::load(loader, mixture, layer)?)
                }
                crate::FeedForward::None => FeedForward::None,
            },
            input: Input::load(loader, layer)?,
            scale: match loader.has(Tensor::LayerScale, layer) {
                true => Some(loader.values(Tensor::LayerScale, layer)?[0]),
                false => None,
            },
        })
    }
}

impl<B: Backend> Model<B> for Decoder<B> {
    fn forward(&mut self, backend: &B, kv: &mut B::Kv, step: &B::Step) -> Result<(), Error> {
        let Decoder { rotation, entry, layers, exit, hidden, levels, activations: a, .. } = self;
        if let Some(entry) = entry {
            entry.embed(backend, step, a)?;
        }
        for (at, layer) in layers.iter_mut().enumerate() {
            if let FeedForward::Dense(mlp) = &layer.feed_forward {
                mlp.look(backend, step, a)?;
            }
            match &layer.mixer {
                LayerMixer::Attention(attention, rotary) => {
                    attention.forward(backend, step, rotation.of(*rotary), kv, a)?;
                }
                LayerMixer::Latent(latent) => {
                    latent.forward(backend, step, rotation.of(Rotary::Model), kv, a)?;
                }
                LayerMixer::Delta(delta) => delta.forward(backend, step, kv, a)?,
                LayerMixer::Conv(conv) => conv.forward(backend, step, kv, a)?,
                LayerMixer::Scan(scan) => scan.forward(backend, step, kv, a)?,
                LayerMixer::ChannelScan(scan) => scan.forward(backend, step, kv, a)?,
                LayerMixer::Beside(scan, attention, rotary) => {
                    scan.look(backend, step, attention.norm(), kv, a)?;
                    attention.forward(backend, step, rotation.of(*rotary), kv, a)?;
                    scan.join(backend, step, a)?;
                }
                LayerMixer::None => {}
            }
            match &layer.feed_forward {
                FeedForward::Dense(mlp) => mlp.forward(backend, step, a)?,
                FeedForward::Experts(experts) => experts.forward(backend, step, a)?,
                FeedForward::None => {}
            }
            if let Some(input) = &layer.input {
                input.forward(backend, step, a)?;
            }
            if at < *levels {
                backend.add_given(step, (at + 1) * *hidden, &mut a.residual)?;
            }
            if let Some(scale) = layer.scale {
                backend.pointwise(step, Rows::Tokens, Pointwise::Scale(scale), &mut a.residual)?;
            }
        }
        match exit {
            Some(exit) => exit.logits(backend, step, entry.as_ref(), a),
            None => Ok(()),
        }
    }

    fn hidden(&mut self, backend: &B, step: &B::Step) -> Result<&B::Buf, Error> {
        let exit = self.exit.as_ref().expect("only a stage with the head is asked what it reads");
        exit.hidden(backend, step, &mut self.activations)?;
        Ok(&self.activations.wanted_normed)
    }

    fn residual(&mut self) -> &mut B::Buf {
        &mut self.activations.residual
    }

    fn logits(&self) -> &B::Buf {
        &self.activations.logits
    }

    fn adapters(&self) -> u32 {
        self.adapters
    }

    fn adapter_room(&self) -> AdapterRoom {
        self.later.as_ref().map_or_else(AdapterRoom::default, |later| later.config.adapter_room)
    }

    fn set_adapter(
        &mut self,
        backend: &B,
        place: u32,
        adapter: Option<&Adapter>,
    ) -> Result<(), crate::Error> {
        let Some(later) = &self.later else { return Err(no_room(adapter)) };
        let (first, room) = (self.adapters as usize, later.config.adapter_room.adapters);
        let place = place as usize;
        assert!((first..first + room).contains(&place), "place {place} is for adapters that come later");
        if let Some(adapter) = adapter {
            later.check(adapter)?;
        }
        let changes: Vec<_> = self.layers.iter_mut().flat_map(Layer::changes).collect();
        // All of it before any is put in, so that what fails changes nothing.
        let made = changes.iter().map(|changes| match adapter {
            Some(adapter) => changes.of(&later.config, backend, adapter),
            None => Ok(Vec::new()),
        });
        let made = made.collect::<Result<Vec<_>, _>>()?;
        changes.into_iter().zip(made).for_each(|(changes, made)| changes.put(place, made));
        Ok(())
    }
}

impl<B: Backend> Layer<B> {
    /// What adapters change of it.
    fn changes(&mut self) -> Vec<&mut Changes<B>> {
        let mut changes = Vec::new();
        match &mut self.mixer {
            LayerMixer::Attention(attention, _) => changes.extend(attention.changes()),
            LayerMixer::Latent(latent) => changes.push(latent.changes()),
            LayerMixer::Delta(delta) => changes.extend(delta.changes()),
            LayerMixer::Conv(conv) => changes.extend(conv.changes()),
            LayerMixer::Scan(scan) => changes.push(scan.changes()),
            LayerMixer::ChannelScan(scan) => changes.push(scan.changes()),
            LayerMixer::Beside(scan, attention, _) => {
                changes.push(scan.changes());
                changes.extend(attention.changes());
            }
            LayerMixer::None => {}
        }
        if let FeedForward::Dense(mlp) = &mut self.feed_forward {
            changes.extend(mlp.changes());
        }
        changes
    }
}

/// The frequencies that layers rotate by.
pub(crate) struct Rotation<M: Memory> {
    rope: Option<Rope<M::Buf>>,        // (rotating pairs of a head)
    window_rope: Option<Rope<M::Buf>>, // (rotating pairs of a head): layers with `Rotary::Window`
}

impl<M: Memory> Rotation<M> {
    pub(crate) fn load(loader: &Loader<'_, M>) -> Result<Rotation<M>, crate::Error> {
        let config = loader.config;
        let rope = |rope: &crate::Rope| -> Result<_, Error> {
            Ok(Rope {
                frequencies: loader.memory.upload_values(&rope.frequencies())?,
                pairs: rope.dims / 2,
                magnitude: rope.magnitude(),
                // Where only tokens are read all sections are the same.
                sections: if config.levels.is_some() { config.sections.clone() } else { Vec::new() },
            })
        };
        let rotates = |rope: &&crate::Rope| rope.dims > 0;
        let window_rope = config.window_rope.as_ref().filter(rotates).map(rope).transpose()?;
        let rope = Some(&config.rope).filter(rotates).map(rope).transpose()?;
        Ok(Rotation { rope, window_rope })
    }

    /// A layer's.
    pub(crate) fn of(&self, rotary: Rotary) -> Option<&Rope<M::Buf>> {
        match rotary {
            Rotary::Model => self.rope.as_ref(),
            Rotary::Window => self.window_rope.as_ref(),
            Rotary::None => None,
        }
    }
}

/// Where tokens come in.
struct Entry<M: Memory> {
    embedding: M::Weight, // (vocab, hidden)
    scale: f32,
    positions: Option<M::Weight>, // (context, hidden)
    layer_inputs: Option<Table<M>>,
}

impl<M: Memory> Entry<M> {
    fn load(loader: &mut Loader<'_, M>) -> Result<Entry<M>, crate::Error> {
        Ok(Entry {
            embedding: loader.table(Tensor::Embedding)?,
            scale: loader.config.embedding_scale,
            positions: match loader.has(Tensor::Positions, 0) {
                true => Some(loader.table(Tensor::Positions)?),
                false => None,
            },
            layer_inputs: Table::load(loader)?,
        })
    }
}

impl<B: Backend> Entry<B> {
    /// `residual` = the embedding; and what layers read beside it.
    fn embed(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        backend.embed(step, &self.embedding, &mut a.residual)?;
        if self.scale != 1.0 {
            let scale = Pointwise::Scale(self.scale);
            backend.pointwise(step, Rows::Tokens, scale, &mut a.residual)?;
        }
        if let Some(positions) = &self.positions {
            backend.add_positions(step, positions, &mut a.residual)?;
        }
        match &self.layer_inputs {
            Some(table) => table.look_up(backend, step, a),
            None => Ok(()),
        }
    }
}

/// Where logits go out.
struct Exit<M: Memory> {
    norm: Norm<M::Buf>,      // (hidden)
    head: Option<M::Weight>, // (vocab, hidden); tied models multiply by the embedding where the stage has it
    bias: Option<M::Buf>,    // (vocab)
    logit_scale: f32,
    logit_cap: Option<f32>,
}

impl<M: Memory> Exit<M> {
    fn load(loader: &mut Loader<'_, M>) -> Result<Exit<M>, crate::Error> {
        let (config, stage) = (loader.config, loader.stage);
        let missing = || crate::Error::MissingTensor { tensor: format!("{:?}", Tensor::OutputNorm) };
        Ok(Exit {
            norm: norm(loader, Tensor::OutputNorm, Some(Tensor::OutputNormBias), 0)?.ok_or_else(missing)?,
            head: match (config.tied, stage.embeds) {
                (true, true) => None,
                (true, false) => Some(loader.weight_for(Role::Head, &[Tensor::Embedding], 0)?),
                (false, _) => Some(loader.weight_for(Role::Head, &[Tensor::Output], 0)?),
            },
            bias: loader.opt_vector(&[Tensor::OutputBias], 0)?,
            logit_scale: config.logit_scale,
            logit_cap: config.logit_cap,
        })
    }
}

impl<B: Backend> Exit<B> {
    /// `wanted_normed` = the last norm of the rows that want logits. Of a recorded step too, whose operations may have
    /// been done at once without leaving it.
    fn hidden(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        backend.gather_wanted(step, &a.residual, &mut a.wanted)?;
        backend.norm(step, Rows::Wanted, &self.norm, &a.wanted, &mut a.wanted_normed)
    }

    /// `logits` = head of the last norm of the rows that want logits: only they are worth a vocabulary.
    fn logits(
        &self,
        backend: &B,
        step: &B::Step,
        entry: Option<&Entry<B>>,
        a: &mut Activations<B>,
    ) -> Result<(), Error> {
        self.hidden(backend, step, a)?;
        let head = self.head.as_ref().or(entry.map(|entry| &entry.embedding));
        let head = head.expect("a stage with the head has its own, or the embedding");
        backend.linear(step, Rows::Wanted, head, self.bias.as_ref(), &a.wanted_normed, &mut a.logits)?;
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
    pub(crate) residual: M::Buf,                   // (tokens, hidden)
    pub(crate) branch: M::Buf,                     // (tokens, hidden): what a branch reads, then what it adds
    pub(crate) room: Option<M::Buf>, // (tokens, hidden): what it adds, where that is normalised or gathered first
    pub(crate) beside: Option<M::Buf>, // (tokens, hidden): what the feed-forward reads, where attention reads the same
    pub(crate) attention: Vec<AttentionRoom<M>>, // by `Config::heads`
    pub(crate) latent: Vec<LatentRoom<M>>, // by `Config::latents`
    pub(crate) states: Vec<StateRoom<M>>, // by `Config::state_widths`
    pub(crate) inner: Vec<InnerRoom<M>>, // by `Config::ffns`
    pub(crate) experts: Vec<ExpertActivations<M>>, // by `Config::mixtures`
    pub(crate) layer_inputs: Option<InputRoom<M>>,
    pub(crate) sum: Option<M::Buf>, // (tokens, hidden): of experts, where it is normalised on its own
    pub(crate) wanted: M::Buf,      // (wanted, hidden)
    pub(crate) wanted_normed: M::Buf, // (wanted, hidden)
    pub(crate) logits: M::Buf,      // (wanted, vocab); nothing of an encoder
}

/// What attention with some heads is computed in.
pub(crate) struct AttentionRoom<M: Memory> {
    pub(crate) qkv: M::Buf,          // (tokens, (query + 2 kv heads) x head size)
    pub(crate) attended: M::Buf,     // (tokens, query heads x head size)
    pub(crate) gate: Option<M::Buf>, // (tokens, query heads x head size), where attention has gates
}

/// What a feed-forward of some inner width is computed in.
pub(crate) struct InnerRoom<M: Memory> {
    pub(crate) gate_up: M::Buf,       // (tokens, 2 ffn), or (tokens, ffn) without gates
    pub(crate) gated: Option<M::Buf>, // (tokens, ffn)
}

/// Which of [`Activations::inner`] a layer computes in.
pub(crate) fn inner_room<M>(loader: &Loader<'_, M>, layer: usize) -> usize {
    let ffn = loader.config.layers[layer].feed_forward.ffn();
    loader.config.ffns(loader.stage).iter().position(|other| *other == ffn).expect("the layer's own is there")
}

impl<M: Memory> Activations<M> {
    pub(crate) fn alloc(loader: &Loader<'_, M>, limits: Limits) -> Result<Activations<M>, Error> {
        let (memory, config, stage) = (loader.memory, loader.config, loader.stage);
        let Limits { tokens_max, wanted_max } = limits;
        let wanted_max = if stage.heads { wanted_max } else { 0 };
        let tokens = |columns| memory.alloc(Purpose::Activations, tokens_max, columns);
        let post_norms = config.facts.has(Tensor::AttentionPostNorm) || config.facts.has(Tensor::MlpPostNorm);
        let gathers = config.residual_scale != 1.0 && config.mixture().is_some();
        let attention = |heads: &Heads| -> Result<_, Error> {
            let attended = heads.query * heads.dim;
            Ok(AttentionRoom {
                qkv: tokens(heads.qkv_columns())?,
                attended: tokens(attended)?,
                gate: if config.facts.has(Tensor::AttentionGate) { Some(tokens(attended)?) } else { None },
            })
        };
        let inner = |ffn| -> Result<_, Error> {
            Ok(match config.gated() {
                true => InnerRoom { gate_up: tokens(2 * ffn)?, gated: Some(tokens(ffn)?) },
                false => InnerRoom { gate_up: tokens(ffn)?, gated: None },
            })
        };
        let state = |widths| StateRoom::alloc(memory, widths, limits);
        let experts = |mixture| ExpertActivations::alloc(memory, config, mixture, limits);
        Ok(Activations {
            residual: memory.alloc(Purpose::Residual, tokens_max, config.hidden)?,
            branch: tokens(config.hidden)?,
            room: match (post_norms, gathers) {
                (_, true) => Some(memory.alloc(Purpose::Residual, tokens_max, config.hidden)?),
                (true, false) => Some(tokens(config.hidden)?),
                (false, false) => None,
            },
            beside: if config.parallel { Some(tokens(config.hidden)?) } else { None },
            attention: config.heads(stage).iter().map(attention).collect::<Result<_, _>>()?,
            latent: config
                .latents(stage)
                .iter()
                .map(|latent| LatentRoom::alloc(memory, latent, tokens_max))
                .collect::<Result<_, _>>()?,
            states: config.state_widths(stage).into_iter().map(state).collect::<Result<_, _>>()?,
            inner: config.ffns(stage).into_iter().map(inner).collect::<Result<_, _>>()?,
            experts: config.mixtures(stage).iter().map(experts).collect::<Result<_, _>>()?,
            layer_inputs: config
                .layer_inputs
                .map(|inputs| InputRoom::alloc(memory, inputs, config.layers.len(), limits))
                .transpose()?,
            sum: match config.facts.has(Tensor::ExpertsPostNorm) && config.mixture().is_some() {
                true => Some(memory.alloc(Purpose::Residual, tokens_max, config.hidden)?),
                false => None,
            },
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
