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

/// Warps of a block share the columns of its rows: more of them where rows are few, so that enough bytes are in flight.
const WARPS_MAX: usize = 8;
const WARPS_MAX_FEW_ROWS: usize = 16;
/// Up to so many times 16 rows are few: four blocks on each of an H100's 132 multiprocessors.
const FEW_ROW_TILES: usize = 528;

/// Activations in the form that products read, of one buffer at a time.
pub(crate) struct Scratch {
    piece: Piece,
    /// What is in it, if anything.
    held: Cell<Option<Held>>,
}

/// Whose values the scratch holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) pointer: u64,
    pub(crate) rows: Rows,
    /// Of the arena: an address may have a new owner.
    pub(crate) generation: u64,
}

/// `Split` of split.cuh.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Split {
    x: u64,
    sums: u64,
    padded: i32,
    pad: i32,
}

/// `Inputs` of gemv.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Inputs {
    x: u64,
    sums: u64,
    first: i32,
    limit: i32,
}

/// `Result` of gemv.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Product {
    values: u64,
    bias: u64,
    columns: i32,
    first: i32,
    adds: i32,
    pad: i32,
}

impl Scratch {
    pub(crate) fn new(piece: Piece) -> Scratch {
        Scratch { piece, held: Cell::new(None) }
    }

    pub(crate) fn forget(&self) {
        self.held.set(None);
    }

    pub(crate) fn hold(&self, held: Held) {
        self.held.set(Some(held));
    }

    /// How many rows of so many columns it holds.
    pub(crate) fn rows(&self, columns: usize) -> usize {
        let padded = columns.next_multiple_of(TILE_COLUMNS) as u64;
        usize::try_from(self.piece.bytes() / (padded * 4 + padded / 4)).expect("fits the device")
    }

    /// Its two areas, for as many rows as it holds.
    pub(crate) fn split(&self, columns: usize) -> Split {
        let padded = columns.next_multiple_of(TILE_COLUMNS);
        let x = self.piece.pointer();
        Split { x, sums: x + (self.rows(columns) * padded * 4) as u64, padded: int(padded), pad: 0 }
    }
}

impl Split {
    /// Asks for nothing.
    pub(crate) const fn none() -> Split {
        Split { x: 0, sums: 0, padded: 0, pad: 0 }
    }

    /// Columns rounded up.
    pub(crate) fn padded(&self) -> usize {
        self.padded.cast_unsigned() as usize
    }
}

/// Warps that share the columns of a weight: a function of the weight alone, so that the order of summation is too.
/// As few steps as possible are left over when they are dealt out.
fn warps(part: &WeightPart) -> usize {
    let steps = part.groups() * TILE_COLUMNS / part.format.step_columns();
    let most = if part.row_tiles() <= FEW_ROW_TILES { WARPS_MAX_FEW_ROWS } else { WARPS_MAX };
    let most = most.min(steps.max(1));
    let idle = |warps: usize| steps.div_ceil(warps) * warps - steps;
    // Not fewer than three quarters of the most: a warp more keeps more bytes in flight. The largest among equals.
    (most * 3 / 4..=most)
        .rev()
        .min_by_key(|&warps| idle(warps.max(1)) * 64 / warps.max(1))
        .unwrap_or(1)
        .max(1)
}

