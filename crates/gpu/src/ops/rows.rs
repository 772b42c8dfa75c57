//! Operations that work row by row: embedding, sums, norms, the gated activation, the choice of rows.

use fornax_compute::{
    Error, Glu, Heads, Norm, NormKind, Pointwise, Pooling, QkNorm, Rows, Temperature, operands,
};

use super::fuse::Due;
use super::gemv::{Call, row_threads};
use crate::abi::{Constant, Layout, layout};
use crate::cuda::{Check, Cuda};
use crate::driver::Arg;
use crate::grid::Grid;
use crate::memory::{Buf, Weight, int};
use crate::program::Key;
use crate::step::Slot;

/// Threads of a block that works value by value.
const THREADS: usize = 256;

/// `Norm` of norm.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct DeviceNorm {
    weight: u64,
    bias: u64,
    eps: f32,
    centred: i32,
    columns: i32,
    pad: i32,
}

pub(super) const LAYOUTS: &[Layout] =
    &[layout!(DeviceNorm, "Norm" in "norm.cu", { weight, bias, eps, centred, columns, pad })];

/// The functions of activation.cuh, and what rows.cu makes of a sequence's rows, as they number them.
const SCALE: usize = 0;
const SOFT_CAP: usize = 1;
const GELU: usize = 2;
const GELU_TANH: usize = 3;
const RELU: usize = 4;
const RELU_SQUARED: usize = 5;
const XIELU: usize = 6;
const MEAN: usize = 0;
const FIRST: usize = 1;
const LAST: usize = 2;

pub(super) const CONSTANTS: &[Constant] = &[
    Constant::new("activation.cuh", "SCALE", SCALE),
    Constant::new("activation.cuh", "SOFT_CAP", SOFT_CAP),
    Constant::new("activation.cuh", "GELU", GELU),
    Constant::new("activation.cuh", "GELU_TANH", GELU_TANH),
    Constant::new("activation.cuh", "RELU", RELU),
    Constant::new("activation.cuh", "RELU_SQUARED", RELU_SQUARED),
    Constant::new("activation.cuh", "XIELU", XIELU),
    Constant::new("rows.cu", "MEAN", MEAN),
    Constant::new("rows.cu", "FIRST", FIRST),
    Constant::new("rows.cu", "LAST", LAST),
];

impl DeviceNorm {
    /// No norm at all.
    pub(super) fn none() -> DeviceNorm {
        DeviceNorm { weight: 0, bias: 0, eps: 0.0, centred: 0, columns: 0, pad: 0 }
    }

    pub(super) fn new(norm: &Norm<Buf>) -> DeviceNorm {
        DeviceNorm {
            weight: norm.weight.pointer(),
            bias: norm.bias.as_ref().map_or(0, Buf::pointer),
            eps: norm.eps,
            centred: i32::from(norm.kind == NormKind::Layer),
            columns: int(norm.weight.columns),
            pad: 0,
        }
    }
}

/// Rows that are gated: so many of each of these tokens.
#[derive(Clone, Copy)]
pub(super) struct Gated {
    pub(super) tokens: usize,
    pub(super) each: usize,
    pub(super) kind: Glu,
}

/// A function as activation.cuh numbers it, and its parameters.
fn numbered(function: Pointwise) -> (usize, [f32; 4]) {
    match function {
        Pointwise::Scale(factor) => (SCALE, [factor, 0.0, 0.0, 0.0]),
        Pointwise::SoftCap(cap) => (SOFT_CAP, [cap, 0.0, 0.0, 0.0]),
        Pointwise::Gelu => (GELU, [0.0; 4]),
        Pointwise::GeluTanh => (GELU_TANH, [0.0; 4]),
        Pointwise::Relu => (RELU, [0.0; 4]),
        Pointwise::ReluSquared => (RELU_SQUARED, [0.0; 4]),
        Pointwise::Xielu { positive, negative, beta, eps } => (XIELU, [positive, negative, beta, eps]),
    }
}

impl Cuda {
    pub(crate) fn op_embed(&self, slot: &Slot, table: &Weight, out: &mut Buf) -> Result<(), Error> {
        operands::fits("embed", "out", out, (slot.tokens, table.columns))?;
        self.check(slot, Check::Tokens { rows: table.rows })?;
        self.check_sampled(slot)?;
        self.op(slot, &[], &[&*out], || {
            for part in &table.parts {
                let function = self.programs.function(&Key::quant("embed.cu", part.format), "embed")?;
                let device_part = table.device_part(part);
                let device_step = self.device_step(slot);
                let args = [
                    Arg::Struct(bytemuck::bytes_of(&device_part)),
                    Arg::Int(int(part.first)),
                    Arg::Struct(bytemuck::bytes_of(&device_step)),
                    Arg::Pointer(self.sampled.pointer()),
                    Arg::Pointer(out.pointer()),
                    Arg::Int(int(table.columns)),
                ];
                let grid = [self.grid_rows(slot, Rows::Tokens), 1, 1];
                self.launch("embed", function, Grid::new(grid, row_threads(table.columns)), &args)?;
            }
            Ok(())
        })
    }

