//! Operations that work row by row: embedding, sums, norms, the gated activation, the choice of rows.

use fornax_compute::{Error, Glu, Need, Norm, NormKind, Rows};

use super::fuse::Due;
use super::gemv::row_threads;
use super::{fits, lacks};
use crate::cuda::{Check, Cuda};
use crate::driver::Arg;
use crate::memory::{Buf, Weight, int};
use crate::program::Key;
use crate::step::Slot;

/// Threads of a block that works value by value.
const THREADS: usize = 256;

impl Cuda {
    pub(crate) fn op_embed(&self, slot: &Slot, table: &Weight, out: &mut Buf) -> Result<(), Error> {
        fits("embed", "out", out, (slot.tokens, table.columns))?;
        self.check(slot, Check::Tokens { rows: table.rows })?;
        self.check_sampled(slot)?;
        self.touch_written(slot, &[Some(out.pointer())])?;
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
            self.launch("embed", function, grid, (row_threads(table.columns), 0), &args)?;
        }
        Ok(())
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
        fits(operation, operand, y, (if vector { 1 } else { count }, columns))?;
        fits(operation, "x", x, (count, columns))?;
        self.touch_read(slot, y)?;
        self.touch_read(slot, x)?;
        self.touch_written(slot, &[Some(x.pointer())])?;
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
        self.launch(operation, function, self.value_grid(slot, rows, columns), (THREADS as u32, 0), &args)
    }

    pub(crate) fn op_norm(
        &self,
        slot: &Slot,
        rows: Rows,
        norm: &Norm<Buf>,
        x: &Buf,
        out: &mut Buf,
    ) -> Result<(), Error> {
        if norm.kind != NormKind::Rms || norm.bias.is_some() {
            return Err(lacks(Need::LayerNorm));
        }
        let (count, columns) = (slot.count(rows), norm.weight.columns);
        fits("norm", "weight", &norm.weight, (1, columns))?;
        fits("norm", "x", x, (count, columns))?;
        fits("norm", "out", out, (count, columns))?;
        if self.fused_norm((slot, rows), norm, x, out)? {
            return Ok(());
        }
        self.touch_read(slot, x)?;
        self.touch_written(slot, &[Some(out.pointer())])?;
        self.norm_rows(slot, &self.due(rows, norm, x, out))
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
        let threads = row_threads(due.columns);
        self.launch("rms_norm", function, [self.grid_rows(slot, due.rows), 1, 1], (threads, 0), &args)
    }

    pub(crate) fn op_glu(&self, slot: &Slot, kind: Glu, gate_up: &Buf, out: &mut Buf) -> Result<(), Error> {
        let columns = out.columns;
        fits("glu", "gate_up", gate_up, (slot.tokens, 2 * columns))?;
        fits("glu", "out", out, (slot.tokens, columns))?;
        if kind != Glu::Silu {
            return Err(lacks(Need::Gelu));
        }
        if self.fused_glu(slot, gate_up, out)? {
            return Ok(());
        }
        self.touch_read(slot, gate_up)?;
        self.touch_written(slot, &[Some(out.pointer())])?;
        let function = self.programs.function(&Key::plain("glu.cu"), "glu_silu")?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Pointer(gate_up.pointer()),
            Arg::Pointer(out.pointer()),
            Arg::Int(int(columns)),
        ];
        let grid = self.value_grid(slot, Rows::Tokens, columns);
        self.launch("glu", function, grid, (THREADS as u32, 0), &args)
    }

    pub(crate) fn op_gather(&self, slot: &Slot, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        let columns = out.columns;
        fits("gather_wanted", "x", x, (slot.tokens, columns))?;
        fits("gather_wanted", "out", out, (slot.wanted, columns))?;
        self.touch_read(slot, x)?;
        self.touch_written(slot, &[Some(out.pointer())])?;
        let function = self.programs.function(&Key::plain("rows.cu"), "gather")?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Pointer(x.pointer()),
            Arg::Pointer(out.pointer()),
            Arg::Int(int(columns)),
        ];
        self.launch(
            "gather_wanted",
            function,
            self.value_grid(slot, Rows::Wanted, columns),
            (THREADS as u32, 0),
            &args,
        )
    }

    fn value_grid(&self, slot: &Slot, rows: Rows, columns: usize) -> [usize; 3] {
        [columns.div_ceil(THREADS), self.grid_rows(slot, rows), 1]
    }
}
