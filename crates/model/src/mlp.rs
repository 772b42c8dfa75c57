//! The feed-forward, gated or not.

use fornax_compute::{Backend, Error, Glu, Linear, Memory, Norm, Pointwise, Role, Rows};

use crate::decoder::{Activations, InnerRoom, branch_off, inner_room, norm};
use crate::join::{Join, Meeting};
use crate::loader::{Changes, Loader};
use crate::names::Tensor;

pub(crate) struct Mlp<M: Memory> {
    norm: Option<Norm<M::Buf>>,   // (hidden)
    gate_up: M::Weight,           // (2 ffn, hidden): gate, then up; (ffn, hidden) without gates
    gate_up_bias: Option<M::Buf>, // (2 ffn), or (ffn)
    gate_up_changes: Changes<M>,
    gate_factors: Option<M::Buf>, // (2 ffn): gate's, then ones
    down: M::Weight,              // (hidden, ffn)
    down_changes: Changes<M>,
    down_bias: Option<M::Buf>, // (hidden)
    glu: Glu,
    function: Pointwise,
    /// Which of the step's buffers are as wide.
    room: usize,
    join: Join<M>,
}

impl<M: Memory> Mlp<M> {
    pub(crate) fn load(loader: &mut Loader<'_, M>, layer: usize) -> Result<Mlp<M>, crate::Error> {
        let (weights, biases): (&[Tensor], &[Tensor]) = if loader.has(Tensor::GateUp, layer) {
            (&[Tensor::GateUp], &[Tensor::GateBias, Tensor::UpBias])
        } else if loader.has(Tensor::Gate, layer) {
            (&[Tensor::Gate, Tensor::Up], &[Tensor::GateBias, Tensor::UpBias])
        } else {
            (&[Tensor::Up], &[Tensor::UpBias])
        };
        let gate_up_changes = loader.changes(weights, layer)?;
        let role = match weights {
            [Tensor::Up] => Role::Tokens,
            _ => {
                let adapted = !gate_up_changes.is_empty() || loader.config.scales.gate != 1.0;
                Role::Gates { glu: loader.config.glu, adapted }
            }
        };
        Ok(Mlp {
            norm: norm(loader, Tensor::MlpNorm, Some(Tensor::MlpNormBias), layer)?,
            gate_up: loader.weight_for(role, weights, layer)?,
            gate_up_bias: loader.opt_vector(biases, layer)?,
            gate_up_changes,
            down_changes: loader.changes(&[Tensor::Down], layer)?,
            down: loader.weight(&[Tensor::Down], layer)?,
            down_bias: loader.opt_vector(&[Tensor::DownBias], layer)?,
            glu: loader.config.glu,
            function: loader.config.xielu.get(layer).copied().unwrap_or(loader.config.function),
            room: inner_room(loader, layer),
            gate_factors: match loader.config.scales.gate {
                1.0 => None,
                gate => {
                    let ffn = loader.config.layers[layer].feed_forward.ffn();
                    let factors = [vec![gate; ffn], vec![1.0; ffn]].concat();
                    Some(loader.memory.upload_values(&factors)?)
                }
            },
            join: Join::load(loader, Tensor::MlpPostNorm, layer)?.times(loader.config.scales.mlp),
        })
    }
}

impl<B: Backend> Mlp<B> {
    /// What adapters change of it.
    pub(crate) fn changes(&mut self) -> [&mut Changes<B>; 2] {
        [&mut self.gate_up_changes, &mut self.down_changes]
    }

    /// Keeps what it will read, before attention adds to the residual stream; where it has no norm of its own, attention
    /// keeps what it reads itself.
    pub(crate) fn look(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        match (&self.norm, &mut a.beside) {
            (Some(norm), Some(beside)) => backend.norm(step, Rows::Tokens, norm, &a.residual, beside),
            _ => Ok(()),
        }
    }

    /// `residual` += feed-forward of it, or of what was kept.
    pub(crate) fn forward(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        let bias = self.gate_up_bias.as_ref();
        let x = match &a.beside {
            Some(beside) => beside,
            None => branch_off(backend, step, self.norm.as_ref(), &a.residual, &mut a.branch)?,
        };
        let InnerRoom { gate_up, gated } = &mut a.inner[self.room];
        backend.linear(step, Rows::Tokens, &self.gate_up, bias, x, gate_up)?;
        if !self.gate_up_changes.is_empty() {
            backend.low_rank(step, &self.gate_up_changes, x, gate_up)?;
        }
        if let Some(factors) = &self.gate_factors {
            backend.scale_columns(step, factors, gate_up)?;
        }
        match (&mut *gated, self.glu) {
            (Some(gated), glu) => backend.glu(step, glu, gate_up, gated)?,
            (None, _) => backend.pointwise(step, Rows::Tokens, self.function, gate_up)?,
        }
        let down = Linear { weight: &self.down, bias: self.down_bias.as_ref() };
        let inner = gated.as_ref().unwrap_or(gate_up);
        let meeting = Meeting { branch: &mut a.branch, room: &mut a.room, residual: &mut a.residual };
        self.join.linear(backend, step, down, &self.down_changes, inner, meeting)
    }
}
