//! Self-attention with grouped key/value heads, rotary positions and paged keys and values.

use fornax_compute::{Backend, Error, Heads, Linear, Memory, Norm, QkNorm, Rope, Rows, Temperature};

use crate::decoder::{Activations, AttentionRoom, branch_off, norm};
use crate::facts::LookAhead;
use crate::join::{Join, Meeting};
use crate::loader::{Changes, Loader};
use crate::names::Tensor;
use crate::{AttentionConfig, Rotary};

pub(crate) struct Attention<M: Memory> {
    norm: Option<Norm<M::Buf>>,      // (hidden)
    qkv: M::Weight,                  // (query + 2 kv heads, head size) x (hidden): Q, K and V stacked by rows
    qkv_bias: Option<M::Buf>,        // (query + 2 kv heads, head size)
    qk_norm: Option<QkNorm<M::Buf>>, // (head size), or (query heads x head size) and (kv heads x head size)
    qkv_changes: Changes<M>,
    gate: Option<M::Weight>, // (query heads x head size) x (hidden)
    gate_changes: Changes<M>,
    output: M::Weight, // (hidden, query heads x head size)
    output_changes: Changes<M>,
    output_bias: Option<M::Buf>, // (hidden)
    /// Whether queries and keys are normalised after they are rotated.
    norms_rotated: bool,
    /// Whether the feed-forward reads what this reads, and has no norm of its own.
    shares_input: bool,
    shape: fornax_compute::Attention<M::Buf>,
    /// What its rows hold: those heads, or the queries alone where another layer's keys are read.
    own_heads: Heads,
    /// How its queries grow with their positions.
    temperature: Option<Temperature>,
    /// Which of the step's buffers are as wide as these heads.
    room: usize,
    join: Join<M>,
}

impl<M: Memory> Attention<M> {
    pub(crate) fn load(loader: &mut Loader<'_, M>, layer: usize) -> Result<Attention<M>, crate::Error> {
        let config = loader.config;
        let attention = *config.layers[layer].attention().expect("asked of layers that attend");
        let AttentionConfig { heads, rotary, keys_of, keys_are_values, .. } = attention;
        check_keys(loader, layer)?;
        let (weights, biases): (&[Tensor], &[Tensor]) = if keys_of.is_some() {
            (&[Tensor::Query], &[Tensor::QueryBias])
        } else if loader.has(Tensor::Qkv, layer) {
            (&[Tensor::Qkv], &[Tensor::QkvBias])
        } else if keys_are_values {
            (
                &[Tensor::Query, Tensor::Key, Tensor::Key],
                &[Tensor::QueryBias, Tensor::KeyBias, Tensor::KeyBias],
            )
        } else {
            (
                &[Tensor::Query, Tensor::Key, Tensor::Value],
                &[Tensor::QueryBias, Tensor::KeyBias, Tensor::ValueBias],
            )
        };
        let shape = fornax_compute::Attention {
            heads,
            layer: config.stage_kv_layer(loader.stage, layer),
            scale: config.attention_scale,
            soft_cap: config.attention_cap,
            sinks: loader.opt_vector(&[Tensor::Sinks], layer)?,
            causal: config.pooling.is_none(),
            ahead: match config.looks_ahead {
                LookAhead::Never => false,
                LookAhead::Everywhere => true,
                LookAhead::InWindows => attention.window.is_some(),
            },
            reach: attention.reach,
            chunk: attention.chunk,
        };
        let norms_rotated = config.facts.norms_rotated;
        let rotates = config.rope.dims > 0 && rotary != Rotary::None;
        // Queries beside another layer's keys are rotated on their own.
        loader.memory.foresee(&shape, rotates && !norms_rotated && keys_of.is_none());
        let of_ones = |loader: &Loader<'_, M>| -> Result<_, crate::Error> {
            let weight = loader.memory.upload_values(&vec![1.0; heads.dim])?;
            Ok(Norm { kind: config.facts.norm, weight, bias: None, eps: config.norm_eps })
        };
        let unit = config.facts.unit_norms && config.qk_norm && rotary != Rotary::None;
        let query_norm = match unit {
            true => Some(of_ones(loader)?),
            false => norm(loader, Tensor::QueryNorm, None, layer)?,
        };
        let value_norm = match &query_norm {
            Some(query) if config.facts.norms_values && keys_of.is_none() => {
                let weight = loader.memory.upload_values(&vec![1.0; heads.dim])?;
                Some(Norm { kind: query.kind, weight, bias: None, eps: query.eps })
            }
            _ => None,
        };
        let key_norm = match &query_norm {
            // There are no keys that it would be applied to.
            Some(query) if keys_of.is_some() => {
                let weight = loader.memory.upload_values(&vec![1.0; heads.dim])?;
                Some(Norm { kind: query.kind, weight, bias: None, eps: query.eps })
            }
            Some(_) if unit => Some(of_ones(loader)?),
            _ => norm(loader, Tensor::KeyNorm, None, layer)?,
        };
        Ok(Attention {
            norm: norm(loader, Tensor::AttentionNorm, Some(Tensor::AttentionNormBias), layer)?,
            qkv: loader.weight(weights, layer)?,
            qkv_bias: loader.opt_vector(biases, layer)?,
            qkv_changes: loader.changes(weights, layer)?,
            gate: match loader.has(Tensor::AttentionGate, layer) {
                true => Some(loader.weight(&[Tensor::AttentionGate], layer)?),
                false => None,
            },
            gate_changes: loader.changes(&[Tensor::AttentionGate], layer)?,
            qk_norm: match (query_norm, key_norm) {
                (Some(query), Some(key)) => Some(QkNorm { query, key, value: value_norm }),
                _ => None,
            },
            output: loader.weight(&[Tensor::AttentionOutput], layer)?,
            output_changes: loader.changes(&[Tensor::AttentionOutput], layer)?,
            output_bias: loader.opt_vector(&[Tensor::AttentionOutputBias], layer)?,
            norms_rotated,
            shares_input: config.parallel && !config.facts.has(Tensor::MlpNorm),
            shape,
            own_heads: attention.own_heads(),
            temperature: config.temperature.filter(|_| config.facts.grows(rotary)),
            room: config
                .heads(loader.stage)
                .iter()
                .position(|other| *other == attention.own_heads())
                .expect("the layer's own are there"),
            join: Join::load(loader, Tensor::AttentionPostNorm, layer)?.times(config.scales.attention),
        })
    }
}

