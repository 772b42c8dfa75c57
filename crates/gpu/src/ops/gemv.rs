//! Products with weights, and the split activations they read.

use std::cell::Cell;

use fornax_compute::{Error, Rows};

use super::fits;
use super::fuse::Pending;
use crate::arena::Piece;
use crate::cuda::Cuda;
use crate::driver::Arg;
use crate::layout::{Format, TILE_COLUMNS, TILE_ROWS};
use crate::memory::{Buf, DevicePart, SPLITS, Weight, WeightPart, int};
use crate::program::Key;
use crate::step::{DeviceStep, Slot};

/// Multiprocessors that blocks are dealt out to: an H100's. A constant, because the order of summation follows from it.
const MULTIPROCESSORS: usize = 132;
/// Warps of a block: where a weight has very many rows, where it has few.
const WARPS_MAX: usize = 8;
const WARPS_MAX_FEW_ROWS: usize = 16;
/// Shared memory of a multiprocessor, less what blocks take beside what they ask for.
const SHARED_BYTES: usize = 218 << 10;
const STAGES_MAX: usize = 4;
/// Bytes of dynamic shared memory of a block: what every chip since Ampere has.
pub(crate) const SHARED_MAX: u32 = 96 << 10;

/// Activations in the form that products read, of one buffer at a time. Of two areas one holds them; the other is filled
/// by whoever reads the first.
pub(crate) struct Scratch {
    areas: [Piece; SPLITS],
    now: Cell<usize>,
    /// What is in it, if anything.
    pub(super) held: Cell<Option<Held>>,
}

/// Whose values the scratch holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Held {
    pub(crate) pointer: u64,
    pub(crate) rows: Rows,
    /// Of the arena: an address may have a new owner.
    pub(crate) generation: u64,
    /// The values are the input of a norm times its weight, with the sums of squares: the product that reads them does
    /// the rest, with this epsilon.
    pub(crate) norm: Option<f32>,
}

/// `Split` of split.cuh.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Split {
    x: u64,
    sums: u64,
    squares: u64,
    padded: i32,
    pad: i32,
}

/// `Inputs` of gemv.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Inputs {
    split: Split,
    first: i32,
    limit: i32,
    eps: f32,
    units: i32,
}

/// `MODE` of gemv.cu: what is done with results beside storing them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Plain,
    Norms,
    Gates,
}

impl Mode {
    /// Tiles of 16 rows that a block has at a time: with gates also their counterparts.
    fn sides(self) -> usize {
        if self == Mode::Gates { 2 } else { 1 }
    }

    fn program(self, format: Format, stages: usize) -> Key {
        let mut key = Key::quant("gemv.cu", format.header());
        key.defines.extend([format!("MODE={}", self as i32), format!("STAGES={stages}")]);
        key
    }
}

/// The programs that products with a part are made of.
pub(crate) fn programs(part: &WeightPart) -> Vec<Key> {
    if part.format == Format::F32 {
        return vec![Key::plain("gemv_f32.cu")];
    }
    // For one stream, and for a prompt.
    let mut keys = Vec::new();
    for (mode, tiles) in [(Mode::Plain, 1), (Mode::Norms, 1), (Mode::Gates, 1), (Mode::Plain, 8)] {
        let key = mode.program(part.format, stages_of(part, mode.sides(), tiles));
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    keys
}

/// `Result` of result.cuh.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Product {
    values: u64,
    bias: u64,
    columns: i32,
    first: i32,
    adds: i32,
    pub(super) pairs: i32,
    pub(super) gated: u64,
    pub(super) norm: u64,
    pub(super) split: Split,
}

/// A product with one part of a weight, ready to be launched.
#[derive(Clone, Copy)]
pub(crate) struct Gemv {
    operation: &'static str,
    part: WeightPart,
    device_part: DevicePart,
    step: DeviceStep,
    pub(super) rows: Rows,
    inputs: Inputs,
    pub(super) product: Product,
}

