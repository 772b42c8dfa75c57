//! What goes through a sequence token by token and keeps a state of it.

use fornax_compute::{
    ConvForm, DeltaRule, Error, GatedNorm, KeySharing, KvLayer, NormKind, Rows, STATE_LANES, ShortConv,
    TAPS_MAX, operands,
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
/// Warps of a block of `gated_norm`, each with a group of values.
const NORM_WARPS: usize = 4;

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

pub(super) const LAYOUTS: &[Layout] = &[
    layout!(DeviceStates, "States" in "recurrence.cu", { values, each, at, rows, pad }),
    layout!(DeviceConv, "ShortConv" in "recurrence.cu", { states, x, weight, out, channels, taps, columns, gated }),
    layout!(DeviceDelta, "DeltaRule" in "recurrence.cu", {
        states, qkv, mixed, rate, bias, out, key, value, dim_k, dim_v, turns, before, mixed_columns, chunk,
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

/// The rows of a matrix of `dim_k` rows that a lane has, and the kernel's name, if there is one.
fn delta_kernel(dim_k: usize) -> Option<(usize, &'static str)> {
    DELTA_KERNELS.into_iter().find(|(rows, _)| rows * DELTA_PARTS >= dim_k)
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
        let Some((each, name)) = delta_kernel(heads.dim_k) else {
            let what = format!("the gated delta rule with keys of {}", heads.dim_k);
            return Err(Error::Unsupported { what, backend: self.device.name() });
        };
        let states = self.states(slot, rule.layer, kv)?;
        self.op(slot, &[qkv, mixed], &[&*out], || {
            let (rows, tokens) = self.grid_states(slot);
            // Where a row has more tokens, the next ones come while these are computed.
            let (chunk, stages) = if tokens <= DELTA_TOKENS { (tokens.max(1), 1) } else { (DELTA_TOKENS, 2) };
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

    pub(crate) fn op_gated_norm(
        &self,
        slot: &Slot,
        gated: &GatedNorm<Buf>,
        gates: &Buf,
        x: &mut Buf,
    ) -> Result<(), Error> {
        operands::gated_norm(slot.tokens, gated, gates, x)?;
        if gated.norm.kind != NormKind::Rms || gated.norm.bias.is_some() {
            let what = "a gated norm that is centred or has a bias".to_owned();
            return Err(Error::Unsupported { what, backend: self.device.name() });
        }
        self.op(slot, &[gates, &*x], &[&*x], || {
            let norm = DeviceNorm::new(&gated.norm);
            let function = self.programs.function(&Key::plain("norm.cu"), "gated_norm")?;
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&norm)),
                Arg::Pointer(gates.pointer() + (gated.column * size_of::<f32>()) as u64),
                Arg::Int(int(gates.columns)),
                Arg::Pointer(x.pointer()),
                Arg::Int(int(x.columns)),
            ];
            let groups = x.columns / gated.norm.weight.columns;
            let grid = [groups.div_ceil(NORM_WARPS), self.grid_rows(slot, Rows::Tokens), 1];
            self.launch("gated_norm", function, Grid::new(grid, NORM_WARPS * 32), &args)
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
            let (rows, _) = delta_kernel(dim_k).unwrap();
            assert!(rows * DELTA_PARTS >= dim_k && (rows == 1 || rows * DELTA_PARTS < 2 * dim_k), "{dim_k}");
            // The smallest that any card has.
            assert!(delta_bytes(rows, DELTA_TOKENS, 2) <= 99 << 10, "{dim_k}");
        }
        assert_eq!(delta_kernel(257), None);
    }
}
