//! What goes through a sequence token by token and keeps a state of it.

use fornax_compute::{
    ChannelInputs, ChannelScan, ConvForm, DeltaRule, Error, GateOrder, GatedNorm, KeySharing, KvLayer,
    NormKind, Rows, STATE_LANES, SelectiveScan, ShortConv, TAPS_MAX, operands,
};

use super::gemv::Call;
use super::rows::DeviceNorm;
use crate::abi::{Constant, Layout, layout};
use crate::cuda::{Check, Cuda};
use crate::driver::Arg;
use crate::grid::Grid;
use crate::memory::{Buf, Kv, int};
use crate::program::Key;
use crate::step::Slot;

/// Threads of a block of `short_conv`, and tokens of one.
const CONV_THREADS: usize = 128;
const CONV_TOKENS: usize = 32;
/// Columns of a block of `delta_rule`, its threads, lanes that share a column, and floats of a token in shared memory
/// beside its keys and queries.
const DELTA_COLUMNS: usize = 32;
const DELTA_THREADS: usize = 160;
const DELTA_PARTS: usize = 16;
const TOKEN_REST: usize = DELTA_COLUMNS + 4;
/// Tokens that a block of `delta_rule` has in shared memory at once, while it brings as many more.
const DELTA_TOKENS: usize = 16;
/// The kernels by the rows of a matrix that a lane has.
const DELTA_KERNELS: [(usize, &str); 5] = [
    (1, "delta_rule_1"),
    (2, "delta_rule_2"),
    (4, "delta_rule_4"),
    (8, "delta_rule_8"),
    (16, "delta_rule_16"),
];
/// The same of `selective_scan`, whose blocks are as large.
const SCAN_KERNELS: [(usize, &str); 5] = [
    (1, "selective_scan_1"),
    (2, "selective_scan_2"),
    (4, "selective_scan_4"),
    (8, "selective_scan_8"),
    (16, "selective_scan_16"),
];
/// Threads of a block of `channel_scan`, each with a channel; and the kernels by the most rows of the matrix.
const CHANNEL_THREADS: usize = 128;
const CHANNEL_KERNELS: [(usize, &str); 2] = [(16, "channel_scan_16"), (32, "channel_scan_32")];
/// Warps of a block of `gated_norm`, each with a group of values.
const NORM_WARPS: usize = 4;
/// Values from which on a group has a block of its own, whose threads have about so many each.
const WIDE_GROUP: usize = 512;
const GROUP_EACH: usize = 8;

/// `States` of recurrence.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct DeviceStates {
    values: u64,
    each: i32,
    at: i32,
    rows: i32,
    pad: i32,
}

/// `ShortConv` of recurrence.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct DeviceConv {
    states: DeviceStates,
    x: u64,
    weight: u64,
    bias: u64,
    out: u64,
    channels: i32,
    taps: i32,
    columns: i32,
    gated: i32,
}

/// `DeltaRule` of recurrence.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct DeviceDelta {
    states: DeviceStates,
    qkv: u64,
    mixed: u64,
    rate: u64,
    bias: u64,
    out: u64,
    key: i32,
    value: i32,
    dim_k: i32,
    dim_v: i32,
    turns: i32,
    before: i32,
    mixed_columns: i32,
    chunk: i32,
}

/// `SelectiveScan` of recurrence.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct DeviceScan {
    states: DeviceStates,
    x: u64,
    mixed: u64,
    rate: u64,
    bias: u64,
    skip: u64,
    out: u64,
    heads: i32,
    groups: i32,
    dim: i32,
    state: i32,
    before: i32,
    mixed_columns: i32,
    chunk: i32,
    pad: i32,
}

/// `ChannelScan` of recurrence.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct DeviceChannels {
    states: DeviceStates,
    x: u64,
    keys: u64,
    queries: u64,
    steps: u64,
    rates: u64,
    bias: u64,
    skip: u64,
    out: u64,
    channels: i32,
    state: i32,
    before: i32,
    pad: i32,
}