impl Scratch {
    pub(crate) fn new(areas: [Piece; SPLITS]) -> Scratch {
        Scratch { areas, now: Cell::new(0), held: Cell::new(None) }
    }

    pub(crate) fn forget(&self) {
        self.held.set(None);
    }

    /// How many rows of so many columns an area holds.
    pub(crate) fn rows(&self, columns: usize) -> usize {
        let padded = columns.next_multiple_of(TILE_COLUMNS) as u64;
        usize::try_from(self.areas[0].bytes() / (padded * 4 + padded / 2)).expect("fits the device")
    }

    /// The area that holds something, laid out for as many rows as there is room for.
    pub(crate) fn split(&self, columns: usize) -> Split {
        self.split_of(self.now.get(), columns)
    }

    /// The other area, which from now on is the one that holds something.
    pub(crate) fn turned(&self, columns: usize) -> Split {
        self.now.set((self.now.get() + 1) % SPLITS);
        self.split(columns)
    }

    fn split_of(&self, area: usize, columns: usize) -> Split {
        let padded = columns.next_multiple_of(TILE_COLUMNS);
        let (x, rows) = (self.areas[area].pointer(), self.rows(columns));
        let sums = x + (rows * padded * 4) as u64;
        Split { x, sums, squares: sums + (rows * padded / 4) as u64, padded: int(padded), pad: 0 }
    }
}

impl Split {
    /// Asks for nothing.
    pub(crate) const fn none() -> Split {
        Split { x: 0, sums: 0, squares: 0, padded: 0, pad: 0 }
    }

    /// Columns rounded up.
    pub(crate) fn padded(&self) -> usize {
        self.padded.cast_unsigned() as usize
    }

    /// Of values that no norm is due for.
    pub(crate) fn plain(self) -> Split {
        Split { squares: 0, ..self }
    }
}

/// Warps of a block that share the columns of a part: a function of the weight alone, so that the order of summation is
/// too. `sides` is 2 where a block has gates and their counterparts.
fn warps_of(part: &WeightPart, sides: usize) -> usize {
    let steps = part.groups() * TILE_COLUMNS / part.format.step_columns();
    let blocks = part.row_tiles() / sides;
    // Few rows: more warps each, down to one step a warp where a block is alone. Otherwise warps of other blocks hide
    // each other's waiting.
    let most = match blocks {
        0..=MULTIPROCESSORS => steps.min(WARPS_MAX_FEW_ROWS),
        _ if blocks <= 4 * MULTIPROCESSORS => steps.div_ceil(2).min(WARPS_MAX_FEW_ROWS),
        _ => steps.min(WARPS_MAX),
    };
    let most = most.min(WARPS_MAX_FEW_ROWS / sides).max(1);
    let idle = |slices: usize| steps.div_ceil(slices) * slices - steps;
    // Not fewer than three quarters of the most: a warp more keeps more bytes in flight. The largest among equals.
    let slices = (most * 3 / 4..=most).rev().min_by_key(|&slices| idle(slices.max(1)) * 64 / slices.max(1));
    slices.unwrap_or(1).max(1) * sides
}

/// Bytes of a block's sums, for `tiles` times four rows of activations.
fn sums_bytes(warps: usize, tiles: usize) -> usize {
    let turns = if tiles == 1 { 2 } else { 1 };
    warps * turns * tiles * TILE_ROWS * 16
}

