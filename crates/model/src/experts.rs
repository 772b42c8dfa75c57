//! The feed-forward of experts: a router chooses a few of them for each token. Some models have one more expert that
//! every token takes, as it is or with a share of its own.

use fornax_compute::{
    Backend, Between, Error, ExpertRoom, Memory, Norm, Pointwise, Purpose, Role, Routing, Rows,
};

use crate::decoder::{Activations, InnerRoom, inner_room, norm};
use crate::loader::Loader;
use crate::names::Tensor;
use crate::{Config, Limits, Mixture};

pub(crate) struct Experts<M: Memory> {
    norm: Norm<M::Buf>,           // (hidden)
    router: M::Weight,            // (experts, hidden)
    router_bias: Option<M::Buf>,  // (experts)
    correction: Option<M::Buf>,   // (experts): added to scores for the choice alone
    gate_up: M::Weight, // (experts, 2 ffn, width): of each expert gate, then up; (experts, ffn, width) without gates
    gate_up_bias: Option<M::Buf>, // (experts, 2 ffn), or (experts, ffn)
    down: M::Weight,    // (experts, width, ffn)
    down_bias: Option<M::Buf>, // (experts, width)
    shared: Option<Shared<M>>,
    narrow: Option<Narrow<M>>,
    router_scales: Option<M::Buf>, // (experts)
    apart: Option<Apart<M>>,
    /// Which of the step's buffers are for such experts.
    room: usize,
    routing: Routing,
    between: Between,
    weighs_inputs: bool,
    /// What all of it is multiplied by before it is added.
    scale: f32,
}

/// The expert that every token takes.
struct Shared<M: Memory> {
    router: Option<M::Weight>, // (1, hidden)
    gate_up: M::Weight,        // (2 ffn, hidden), or (ffn, hidden)
    down: M::Weight,           // (hidden, ffn)
    /// Which of the step's buffers are as wide.
    room: usize,
}

impl<M: Memory> Shared<M> {
    fn load(
        loader: &mut Loader<'_, M>,
        between: Between,
        layer: usize,
    ) -> Result<Option<Shared<M>>, crate::Error> {
        if !loader.has(Tensor::SharedUp, layer) {
            return Ok(None);
        }
        let (role, tensors): (Role, &[Tensor]) = match between {
            Between::Gates(glu) => {
                (Role::Gates { glu, adapted: false }, &[Tensor::SharedGate, Tensor::SharedUp])
            }
            Between::Function(_) => (Role::Tokens, &[Tensor::SharedUp]),
        };
        Ok(Some(Shared {
            router: match loader.has(Tensor::SharedRouter, layer) {
                true => Some(loader.weight(&[Tensor::SharedRouter], layer)?),
                false => None,
            },
            gate_up: loader.weight_for(role, tensors, layer)?,
            down: loader.weight(&[Tensor::SharedDown], layer)?,
            room: inner_room(loader, layer),
        }))
    }
}

impl<B: Backend> Shared<B> {
    /// What its second product reads.
    fn inner<'r>(
        &self,
        backend: &B,
        step: &B::Step,
        between: Between,
        x: &B::Buf,
        room: &'r mut InnerRoom<B>,
    ) -> Result<&'r B::Buf, Error> {
        let InnerRoom { gate_up, gated } = room;
        backend.matmul(step, Rows::Tokens, &self.gate_up, x, gate_up)?;
        match between {
            Between::Gates(glu) => {
                let gated = gated.as_mut().expect("what has gates has room for what they make");
                backend.glu(step, glu, gate_up, gated)?;
                Ok(gated)
            }
            Between::Function(function) => {
                backend.pointwise(step, Rows::Tokens, function, gate_up)?;
                Ok(gate_up)
            }
        }
    }
}

/// What the chosen experts read and add up to is narrower than the residual stream.
struct Narrow<M: Memory> {
    down: M::Weight,       // (width, hidden)
    up: M::Weight,         // (hidden, width)
    nothing: Norm<M::Buf>, // (width): weights of zero, which make the zeros that experts add to
}

