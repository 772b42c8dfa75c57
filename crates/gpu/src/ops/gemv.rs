//! Products with weights, and the activations in the form they read.

use std::cell::Cell;

use fornax_compute::{Error, Rows};

use super::fits;
use super::fuse::Pending;
use crate::arena::Piece;
use crate::cuda::Cuda;
use crate::driver::Arg;
use crate::layout::{Format, TILE_COLUMNS, TILE_ROWS};
use crate::memory::{Buf, DevicePart, Weight, WeightPart, int};
use crate::program::Key;
use crate::step::{DeviceStep, Slot};

/// Multiprocessors that blocks are dealt out to: an H100's. A constant, because the order of summation follows from it.
const MULTIPROCESSORS: usize = 132;
/// The most slices that the columns of a tile are shared out in: of codes, which are latency, and of floats, which are
/// bytes.
const SLICES_MAX: [usize; 2] = [26, 14];
/// How many where there are very many tiles, and units that a block then has of one row.
const SLICES_WIDE: [usize; 2] = [3, 2];
const UNITS_WIDE_MAX: usize = 9;
/// Tiles of a unit, of one row.
const UNIT_MAX: usize = 3;
/// Warps of a block for several rows.
const WARPS_SEVERAL: usize = 8;
/// From so many units on (16 rows of a weight and 32 of activations) each is one warp's: four for every multiprocessor.
const ALONE_UNITS: usize = 4 * MULTIPROCESSORS;
const STAGES_MAX: usize = 6;
/// Bytes of dynamic shared memory of a block: what every chip since Ampere has.
pub(crate) const SHARED_MIN: usize = 96 << 10;
/// Bytes of 128 columns of activations: as in split.cuh.
const RECORD: usize = 640;

/// Activations in the form that products read, of one buffer at a time.
pub(crate) struct Scratch {
    area: Piece,
    /// What is in it, if anything.
    held: Cell<Option<Held>>,
}

/// Whose values the scratch holds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Held {
    pointer: u64,
    /// The weight of the norm that is due, or 0.
    norm: u64,
    rows: Rows,
    floats: bool,
    /// Of the arena: an address may have a new owner.
    generation: u64,
}

/// `Inputs` of gemv.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Inputs {
    x: u64,
    records: u64,
    norm: u64,
    first: i32,
    limit: i32,
    eps: f32,
    tiles: i32,
    slices: i32,
    pad: i32,
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

impl Gemv {
    /// Whether the activations are one row, which the kernel brings into form itself.
    pub(super) fn one_row(&self) -> bool {
        self.inputs.limit <= 1
    }
}

impl Scratch {
    pub(crate) fn new(area: Piece) -> Scratch {
        Scratch { area, held: Cell::new(None) }
    }

    pub(crate) fn forget(&self) {
        self.held.set(None);
    }

    /// Of one of these buffers it holds nothing any more.
    pub(super) fn forget_written(&self, written: &[Option<u64>]) {
        if self.held.get().is_some_and(|held| written.contains(&Some(held.pointer))) {
            self.forget();
        }
    }

    /// How many rows of so many columns it holds.
    pub(super) fn rows(&self, columns: usize) -> usize {
        let bytes = (columns.div_ceil(TILE_COLUMNS) * RECORD) as u64;
        usize::try_from(self.area.bytes() / bytes).expect("fits the device")
    }
}

/// How a product with a part is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Whether a block has several units at once, because the weight has very many rows.
    wide: bool,
    /// Of several rows of activations: whether a warp has a unit for itself, and takes its slices one after the other.
    alone: bool,
    /// How many slices the columns of a tile are shared out in.
    slices: usize,
    /// Tiles of a unit, and how many units there are.
    unit: usize,
    units: usize,
    warps: usize,
    /// Blocks that a multiprocessor has at once.
    together: usize,
    stages: usize,
    /// Dynamic shared memory of a block.
    shared: usize,
}

