//! Embeddings that layers have of their own: a row of one large table for each token, to which a projection of the model's
//! embedding is added. Each layer reads its part of the row behind its feed-forward.

use fornax_compute::{Backend, Error, Glu, Heads, Linear, Memory, Norm, Pointwise, Purpose, QkNorm, Rows};

use crate::decoder::Activations;
use crate::join::{Join, Meeting};
use crate::loader::Loader;
use crate::names::Tensor;
use crate::{LayerInputs, Limits};

/// Where a row is given in place of a token, layers read what the table has for the token that fills up: the first one.
const FILLS_UP: u32 = 0;

/// What makes the inputs of all layers.
pub(crate) struct Table<M: Memory> {
    table: M::Weight,      // (vocab, layers x width)
    projection: M::Weight, // (layers x width, hidden)
    norm: QkNorm<M::Buf>,  // (width)
    /// The parts of a row, which are normalised as heads are.
    parts: Heads,
    /// Multiplies what is projected.
    scale: f32,
}

/// What a layer makes of its input.
pub(crate) struct Input<M: Memory> {
    gate: M::Weight, // (width, hidden)
    up: M::Weight,   // (hidden, width)
    /// Where its part of a row begins.
    column: usize,
    glu: Glu,
    join: Join<M>,
}

/// What they are computed in.
pub(crate) struct InputRoom<M: Memory> {
    all: M::Buf,       // (tokens, layers x width)
    projected: M::Buf, // (tokens, layers x width)
    gate: M::Buf,      // (tokens, width)
}

impl<M: Memory> Table<M> {
    pub(crate) fn load(loader: &mut Loader<'_, M>) -> Result<Option<Table<M>>, crate::Error> {
        let config = loader.config;
        let Some(LayerInputs { width, .. }) = config.layer_inputs else { return Ok(None) };
        let projection = loader.weight(&[Tensor::LayerProjection], 0)?;
        let norm = |weight| Norm::rms(weight, config.norm_eps);
        let query = norm(loader.vector(&[Tensor::LayerProjectionNorm], 0)?);
        // There are no keys that it would be applied to.
        let key = norm(loader.memory.upload_values(&vec![1.0; width])?);
        Ok(Some(Table {
            norm: QkNorm { query, key, value: None },
            projection,
            table: loader.table(Tensor::LayerTable)?,
            parts: Heads { query: config.layers.len(), kv: 0, dim: width },
            scale: (config.hidden as f32).sqrt().recip(),
        }))
    }
}

impl<B: Backend> Table<B> {
    /// What all layers read of the step's tokens, whose embedding the residual stream holds.
    pub(crate) fn look_up(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        let Some(InputRoom { all, projected, .. }) = &mut a.layer_inputs else { return Ok(()) };
        let scaled =
            |factor: f32, x: &mut B::Buf| backend.pointwise(step, Rows::Tokens, Pointwise::Scale(factor), x);
        backend.look_up(step, &self.table, FILLS_UP, all)?;
        scaled((self.parts.dim as f32).sqrt(), all)?;
        backend.matmul(step, Rows::Tokens, &self.projection, &a.residual, projected)?;
        scaled(self.scale, projected)?;
        backend.qk_norm(step, self.parts, &self.norm, projected)?;
        backend.add(step, Rows::Tokens, projected, all)?;
        scaled(std::f32::consts::FRAC_1_SQRT_2, all)
    }
}

impl<M: Memory> Input<M> {
    pub(crate) fn load(loader: &mut Loader<'_, M>, layer: usize) -> Result<Option<Input<M>>, crate::Error> {
        let Some(LayerInputs { width, .. }) = loader.config.layer_inputs else { return Ok(None) };
        Ok(Some(Input {
            gate: loader.weight(&[Tensor::LayerGate], layer)?,
            up: loader.weight(&[Tensor::LayerUp], layer)?,
            column: layer * width,
            glu: loader.config.glu,
            join: Join::load(loader, Tensor::LayerPostNorm, layer)?,
        }))
    }
}

impl<B: Backend> Input<B> {
    /// `residual` += what the layer makes of its input, opened by the stream itself.
    pub(crate) fn forward(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        let Some(InputRoom { all, gate, .. }) = &mut a.layer_inputs else { return Ok(()) };
        backend.matmul(step, Rows::Tokens, &self.gate, &a.residual, gate)?;
        backend.glu_beside(step, self.glu, all, self.column, gate)?;
        let up = Linear { weight: &self.up, bias: None };
        let meeting = Meeting { branch: &mut a.branch, room: &mut a.room, residual: &mut a.residual };
        self.join.linear(backend, step, up, &[], gate, meeting)
    }
}

impl<M: Memory> InputRoom<M> {
    pub(crate) fn alloc(
        memory: &M,
        inputs: LayerInputs,
        layers: usize,
        limits: Limits,
    ) -> Result<InputRoom<M>, Error> {
        let tokens = |columns| memory.alloc(Purpose::Activations, limits.tokens_max, columns);
        let all = layers * inputs.width;
        Ok(InputRoom { all: tokens(all)?, projected: tokens(all)?, gate: tokens(inputs.width)? })
    }
}