    /// `y` is one row for all of `x`, or as many.
    pub(crate) fn op_add(
        &self,
        operation: &'static str,
        slot: &Slot,
        rows: Rows,
        y: &Buf,
        x: &mut Buf,
    ) -> Result<(), Error> {
        let (count, columns) = (slot.count(rows), x.columns);
        let vector = operation == "add_vector";
        let operand = if vector { "vector" } else { "y" };
        operands::pair(operation, (operand, y), ("x", x), (if vector { 1 } else { count }, count))?;
        self.op(slot, &[y, &*x], &[&*x], || {
            let function = self.programs.function(&Key::plain("rows.cu"), "add")?;
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Int(i32::from(rows == Rows::Wanted)),
                Arg::Pointer(y.pointer()),
                Arg::Int(if vector { 0 } else { int(columns) }),
                Arg::Pointer(x.pointer()),
                Arg::Int(int(columns)),
            ];
            self.launch(operation, function, self.value_grid(slot, rows, columns), &args)
        })
    }

    pub(crate) fn op_scale_columns(&self, slot: &Slot, factors: &Buf, x: &mut Buf) -> Result<(), Error> {
        const OPERATION: &str = "scale_columns";
        operands::pair(OPERATION, ("factors", factors), ("x", x), (1, slot.tokens))?;
        self.op(slot, &[factors, &*x], &[&*x], || {
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Pointer(factors.pointer()),
                Arg::Pointer(x.pointer()),
                Arg::Int(int(x.columns)),
            ];
            self.launch_values(Call::of_tokens(OPERATION, slot), "rows.cu", x.columns, &args)
        })
    }

    pub(crate) fn op_norm(
        &self,
        slot: &Slot,
        rows: Rows,
        norm: &Norm<Buf>,
        x: &Buf,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let (count, columns) = (slot.count(rows), norm.weight.columns);
        operands::norm("norm", norm)?;
        operands::fits("norm", "x", x, (count, columns))?;
        operands::fits("norm", "out", out, (count, columns))?;
        let plain = norm.kind == NormKind::Rms && norm.bias.is_none();
        if plain && self.fused_norm(slot, rows, norm, x, out)? {
            return Ok(());
        }
        self.op(slot, &[x], &[&*out], || {
            if plain {
                return self.norm_rows(slot, &self.due(rows, norm, x, out));
            }
            let norm = DeviceNorm::new(norm);
            let function = self.programs.function(&Key::plain("norm.cu"), "any_norm")?;
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Int(i32::from(rows == Rows::Wanted)),
                Arg::Struct(bytemuck::bytes_of(&norm)),
                Arg::Pointer(x.pointer()),
                Arg::Pointer(out.pointer()),
            ];
            let grid = [self.grid_rows(slot, rows), 1, 1];
            self.launch("norm", function, Grid::new(grid, row_threads(columns)), &args)
        })
    }

    pub(crate) fn op_qk_norm(
        &self,
        slot: &Slot,
        heads: Heads,
        norm: &QkNorm<Buf>,
        qkv: &mut Buf,
    ) -> Result<(), Error> {
        const OPERATION: &str = "qk_norm";
        let columns = heads.qkv_columns();
        operands::qk_norm(slot.tokens, heads, norm, qkv)?;
        let (queries, keys) = (heads.query * heads.dim, heads.kv * heads.dim);
        let of_values = norm.value.as_ref().map_or(0, |value| keys / value.weight.columns);
        let stretches = queries / norm.query.weight.columns + keys / norm.key.weight.columns + of_values;
        let widest = norm.query.weight.columns.max(norm.key.weight.columns);
        let [query, key] = [DeviceNorm::new(&norm.query), DeviceNorm::new(&norm.key)];
        // Without a norm of values no block asks for it.
        let value = DeviceNorm::new(norm.value.as_ref().unwrap_or(&norm.key));
        self.op(slot, &[&*qkv], &[&*qkv], || {
            let function = self.programs.function(&Key::plain("norm.cu"), "qk_norm")?;
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&query)),
                Arg::Struct(bytemuck::bytes_of(&key)),
                Arg::Struct(bytemuck::bytes_of(&value)),
                Arg::Int(int(queries)),
                Arg::Int(int(keys)),
                Arg::Int(int(columns)),
                Arg::Pointer(qkv.pointer()),
            ];
            let grid = [stretches, self.grid_rows(slot, Rows::Tokens), 1];
            self.launch(OPERATION, function, Grid::new(grid, row_threads(widest)), &args)
        })
    }

    pub(crate) fn op_add_positions(&self, slot: &Slot, table: &Weight, x: &mut Buf) -> Result<(), Error> {
        const OPERATION: &str = "add_positions";
        operands::fits(OPERATION, "x", x, (slot.tokens, table.columns))?;
        self.check(slot, Check::Positions { rows: table.rows })?;
        self.op(slot, &[&*x], &[&*x], || {
            for part in &table.parts {
                let key = Key::quant("embed.cu", part.format);
                let function = self.programs.function(&key, OPERATION)?;
                let (device_part, device_step) = (table.device_part(part), self.device_step(slot));
                let args = [
                    Arg::Struct(bytemuck::bytes_of(&device_part)),
                    Arg::Int(int(part.first)),
                    Arg::Struct(bytemuck::bytes_of(&device_step)),
                    Arg::Pointer(x.pointer()),
                    Arg::Int(int(table.columns)),
                ];
                let grid = [self.grid_rows(slot, Rows::Tokens), 1, 1];
                self.launch(OPERATION, function, Grid::new(grid, row_threads(table.columns)), &args)?;
            }
            Ok(())
        })
    }

    pub(crate) fn op_pointwise(
        &self,
        slot: &Slot,
        rows: Rows,
        function: Pointwise,
        x: &mut Buf,
    ) -> Result<(), Error> {
        const OPERATION: &str = "pointwise";
        let columns = x.columns;
        operands::fits(OPERATION, "x", x, (slot.count(rows), columns))?;
        self.op(slot, &[&*x], &[&*x], || {
            let (number, parameters) = numbered(function);
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Int(i32::from(rows == Rows::Wanted)),
                Arg::Int(int(number)),
                Arg::Struct(bytemuck::bytes_of(&parameters)),
                Arg::Pointer(x.pointer()),
                Arg::Int(int(columns)),
            ];
            self.launch_values(Call { operation: OPERATION, slot, rows }, "rows.cu", columns, &args)
        })
    }

    pub(crate) fn op_pool(&self, slot: &Slot, pooling: Pooling, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        const OPERATION: &str = "pool";
        let columns = out.columns;
        operands::pair(OPERATION, ("x", x), ("out", out), (slot.tokens, slot.wanted))?;
        self.op(slot, &[x], &[&*out], || {
            let number = match pooling {
                Pooling::Mean => MEAN,
                Pooling::First => FIRST,
                Pooling::Last => LAST,
            };
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Int(int(number)),
                Arg::Pointer(x.pointer()),
                Arg::Pointer(out.pointer()),
                Arg::Int(int(columns)),
            ];
            let call = Call { operation: OPERATION, slot, rows: Rows::Wanted };
            self.launch_values(call, "rows.cu", columns, &args)
        })
    }

    pub(super) fn norm_rows(&self, slot: &Slot, due: &Due) -> Result<(), Error> {
        let function = self.programs.function(&Key::plain("norm.cu"), "rms_norm")?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Int(i32::from(due.rows == Rows::Wanted)),
            Arg::Pointer(due.weight),
            Arg::Float(due.eps),
            Arg::Pointer(due.x),
            Arg::Pointer(due.out),
            Arg::Int(int(due.columns)),
        ];
        let grid = [self.grid_rows(slot, due.rows), 1, 1];
        self.launch("rms_norm", function, Grid::new(grid, row_threads(due.columns)), &args)
    }

    pub(crate) fn op_glu(&self, slot: &Slot, kind: Glu, gate_up: &Buf, out: &mut Buf) -> Result<(), Error> {
        operands::glu(slot.tokens, gate_up, out)?;
        if kind == Glu::Silu && self.fused_glu(slot, gate_up, out)? {
            return Ok(());
        }
        self.op(slot, &[gate_up], &[&*out], || {
            let gated = Gated { tokens: self.grid_rows(slot, Rows::Tokens), each: 1, kind };
            self.gate_rows("glu", slot, gated, gate_up, out)
        })
    }

    pub(crate) fn op_glu_beside(
        &self,
        slot: &Slot,
        kind: Glu,
        up: &Buf,
        column: usize,
        gate: &mut Buf,
    ) -> Result<(), Error> {
        const OPERATION: &str = "glu_beside";
        operands::glu_beside(slot.tokens, up, column, gate)?;
        // As rows.cu numbers them.
        let number = match kind {
            Glu::Silu => 0,
            Glu::Gelu => 1,
            Glu::GeluTanh => 2,
            Glu::Clamped => {
                let what = format!("{OPERATION} by {kind:?}");
                return Err(Error::Unsupported { what, backend: self.device.name() });
            }
        };
        self.op(slot, &[up, &*gate], &[&*gate], || {
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Int(number),
                Arg::Pointer(up.pointer() + (column * size_of::<f32>()) as u64),
                Arg::Int(int(up.columns)),
                Arg::Pointer(gate.pointer()),
                Arg::Int(int(gate.columns)),
            ];
            self.launch_values(Call::of_tokens(OPERATION, slot), "rows.cu", gate.columns, &args)
        })
    }

    pub(crate) fn op_scale_by_position(
        &self,
        slot: &Slot,
        temperature: Temperature,
        columns: usize,
        x: &mut Buf,
    ) -> Result<(), Error> {
        const OPERATION: &str = "scale_by_position";
        operands::scale_by_position(slot.tokens, columns, x)?;
        self.op(slot, &[&*x], &[&*x], || {
            let Temperature { beta, length, offset } = temperature;
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Float(beta),
                // Counts of 32 bits, which the kernel takes as such.
                Arg::Int(length.cast_signed()),
                Arg::Int(offset.cast_signed()),
                Arg::Int(int(columns)),
                Arg::Pointer(x.pointer()),
                Arg::Int(int(x.columns)),
            ];
            self.launch_values(Call::of_tokens(OPERATION, slot), "rows.cu", columns, &args)
        })
    }

    pub(crate) fn op_scale_chosen(&self, slot: &Slot, scales: &Buf, chosen: &mut Buf) -> Result<(), Error> {
        const OPERATION: &str = "scale_chosen";
        operands::scale_chosen(slot.tokens, scales, chosen)?;
        self.op(slot, &[scales, &*chosen], &[&*chosen], || {
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Pointer(scales.pointer()),
                Arg::Int(int(scales.columns)),
                Arg::Pointer(chosen.pointer()),
                Arg::Int(int(chosen.columns)),
            ];
            self.launch_values(Call::of_tokens(OPERATION, slot), "rows.cu", chosen.columns / 2, &args)
        })
    }

    /// The gated activation of rows.
    pub(super) fn gate_rows(
        &self,
        operation: &'static str,
        slot: &Slot,
        Gated { tokens, each, kind }: Gated,
        gate_up: &Buf,
        out: &Buf,
    ) -> Result<(), Error> {
        let name = match kind {
            Glu::Silu => "glu_silu",
            Glu::Gelu => "glu_gelu",
            Glu::GeluTanh => "glu_gelu_tanh",
            Glu::Clamped => "glu_clamped",
        };
        let function = self.programs.function(&Key::plain("glu.cu"), name)?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Int(int(each)),
            Arg::Pointer(gate_up.pointer()),
            Arg::Pointer(out.pointer()),
            Arg::Int(int(out.columns)),
        ];
        let grid = [out.columns.div_ceil(THREADS), tokens * each, 1];
        self.launch(operation, function, Grid::new(grid, THREADS), &args)
    }

    /// `x` = a function of each value, of so many rows of each of these tokens.
    pub(super) fn function_rows(
        &self,
        operation: &'static str,
        slot: &Slot,
        (tokens, each): (usize, usize),
        function: Pointwise,
        x: &Buf,
    ) -> Result<(), Error> {
        let (number, parameters) = numbered(function);
        let kernel = self.programs.function(&Key::plain("glu.cu"), "of_values")?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Int(int(each)),
            Arg::Int(int(number)),
            Arg::Struct(bytemuck::bytes_of(&parameters)),
            Arg::Pointer(x.pointer()),
            Arg::Int(int(x.columns)),
        ];
        let grid = [x.columns.div_ceil(THREADS), tokens * each, 1];
        self.launch(operation, kernel, Grid::new(grid, THREADS), &args)
    }

    pub(crate) fn op_gather(&self, slot: &Slot, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        let columns = out.columns;
        operands::pair("gather_wanted", ("x", x), ("out", out), (slot.tokens, slot.wanted))?;
        self.op(slot, &[x], &[&*out], || {
            let function = self.programs.function(&Key::plain("rows.cu"), "gather")?;
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Pointer(x.pointer()),
                Arg::Pointer(out.pointer()),
                Arg::Int(int(columns)),
            ];
            self.launch("gather_wanted", function, self.value_grid(slot, Rows::Wanted, columns), &args)
        })
    }

    /// Launches a kernel of its operation's name with a thread for every value.
    pub(super) fn launch_values(
        &self,
        Call { operation, slot, rows }: Call<'_>,
        unit: &'static str,
        columns: usize,
        args: &[Arg<'_>],
    ) -> Result<(), Error> {
        let function = self.programs.function(&Key::plain(unit), operation)?;
        self.launch(operation, function, self.value_grid(slot, rows, columns), args)
    }

    fn value_grid(&self, slot: &Slot, rows: Rows, columns: usize) -> Grid {
        Grid::new([columns.div_ceil(THREADS), self.grid_rows(slot, rows), 1], THREADS)
    }
}