impl Cuda {
    /// `out` = product, or with `adds` += product.
    pub(crate) fn op_linear(
        &self,
        (operation, adds): (&'static str, bool),
        (slot, rows): (&Slot, Rows),
        (weight, bias): (&Weight, Option<&Buf>),
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
            columns: int(weight.rows),
            first: 0,
            adds: i32::from(adds),
            pad: 0,
        };
        for part in weight.parts.iter().filter(|part| part.format == Format::F32) {
            self.multiply_f32(operation, (slot, rows), (weight, part), x, &product)?;
        }
        let parts: Vec<&WeightPart> = weight.parts.iter().filter(|part| part.format != Format::F32).collect();
        if !parts.is_empty() {
            let at_once = self.scratch.rows(weight.columns);
            let held = self.held(x, rows);
            let split = self.scratch.split(weight.columns);
            for first in (0..count).step_by(at_once) {
                let limit = at_once.min(count - first);
                if self.scratch.held.get() != Some(held) || count > at_once {
                    self.split(operation, (slot, rows), x, (first, limit), &split)?;
                    self.scratch.held.set((count <= at_once).then_some(held));
                }
                for part in &parts {
                    self.multiply(operation, (slot, rows), (weight, part), (first, limit), &split, &product)?;
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
        (slot, rows): (&Slot, Rows),
        x: &Buf,
        (first, limit): (usize, usize),
        split: &Split,
    ) -> Result<(), Error> {
        const THREADS: usize = 128;
        let function = self.programs.function(&Key::plain("split.cu"), "split")?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Pointer(x.pointer()),
            Arg::Int(int(x.columns)),
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Int(int(first)),
            Arg::Struct(bytemuck::bytes_of(split)),
        ];
        let grid = [split.padded() / THREADS, limit, 1];
        self.launch(operation, function, grid, (THREADS as u32, 0), &args)
    }

    fn multiply(
        &self,
        operation: &'static str,
        (slot, rows): (&Slot, Rows),
        (weight, part): (&Weight, &WeightPart),
        (first, limit): (usize, usize),
        split: &Split,
        product: &Product,
    ) -> Result<(), Error> {
        let (name, tiles) = match limit {
            0..=4 => ("gemv_1", 1),
            5..=8 => ("gemv_2", 2),
            9..=16 => ("gemv_4", 4),
            _ => ("gemv_8", 8),
        };
        let key = Key::quant("gemv.cu", part.format.header());
        let function = self.programs.function(&key, name)?;
        let device_part = weight.device_part(part);
        let inputs = Inputs { x: split.x, sums: split.sums, first: int(first), limit: int(limit) };
        let product = Product { first: int(part.first), ..*product };
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_part)),
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Struct(bytemuck::bytes_of(&inputs)),
            Arg::Struct(bytemuck::bytes_of(&product)),
        ];
        let warps = warps(part);
        let shared = u32::try_from(warps * tiles * 256).expect("at most 32 KB");
        let block = u32::try_from(warps * 32).expect("a few warps");
        let grid = [part.row_tiles(), limit.div_ceil(4 * tiles), 1];
        self.launch(operation, function, grid, (block, shared), &args)
    }

    fn multiply_f32(
        &self,
        operation: &'static str,
        (slot, rows): (&Slot, Rows),
        (weight, part): (&Weight, &WeightPart),
        x: &Buf,
        product: &Product,
    ) -> Result<(), Error> {
        const WARPS: usize = 8;
        let function = self.programs.function(&Key::plain("gemv_f32.cu"), "gemv_f32")?;
        let device_part = weight.device_part(part);
        let product = Product { first: int(part.first), ..*product };
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_part)),
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Pointer(x.pointer()),
            Arg::Struct(bytemuck::bytes_of(&product)),
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
        let check = |format, rows, columns, wanted| {
            let part = WeightPart { format, first: 0, rows, columns, planes: [0; PLANES] };
            assert_eq!(warps(&part), wanted, "{format:?} {rows} x {columns}");
        };
        check(Format::BF16, 16, 17, 1);
        check(Format::BF16, 9728, 896, 7);
        check(Format::BF16, 152_064, 3584, 7);
        check(Format::BF16, 3584, 3584, 14);
        check(Format::Q4_K, 37_888, 3584, 7);
        check(Format::Q4_K, 3584, 3584, 14);
        check(Format::Q8_0, 37_888, 4096, 8);
        check(Format::Q6_K, 3584, 18_944, 15);
    }
}
