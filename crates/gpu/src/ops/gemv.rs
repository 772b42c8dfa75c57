//! Products with weights, and the split activations they read.

use std::cell::Cell;

use fornax_compute::{Error, Rows};

use super::fits;
use crate::arena::Piece;
use crate::cuda::Cuda;
use crate::driver::Arg;
use crate::layout::{Format, TILE_COLUMNS};
use crate::memory::{Buf, Weight, WeightPart, int};
use crate::program::Key;
use crate::step::Slot;

/// Warps of a block share a row's columns; more than this are not needed to keep enough bytes in flight.
const WARPS_MAX: usize = 8;

/// Activations in the form that products read, of one buffer at a time.
pub(crate) struct Scratch {
    piece: Piece,
    /// What is in it, if anything.
    held: Cell<Option<Held>>,
    /// Whether the weights that were uploaded last want bf16 halves.
    bf16: Cell<bool>,
}

/// Whose values the scratch holds, and in which halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) pointer: u64,
    pub(crate) rows: Rows,
    pub(crate) bf16: bool,
    /// Of the arena: an address may have a new owner.
    pub(crate) generation: u64,
}

/// `Split` of split.cuh.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Split {
    x: u64,
    sums: u64,
    factors: u64,
    bf16: i32,
    padded: i32,
}

/// `Inputs` of gemv.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Inputs {
    x: u64,
    sums: u64,
    factors: u64,
    first: i32,
    limit: i32,
}

/// `Result` of gemv.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Product {
    values: u64,
    bias: u64,
    residual: u64,
    columns: i32,
    first: i32,
}

impl Scratch {
    pub(crate) fn new(piece: Piece) -> Scratch {
        Scratch { piece, held: Cell::new(None), bf16: Cell::new(false) }
    }

    pub(crate) fn forget(&self) {
        self.held.set(None);
    }

    pub(crate) fn hold(&self, held: Held) {
        self.held.set(Some(held));
    }

    /// Remembers what a weight of this format will read.
    pub(crate) fn prefer(&self, format: Format) {
        if format != Format::F32 {
            self.bf16.set(format == Format::BF16);
        }
    }

    pub(crate) fn preferred(&self) -> bool {
        self.bf16.get()
    }

    /// How many rows of so many columns it holds.
    pub(crate) fn rows(&self, columns: usize) -> usize {
        let padded = columns.next_multiple_of(TILE_COLUMNS) as u64;
        usize::try_from(self.piece.bytes() / (padded * 4 + padded / 8 + 4)).expect("fits the device")
    }

    /// Its three areas, for as many rows as it holds.
    pub(crate) fn split(&self, columns: usize, bf16: bool) -> Split {
        let padded = columns.next_multiple_of(TILE_COLUMNS);
        let rows = self.rows(columns);
        let x = self.piece.pointer();
        let sums = x + (rows * padded * 4) as u64;
        let factors = sums + (rows * padded / 8) as u64;
        Split { x, sums, factors, bf16: i32::from(bf16), padded: int(padded) }
    }
}

impl Split {
    /// Asks for nothing.
    pub(crate) fn none() -> Split {
        bytemuck::Zeroable::zeroed()
    }
}

/// Warps that share the columns of a weight: a function of the weight alone, so that the order of summation is too.
/// As few steps as possible are left over when they are dealt out.
fn warps(part: &WeightPart) -> usize {
    let steps = part.groups() * TILE_COLUMNS / part.format.step_columns();
    let most = WARPS_MAX.min(steps.max(1));
    let idle = |warps: usize| steps.div_ceil(warps) * warps - steps;
    // Not fewer than three quarters of the most: a warp more keeps more bytes in flight. The largest among equals.
    (most * 3 / 4..=most)
        .rev()
        .min_by_key(|&warps| idle(warps.max(1)) * 64 / warps.max(1))
        .unwrap_or(1)
        .max(1)
}

impl Cuda {
    #[expect(clippy::too_many_arguments, reason = "the operation's own operands")]
    pub(crate) fn op_linear(
        &self,
        operation: &'static str,
        slot: &Slot,
        rows: Rows,
        weight: &Weight,
        bias: Option<&Buf>,
        x: &Buf,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let count = slot.count(rows);
        fits(operation, "x", x, (count, weight.columns))?;
        fits(operation, "out", out, (count, weight.rows))?;
        if let Some(bias) = bias {
            fits(operation, "bias", bias, (1, weight.rows))?;
        }
        let count = self.grid_rows(slot, rows);
        let product = Product {
            values: out.pointer(),
            bias: bias.map_or(0, Buf::pointer),
            residual: 0,
            columns: int(weight.rows),
            first: 0,
        };
        for part in weight.parts.iter().filter(|part| part.format == Format::F32) {
            self.multiply_f32(operation, slot, rows, weight, part, x, &product)?;
        }
        for bf16 in [false, true] {
            let takes =
                |part: &&WeightPart| part.format != Format::F32 && (part.format == Format::BF16) == bf16;
            let parts: Vec<&WeightPart> = weight.parts.iter().filter(takes).collect();
            if parts.is_empty() {
                continue;
            }
            let at_once = self.scratch.rows(weight.columns);
            let held = Held { bf16, ..self.held(x, rows) };
            for first in (0..count).step_by(at_once) {
                let limit = at_once.min(count - first);
                let split = self.scratch.split(weight.columns, bf16);
                if self.scratch.held.get() != Some(held) || count > at_once {
                    self.split(operation, slot, rows, x, (first, limit), &split)?;
                    self.scratch.held.set((count <= at_once).then_some(held));
                }
                for part in &parts {
                    self.multiply(operation, slot, rows, (weight, part), (first, limit), &split, &product)?;
                }
            }
        }
        // The output may be what was split.
        if self.scratch.held.get().is_some_and(|held| held.pointer == out.pointer()) {
            self.scratch.forget();
        }
        Ok(())
    }

