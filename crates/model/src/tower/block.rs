//! One block of a tower: attention in both directions and a feed-forward around a residual stream.

use fornax_compute::{Attention, Backend, Error, Memory, Norm, QkNorm, Rope, Rows};

use super::Room;
use super::config::TowerConfig;
use super::facts::{Function, Part};
use super::layer::{Layer, Meeting};
use super::weights::{InHeads, Stack, Weights};

/// Its weights.
pub(super) struct Block<M: Memory> {
    attention_norm: Norm<M::Buf>,              // (hidden)
    qkv: Layer<M>,                             // (3 x heads x head, hidden)
    head_norms: Option<QkNorm<M::Buf>>,        // (head)
    output: Layer<M>,                          // (hidden, heads x head)
    attention_post_norm: Option<Norm<M::Buf>>, // (hidden)
    mlp_norm: Norm<M::Buf>,                    // (hidden)
    up: Layer<M>,   // (ffn, hidden), behind gates of the same size where there are some
    down: Layer<M>, // (hidden, ffn)
    mlp_post_norm: Option<Norm<M::Buf>>, // (hidden)
}

/// What all blocks of a tower have in common.
pub(super) struct Alike<M: Memory> {
    pub(super) rope: Option<Rope<M::Buf>>,
    pub(super) shape: Attention<M::Buf>,
    pub(super) function: Function,
}

impl<M: Memory> Block<M> {
    pub(super) fn load(
        weights: &mut Weights<'_, M>,
        config: &TowerConfig,
        at: usize,
    ) -> Result<Block<M>, crate::Error> {
        let TowerConfig { hidden, ffn, facts, .. } = *config;
        let mut stack =
            |parts: &[Part], rows, heads| weights.stack(Stack { parts, at, rows, columns: hidden, heads });
        let qkv = match facts.name_of(Part::Qkv) {
            Some(_) => stack(&[Part::Qkv], 3 * hidden, InHeads::Rows)?,
            None => stack(&[Part::Query, Part::Key, Part::Value], hidden, InHeads::Rows)?,
        };
        let output = stack(&[Part::AttentionOutput], hidden, InHeads::Columns)?;
        let [gate, up, down] = weights.feed_forward(at);
        let up: &[Part] = if facts.name_of(Part::Gate).is_some() { &[gate, up] } else { &[up] };
        Ok(Block {
            qkv,
            output,
            up: weights.stack(Stack {
                parts: up,
                at,
                rows: ffn,
                columns: hidden,
                heads: InHeads::Nothing,
            })?,
            down: weights.layer(down, at, hidden, ffn)?,
            attention_norm: weights.norm(facts.norm, Part::AttentionNorm, at, hidden)?,
            head_norms: weights.head_norms(at)?,
            attention_post_norm: weights.opt_norm(facts.norm, Part::AttentionPostNorm, at, hidden)?,
            mlp_norm: weights.norm(facts.norm, Part::MlpNorm, at, hidden)?,
            mlp_post_norm: weights.opt_norm(facts.norm, Part::MlpPostNorm, at, hidden)?,
        })
    }
}

impl<B: Backend> Block<B> {
    /// `residual` += the block of it.
    pub(super) fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        alike: &Alike<B>,
        kv: &mut B::Kv,
        r: &mut Room<B>,
    ) -> Result<(), Error> {
        let (Alike { rope, shape, function }, tokens) = (alike, Rows::Tokens);
        let Room { residual, branch, room, qkv, attended, inner, gated, .. } = r;
        backend.norm(step, tokens, &self.attention_norm, residual, branch)?;
        self.qkv.forward(backend, step, branch, qkv)?;
        if let Some(norms) = &self.head_norms {
            backend.qk_norm(step, shape.heads, norms, qkv)?;
        }
        backend.attend(step, shape, rope.as_ref(), qkv, kv, attended)?;
        let meeting = Meeting { norm: self.attention_post_norm.as_ref(), branch, room, residual };
        self.output.join(backend, step, attended, meeting)?;
        backend.norm(step, tokens, &self.mlp_norm, residual, branch)?;
        self.up.forward(backend, step, branch, inner)?;
        let inner = match (function, gated) {
            (Function::Gated(kind), Some(gated)) => {
                backend.glu(step, *kind, inner, gated)?;
                gated
            }
            (Function::Plain(function), _) => {
                backend.pointwise(step, tokens, *function, inner)?;
                inner
            }
            (Function::Gated(_), None) => unreachable!("gates have room"),
        };
        let meeting = Meeting { norm: self.mlp_post_norm.as_ref(), branch, room, residual };
        self.down.join(backend, step, inner, meeting)
    }
}
