//! A layer of the selective scan of Mamba-1: values go through a short convolution, say how long a step is and what is written
//! and read, and each channel's column of one matrix takes them in. What is read is gated.

use fornax_compute::{
    Backend, ChannelInputs, ChannelScan, ConvForm, Error, GateOrder, GatedNorm, Linear, Memory, Norm, Rows,
    ShortConv, conv_values,
};

use crate::decoder::{Activations, branch_off, norm};
use crate::join::{Join, Meeting};
use crate::loader::{Changes, Loader};
use crate::names::Tensor;
use crate::recurrent::{InputRoom, StateRoom, StepRoom, state_room};
use crate::{ChannelScanConfig, StepNorms};

pub(crate) struct ByChannel<M: Memory> {
    norm: Option<Norm<M::Buf>>, // (hidden)
    mixed: M::Weight,           // (channels, gates) x (hidden), stacked by rows
    conv: ShortConv<M::Buf>,
    inputs: [Input<M>; 3], // what steps are made of, keys, queries
    steps: M::Weight,      // (channels, rank)
    scan: ChannelScan<M::Buf>,
    gated: GatedNorm<M::Buf>,
    output: M::Weight, // (hidden, channels)
    output_changes: Changes<M>,
    /// Which of the step's buffers are as wide.
    room: usize,
    join: Join<M>,
}

/// One of those that are made of what was convolved.
struct Input<M: Memory> {
    weight: M::Weight, // (rank, channels), or (state, channels)
    norm: Option<Norm<M::Buf>>,
}

impl<M: Memory> Input<M> {
    fn load(
        loader: &mut Loader<'_, M>,
        (weight, own_norm): (Tensor, Tensor),
        norms: StepNorms,
        (layer, columns): (usize, usize),
    ) -> Result<Input<M>, crate::Error> {
        Ok(Input {
            weight: loader.weight(&[weight], layer)?,
            norm: match norms {
                StepNorms::None => None,
                StepNorms::Weighted => norm(loader, own_norm, None, layer)?,
                StepNorms::Plain { eps } => {
                    let ones = loader.memory.upload_values(&vec![1.0; columns])?;
                    Some(Norm::rms(ones, eps.unwrap_or(loader.config.norm_eps)))
                }
            },
        })
    }
}

impl<B: Backend> Input<B> {
    /// It, of what was convolved.
    fn read<'r>(
        &self,
        backend: &B,
        step: &B::Step,
        convolved: &B::Buf,
        room: &'r mut InputRoom<B>,
    ) -> Result<&'r B::Buf, Error> {
        let InputRoom { raw, normed } = room;
        backend.matmul(step, Rows::Tokens, &self.weight, convolved, raw)?;
        let Some(norm) = &self.norm else { return Ok(raw) };
        backend.norm(step, Rows::Tokens, norm, raw, normed)?;
        Ok(normed)
    }
}

impl<M: Memory> ByChannel<M> {
    pub(crate) fn load(
        loader: &mut Loader<'_, M>,
        layer: usize,
        scan: &ChannelScanConfig,
    ) -> Result<ByChannel<M>, crate::Error> {
        let ChannelScanConfig { channels, state, rank, taps, norms, .. } = *scan;
        let at = loader.config.stage_state_layer(loader.stage, layer);
        Ok(ByChannel {
            norm: norm(loader, Tensor::AttentionNorm, None, layer)?,
            mixed: loader.weight(&[Tensor::ScanChannels, Tensor::ScanGate], layer)?,
            conv: ShortConv {
                layer: at,
                channels,
                taps,
                weight: loader.taps(Tensor::Conv, layer)?,
                bias: loader.opt_vector(&[Tensor::ConvBias], layer)?,
                form: ConvForm::Silu,
            },
            inputs: [
                Input::load(loader, (Tensor::StepIn, Tensor::StepNorm), norms, (layer, rank))?,
                Input::load(loader, (Tensor::ScanKeys, Tensor::ScanKeyNorm), norms, (layer, state))?,
                Input::load(loader, (Tensor::ScanQueries, Tensor::ScanQueryNorm), norms, (layer, state))?,
            ],
            steps: loader.weight(&[Tensor::StepOut], layer)?,
            scan: ChannelScan {
                layer: at,
                channels,
                state,
                before: conv_values(channels, taps),
                rates: loader.rates(Tensor::StateRates, layer)?,
                bias: loader.vector(&[Tensor::StateBias], layer)?,
                skip: loader.vector(&[Tensor::StateSkip], layer)?,
            },
            gated: GatedNorm { norm: None, group: channels, column: channels, order: GateOrder::GatesFirst },
            output: loader.weight(&[Tensor::StateOutput], layer)?,
            output_changes: loader.changes(&[Tensor::StateOutput], layer)?,
            room: state_room(loader, layer),
            join: Join::load(loader, Tensor::AttentionPostNorm, layer)?,
        })
    }
}

impl<B: Backend> ByChannel<B> {
    /// What adapters change of it.
    pub(crate) fn changes(&mut self) -> &mut Changes<B> {
        &mut self.output_changes
    }

    /// `residual` += what the matrix says of it.
    pub(crate) fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        kv: &mut B::Kv,
        a: &mut Activations<B>,
    ) -> Result<(), Error> {
        let x = branch_off(backend, step, self.norm.as_ref(), &a.residual, &mut a.branch)?;
        let StateRoom { mixed, convolved, read, steps } = &mut a.states[self.room];
        let read = read.as_mut().expect("allocated for such layers");
        let StepRoom { inputs, steps } = steps.as_mut().expect("allocated for such layers");
        backend.linear(step, Rows::Tokens, &self.mixed, None, x, mixed)?;
        backend.short_conv(step, &self.conv, mixed, kv, convolved)?;
        let [of_steps, of_keys, of_queries] = &self.inputs;
        let [for_steps, for_keys, for_queries] = inputs;
        let narrow = of_steps.read(backend, step, convolved, for_steps)?;
        backend.linear(step, Rows::Tokens, &self.steps, None, narrow, steps)?;
        let inputs = ChannelInputs {
            x: convolved,
            keys: of_keys.read(backend, step, convolved, for_keys)?,
            queries: of_queries.read(backend, step, convolved, for_queries)?,
        };
        backend.channel_scan(step, &self.scan, &inputs, steps, kv, read)?;
        backend.gated_norm(step, &self.gated, mixed, read)?;
        let output = Linear { weight: &self.output, bias: None };
        let meeting = Meeting { branch: &mut a.branch, room: &mut a.room, residual: &mut a.residual };
        self.join.linear(backend, step, output, &self.output_changes, read, meeting)
    }
}