impl Shape {
    /// For `limit` rows of activations; one is brought into form by the block itself. `room` is how much shared memory a
    /// block may have. How many slices there are follows from the part and the chip alone.
    fn of(part: &WeightPart, gates: bool, limit: usize, room: usize) -> Shape {
        let tiles = tiles(limit);
        let (groups, sides) = (part.groups(), if gates { 2 } else { 1 });
        let steps = groups * TILE_COLUMNS / part.format.step_columns();
        let wide = part.row_tiles() >= 12 * MULTIPROCESSORS && groups * RECORD <= 40 << 10;
        let floats = usize::from(part.format.floats());
        let records_each = part.format.step_columns() / TILE_COLUMNS;
        let (step_bytes, sum_bytes) = (part.format.step_bytes(), 2 * TILE_ROWS * 4);
        // As few slices as take no longer, and no more than a block can hold with one step each.
        let each = step_bytes + records_each * RECORD + 2 * sum_bytes;
        let most = SLICES_MAX[floats].min((room - groups * 4) / each);
        let slices = if wide { SLICES_WIDE[floats] } else { steps.div_ceil(steps.div_ceil(most)) };
        let row_tiles = part.row_tiles() / sides;
        if tiles > 0 {
            // Where there are units for every multiprocessor, warps that wait for nobody are faster.
            let alone = wide || row_tiles * limit.div_ceil(4 * tiles) >= ALONE_UNITS;
            // As few as take no longer.
            let warps = if alone { WARPS_SEVERAL } else { slices.div_ceil(slices.div_ceil(WARPS_SEVERAL)) };
            let fixed = if alone { 0 } else { slices * tiles * 256 };
            let stage = warps * step_bytes;
            let stages = (SHARED_MIN.saturating_sub(fixed) / stage).clamp(1, 2);
            let shared = fixed + stages * stage;
            let units = row_tiles;
            return Shape { wide, alone, slices, unit: 1, units, warps, together: 1, stages, shared };
        }
        let tiles_each = row_tiles.div_ceil(MULTIPROCESSORS);
        // Where it is wide, each block has as many units as the others, as far as that goes and fits.
        let units_room = room.saturating_sub(groups * (RECORD + 4)) / (slices * 2 * (step_bytes + sum_bytes));
        let units_most = units_room.clamp(1, UNITS_WIDE_MAX);
        let warps = if wide { slices * tiles_each.div_ceil(tiles_each.div_ceil(units_most)) } else { slices };
        let records = if wide { groups } else { warps * records_each };
        let stage = warps * step_bytes;
        let fixed = |unit: usize| records * RECORD + warps * sides * unit * sum_bytes + groups * 4;
        // Where warps have several steps, much is done once for a unit, so it has several tiles.
        let unit_most = if wide || steps < 14 { 1 } else { tiles_each.clamp(1, UNIT_MAX / sides) };
        let unit = (1..=unit_most).rev().find(|&unit| fixed(unit) + stage <= room).unwrap_or(1);
        let (units, parts, fixed) = (row_tiles.div_ceil(unit), sides * unit, fixed(unit));
        // How many blocks a multiprocessor has.
        let together = match slices {
            _ if wide => 1,
            0..=8 => units.div_ceil(MULTIPROCESSORS).clamp(1, 3),
            _ => 1,
        };
        let fits = |room: usize| room.saturating_sub(fixed) / stage;
        // Blocks that share a multiprocessor leave a quarter of it to the next kernel's.
        let roomy = if wide { room } else { room * 3 / 4 / together };
        let rounds = units.div_ceil(MULTIPROCESSORS * together);
        let at_once = if wide { STAGES_MAX } else { steps.div_ceil(warps) * parts * rounds };
        let stages = fits(roomy).max(2).min(fits(room)).min(at_once).clamp(1, STAGES_MAX);
        // Few programs: each is compiled.
        let stages = if stages == 5 { 4 } else { stages };
        let shared = fixed + stages * stage;
        Shape { wide, alone: false, slices, unit, units, warps, together, stages, shared }
    }

    fn program(&self, part: &WeightPart, gates: bool, limit: usize) -> Key {
        let mut key = Key::quant("gemv.cu", part.format);
        // What registers are shared out among: more than there are, so that the next kernel's blocks fit beside these.
        let one_row = tiles(limit) == 0;
        let threads = match (self.warps, one_row) {
            // Sums take more registers than two blocks could share: spilled, a prompt takes twice as long.
            (_, false) => WARPS_SEVERAL * 32,
            (0..=8, true) => 256,
            (9..=16, true) => 768,
            _ => 864,
        };
        let wide = if one_row { self.wide } else { self.alone };
        key.defines.extend([
            format!("WIDE={}", if wide { self.slices } else { 0 }),
            format!("GATES={}", i32::from(gates)),
            format!("STAGES={}", self.stages),
            format!("ONE_ROW={}", i32::from(one_row)),
            format!("TILES={}", self.unit),
            format!("THREADS={threads}"),
            format!("BLOCKS={}", if one_row { self.together } else { 1 }),
        ]);
        key
    }
}