/// How many steps each warp has under way: two, or as many more as fit while a multiprocessor holds all the warps it can.
fn stages_of(part: &WeightPart, sides: usize, tiles: usize) -> usize {
    let warps = warps_of(part, sides);
    let steps = part.groups() * TILE_COLUMNS / part.format.step_columns();
    let blocks = part.row_tiles() / sides;
    let resident = blocks.div_ceil(MULTIPROCESSORS).clamp(1, (part.format.warps_resident() / warps).max(1));
    // Where a block has several times 16 rows, its warps read on into the next.
    let most = (steps.div_ceil(warps / sides) * blocks.div_ceil(MULTIPROCESSORS * resident)).min(STAGES_MAX);
    let fits = |stages: &usize, room: usize| block_bytes(part, warps, *stages, tiles) <= room;
    let roomy =
        (2..=most).rev().find(|stages| fits(stages, (SHARED_BYTES / resident).min(SHARED_MAX as usize)));
    roomy.or((2..=most).find(|stages| fits(stages, SHARED_MAX as usize))).unwrap_or(1)
}

/// Dynamic shared memory of a block.
fn block_bytes(part: &WeightPart, warps: usize, stages: usize, tiles: usize) -> usize {
    warps * stages * part.format.step_bytes() + sums_bytes(warps, tiles)
}