impl<M: Memory> Narrow<M> {
    fn load(
        loader: &mut Loader<'_, M>,
        mixture: &Mixture,
        layer: usize,
    ) -> Result<Option<Narrow<M>>, crate::Error> {
        let Some(width) = mixture.narrow else { return Ok(None) };
        if loader.config.residual_scale != 1.0 {
            return Err(crate::Error::Unsupported {
                what: "experts of another width whose sum is scaled".to_owned(),
                supported: "experts as wide as the residual stream".to_owned(),
            });
        }
        let zeros = loader.memory.upload_values(&vec![0.0; width])?;
        Ok(Some(Narrow {
            down: loader.weight(&[Tensor::ExpertsNarrow], layer)?,
            up: loader.weight(&[Tensor::ExpertsWiden], layer)?,
            nothing: Norm::rms(zeros, loader.config.norm_eps),
        }))
    }
}

/// Norms of models whose experts stand beside what every token takes: each reads and adds by norms of its own.
struct Apart<M: Memory> {
    router_norm: Norm<M::Buf>, // (hidden)
    norm: Norm<M::Buf>,        // (hidden): before the experts
    nothing: Norm<M::Buf>,     // (hidden): weights of zero, which make the zeros that experts add to
    shared_post: Norm<M::Buf>, // (hidden)
    post: Norm<M::Buf>,        // (hidden): behind the experts
    sum_post: Norm<M::Buf>,    // (hidden): behind the sum of both
}

impl<M: Memory> Apart<M> {
    fn load(loader: &mut Loader<'_, M>, layer: usize) -> Result<Option<Apart<M>>, crate::Error> {
        if !loader.has(Tensor::ExpertsPostNorm, layer) {
            return Ok(None);
        }
        let (hidden, eps) = (loader.config.hidden, loader.config.norm_eps);
        let mut own =
            |tensor| -> Result<_, crate::Error> { Ok(Norm::rms(loader.vector(&[tensor], layer)?, eps)) };
        let [norm, shared_post, post, sum_post] =
            [Tensor::ExpertsNorm, Tensor::SharedPostNorm, Tensor::ExpertsPostNorm, Tensor::MlpPostNorm]
                .map(&mut own);
        let (norm, shared_post, post, sum_post) = (norm?, shared_post?, post?, sum_post?);
        // What the router reads is divided by the root of its width.
        let width = (hidden as f32).sqrt();
        let scales = loader.values(Tensor::RouterScale, layer)?;
        let scales: Vec<f32> = scales.iter().map(|scale| scale / width).collect();
        Ok(Some(Apart {
            router_norm: Norm::rms(loader.memory.upload_values(&scales)?, eps),
            norm,
            nothing: Norm::rms(loader.memory.upload_values(&vec![0.0; hidden])?, eps),
            shared_post,
            post,
            sum_post,
        }))
    }
}

impl<M: Memory> Experts<M> {
    pub(crate) fn load(
        loader: &mut Loader<'_, M>,
        mixture: &Mixture,
        layer: usize,
    ) -> Result<Experts<M>, crate::Error> {
        let mixtures = loader.config.mixtures(loader.stage);
        if loader.config.residual_scale != 1.0 && !loader.has(Tensor::SharedUp, layer) {
            return Err(crate::Error::Unsupported {
                what: "experts whose sum is scaled, without one that every token takes".to_owned(),
                supported: "one that every token takes".to_owned(),
            });
        }
        let missing = || crate::Error::MissingTensor { tensor: format!("{:?}", Tensor::MlpNorm) };
        let between = match loader.config.gated() {
            true => Between::Gates(loader.config.glu),
            false => Between::Function(loader.config.function),
        };
        let (first, first_biases): (&[Tensor], &[Tensor]) = match between {
            Between::Gates(_) => {
                (&[Tensor::ExpertGate, Tensor::ExpertUp], &[Tensor::ExpertGateBias, Tensor::ExpertUpBias])
            }
            Between::Function(_) => (&[Tensor::ExpertUp], &[Tensor::ExpertUpBias]),
        };
        Ok(Experts {
            norm: norm(loader, Tensor::MlpNorm, None, layer)?.ok_or_else(missing)?,
            router: loader.weight(&[Tensor::Router], layer)?,
            router_bias: loader.opt_vector(&[Tensor::RouterBias], layer)?,
            correction: loader.opt_vector(&[Tensor::RouterCorrection], layer)?,
            gate_up: loader.experts(first, layer)?,
            gate_up_bias: loader.opt_experts_vector(first_biases, layer)?,
            down: loader.experts(&[Tensor::ExpertDown], layer)?,
            down_bias: loader.opt_experts_vector(&[Tensor::ExpertDownBias], layer)?,
            shared: Shared::load(loader, between, layer)?,
            narrow: Narrow::load(loader, mixture, layer)?,
            router_scales: loader.opt_vector(&[Tensor::ExpertScales], layer)?,
            apart: Apart::load(loader, layer)?,
            room: mixtures.iter().position(|other| other == mixture).expect("the layer's own are there"),
            routing: mixture.routing,
            between,
            weighs_inputs: loader.config.facts.weighs_inputs,
            scale: loader.config.residual_scale,
        })
    }
}