/// How many times four rows of activations a block has; 0: one row.
fn tiles(limit: usize) -> usize {
    match limit {
        0..=1 => 0,
        2..=4 => 1,
        5..=8 => 2,
        9..=16 => 4,
        _ => 8,
    }
}

/// The programs that products with a part are made of: for one stream, for several, and for a prompt.
pub(crate) fn programs(part: &WeightPart, room: usize) -> Vec<Key> {
    if part.format == Format::F32 {
        return vec![Key::plain("gemv_f32.cu")];
    }
    let mut keys = Vec::new();
    for (gates, limit) in [(false, 1), (true, 1), (false, 2), (false, 512)] {
        let key = Shape::of(part, gates, limit, room).program(part, gates, limit);
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    keys
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
        self.touch_written(slot, &[Some(out.pointer()), room.map(Buf::pointer)])?;
        let plain = weight.parts.iter().any(|part| part.format == Format::F32);
        let due = self.due_norm(x, rows).filter(|_| !plain);
        if due.is_none() {
            self.touch_read(slot, x)?;
        }
        let count = self.grid_rows(slot, rows);
        let product = Product {
            values: out.pointer(),
            bias: bias.map_or(0, Buf::pointer),
            columns: int(weight.rows),
            first: 0,
            adds: i32::from(adds),
            pairs: 0,
            gated: 0,
        };
        let (from, norm, eps) = due.map_or((x.pointer(), 0, 0.0), |due| (due.x, due.weight, due.eps));
        let at_once = self.scratch.rows(weight.columns);
        for part in &weight.parts {
            let product = Product { first: int(part.first), ..product };
            if part.format == Format::F32 {
                self.multiply_f32(operation, (slot, rows), (weight, part), x, &product)?;
                continue;
            }
            for first in (0..count).step_by(at_once) {
                let limit = at_once.min(count - first);
                let inputs = Inputs {
                    x: from,
                    records: self.scratch.area.pointer(),
                    norm,
                    first: int(first),
                    limit: int(limit),
                    eps,
                    tiles: 0,
                    slices: 0,
                    pad: 0,
                };
                let floats = part.format.floats();
                let held = Held { pointer: from, norm, rows, floats, generation: self.generation() };
                if count > 1 && (self.scratch.held.get() != Some(held) || count > at_once) {
                    self.split(operation, (slot, rows), weight.columns, floats, &inputs)?;
                    self.scratch.held.set((count <= at_once).then_some(held));
                }
                let device_part = weight.device_part(part);
                let step = self.device_step(slot);
                let gemv = Gemv { operation, part: *part, device_part, step, rows, inputs, product };
                // The gated activation may be done by the same kernel.
                let whole = weight.parts.len() == 1 && at_once >= self.options().tokens_max;
                if self.fuses() && whole {
                    self.pend(Pending { gemv, out: out.pointer(), columns: weight.rows });
                } else {
                    self.multiply(&gemv)?;
                }
            }
        }
        Ok(())
    }

    /// Brings rows into the form that products read.
    fn split(
        &self,
        operation: &'static str,
        (slot, rows): (&Slot, Rows),
        columns: usize,
        floats: bool,
        inputs: &Inputs,
    ) -> Result<(), Error> {
        const WARPS: usize = 4;
        let name = if floats { "split_floats" } else { "split_codes" };
        let function = self.programs.function(&Key::plain("split.cu"), name)?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Pointer(inputs.x),
            Arg::Pointer(inputs.norm),
            Arg::Int(int(columns)),
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Int(inputs.first),
            Arg::Pointer(inputs.records),
        ];
        let limit = inputs.limit.cast_unsigned() as usize;
        let grid = [columns.div_ceil(TILE_COLUMNS * WARPS), limit, 1];
        self.launch(operation, function, grid, (WARPS as u32 * 32, 0), &args)
    }

    /// Launches a product.
    pub(super) fn multiply(&self, gemv: &Gemv) -> Result<(), Error> {
        let Gemv { operation, part, device_part, step, rows, mut inputs, product } = *gemv;
        let limit = inputs.limit.cast_unsigned() as usize;
        let tiles = tiles(limit);
        let name = match tiles {
            0 => "gemv_one",
            1 => "gemv_1",
            2 => "gemv_2",
            4 => "gemv_4",
            _ => "gemv_8",
        };
        let gates = product.pairs > 0;
        let shape = Shape::of(&part, gates, limit, self.device.shared_max);
        let function = self.programs.function(&shape.program(&part, gates, limit), name)?;
        inputs.tiles = int(part.row_tiles() / if gates { 2 } else { 1 });
        inputs.slices = int(shape.slices);
        let multiprocessors = self.device.multiprocessors as usize;
        let blocks = match tiles {
            0 if shape.wide => shape.units.div_ceil(shape.warps / shape.slices).min(multiprocessors),
            0 => shape.units.min(shape.together * multiprocessors),
            _ if shape.alone => shape.units.div_ceil(shape.warps),
            _ => shape.units,
        };
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_part)),
            Arg::Struct(bytemuck::bytes_of(&step)),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Struct(bytemuck::bytes_of(&inputs)),
            Arg::Struct(bytemuck::bytes_of(&product)),
        ];
        let shared = u32::try_from(shape.shared).expect("at most what a block has");
        let block = u32::try_from(shape.warps * 32).expect("a few warps");
        let grid = [blocks, limit.div_ceil(4 * tiles.max(1)), 1];
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
        let check = |format, shape, gates, wanted| {
            let Shape { wide, unit, warps, stages, .. } =
                Shape::of(&part(format, shape), gates, 1, 219 << 10);
            assert_eq!((wide, unit, warps, stages), wanted, "{format:?} {shape:?}, gates {gates}");
        };
        check(Format::BF16, (16, 17), false, (false, 1, 1, 1));
        check(Format::BF16, (9728, 896), true, (false, 1, 7, 2));
        check(Format::BF16, (152_064, 3584), false, (true, 1, 18, 2));
        check(Format::BF16, (3584, 3584), false, (false, 2, 14, 2));
        check(Format::Q4_K, (37_888, 3584), true, (true, 1, 27, 3));
        check(Format::Q4_K, (3584, 3584), false, (false, 2, 14, 2));
        check(Format::Q8_0, (37_888, 4096), false, (true, 1, 27, 3));
        check(Format::Q6_K, (3584, 18_944), false, (false, 2, 25, 2));
    }

    #[test]
    fn how_columns_are_shared_does_not_depend_on_the_batch() {
        for format in [Format::BF16, Format::Q8_0, Format::Q4_K] {
            for rows in [16, 512, 3584, 8192, 25_344, 152_064] {
                for columns in [256, 1024, 3584, 18_944, 32_768] {
                    let shapes = [(false, 1), (true, 1), (false, 2), (true, 17), (false, 512)].map(
                        |(gates, limit)| Shape::of(&part(format, (rows, columns)), gates, limit, SHARED_MIN),
                    );
                    let slices = shapes.map(|shape| (shape.wide, shape.slices));
                    assert!(slices.iter().all(|some| *some == slices[0]), "{format:?} {rows} x {columns}");
                }
            }
        }
    }

    #[test]
    fn no_block_asks_for_more_shared_memory_than_every_chip_has() {
        for format in [Format::F16, Format::Q8_0, Format::Q4_K, Format::Q5_K, Format::Q6_K, Format::Q5_1] {
            for rows in [16, 512, 3584, 8192, 152_064] {
                for columns in [256, 1024, 3584, 18_944, 32_768, 262_144] {
                    for (gates, limit) in
                        [(false, 1), (true, 1), (false, 2), (true, 2), (false, 17), (true, 17), (false, 512)]
                    {
                        let shape = Shape::of(&part(format, (rows, columns)), gates, limit, SHARED_MIN);
                        assert!(shape.warps <= 27 && (1..=STAGES_MAX).contains(&shape.stages));
                        assert!(shape.shared <= SHARED_MIN, "{format:?} {rows} x {columns}: {shape:?}");
                    }
                }
            }
        }
    }
}
