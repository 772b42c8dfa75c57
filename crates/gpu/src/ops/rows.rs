//! Operations that work row by row: embedding, sums, norms, the gated activation, the choice of rows.

use fornax_compute::{Error, Glu, Norm, Rows};

use super::fits;
use super::gemv::{Split, row_threads};
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
        self.scratch.forget();
        for part in &table.parts {
            let function = self.programs.function(&Key::quant("embed.cu", part.format.header()), "embed")?;
            let device_part = table.device_part(part);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_part)),
                Arg::Int(int(part.first)),
                Arg::Pointer(slot.pointer()),
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
        self.scratch.forget();
        let function = self.programs.function(&Key::plain("rows.cu"), "add")?;
        let args = [
            Arg::Pointer(slot.pointer()),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Pointer(y.pointer()),
            Arg::Int(if vector { 0 } else { int(columns) }),
            Arg::Pointer(x.pointer()),
            Arg::Int(int(columns)),
        ];
        self.launch(operation, function, self.value_grid(slot, rows, columns), (THREADS as u32, 0), &args)
    }

    pub(crate) fn op_rms_norm(
        &self,
        slot: &Slot,
        rows: Rows,
        norm: &Norm<Buf>,
        x: &Buf,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let (count, columns) = (slot.count(rows), norm.weight.columns);
        fits("rms_norm", "weight", &norm.weight, (1, columns))?;
        fits("rms_norm", "x", x, (count, columns))?;
        fits("rms_norm", "out", out, (count, columns))?;
        let count = self.grid_rows(slot, rows);
        // What a norm puts out is what a product reads next.
        let bf16 = self.scratch.preferred();
        let splits = count <= self.scratch.rows(columns);
        let split = if splits { self.scratch.split(columns, bf16) } else { Split::none() };
        let function = self.programs.function(&Key::plain("norm.cu"), "rms_norm")?;
        let args = [
            Arg::Pointer(slot.pointer()),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Pointer(norm.weight.pointer()),
            Arg::Float(norm.eps),
            Arg::Pointer(x.pointer()),
            Arg::Pointer(out.pointer()),
            Arg::Int(int(columns)),
            Arg::Struct(bytemuck::bytes_of(&split)),
        ];
        self.launch("rms_norm", function, [count, 1, 1], (row_threads(columns.div_ceil(4)), 0), &args)?;
        if splits {
            self.scratch.hold(self.held(out, rows));
        } else {
            self.scratch.forget();
        }
        Ok(())
    }

    pub(crate) fn op_glu(&self, slot: &Slot, kind: Glu, gate_up: &Buf, out: &mut Buf) -> Result<(), Error> {
        let columns = out.columns;
        fits("glu", "gate_up", gate_up, (slot.tokens, 2 * columns))?;
        fits("glu", "out", out, (slot.tokens, columns))?;
        self.scratch.forget();
        let name = match kind {
            Glu::Silu => "silu",
        };
        let function = self.programs.function(&Key::plain("glu.cu"), name)?;
        let args = [
            Arg::Pointer(slot.pointer()),
            Arg::Pointer(gate_up.pointer()),
            Arg::Pointer(out.pointer()),
            Arg::Int(int(columns)),
        ];
        self.launch("glu", function, self.value_grid(slot, Rows::Tokens, columns), (THREADS as u32, 0), &args)
    }

    pub(crate) fn op_gather(&self, slot: &Slot, x: &Buf, out: &mut Buf) -> Result<(), Error> {
        let columns = out.columns;
        fits("gather_wanted", "x", x, (slot.tokens, columns))?;
        fits("gather_wanted", "out", out, (slot.wanted, columns))?;
        self.scratch.forget();
        let function = self.programs.function(&Key::plain("rows.cu"), "gather")?;
        let args = [
            Arg::Pointer(slot.pointer()),
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