impl<B: Backend> Experts<B> {
    /// `residual` += feed-forward of it.
    pub(crate) fn forward(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        if let (Some(apart), Some(shared)) = (&self.apart, &self.shared) {
            return self.forward_apart(backend, step, (apart, shared), a);
        }
        let (tokens, bias) = (Rows::Tokens, self.router_bias.as_ref());
        let room = &mut a.experts[self.room];
        backend.norm(step, tokens, &self.norm, &a.residual, &mut a.branch)?;
        backend.linear(step, tokens, &self.router, bias, &a.branch, &mut room.logits)?;
        let correction = self.correction.as_ref();
        backend.route(step, &self.routing, &room.logits, correction, &mut room.chosen)?;
        let experts = self.weights();
        let together = self.shared.as_ref().zip(a.room.as_mut()).filter(|_| self.scale != 1.0);
        if let Some((shared, sum)) = together {
            // What every token takes is where the sum begins, which is scaled before it is added.
            let inner = shared.inner(backend, step, self.between, &a.branch, &mut a.inner[shared.room])?;
            backend.matmul(step, tokens, &shared.down, inner, sum)?;
            backend.experts(step, &experts, &room.chosen, &a.branch, &mut room.inner, sum)?;
            backend.pointwise(step, tokens, Pointwise::Scale(self.scale), sum)?;
            return backend.add(step, tokens, sum, &mut a.residual);
        }
        match (&self.narrow, &mut room.narrow) {
            (Some(narrow), Some(own)) => {
                backend.matmul(step, tokens, &narrow.down, &a.branch, &mut own.x)?;
                backend.norm(step, tokens, &narrow.nothing, &own.x, &mut own.sum)?;
                backend.experts(step, &experts, &room.chosen, &own.x, &mut room.inner, &mut own.sum)?;
            }
            _ => {
                backend.experts(step, &experts, &room.chosen, &a.branch, &mut room.inner, &mut a.residual)?
            }
        }
        if let Some(shared) = &self.shared {
            if let Some(router) = &shared.router {
                backend.matmul(step, tokens, router, &a.branch, &mut room.share)?;
            }
            let inner = shared.inner(backend, step, self.between, &a.branch, &mut a.inner[shared.room])?;
            backend.matmul(step, tokens, &shared.down, inner, &mut a.branch)?;
            match &shared.router {
                Some(_) => backend.add_gated(step, &room.share, &a.branch, &mut a.residual)?,
                None => backend.add(step, tokens, &a.branch, &mut a.residual)?,
            }
        }
        match (&self.narrow, &room.narrow) {
            (Some(narrow), Some(own)) => {
                backend.matmul(step, tokens, &narrow.up, &own.sum, &mut a.branch)?;
                backend.add(step, tokens, &a.branch, &mut a.residual)
            }
            _ => Ok(()),
        }
    }
}