pub(super) const LAYOUTS: &[Layout] = &[
    layout!(DeviceStates, "States" in "recurrence.cu", { values, each, at, rows, pad }),
    layout!(DeviceConv, "ShortConv" in "recurrence.cu", { states, x, weight, bias, out, channels, taps, columns, gated }),
    layout!(DeviceDelta, "DeltaRule" in "recurrence.cu", {
        states, qkv, mixed, rate, bias, out, key, value, dim_k, dim_v, turns, before, mixed_columns, chunk,
    }),
    layout!(DeviceScan, "SelectiveScan" in "recurrence.cu", {
        states, x, mixed, rate, bias, skip, out, heads, groups, dim, state, before, mixed_columns, chunk, pad,
    }),
    layout!(DeviceChannels, "ChannelScan" in "recurrence.cu", {
        states, x, keys, queries, steps, rates, bias, skip, out, channels, state, before, pad,
    }),
];
pub(super) const CONSTANTS: &[Constant] = &[
    Constant::new("recurrence.cu", "TAPS_MAX", TAPS_MAX),
    Constant::new("recurrence.cu", "TOKENS_EACH", CONV_TOKENS),
    Constant::new("recurrence.cu", "STATE_LANES", STATE_LANES),
    Constant::new("recurrence.cu", "COLUMNS", DELTA_COLUMNS),
    Constant::new("recurrence.cu", "DELTA_THREADS", DELTA_THREADS),
    Constant::new("recurrence.cu", "PARTS", DELTA_PARTS),
    Constant::new("recurrence.cu", "TOKEN_REST", TOKEN_REST),
];

/// What layers with states launch; it depends on no model.
pub(crate) fn program() -> Key {
    Key::plain("recurrence.cu")
}

