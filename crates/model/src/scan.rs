//! A layer of the selective scan of Mamba-2: values, keys and queries go through a short convolution, a matrix of each head
//! takes them in, and what it says is gated and normalised.

use fornax_compute::{
    Backend, ConvForm, Error, GatedNorm, Linear, Memory, Norm, NormKind, Rows, SelectiveScan, ShortConv,
    conv_values,
};

use crate::ScanConfig;
use crate::config::ScanScales;
use crate::decoder::{Activations, branch_off, norm};
use crate::join::{Join, Meeting};
use crate::loader::{Changes, Loader};
use crate::names::Tensor;
use crate::recurrent::{StateRoom, state_room};

pub(crate) struct Scan<M: Memory> {
    norm: Option<Norm<M::Buf>>, // (hidden); attention's own where both are side by side
    mixed: M::Weight,           // (values, keys, queries, gates, steps) x (hidden), stacked by rows
    factors: Option<M::Buf>,    // (values, keys, queries, gates, steps): what they are multiplied by
    conv: ShortConv<M::Buf>,
    scan: SelectiveScan<M::Buf>,
    gated: GatedNorm<M::Buf>,
    output: M::Weight, // (hidden, values)
    output_changes: Changes<M>,
    /// Which of the step's buffers are as wide.
    room: usize,
    join: Join<M>,
}

/// What reads the residual stream, in the order of its rows.
const MIXED: &[Tensor] = &[Tensor::ScanChannels, Tensor::ScanGate, Tensor::ScanStep];

impl<M: Memory> Scan<M> {
    pub(crate) fn load(
        loader: &mut Loader<'_, M>,
        layer: usize,
        scan: &ScanConfig,
    ) -> Result<Scan<M>, crate::Error> {
        let ScanConfig { heads, taps, gates, .. } = *scan;
        let state = loader.config.stage_state_layer(loader.stage, layer);
        let channels = heads.columns();
        Ok(Scan {
            norm: match loader.config.layers[layer].attention() {
                Some(_) => None,
                None => norm(loader, Tensor::AttentionNorm, None, layer)?,
            },
            mixed: loader.weight(MIXED, layer)?,
            factors: match loader.config.scales.scan_inputs {
                ScanScales::ONES => None,
                scales => Some(loader.memory.upload_values(&scales.columns(heads))?),
            },
            conv: ShortConv {
                layer: state,
                channels,
                taps,
                weight: loader.taps(Tensor::Conv, layer)?,
                bias: loader.opt_vector(&[Tensor::ConvBias], layer)?,
                form: ConvForm::Silu,
            },
            scan: SelectiveScan {
                layer: state,
                heads,
                before: conv_values(channels, taps),
                rate: loader.vector(&[Tensor::StateRate], layer)?,
                bias: loader.vector(&[Tensor::StateBias], layer)?,
                skip: loader.vector(&[Tensor::StateSkip], layer)?,
            },
            gated: GatedNorm {
                norm: loader.opt_vector(&[Tensor::StateNorm], layer)?.map(|weight| Norm {
                    kind: NormKind::Rms,
                    weight,
                    bias: None,
                    eps: loader.config.norm_eps,
                }),
                group: scan.values() / heads.groups,
                column: channels,
                order: gates,
            },
            output: loader.weight(&[Tensor::StateOutput], layer)?,
            output_changes: loader.changes(&[Tensor::StateOutput], layer)?,
            room: state_room(loader, layer),
            join: Join::load(loader, Tensor::AttentionPostNorm, layer)?.times(loader.config.scales.scan),
        })
    }
}

impl<B: Backend> Scan<B> {
    /// What adapters change of it.
    pub(crate) fn changes(&mut self) -> &mut Changes<B> {
        &mut self.output_changes
    }

    /// `residual` += what the matrices say of it.
    pub(crate) fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        kv: &mut B::Kv,
        a: &mut Activations<B>,
    ) -> Result<(), Error> {
        self.look(backend, step, self.norm.as_ref(), kv, a)?;
        self.join(backend, step, a)
    }

    /// What the matrices say of the norm, kept beside the residual stream.
    pub(crate) fn look(
        &self,
        backend: &B,
        step: &B::Step,
        norm: Option<&Norm<B::Buf>>,
        kv: &mut B::Kv,
        a: &mut Activations<B>,
    ) -> Result<(), Error> {
        let x = branch_off(backend, step, norm, &a.residual, &mut a.branch)?;
        let StateRoom { mixed, convolved, read, .. } = &mut a.states[self.room];
        let read = read.as_mut().expect("allocated for such layers");
        backend.linear(step, Rows::Tokens, &self.mixed, None, x, mixed)?;
        if let Some(factors) = &self.factors {
            backend.scale_columns(step, factors, mixed)?;
        }
        backend.short_conv(step, &self.conv, mixed, kv, convolved)?;
        backend.selective_scan(step, &self.scan, convolved, mixed, kv, read)?;
        backend.gated_norm(step, &self.gated, mixed, read)
    }

    /// `residual` += what was kept.
    pub(crate) fn join(&self, backend: &B, step: &B::Step, a: &mut Activations<B>) -> Result<(), Error> {
        let read = a.states[self.room].read.as_ref().expect("allocated for such layers");
        let output = Linear { weight: &self.output, bias: None };
        let meeting = Meeting { branch: &mut a.branch, room: &mut a.room, residual: &mut a.residual };
        self.join.linear(backend, step, output, &self.output_changes, read, meeting)
    }
}