    fn split(
        &self,
        operation: &'static str,
        slot: &Slot,
        rows: Rows,
        x: &Buf,
        (first, limit): (usize, usize),
        split: &Split,
    ) -> Result<(), Error> {
        let function = self.programs.function(&Key::plain("split.cu"), "split")?;
        let args = [
            Arg::Pointer(x.pointer()),
            Arg::Int(int(x.columns)),
            Arg::Pointer(slot.pointer()),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Int(int(first)),
            Arg::Struct(bytemuck::bytes_of(split)),
        ];
        let threads = row_threads(x.columns.div_ceil(8));
        self.launch(operation, function, [limit, 1, 1], (threads, 0), &args)
    }

    #[expect(clippy::too_many_arguments, reason = "a leaf of the loop above, which made them all")]
    fn multiply(
        &self,
        operation: &'static str,
        slot: &Slot,
        rows: Rows,
        (weight, part): (&Weight, &WeightPart),
        (first, limit): (usize, usize),
        split: &Split,
        product: &Product,
    ) -> Result<(), Error> {
        let (name, tiles) = match limit {
            0..=8 => ("gemv_1", 1),
            9..=16 => ("gemv_2", 2),
            _ => ("gemv_4", 4),
        };
        let function = self.programs.function(&Key::quant("gemv.cu", part.format.header()), name)?;
        let device_part = weight.device_part(part);
        let inputs = Inputs {
            x: split.x,
            sums: split.sums,
            factors: split.factors,
            first: int(first),
            limit: int(limit),
        };
        let product = Product { first: int(part.first), ..*product };
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_part)),
            Arg::Pointer(slot.pointer()),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Struct(bytemuck::bytes_of(&inputs)),
            Arg::Struct(bytemuck::bytes_of(&product)),
        ];
        let warps = warps(part);
        let shared = u32::try_from(warps * tiles * 512).expect("a few kilobytes");
        let block = u32::try_from(warps * 32).expect("a few warps");
        self.launch(
            operation,
            function,
            [part.row_tiles(), limit.div_ceil(8 * tiles), 1],
            (block, shared),
            &args,
        )
    }

    #[expect(clippy::too_many_arguments, reason = "a leaf of the loop above, which made them all")]
    fn multiply_f32(
        &self,
        operation: &'static str,
        slot: &Slot,
        rows: Rows,
        weight: &Weight,
        part: &WeightPart,
        x: &Buf,
        product: &Product,
    ) -> Result<(), Error> {
        const WARPS: usize = 8;
        let function = self.programs.function(&Key::plain("gemv_f32.cu"), "gemv_f32")?;
        let device_part = weight.device_part(part);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_part)),
            Arg::Pointer(slot.pointer()),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Pointer(x.pointer()),
            Arg::Pointer(product.bias),
            Arg::Pointer(product.values),
            Arg::Int(product.columns),
            Arg::Int(int(part.first)),
        ];
        let grid = [part.rows.div_ceil(WARPS), self.grid_rows(slot, rows), 1];
        self.launch(operation, function, grid, (WARPS as u32 * 32, 0), &args)
    }
}

/// Threads for a row of so many items: whole warps, at most a block.
pub(super) fn row_threads(items: usize) -> u32 {
    u32::try_from(items.next_multiple_of(32).clamp(32, 1024)).expect("at most 1024")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::PLANES;

    #[test]
    fn warps_follow_from_the_weight_and_leave_few_steps_over() {
        let check = |format, columns, wanted| {
            for rows in [1, 16, 4608] {
                let part = WeightPart { format, first: 0, rows, columns, planes: [0; PLANES] };
                assert_eq!(warps(&part), wanted, "{format:?} {columns}");
            }
        };
        check(Format::BF16, 17, 1);
        check(Format::BF16, 896, 7);
        check(Format::BF16, 3584, 7);
        check(Format::Q4_K, 3584, 7);
        check(Format::Q8_0, 4096, 8);
        check(Format::Q6_K, 18944, 7);
    }
}