/// The rows of a matrix of so many that a lane has, and the kernel's name among these, if there is one.
fn by_rows(kernels: [(usize, &'static str); 5], matrix_rows: usize) -> Option<(usize, &'static str)> {
    kernels.into_iter().find(|(rows, _)| rows * DELTA_PARTS >= matrix_rows)
}

/// Tokens that are in shared memory at once, and how many times.
fn stages(tokens: usize) -> (usize, usize) {
    // Where a row has more tokens, the next ones come while these are computed.
    if tokens <= DELTA_TOKENS { (tokens.max(1), 1) } else { (DELTA_TOKENS, 2) }
}

/// Bytes of `stages` times this many tokens in shared memory.
fn delta_bytes(rows: usize, tokens: usize, stages: usize) -> usize {
    stages * tokens * (2 * DELTA_PARTS * rows + TOKEN_REST) * size_of::<f32>()
}

impl Cuda {
    pub(crate) fn op_short_conv(
        &self,
        slot: &Slot,
        conv: &ShortConv<Buf>,
        x: &Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        operands::short_conv(slot.tokens, conv, x, kv.group(conv.layer), out)?;
        let states = self.states(slot, conv.layer, kv)?;
        self.op(slot, &[x], &[&*out], || {
            let device_conv = DeviceConv {
                states,
                x: x.pointer(),
                weight: conv.weight.pointer(),
                bias: conv.bias.as_ref().map_or(0, Buf::pointer),
                out: out.pointer(),
                channels: int(conv.channels),
                taps: int(conv.taps),
                columns: int(x.columns),
                gated: i32::from(conv.form == ConvForm::Gated),
            };
            let function = self.programs.function(&program(), "short_conv")?;
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&device_conv)),
            ];
            let (rows, tokens) = self.grid_states(slot);
            let grid = [conv.channels.div_ceil(CONV_THREADS), rows, tokens.div_ceil(CONV_TOKENS)];
            self.launch("short_conv", function, Grid::new(grid, CONV_THREADS), &args)
        })
    }

    pub(crate) fn op_delta_rule(
        &self,
        slot: &Slot,
        rule: &DeltaRule<Buf>,
        qkv: &Buf,
        mixed: &Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let heads = rule.heads;
        operands::delta_rule(slot.tokens, rule, (qkv, mixed), kv.group(rule.layer), out)?;
        let Some((each, name)) = by_rows(DELTA_KERNELS, heads.dim_k) else {
            let what = format!("the gated delta rule with keys of {}", heads.dim_k);
            return Err(Error::Unsupported { what, backend: self.device.name() });
        };
        let states = self.states(slot, rule.layer, kv)?;
        self.op(slot, &[qkv, mixed], &[&*out], || {
            let (rows, tokens) = self.grid_states(slot);
            let (chunk, stages) = stages(tokens);
            let device_rule = DeviceDelta {
                states,
                qkv: qkv.pointer(),
                mixed: mixed.pointer(),
                rate: rule.rate.pointer(),
                bias: rule.bias.pointer(),
                out: out.pointer(),
                key: int(heads.key),
                value: int(heads.value),
                dim_k: int(heads.dim_k),
                dim_v: int(heads.dim_v),
                turns: i32::from(heads.sharing == KeySharing::Turns),
                before: int(rule.before),
                mixed_columns: int(mixed.columns),
                chunk: int(chunk),
            };
            let function = self.programs.function(&program(), name)?;
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&device_rule)),
            ];
            let grid = [heads.dim_v.div_ceil(DELTA_COLUMNS) * heads.value, rows, 1];
            let grid = Grid::new(grid, DELTA_THREADS).with_shared(delta_bytes(each, chunk, stages));
            self.launch("delta_rule", function, grid, &args)
        })
    }

    pub(crate) fn op_selective_scan(
        &self,
        slot: &Slot,
        scan: &SelectiveScan<Buf>,
        x: &Buf,
        mixed: &Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let heads = scan.heads;
        operands::selective_scan(slot.tokens, scan, (x, mixed), kv.group(scan.layer), out)?;
        let Some((each, name)) = by_rows(SCAN_KERNELS, heads.state) else {
            let what = format!("a selective scan with keys of {}", heads.state);
            return Err(Error::Unsupported { what, backend: self.device.name() });
        };
        let states = self.states(slot, scan.layer, kv)?;
        self.op(slot, &[x, mixed], &[&*out], || {
            let (rows, tokens) = self.grid_states(slot);
            let (chunk, stages) = stages(tokens);
            let device_scan = DeviceScan {
                states,
                x: x.pointer(),
                mixed: mixed.pointer(),
                rate: scan.rate.pointer(),
                bias: scan.bias.pointer(),
                skip: scan.skip.pointer(),
                out: out.pointer(),
                heads: int(heads.heads),
                groups: int(heads.groups),
                dim: int(heads.dim),
                state: int(heads.state),
                before: int(scan.before),
                mixed_columns: int(mixed.columns),
                chunk: int(chunk),
                pad: 0,
            };
            let function = self.programs.function(&program(), name)?;
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&device_scan)),
            ];
            let grid = [heads.dim.div_ceil(DELTA_COLUMNS) * heads.heads, rows, 1];
            let grid = Grid::new(grid, DELTA_THREADS).with_shared(delta_bytes(each, chunk, stages));
            self.launch("selective_scan", function, grid, &args)
        })
    }

    pub(crate) fn op_channel_scan(
        &self,
        slot: &Slot,
        scan: &ChannelScan<Buf>,
        inputs: &ChannelInputs<'_, Buf>,
        steps: &Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        operands::channel_scan(slot.tokens, scan, inputs, (steps, out), kv.group(scan.layer))?;
        let Some((_, name)) = CHANNEL_KERNELS.into_iter().find(|(rows, _)| *rows >= scan.state) else {
            let what = format!("a selective scan by channels with keys of {}", scan.state);
            return Err(Error::Unsupported { what, backend: self.device.name() });
        };
        let states = self.states(slot, scan.layer, kv)?;
        self.op(slot, &[inputs.x, inputs.keys, inputs.queries, steps], &[&*out], || {
            let device_scan = DeviceChannels {
                states,
                x: inputs.x.pointer(),
                keys: inputs.keys.pointer(),
                queries: inputs.queries.pointer(),
                steps: steps.pointer(),
                rates: scan.rates.pointer(),
                bias: scan.bias.pointer(),
                skip: scan.skip.pointer(),
                out: out.pointer(),
                channels: int(scan.channels),
                state: int(scan.state),
                before: int(scan.before),
                pad: 0,
            };
            let function = self.programs.function(&program(), name)?;
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&device_scan)),
            ];
            let (rows, _) = self.grid_states(slot);
            let grid = [scan.channels.div_ceil(CHANNEL_THREADS), rows, 1];
            self.launch("channel_scan", function, Grid::new(grid, CHANNEL_THREADS), &args)
        })
    }

    pub(crate) fn op_gated_norm(
        &self,
        slot: &Slot,
        gated: &GatedNorm<Buf>,
        gates: &Buf,
        x: &mut Buf,
    ) -> Result<(), Error> {
        operands::gated_norm(slot.tokens, gated, gates, x)?;
        if gated.norm.as_ref().is_some_and(|norm| norm.kind != NormKind::Rms || norm.bias.is_some()) {
            let what = "a gated norm that is centred or has a bias".to_owned();
            return Err(Error::Unsupported { what, backend: self.device.name() });
        }
        let group = if gated.norm.is_some() { gated.group } else { x.columns.min(WIDE_GROUP) };
        let each = gated.norm.as_ref().is_some_and(|norm| norm.weight.columns == gated.group);
        let warps = each && gated.order == GateOrder::NormFirst && group < WIDE_GROUP;
        self.op(slot, &[gates, &*x], &[&*x], || {
            let norm = gated.norm.as_ref().map_or(DeviceNorm::none(), DeviceNorm::new);
            let name = if warps { "gated_norm" } else { "gated_group_norm" };
            let function = self.programs.function(&Key::plain("norm.cu"), name)?;
            let device_step = self.device_step(slot);
            let mut args =
                vec![Arg::Struct(bytemuck::bytes_of(&device_step)), Arg::Struct(bytemuck::bytes_of(&norm))];
            if !warps {
                let first = gated.order == GateOrder::GatesFirst;
                args.extend([Arg::Int(int(group)), Arg::Int(i32::from(first))]);
            }
            args.extend([
                Arg::Pointer(gates.pointer() + (gated.column * size_of::<f32>()) as u64),
                Arg::Int(int(gates.columns)),
                Arg::Pointer(x.pointer()),
                Arg::Int(int(x.columns)),
            ]);
            let groups = x.columns.div_ceil(group);
            let (blocks, threads) = match warps {
                true => (groups.div_ceil(NORM_WARPS), NORM_WARPS * 32),
                false => (groups, group.div_ceil(GROUP_EACH).next_multiple_of(32).min(1024)),
            };
            let grid = [blocks, self.grid_rows(slot, Rows::Tokens), 1];
            self.launch(name, function, Grid::new(grid, threads), &args)
        })
    }

    pub(crate) fn op_sigmoid_gate(&self, slot: &Slot, gates: &Buf, x: &mut Buf) -> Result<(), Error> {
        const OPERATION: &str = "sigmoid_gate";
        operands::pair(OPERATION, ("gates", gates), ("x", x), (slot.tokens, slot.tokens))?;
        self.op(slot, &[gates, &*x], &[&*x], || {
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Pointer(gates.pointer()),
                Arg::Pointer(x.pointer()),
                Arg::Int(int(x.columns)),
            ];
            self.launch_values(Call::of_tokens(OPERATION, slot), "rows.cu", x.columns, &args)
        })
    }

    /// A layer's states as kernels take them; every one that the step names is among them.
    fn states(&self, slot: &Slot, layer: KvLayer, kv: &Kv) -> Result<DeviceStates, Error> {
        let group = kv.group(layer);
        let groups = slot.groups;
        self.check(slot, Check::States { group: layer.group, groups, pages: group.pages })?;
        let bytes = group.page_bytes(kv.dtype) / group.layers as u64;
        // A recorded step is of single tokens, as many rows as tokens.
        let rows = if self.is_recording() { -1 } else { int(slot.row_count) };
        let each = int(usize::try_from(bytes).unwrap_or(usize::MAX) / size_of::<f32>());
        Ok(DeviceStates {
            values: kv.pages(layer),
            each,
            at: int(slot.states_at(layer.group - groups)),
            rows,
            pad: 0,
        })
    }

    /// Rows that grids are made for, and tokens of the longest.
    fn grid_states(&self, slot: &Slot) -> (usize, usize) {
        match self.is_recording() {
            true => (self.grid_rows(slot, Rows::Tokens), 1),
            false => (slot.row_count, slot.len_max),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_every_size_up_to_256_have_a_kernel_whose_tokens_fit() {
        for dim_k in 1..=256 {
            let (rows, _) = by_rows(DELTA_KERNELS, dim_k).unwrap();
            assert_eq!(by_rows(SCAN_KERNELS, dim_k).unwrap().0, rows);
            assert!(rows * DELTA_PARTS >= dim_k && (rows == 1 || rows * DELTA_PARTS < 2 * dim_k), "{dim_k}");
            // The smallest that any card has.
            assert!(delta_bytes(rows, DELTA_TOKENS, 2) <= 99 << 10, "{dim_k}");
        }
        assert_eq!(by_rows(DELTA_KERNELS, 257), None);
    }
}