/// Refuses a layer that reads keys which it cannot: of a layer behind it, of another stage, of other heads.
fn check_keys<M: Memory>(loader: &Loader<'_, M>, layer: usize) -> Result<(), crate::Error> {
    let layers = &loader.config.layers;
    let Some(from) = loader.config.keys_of(layer) else { return Ok(()) };
    let own = layers[layer].attention().map(|own| (own.heads.kv, own.heads.dim, own.window));
    let there = layers.get(from).and_then(|layer| layer.attention());
    let there = there.filter(|there| there.keys_of.is_none());
    if from < layer
        && loader.stage.layers.contains(&from)
        && own == there.map(|there| (there.heads.kv, there.heads.dim, there.window))
    {
        return Ok(());
    }
    Err(crate::Error::Unsupported {
        what: format!("layer {layer} with the keys of layer {from}"),
        supported: "keys of an earlier layer on the same device, of the same heads and window".to_owned(),
    })
}

impl<B: Backend> Attention<B> {
    /// What adapters change of it.
    pub(crate) fn changes(&mut self) -> [&mut Changes<B>; 3] {
        [&mut self.qkv_changes, &mut self.gate_changes, &mut self.output_changes]
    }

    /// The norm of what it reads.
    pub(crate) fn norm(&self) -> Option<&Norm<B::Buf>> {
        self.norm.as_ref()
    }

    /// `residual` += attention of it.
    pub(crate) fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        rope: Option<&Rope<B::Buf>>,
        kv: &mut B::Kv,
        a: &mut Activations<B>,
    ) -> Result<(), Error> {
        let to = match &mut a.beside {
            Some(beside) if self.shares_input => beside,
            _ => &mut a.branch,
        };
        let x = branch_off(backend, step, self.norm.as_ref(), &a.residual, to)?;
        let AttentionRoom { qkv, attended, gate } = &mut a.attention[self.room];
        backend.linear(step, Rows::Tokens, &self.qkv, self.qkv_bias.as_ref(), x, qkv)?;
        if !self.qkv_changes.is_empty() {
            backend.low_rank(step, &self.qkv_changes, x, qkv)?;
        }
        if let Some((weight, gate)) = self.gate.as_ref().zip(gate.as_mut()) {
            backend.linear(step, Rows::Tokens, weight, None, x, gate)?;
            if !self.gate_changes.is_empty() {
                backend.low_rank(step, &self.gate_changes, x, gate)?;
            }
        }
        let rope = match (&self.qk_norm, rope) {
            (Some(norm), Some(rope)) if self.norms_rotated => {
                backend.rope(step, self.own_heads, rope, qkv)?;
                backend.qk_norm(step, self.own_heads, norm, qkv)?;
                None
            }
            (Some(norm), rope) => {
                backend.qk_norm(step, self.own_heads, norm, qkv)?;
                rope
            }
            (None, rope) => rope,
        };
        if let Some(temperature) = self.temperature {
            // Before they are rotated or after it: rotation changes no lengths.
            let queries = self.own_heads.query * self.own_heads.dim;
            backend.scale_by_position(step, temperature, queries, qkv)?;
        }
        if self.own_heads == self.shape.heads {
            backend.attend(step, &self.shape, rope, qkv, kv, attended)?;
        } else {
            if let Some(rope) = rope {
                backend.rope(step, self.own_heads, rope, qkv)?;
            }
            backend.attention(step, &self.shape, qkv, kv, attended)?;
        }
        if let Some((_, gate)) = self.gate.as_ref().zip(gate.as_ref()) {
            backend.sigmoid_gate(step, gate, attended)?;
        }
        let output = Linear { weight: &self.output, bias: self.output_bias.as_ref() };
        let meeting = Meeting { branch: &mut a.branch, room: &mut a.room, residual: &mut a.residual };
        self.join.linear(backend, step, output, &self.output_changes, attended, meeting)
    }
}
