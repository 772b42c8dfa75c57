//! A layer of a gated short convolution: of three parts of a product one gates what is convolved, one what comes of it.

use fornax_compute::{Backend, ConvForm, Error, Linear, Memory, Norm, Rows, ShortConv};

use crate::ConvConfig;
use crate::decoder::{Activations, branch_off, norm};
use crate::join::{Join, Meeting};
use crate::loader::{Changes, Loader};
use crate::names::Tensor;
use crate::recurrent::{StateRoom, state_room};

pub(crate) struct Convolution<M: Memory> {
    norm: Option<Norm<M::Buf>>, // (hidden)
    mixed: M::Weight,           // (3 channels, hidden): the gates before, the gates behind, what is convolved
    mixed_changes: Changes<M>,
    conv: ShortConv<M::Buf>,
    output: M::Weight, // (hidden, channels)
    output_changes: Changes<M>,
    /// Which of the step's buffers are as wide.
    room: usize,
    join: Join<M>,
}

impl<M: Memory> Convolution<M> {
    pub(crate) fn load(
        loader: &mut Loader<'_, M>,
        layer: usize,
        conv: &ConvConfig,
    ) -> Result<Convolution<M>, crate::Error> {
        Ok(Convolution {
            norm: norm(loader, Tensor::AttentionNorm, None, layer)?,
            mixed: loader.weight(&[Tensor::ConvMixed], layer)?,
            mixed_changes: loader.changes(&[Tensor::ConvMixed], layer)?,
            conv: ShortConv {
                layer: loader.config.stage_state_layer(loader.stage, layer),
                channels: conv.channels,
                taps: conv.taps,
                weight: loader.taps(Tensor::Conv, layer)?,
                bias: None,
                form: ConvForm::Gated,
            },
            output: loader.weight(&[Tensor::ConvOutput], layer)?,
            output_changes: loader.changes(&[Tensor::ConvOutput], layer)?,
            room: state_room(loader, layer),
            join: Join::load(loader, Tensor::AttentionPostNorm, layer)?,
        })
    }
}

impl<B: Backend> Convolution<B> {
    /// What adapters change of it.
    pub(crate) fn changes(&mut self) -> [&mut Changes<B>; 2] {
        [&mut self.mixed_changes, &mut self.output_changes]
    }

    /// `residual` += its convolution.
    pub(crate) fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        kv: &mut B::Kv,
        a: &mut Activations<B>,
    ) -> Result<(), Error> {
        let x = branch_off(backend, step, self.norm.as_ref(), &a.residual, &mut a.branch)?;
        let StateRoom { mixed, convolved, .. } = &mut a.states[self.room];
        backend.linear(step, Rows::Tokens, &self.mixed, None, x, mixed)?;
        if !self.mixed_changes.is_empty() {
            backend.low_rank(step, &self.mixed_changes, x, mixed)?;
        }
        backend.short_conv(step, &self.conv, mixed, kv, convolved)?;
        let output = Linear { weight: &self.output, bias: None };
        let meeting = Meeting { branch: &mut a.branch, room: &mut a.room, residual: &mut a.residual };
        self.join.linear(backend, step, output, &self.output_changes, convolved, meeting)
    }
}