impl<B: Backend> Experts<B> {
    fn weights(&self) -> fornax_compute::Experts<'_, B> {
        fornax_compute::Experts {
            count: self.routing.experts,
            gate_up: &self.gate_up,
            gate_up_bias: self.gate_up_bias.as_ref(),
            down: &self.down,
            down_bias: self.down_bias.as_ref(),
            between: self.between,
            weighs_inputs: self.weighs_inputs,
        }
    }

    /// The same where both have norms of their own, and their sum has one, too.
    fn forward_apart(
        &self,
        backend: &B,
        step: &B::Step,
        (apart, shared): (&Apart<B>, &Shared<B>),
        a: &mut Activations<B>,
    ) -> Result<(), Error> {
        let tokens = Rows::Tokens;
        let (Some(both), Some(sum)) = (&mut a.room, &mut a.sum) else { return Ok(()) };
        backend.norm(step, tokens, &self.norm, &a.residual, &mut a.branch)?;
        let inner = shared.inner(backend, step, self.between, &a.branch, &mut a.inner[shared.room])?;
        backend.matmul(step, tokens, &shared.down, inner, &mut a.branch)?;
        backend.norm(step, tokens, &apart.shared_post, &a.branch, both)?;

        let room = &mut a.experts[self.room];
        backend.norm(step, tokens, &apart.router_norm, &a.residual, &mut a.branch)?;
        backend.linear(step, tokens, &self.router, self.router_bias.as_ref(), &a.branch, &mut room.logits)?;
        backend.route(step, &self.routing, &room.logits, self.correction.as_ref(), &mut room.chosen)?;
        if let Some(scales) = &self.router_scales {
            backend.scale_chosen(step, scales, &mut room.chosen)?;
        }
        backend.norm(step, tokens, &apart.nothing, &a.residual, sum)?;
        backend.norm(step, tokens, &apart.norm, &a.residual, &mut a.branch)?;
        backend.experts(step, &self.weights(), &room.chosen, &a.branch, &mut room.inner, sum)?;
        backend.norm(step, tokens, &apart.post, sum, &mut a.branch)?;
        backend.add(step, tokens, &a.branch, both)?;
        backend.norm(step, tokens, &apart.sum_post, both, &mut a.branch)?;
        backend.add(step, tokens, &a.branch, &mut a.residual)
    }
}

/// What experts are computed in.
pub(crate) struct ExpertActivations<M: Memory> {
    logits: M::Buf, // (tokens, experts)
    chosen: M::Buf, // (tokens, 2 x chosen): numbers, then weights
    share: M::Buf,  // (tokens, 1): the shared expert's, where there is one
    inner: ExpertRoom<M::Buf>,
    narrow: Option<NarrowRoom<M>>,
}

/// What experts narrower than the residual stream read, and their sum.
struct NarrowRoom<M: Memory> {
    x: M::Buf,   // (tokens, width)
    sum: M::Buf, // (tokens, width)
}

impl<M: Memory> ExpertActivations<M> {
    pub(crate) fn alloc(
        memory: &M,
        config: &Config,
        mixture: &Mixture,
        limits: Limits,
    ) -> Result<Self, Error> {
        let Mixture { routing, ffn, shared_ffn, narrow } = *mixture;
        let gate_up = if config.gated() { 2 * ffn } else { 0 };
        // Numbers of experts and shares want every bit.
        let exact = |columns| memory.alloc(Purpose::Residual, limits.tokens_max, columns);
        let rows = limits.tokens_max.saturating_mul(routing.chosen);
        let room = |columns| memory.alloc(Purpose::Activations, rows, columns);
        Ok(ExpertActivations {
            logits: exact(routing.experts)?,
            chosen: exact(2 * routing.chosen)?,
            share: exact(usize::from(shared_ffn.is_some()))?,
            inner: ExpertRoom {
                rows: room(narrow.unwrap_or(config.hidden))?,
                gate_up: room(gate_up)?,
                gated: room(ffn)?,
            },
            narrow: match narrow {
                Some(width) => Some(NarrowRoom {
                    x: memory.alloc(Purpose::Activations, limits.tokens_max, width)?,
                    sum: exact(width)?,
                }),
                None => None,
            },
        })
    }
}