impl Cuda {
    /// `out` = product, or with `adds` += product. Beside `out`, `room` need not keep what it holds.
    pub(crate) fn op_linear(
        &self,
        (operation, adds): (&'static str, bool),
        (slot, rows): (&Slot, Rows),
        (weight, bias): (&Weight, Option<&Buf>),
        x: &Buf,
        (out, room): (&mut Buf, Option<&Buf>),
    ) -> Result<(), Error> {
        let count = slot.count(rows);
        fits(operation, "x", x, (count, weight.columns))?;
        fits(operation, "out", out, (count, weight.rows))?;
        if let Some(bias) = bias {
            fits(operation, "bias", bias, (1, weight.rows))?;
        }
        self.flush()?;
        let plain = weight.parts.iter().any(|part| part.format == Format::F32);
        let due = self.due_norm(x, rows).filter(|_| !plain);
        if due.is_none() {
            self.touch_read(slot, x)?;
        }
        self.touch_written(slot, &[Some(out.pointer()), room.map(Buf::pointer)])?;
        let count = self.grid_rows(slot, rows);
        let product = Product {
            values: out.pointer(),
            bias: bias.map_or(0, Buf::pointer),
            columns: int(weight.rows),
            first: 0,
            adds: i32::from(adds),
            pairs: 0,
            gated: 0,
            norm: 0,
            split: Split::none(),
        };
        for part in weight.parts.iter().filter(|part| part.format == Format::F32) {
            self.multiply_f32(operation, (slot, rows), (weight, part), x, &product)?;
        }
        let parts: Vec<&WeightPart> = weight.parts.iter().filter(|part| part.format != Format::F32).collect();
        if parts.is_empty() {
            return Ok(());
        }
        let at_once = self.scratch.rows(weight.columns);
        let held = self.held(x, rows);
        let is_held = || self.scratch.held.get() == Some(held);
        for first in (0..count).step_by(at_once) {
            let limit = at_once.min(count - first);
            if due.is_none() && (!is_held() || count > at_once) {
                let split = self.scratch.turned(weight.columns).plain();
                self.split(operation, (slot, rows), x, (first, limit), &split)?;
                self.scratch.held.set((count <= at_once).then_some(held));
            }
            let split = self.scratch.split(weight.columns);
            let inputs = Inputs {
                split: if due.is_some() { split } else { split.plain() },
                first: int(first),
                limit: int(limit),
                eps: due.unwrap_or(0.0),
                units: 0,
            };
            for part in &parts {
                let gemv = Gemv {
                    operation,
                    part: **part,
                    device_part: weight.device_part(part),
                    step: self.device_step(slot),
                    rows,
                    inputs,
                    product: Product { first: int(part.first), ..product },
                };
                // What follows may be done by the same kernel.
                if self.fuses() && weight.parts.len() == 1 && limit == count {
                    self.pend(Pending { gemv, out: out.pointer(), columns: weight.rows });
                } else {
                    self.multiply(&gemv)?;
                }
            }
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

    /// Launches a product.
    pub(super) fn multiply(&self, gemv: &Gemv) -> Result<(), Error> {
        let Gemv { operation, part, device_part, step, rows, mut inputs, product } = *gemv;
        let limit = inputs.limit.cast_unsigned() as usize;
        let (name, tiles) = match limit {
            0..=4 => ("gemv_1", 1),
            5..=8 => ("gemv_2", 2),
            9..=16 => ("gemv_4", 4),
            _ => ("gemv_8", 8),
        };
        let mode = match (product.pairs, product.norm) {
            (0, 0) => Mode::Plain,
            (0, _) => Mode::Norms,
            _ => Mode::Gates,
        };
        let (warps, stages) = (warps_of(&part, mode.sides()), stages_of(&part, mode.sides(), tiles));
        let function = self.programs.function(&mode.program(part.format, stages), name)?;
        let shared = block_bytes(&part, warps, stages, tiles);
        let units = part.row_tiles() / mode.sides();
        inputs.units = int(units);
        // Blocks that stay: each as many times as the others, as far as that goes. Where nothing has to be unpacked,
        // blocks of their own are faster: 7B in bf16 4.5 ms a step instead of 4.7.
        let resident = (part.format.warps_resident() / warps).min(SHARED_BYTES / shared).max(1);
        let slots = self.device.multiprocessors as usize * resident;
        let blocks = match part.format {
            Format::BF16 | Format::F16 => units,
            _ => units.div_ceil(units.div_ceil(slots).max(1)),
        };
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_part)),
            Arg::Struct(bytemuck::bytes_of(&step)),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Struct(bytemuck::bytes_of(&inputs)),
            Arg::Struct(bytemuck::bytes_of(&product)),
        ];
        let shared = u32::try_from(shared).expect("at most 96 KB");
        let block = u32::try_from(warps * 32).expect("a few warps");
        let grid = [blocks, limit.div_ceil(4 * tiles), 1];
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

    fn part(format: Format, (rows, columns): (usize, usize)) -> WeightPart {
        WeightPart { format, first: 0, rows, columns, planes: [0; PLANES] }
    }

    #[test]
    fn the_shape_of_a_product_follows_from_the_weight_and_leaves_few_steps_over() {
        let check = |format, shape, sides, wanted| {
            let part = part(format, shape);
            let got = (warps_of(&part, sides), stages_of(&part, sides, 1));
            assert_eq!(got, wanted, "{format:?} {shape:?}, {sides}");
        };
        check(Format::BF16, (16, 17), 1, (1, 1));
        check(Format::BF16, (9728, 896), 2, (8, 2));
        check(Format::BF16, (152_064, 3584), 1, (7, 2));
        check(Format::BF16, (3584, 3584), 1, (14, 1));
        check(Format::Q4_K, (37_888, 3584), 2, (14, 2));
        check(Format::Q4_K, (3584, 3584), 1, (7, 2));
        check(Format::Q8_0, (37_888, 4096), 1, (8, 2));
        check(Format::Q6_K, (3584, 18_944), 1, (15, 1));
    }

    #[test]
    fn no_block_asks_for_more_shared_memory_than_every_chip_has() {
        for format in [Format::F16, Format::Q8_0, Format::Q4_K, Format::Q5_K, Format::Q6_K, Format::Q5_1] {
            for rows in [16, 512, 3584, 8192, 152_064] {
                for columns in [256, 1024, 3584, 18_944, 32_768] {
                    for (sides, tiles) in [(1, 1), (2, 1), (1, 8), (2, 8)] {
                        let part = part(format, (rows, columns));
                        let (warps, stages) = (warps_of(&part, sides), stages_of(&part, sides, tiles));
                        assert!(warps <= 16 && warps % sides == 0 && (1..=STAGES_MAX).contains(&stages));
                        let bytes = block_bytes(&part, warps, stages, tiles);
                        assert!(bytes <= SHARED_MAX as usize, "{format:?} {rows} x {columns}: {bytes}");
                    }
                }
            }
        }
    }
}
