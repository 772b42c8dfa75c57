//! A layer of the gated delta rule: queries, keys and values go through a short convolution, a matrix of each value head
//! learns from them, and what it says is normalised with gates.

use fornax_compute::{
    Backend, ConvForm, DeltaRule, Error, GateOrder, GatedNorm, Linear, Memory, Norm, NormKind, Rows,
    ShortConv, conv_values,
};

use crate::DeltaConfig;
use crate::decoder::{Activations, branch_off, norm};
use crate::join::{Join, Meeting};
use crate::loader::{Changes, Loader};
use crate::names::Tensor;
use crate::recurrent::{StateRoom, state_room};

pub(crate) struct DeltaNet<M: Memory> {
    norm: Option<Norm<M::Buf>>, // (hidden)
    mixed: M::Weight,           // (queries, keys, values, gates, betas, decays) x (hidden), stacked by rows
    mixed_changes: Changes<M>,
    conv: ShortConv<M::Buf>,
    rule: DeltaRule<M::Buf>,
    gated: GatedNorm<M::Buf>,
    output: M::Weight, // (hidden, value heads x their size)
    output_changes: Changes<M>,
    /// Which of the step's buffers are as wide.
    room: usize,
    join: Join<M>,
}

/// What reads the residual stream, in the order of its rows.
const MIXED: &[Tensor] = &[Tensor::DeltaQkv, Tensor::DeltaGate, Tensor::DeltaBeta, Tensor::DeltaDecay];

impl<M: Memory> DeltaNet<M> {
    pub(crate) fn load(
        loader: &mut Loader<'_, M>,
        layer: usize,
        delta: &DeltaConfig,
    ) -> Result<DeltaNet<M>, crate::Error> {
        let DeltaConfig { heads, taps } = *delta;
        let state = loader.config.stage_state_layer(loader.stage, layer);
        let channels = heads.columns();
        Ok(DeltaNet {
            norm: norm(loader, Tensor::AttentionNorm, None, layer)?,
            mixed: loader.weight(MIXED, layer)?,
            mixed_changes: loader.changes(MIXED, layer)?,
            conv: ShortConv {
                layer: state,
                channels,
                taps,
                weight: loader.taps(Tensor::Conv, layer)?,
                bias: None,
                form: ConvForm::Silu,
            },
            rule: DeltaRule {
                layer: state,
                heads,
                before: conv_values(channels, taps),
                rate: loader.vector(&[Tensor::StateRate], layer)?,
                bias: loader.vector(&[Tensor::StateBias], layer)?,
            },
            gated: GatedNorm {
                norm: Some(Norm {
                    kind: NormKind::Rms,
                    weight: loader.vector(&[Tensor::StateNorm], layer)?,
                    bias: None,
                    eps: loader.config.norm_eps,
                }),
                group: heads.dim_v,
                column: channels,
                order: GateOrder::NormFirst,
            },
            output: loader.weight(&[Tensor::StateOutput], layer)?,
            output_changes: loader.changes(&[Tensor::StateOutput], layer)?,
            room: state_room(loader, layer),
            join: Join::load(loader, Tensor::AttentionPostNorm, layer)?,
        })
    }
}

impl<B: Backend> DeltaNet<B> {
    /// What adapters change of it.
    pub(crate) fn changes(&mut self) -> [&mut Changes<B>; 2] {
        [&mut self.mixed_changes, &mut self.output_changes]
    }

    /// `residual` += what the matrices say of it.
    pub(crate) fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        kv: &mut B::Kv,
        a: &mut Activations<B>,
    ) -> Result<(), Error> {
        let x = branch_off(backend, step, self.norm.as_ref(), &a.residual, &mut a.branch)?;
        let StateRoom { mixed, convolved, read, .. } = &mut a.states[self.room];
        let read = read.as_mut().expect("allocated for such layers");
        backend.linear(step, Rows::Tokens, &self.mixed, None, x, mixed)?;
        if !self.mixed_changes.is_empty() {
            backend.low_rank(step, &self.mixed_changes, x, mixed)?;
        }
        backend.short_conv(step, &self.conv, mixed, kv, convolved)?;
        backend.delta_rule(step, &self.rule, convolved, mixed, kv, read)?;
        backend.gated_norm(step, &self.gated, mixed, read)?;
        let output = Linear { weight: &self.output, bias: None };
        let meeting = Meeting { branch: &mut a.branch, room: &mut a.room, residual: &mut a.residual };
        self.join.linear(backend, step, output, &self.output_changes, read, meeting)
    }
}
