//! Architectures, each written once over [`Backend`]; the table of their facts; names and transforms of weights.
//!
//! A [`Config`] is read from a checkpoint of either container, and [`load`] makes a [`Model`] of both. The model owns
//! its weights and activations, allocated once; after that it sees nothing but the [`Step`](Backend::Step), so that a
//! recorded step replays correctly.
//!
//! This crate knows what tensors mean. It must never know a token's text, a request, a concrete backend, a file name
//! or an environment variable.

mod adapter;
mod arch;
mod attention;
mod channels;
mod config;
mod conv;
mod decoder;
mod delta;
mod encoder;
mod error;
mod experts;
mod export;
mod facts;
mod join;
mod latent;
mod layer_inputs;
mod layers;
mod loader;
mod mlp;
mod names;
mod recurrent;
mod relaid;
mod rope;
mod scan;
mod source;
mod stage;
mod tower;

use fornax_compute::{Backend, Memory};
use fornax_format::Checkpoint;

use crate::decoder::Decoder;
use crate::encoder::Encoder;
use crate::loader::Loader;

pub use adapter::{Adapter, AdapterFault};
pub use config::{AdapterRoom, Config, LayerInputs, Scales, ScanScales};
pub use error::Error;
pub use export::{Export, Exported, Pairs, export, exportable};
pub use facts::{
    AttentionScale, BiasRule, EmbeddingScale, Facts, FirstPosition, Floor, LogitScale, ParallelRule, QkRows,
    Recurrent, RotaryRule, ScanLayers, ShareRule, SoftCaps, TemperatureRule, WindowRule,
};
pub use latent::{LatentConfig, LatentPart};
pub use layers::{AttentionConfig, FeedForward, LayerConfig, Mixer, Mixture, Rotary};
pub use names::{Dim, Inner, Name, Owner, Portion, Stretch, Tensor, Transform, When};
pub use recurrent::{ChannelScanConfig, ConvConfig, DeltaConfig, ScanConfig, StepNorms};
pub use relaid::Interleave;
pub use rope::{LongFactors, Rope, Scaling};
pub use stage::Stage;
pub use tower::{PatchGrid, Tower, TowerConfig};

/// A loaded model.
pub trait Model<B: Backend> {
    /// Computes the step's tokens: their keys and values go into `kv`, the wanted rows' logits into
    /// [`logits`](Model::logits).
    fn forward(&mut self, backend: &B, kv: &mut B::Kv, step: &B::Step) -> Result<(), fornax_compute::Error>;

    /// What the head reads: the last norm of the wanted rows of the step computed last. (wanted rows, hidden) Only a stage with
    /// the head has it.
    fn hidden(&mut self, backend: &B, step: &B::Step) -> Result<&B::Buf, fornax_compute::Error>;

    /// (wanted rows of the last step, vocab). An encoder has none, nor has a stage without the head.
    fn logits(&self) -> &B::Buf;

    /// The residual stream. A stage without the embedding reads it, one without the head leaves it to the next: write rows here
    /// before [`forward`](Model::forward), or read them after it. (tokens, hidden)
    fn residual(&mut self) -> &mut B::Buf;

    /// Whether it encodes: a sequence is computed whole, in one step and without what others have computed, and
    /// [`hidden`](Model::hidden) is its pooled vector.
    fn encodes(&self) -> bool {
        false
    }

    /// Whether it reads two texts together, and [`hidden`](Model::hidden) is one number, how well they fit. The positions of
    /// the second are counted from this one on.
    fn pairs(&self) -> Option<u32> {
        None
    }

    /// Adapters that it was loaded with. Rows of a step name them by their place among those, and the places behind them
    /// are for adapters that come later.
    fn adapters(&self) -> u32 {
        0
    }

    /// Room for adapters that come later.
    fn adapter_room(&self) -> AdapterRoom {
        AdapterRoom::default()
    }

    /// Loads an adapter into a place for those that come later, or empties the place; no step is under way. What cannot
    /// be had of it leaves the place as it is.
    fn set_adapter(&mut self, backend: &B, place: u32, adapter: Option<&Adapter>) -> Result<(), Error> {
        let _ = (backend, place);
        Err(no_room(adapter))
    }
}

/// Refuses an adapter where there is no room for any.
pub(crate) fn no_room(adapter: Option<&Adapter>) -> Error {
    let adapter = adapter.map_or_else(String::new, |adapter| adapter.name().to_owned());
    Error::Adapter { adapter, fault: AdapterFault::NoRoom }
}

/// The largest step, which sizes the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens in a step.
    pub tokens_max: usize,
    /// Rows of a step that want logits.
    pub wanted_max: usize,
}

/// Loads a model. `progress` is told the bytes of weights loaded and the bytes there are.
pub fn load<B: Backend + 'static>(
    checkpoint: &Checkpoint,
    config: &Config,
    backend: &B,
    limits: Limits,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Box<dyn Model<B>>, Error> {
    load_with(checkpoint, config, &[], backend, limits, progress)
}

/// The same with adapters beside it, which rows of a batch name by their place in this list.
pub fn load_with<B: Backend + 'static>(
    checkpoint: &Checkpoint,
    config: &Config,
    adapters: &[Adapter],
    backend: &B,
    limits: Limits,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Box<dyn Model<B>>, Error> {
    load_stage(checkpoint, config, &Stage::whole(config), adapters, backend, limits, progress)
}

/// Loads a part of a model. Tensors of other parts need not be there, and are not read. Its keys and values are those of
/// [`Config::stage_kv_groups`].
pub fn load_stage<B: Backend + 'static>(
    checkpoint: &Checkpoint,
    config: &Config,
    stage: &Stage,
    adapters: &[Adapter],
    backend: &B,
    limits: Limits,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Box<dyn Model<B>>, Error> {
    let mut loader = Loader::new(checkpoint, (config, stage), adapters, backend, progress)?;
    match config.pooling {
        Some(pooling) => Ok(Box::new(Encoder::load(&mut loader, pooling, limits)?)),
        None => Ok(Box::new(Decoder::load(&mut loader, limits)?)),
    }
}

/// Takes a [`load`] to any memory and drops what comes of it. On a [`Counting`](fornax_compute::Counting) memory this
/// counts exactly what loading on its backend will allocate: that is the plan.
pub fn measure<M: Memory>(
    checkpoint: &Checkpoint,
    config: &Config,
    memory: &M,
    limits: Limits,
) -> Result<(), Error> {
    measure_with(checkpoint, config, &[], memory, limits)
}

/// The same with adapters beside it.
pub fn measure_with<M: Memory>(
    checkpoint: &Checkpoint,
    config: &Config,
    adapters: &[Adapter],
    memory: &M,
    limits: Limits,
) -> Result<(), Error> {
    measure_stage(checkpoint, config, &Stage::whole(config), adapters, memory, limits)
}

/// The same of a part of a model.
pub fn measure_stage<M: Memory>(
    checkpoint: &Checkpoint,
    config: &Config,
    stage: &Stage,
    adapters: &[Adapter],
    memory: &M,
    limits: Limits,
) -> Result<(), Error> {
    let mut silent = |_, _| {};
    let mut loader = Loader::new(checkpoint, (config, stage), adapters, memory, &mut silent)?;
    match config.pooling {
        Some(pooling) => Encoder::load(&mut loader, pooling, limits).map(drop),
        None => Decoder::load(&mut loader, limits).map(drop),
    }
}
