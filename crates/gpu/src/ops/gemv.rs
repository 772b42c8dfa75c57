//! Products with a weight for one row of activations and for a few, and how rows are prepared for them.

use std::cell::Cell;

use bytemuck::Zeroable;
use fornax_compute::{Error, Linear, Rows, operands};

use super::fuse::Pending;
use super::gemm::{Gemm, room_for};
use super::gemm_few::rows_max as rows_few;
use crate::abi::{Constant, Layout, layout};
use crate::arena::Piece;
use crate::cuda::Cuda;
use crate::driver::Arg;
use crate::grid::Grid;
use crate::layout::{Format, TILE_COLUMNS, TILE_ROWS};
use crate::memory::{Buf, DevicePart, PARTIALS_BYTES, TICKETS, Weight, WeightPart, int};
use crate::program::Key;
use crate::step::{DeviceStep, Slot};

/// Multiprocessors that work is split for: those of an H100. It is a constant because the order of summation depends on
/// it.
pub(super) const MULTIPROCESSORS: usize = 132;
/// From this many tiles of 16 rows on, columns are split into this many slices: the fewer tiles, the more slices, so
/// that every multiprocessor has enough warps.
const SLICES: [(usize, usize); 4] =
    [(8 * MULTIPROCESSORS, 1), (4 * MULTIPROCESSORS, 2), (MULTIPROCESSORS, 4), (0, 8)];
/// Warps of a block: for one row of activations, and for several rows, whose sums need registers.
const WARPS_MAX: usize = 18;
const WARPS_SEVERAL: usize = 18;
/// With fewer warps a multiprocessor is not busy all the time.
const WARPS_ENOUGH: usize = 8;
/// Slices of at least this many columns are halved.
const SLICE_COLUMNS: usize = 4096;
/// The most tiles that a block works on at the same time where several warps share a tile: one barrier each.
const TEAMS_MAX: usize = 15;
/// The most groups of 128 columns that one warp prepares: it keeps them in registers.
const EACH_MAX: usize = 20;
/// Up to this many rows, each row is prepared by a block of 1024 threads: about one row for each multiprocessor.
const FORM_FEW: usize = 128;
/// Threads of a block of `form_fours`, columns that it keeps in registers, and rows that are loaded ahead by a block of
/// `form_stream`.
const FORM_FOURS: usize = 512;
const FORM_KEPT: usize = 4096;
const STREAM_MAX: usize = 8;
const STAGES_MAX: usize = 8;
/// Half of a multiprocessor's shared memory.
const SHARED_HALF: usize = 113 << 10;
/// A little more than half, so that two such blocks do not fit on one multiprocessor. Otherwise a multiprocessor that
/// is free early gets two blocks of the next kernel, and another one gets none.
const SHARED_ALONE: usize = SHARED_HALF + 2048;
/// A product that reads at least this many bytes asks for `SHARED_ALONE`.
const ALONE_BYTES: usize = 6 << 20;
/// What fits beside such a block. Products of small models, other than gates, ask for it. One of their blocks then
/// starts on each multiprocessor beside a block of the gates, and no multiprocessor gets two of them while another has
/// none.
const SHARED_BESIDE: usize = 109 << 10;
/// The same bound as `ALONE_BYTES`, for products of small models.
const SMALL_ALONE_BYTES: usize = 2 << 20;
/// A product that reads at least this many bytes does not belong to a small model.
const LARGE_BYTES: usize = 24 << 20;
/// Up to this many groups of 128 columns, one lane adds up the squares of the groups.
const FEW_GROUPS: usize = 8;
/// The most rows of activations that one product takes.
const PASS_ROWS_MAX: usize = 1024;
/// The most rows of activations that one block takes.
const ROWS_MAX: usize = 64;
/// Dynamic shared memory of a block in bytes: every chip since Ampere has this much.
#[cfg(test)]
pub(crate) const SHARED_MIN: usize = 96 << 10;

/// Prepared rows, of one buffer at a time.
pub(crate) struct Scratch {
    area: Piece,
    /// What the scratch holds, if anything.
    held: Cell<Option<Held>>,
}

/// Which buffer's rows the scratch holds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Held {
    pointer: u64,
    /// The address of the weight of the norm that has not been applied yet, or 0.
    norm: u64,
    rows: Rows,
    /// Whether the rows are prepared for products of many rows, and whether as 8-bit floats.
    many: bool,
    floats8: bool,
    /// The arena's generation: after a change the same address may belong to another buffer.
    generation: u64,
}

/// `Inputs` of gemv.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Inputs {
    pub(super) x: u64,
    pub(super) values: u64,
    pub(super) factors: u64,
    pub(super) norm: u64,
    pub(super) partials: u64,
    pub(super) tickets: u64,
    pub(super) first: i32,
    pub(super) limit: i32,
    pub(super) eps: f32,
    pub(super) tiles: i32,
}

/// `Result` of result.cuh.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Product {
    pub(super) values: u64,
    pub(super) bias: u64,
    pub(super) columns: i32,
    pub(super) first: i32,
    pub(super) adds: i32,
    pub(super) pairs: i32,
    pub(super) gated: u64,
}

pub(super) const LAYOUTS: &[Layout] = &[
    layout!(Inputs, "Inputs" in "gemv.cu", {
        x, values, factors, norm, partials, tickets, first, limit, eps, tiles,
    }),
    layout!(Product, "Result" in "result.cuh", { values, bias, columns, first, adds, pairs, gated }),
];
pub(super) const CONSTANTS: &[Constant] = &[
    Constant::new("form.cuh", "BLOCK", TILE_COLUMNS),
    Constant::new("form.cu", "FOURS_THREADS", FORM_FOURS),
    Constant::new("form.cu", "FOURS_KEPT * BLOCK * (FOURS_THREADS / WARP)", FORM_KEPT),
    Constant::new("form.cu", "STREAM_MAX", STREAM_MAX),
];

/// The operation of a step that something is done for.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    /// Its name in messages.
    pub(crate) operation: &'static str,
    pub(crate) slot: &'a Slot,
    /// The rows that it runs over.
    pub(crate) rows: Rows,
}

impl Call<'_> {
    /// Over all tokens.
    pub(super) fn of_tokens<'a>(operation: &'static str, slot: &'a Slot) -> Call<'a> {
        Call { operation, slot, rows: Rows::Tokens }
    }
}

/// Rows that are to be prepared.
#[derive(Clone, Copy)]
pub(super) struct Prepared {
    pub(super) columns: usize,
    /// For the products of many rows.
    pub(super) many: bool,
    /// As 8-bit floats, which only products of many rows take.
    pub(super) floats8: bool,
    /// Whether they are all rows of the step.
    pub(super) whole: bool,
}

/// A product with one part of a weight, ready to be launched.
#[derive(Clone, Copy)]
pub(crate) struct Gemv {
    operation: &'static str,
    part: WeightPart,
    device_part: DevicePart,
    step: DeviceStep,
    pub(super) rows: Rows,
    /// Whether it takes the kernels for many rows.
    many: bool,
    inputs: Inputs,
    pub(super) product: Product,
}

impl Cuda {
    /// Whether the product's kernel can also apply the gated activation to its result.
    pub(super) fn gates(&self, gemv: &Gemv) -> bool {
        let limit = gemv.inputs.limit.cast_unsigned() as usize;
        gemv.many && self.gates_many(&gemv.part, limit)
            || gemv.inputs.values == 0
                && GemvPlan::one(&gemv.part, true, self.device.abilities().shared_max).is_some()
    }

    /// The same for this many rows: with few rows and several slices, the activation is a kernel of its own.
    pub(super) fn gates_many(&self, part: &WeightPart, limit: usize) -> bool {
        limit > rows_few(part) || self.takes_few(part, true, limit)
    }
}

impl Scratch {
    pub(crate) fn new(area: Piece) -> Scratch {
        Scratch { area, held: Cell::new(None) }
    }

    pub(crate) fn forget(&self) {
        self.held.set(None);
    }

    /// Forgets what it holds of one of these buffers.
    pub(super) fn forget_written(&self, written: &[&Buf]) {
        let held = self.held.get();
        if held.is_some_and(|held| written.iter().any(|buf| buf.pointer() == held.pointer)) {
            self.forget();
        }
    }

    /// How many rows of this many columns fit: the values, and one factor for each row.
    pub(super) fn rows(&self, columns: usize) -> usize {
        let bytes = (columns.next_multiple_of(TILE_COLUMNS) * 2 + 4) as u64;
        usize::try_from(self.area.bytes() / bytes).expect("fits the device")
    }

    /// Where its rows are.
    pub(super) fn values(&self) -> u64 {
        self.area.pointer()
    }

    /// Where the factors of its rows are.
    pub(super) fn factors(&self, columns: usize) -> u64 {
        self.area.pointer() + (self.rows(columns) * columns.next_multiple_of(TILE_COLUMNS) * 2) as u64
    }
}

/// How many slices the columns of a part are split into. This depends only on the part of the whole weight, so sums
/// have the same order everywhere, also on a shard of it.
pub(crate) fn slices(part: &WeightPart) -> usize {
    if let Some(slices) = part.slices {
        return slices;
    }
    let wanted = SLICES.iter().find(|(tiles, _)| part.row_tiles() >= *tiles).map_or(1, |&(_, slices)| slices);
    let wanted = if part.columns >= SLICE_COLUMNS * wanted { 2 * wanted } else { wanted };
    wanted.min(8).min(steps(part))
}

pub(crate) fn steps(part: &WeightPart) -> usize {
    part.groups() * TILE_COLUMNS / part.format.step_columns()
}

/// How a product with a part is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GemvPlan {
    slices: usize,
    /// Rows of activations per block. With one row, the block prepares it itself.
    rows: usize,
    pub(super) warps: usize,
    pub(super) blocks: usize,
    stages: usize,
    /// Whether all of a warp's weights are requested before it begins: there is a stage for each step.
    all_ahead: bool,
    /// Whether the next kernel may start before this one has requested its weights.
    early: bool,
    /// Groups of 128 columns that one warp prepares.
    each: usize,
    /// Dynamic shared memory of a block.
    pub(super) shared: usize,
}

impl GemvPlan {
    /// The plan for one row of activations; `None` where the row does not fit a block, or is to be of 8-bit floats.
    /// `room` is the shared memory of a block.
    fn one(part: &WeightPart, gates: bool, room: usize) -> Option<GemvPlan> {
        if part.format.takes_floats8() {
            return None;
        }
        GemvPlan::one_of(part, gates, slices(part), MULTIPROCESSORS, room)
    }

    /// The same with this many slices, on this many multiprocessors.
    pub(super) fn one_of(
        part: &WeightPart,
        gates: bool,
        slices: usize,
        multiprocessors: usize,
        room: usize,
    ) -> Option<GemvPlan> {
        let (groups, sides) = (part.groups(), if gates { 2 } else { 1 });
        let (tiles, team, step_bytes) = (part.row_tiles() / sides, slices * sides, part.format.step_bytes());
        // The row and its squares, the sums, and a barrier for each stage.
        let fixed =
            |warps: usize| groups * (TILE_COLUMNS * 2 + 4) + 8 + warps * (2 * TILE_ROWS * 4 + STAGES_MAX * 8);
        let fits = |teams: usize| {
            let warps = teams * team;
            warps <= WARPS_MAX.max(team)
                && (team == 1 || teams <= TEAMS_MAX)
                && fixed(warps) + warps * step_bytes <= room
        };
        // Enough warps to prepare a row; then as few rounds over a block's tiles as the warps allow, with as few idle
        // warps as possible.
        let least = groups.div_ceil(EACH_MAX).div_ceil(team).max(1);
        let tiles_each = tiles.div_ceil(multiprocessors).max(1);
        let teams =
            (least..=least.max(WARPS_MAX / team)).filter(|&teams| fits(teams)).min_by_key(|&teams| {
                let rounds = tiles_each.div_ceil(teams);
                (rounds * teams + if teams * team < WARPS_ENOUGH { tiles_each } else { 0 }, rounds)
            })?;
        let rounds = tiles_each.div_ceil(teams);
        let warps = teams * team;
        let blocks = tiles.min(multiprocessors);
        let each = groups.div_ceil(warps);
        // Keep the number of programs small: each one is compiled.
        let each = if each > 4 { each.next_multiple_of(5) } else { each };
        let (stage, fixed) = (warps * step_bytes, fixed(warps));
        let at_once = steps(part).div_ceil(slices) * rounds;
        let bytes = part.row_tile_bytes().iter().sum::<usize>() * part.row_tiles();
        let small = part.rows.min(part.columns) < TILE_ROWS * multiprocessors && bytes < LARGE_BYTES;
        let beside = small && !gates;
        let ahead = if beside { SHARED_BESIDE } else { SHARED_HALF }.saturating_sub(fixed).max(2 * stage);
        let stages = (room - fixed).min(ahead) / stage;
        let stages = stages.min(at_once).clamp(1, STAGES_MAX);
        // Two blocks of a product on one multiprocessor would leave another one idle.
        let alone = match bytes >= if small { SMALL_ALONE_BYTES } else { ALONE_BYTES } {
            true if beside => SHARED_BESIDE,
            true => SHARED_ALONE,
            false => 0,
        };
        let shared = (fixed + stages * stage).max(alone.min(room));
        let all_ahead = stages == at_once;
        Some(GemvPlan { slices, rows: 1, warps, blocks, stages, all_ahead, early: small, each, shared })
    }

    /// The plan for up to `limit` prepared rows. A block works on one slice.
    fn several(part: &WeightPart, limit: usize, room: usize) -> GemvPlan {
        let (slices, tiles, step_bytes) = (slices(part), part.row_tiles(), part.format.step_bytes());
        let row_bytes = part.format.step_columns() * 2 + 64;
        let stage = |rows: usize, warps: usize| rows * row_bytes + warps * step_bytes;
        // As few tiles as do not cost time: with slices all blocks run at once, else one after the other.
        let tiles_each = (tiles * slices).div_ceil(MULTIPROCESSORS);
        let rounds = tiles_each.div_ceil(WARPS_SEVERAL);
        let wanted = tiles_each.div_ceil(rounds);
        // The most rows for which two steps fit at the same time, then the most tiles.
        let rows_wanted = limit.next_power_of_two().clamp(8, ROWS_MAX);
        let mut rows = [64, 32, 16, 8].into_iter().filter(|&rows| rows <= rows_wanted);
        let rows = rows.find(|&rows| 2 * stage(rows, wanted.min(8)) <= room).unwrap_or(8);
        let enough = |stages: usize| (1..=wanted).rev().find(|&warps| stages * stage(rows, warps) <= room);
        let warps = enough(2).or_else(|| enough(1)).unwrap_or(1);
        let stage = stage(rows, warps);
        let stages = (room / stage).clamp(1, 4);
        let blocks = tiles.div_ceil(warps);
        let blocks = if slices == 1 { blocks.min(MULTIPROCESSORS) } else { blocks };
        let (all_ahead, early) = (false, false);
        GemvPlan { slices, rows, warps, blocks, stages, all_ahead, early, each: 0, shared: stages * stage }
    }

    pub(super) fn program(&self, part: &WeightPart, gates: bool) -> Key {
        let mut key = Key::quant("gemv.cu", part.format);
        // The registers that are divided among these.
        let threads = match self.warps {
            0..=8 => 256,
            9..=12 => 384,
            13..=16 => 512,
            _ => WARPS_MAX * 32,
        };
        key.defines.extend([
            format!("SLICES={}", self.slices),
            format!("STAGES={}", self.stages),
            format!("THREADS={threads}"),
            format!("GATES={}", i32::from(gates)),
            format!("ONE_ROW={}", i32::from(self.rows == 1)),
        ]);
        key.defines.extend(match self.rows {
            1 => vec![
                format!("EACH={}", self.each),
                format!("FOURS={}", i32::from(part.columns.is_multiple_of(4))),
                format!("FEW_GROUPS={}", i32::from(part.groups() <= FEW_GROUPS)),
                format!("ALL_AHEAD={}", i32::from(self.all_ahead)),
                format!("EARLY={}", i32::from(self.early)),
            ],
            rows => vec![format!("ROWS={rows}"), "FOURS=0".to_owned()],
        });
        key
    }
}

/// The program that prepares rows of this many columns, or the rows of experts.
pub(crate) fn form_program(columns: usize, experts: bool) -> Key {
    form_program_of(&[("FOURS", columns.is_multiple_of(4)), ("EXPERTS", experts)])
}

/// The program that prepares rows as 8-bit floats; their columns fill whole pieces.
pub(crate) fn form_floats8_program() -> Key {
    form_program_of(&[("FOURS", true), ("EXPERTS", false), ("FLOATS8", true)])
}

fn form_program_of(flags: &[(&str, bool)]) -> Key {
    let defines = flags.iter().map(|(name, on)| format!("{name}={}", i32::from(*on)));
    Key { unit: "form.cu", defines: defines.collect() }
}

/// The program of a product with one row, where the row fits a block.
pub(crate) fn program_one(part: &WeightPart, gates: bool, room: usize) -> Option<Key> {
    GemvPlan::one(part, gates, room).map(|plan| plan.program(part, gates))
}

/// The programs of products with up to this many rows, as far as the kernels of gemv.cu do them.
pub(crate) fn programs_several(part: &WeightPart, rows_max: usize, room: usize) -> Vec<Key> {
    let mut keys = Vec::new();
    for limit in [8, 16, 32, 64].into_iter().filter(|rows| *rows < 2 * rows_max.max(8)) {
        let key = GemvPlan::several(part, limit, room).program(part, false);
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    keys
}

impl Cuda {
    /// `out` = product; with `room`, which may be overwritten, `out` += product.
    pub(crate) fn op_linear(
        &self,
        call: Call<'_>,
        linear: Linear<'_, Cuda>,
        x: &Buf,
        out: &mut Buf,
        room: Option<&Buf>,
    ) -> Result<(), Error> {
        let (Call { operation, slot, rows }, Linear { weight, bias }) = (call, linear);
        operands::linear(operation, slot.count(rows), weight, bias, x, out)?;
        let written = room.unwrap_or(out);
        self.op(slot, &[], &[&*out, written], || {
            let plain = weight.parts.iter().any(|part| part.format == Format::F32);
            let due = self.due_norm(x, rows).filter(|_| !plain);
            if due.is_none() {
                // Read only now: the norm that yields `x` may be left out, unless its input is about to be overwritten.
                self.op(slot, &[x], &[], || Ok(()))?;
            }
            let (from, norm, eps) = due.map_or((x.pointer(), 0, 0.0), |due| (due.x, due.weight, due.eps));
            let inputs = Inputs {
                x: from,
                norm,
                eps,
                partials: self.partials.pointer(),
                tickets: self.tickets.pointer(),
                ..Inputs::zeroed()
            };
            for part in &weight.parts {
                let product = Product {
                    values: out.pointer(),
                    bias: bias.map_or(0, Buf::pointer),
                    columns: int(weight.rows),
                    first: int(part.first),
                    adds: i32::from(room.is_some()),
                    pairs: 0,
                    gated: 0,
                };
                match part.format {
                    Format::F32 => self.multiply_f32(call, weight, part, x, &product)?,
                    _ => self.multiply_part(call, weight, part, inputs, product)?,
                }
            }
            Ok(())
        })
    }

    /// The product with one part of a weight, in as many passes over the rows as scratch and partial sums ask for.
    /// `inputs` says what is read; each pass adds which of its rows, and where they are prepared.
    fn multiply_part(
        &self,
        call: Call<'_>,
        weight: &Weight,
        part: &WeightPart,
        inputs: Inputs,
        product: Product,
    ) -> Result<(), Error> {
        let Call { operation, slot, rows } = call;
        let count = self.grid_rows(slot, rows);
        let (at_once, many) = self.rows_at_once(weight, part, count);
        let whole = count <= at_once;
        // One row is prepared by the product itself.
        let room = self.device.abilities().shared_max;
        let one = count == 1 && (GemvPlan::one(part, false, room).is_some() || self.converts_one(part));
        for first in (0..count).step_by(at_once) {
            let limit = at_once.min(count - first);
            let mut inputs = Inputs { first: int(first), limit: int(limit), ..inputs };
            if !one {
                inputs.values = self.scratch.values();
                inputs.factors = self.scratch.factors(weight.columns);
                let floats8 = part.format.takes_floats8();
                self.hold(call, Prepared { columns: weight.columns, many, floats8, whole }, &inputs)?;
            }
            let (device_part, step) = (weight.device_part(part), self.device_step(slot));
            let gemv = Gemv { operation, part: *part, device_part, step, rows, many, inputs, product };
            // The same kernel may apply the gated activation.
            if self.fuses() && weight.parts.len() == 1 && whole {
                self.pend(Pending { gemv, out: product.values, columns: weight.rows });
            } else {
                self.multiply(&gemv)?;
            }
        }
        Ok(())
    }

    /// How many of `count` rows one pass takes, and whether with the kernels for many.
    fn rows_at_once(&self, weight: &Weight, part: &WeightPart, count: usize) -> (usize, bool) {
        // The scratch holds only a few rows that are too long for one block.
        let held = self.scratch.rows(weight.columns);
        if self.takes_many(count.min(held)) || part.format.takes_floats8() {
            return (held / room_for(1) * room_for(1), true);
        }
        // The sums of slices need room, too.
        let partial_bytes = slices(part) * part.row_tiles() * TILE_ROWS * 4;
        let partials = PARTIALS_BYTES as usize / partial_bytes / 8 * 8;
        (held.min(partials.clamp(8, PASS_ROWS_MAX)), false)
    }

    /// Prepares rows for products, unless the scratch holds them already.
    pub(super) fn hold(&self, call: Call<'_>, prepared: Prepared, inputs: &Inputs) -> Result<(), Error> {
        let (Call { rows, .. }, Prepared { many, floats8, whole, .. }) = (call, prepared);
        let Inputs { x: pointer, norm, .. } = *inputs;
        let held = Held { pointer, norm, rows, many, floats8, generation: self.generation() };
        if self.scratch.held.get() != Some(held) || !whole {
            self.form(call, prepared, inputs)?;
            self.scratch.held.set(whole.then_some(held));
        }
        Ok(())
    }

    /// Prepares rows, for products of several rows or of many.
    fn form(&self, call: Call<'_>, prepared: Prepared, inputs: &Inputs) -> Result<(), Error> {
        let (Call { operation, slot, rows }, Prepared { columns, many, floats8, .. }) = (call, prepared);
        let few = inputs.limit.cast_unsigned() as usize <= FORM_FEW;
        let (name, threads) = match columns.is_multiple_of(4) {
            true if few => ("form_few", 1024),
            // Several rows share a multiprocessor.
            true => ("form_fours", FORM_FOURS),
            false => ("form_any", 1024),
        };
        // Long rows go through shared memory, where two of them fit.
        let limit = inputs.limit.cast_unsigned() as usize;
        let (row_bytes, squares) = (columns * 4, 2 * columns.div_ceil(TILE_COLUMNS) * 4);
        let stages = self.device.abilities().shared_max.saturating_sub(squares) / row_bytes;
        let streams = name == "form_fours" && many && columns > FORM_KEPT && stages >= 2;
        let name = if streams { "form_stream" } else { name };
        let program = if floats8 { form_floats8_program() } else { form_program(columns, false) };
        let function = self.programs.function(&program, name)?;
        let device_step = self.device_step(slot);
        let mut args = vec![
            Arg::Pointer(inputs.x),
            Arg::Pointer(inputs.norm),
            Arg::Float(inputs.eps),
            Arg::Int(int(columns)),
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Int(inputs.first),
            Arg::Pointer(inputs.values),
            Arg::Pointer(inputs.factors),
            Arg::Int(if many { int(room_for(limit)) } else { 0 }),
        ];
        if streams {
            let stages = stages.min(STREAM_MAX);
            args.extend([Arg::Int(int(limit)), Arg::Int(int(stages))]);
            let grid = Grid::new([limit.min(self.device.abilities().multiprocessors), 1, 1], 1024);
            let grid = grid.with_shared(stages * row_bytes + squares);
            return self.launch(operation, function, grid, &args);
        }
        self.launch(operation, function, Grid::new([limit, 1, 1], form_threads(columns, threads)), &args)
    }

    /// Launches a product.
    pub(super) fn multiply(&self, gemv: &Gemv) -> Result<(), Error> {
        let Gemv { operation, part, device_part, step, rows, many, mut inputs, product } = *gemv;
        if many {
            return self.multiply_many(&Gemm { operation, part, device_part, step, rows, inputs, product });
        }
        let limit = inputs.limit.cast_unsigned() as usize;
        let gates = product.pairs > 0;
        let room = self.device.abilities().shared_max;
        let plan = match inputs.values {
            0 => GemvPlan::one(&part, gates, room).expect("asked before"),
            _ => GemvPlan::several(&part, limit, room),
        };
        let name = if plan.rows == 1 { "gemv_one" } else { "gemv_several" };
        let function = self.programs.function(&plan.program(&part, gates), name)?;
        inputs.tiles = int(part.row_tiles() / if gates { 2 } else { 1 });
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_part)),
            Arg::Struct(bytemuck::bytes_of(&step)),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Struct(bytemuck::bytes_of(&inputs)),
            Arg::Struct(bytemuck::bytes_of(&product)),
        ];
        let slices = if plan.rows == 1 { 1 } else { plan.slices };
        let blocks = [plan.blocks, limit.div_ceil(plan.rows), slices];
        assert!(slices == 1 || blocks[0] * blocks[1] <= TICKETS, "{blocks:?} blocks count their slices");
        let grid = Grid::new(blocks, plan.warps * 32).with_shared(plan.shared);
        self.launch(operation, function, grid, &args)
    }

    fn multiply_f32(
        &self,
        call: Call<'_>,
        weight: &Weight,
        part: &WeightPart,
        x: &Buf,
        product: &Product,
    ) -> Result<(), Error> {
        const WARPS: usize = 8;
        let Call { operation, slot, rows } = call;
        let function = self.programs.function(&Key::plain("gemv_f32.cu"), "gemv_f32")?;
        let device_part = weight.device_part(part);
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_part)),
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Pointer(x.pointer()),
            Arg::Struct(bytemuck::bytes_of(product)),
        ];
        let grid = [part.rows.div_ceil(WARPS), self.grid_rows(slot, rows), 1];
        self.launch(operation, function, Grid::new(grid, WARPS * 32), &args)
    }
}

/// Threads that prepare a row: a warp for each 128 columns, up to this many.
pub(super) fn form_threads(columns: usize, most: usize) -> usize {
    row_threads(columns.div_ceil(TILE_COLUMNS) * 32).min(most)
}

/// Threads for a row of this many items: whole warps, at most one block.
pub(super) fn row_threads(items: usize) -> usize {
    items.next_multiple_of(32).clamp(32, 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shapes::part;

    #[test]
    fn the_shape_of_a_product_of_one_row_follows_from_the_weight() {
        let check = |format, shape, gates, wanted| {
            let GemvPlan { slices, warps, blocks, stages, .. } =
                GemvPlan::one(&part(format, shape), gates, 219 << 10).unwrap();
            assert_eq!((slices, warps, blocks, stages), wanted, "{format:?} {shape:?}, gates {gates}");
        };
        check(Format::BF16, (16, 17), false, (1, 1, 1, 1));
        check(Format::BF16, (9728, 896), true, (2, 12, 132, 2));
        check(Format::BF16, (152_064, 3584), false, (1, 18, 132, 2));
        check(Format::BF16, (3584, 3584), false, (4, 8, 132, 3));
        check(Format::Q4_K, (37_888, 3584), true, (1, 18, 132, 2));
        check(Format::Q4_K, (3584, 3584), false, (4, 8, 132, 4));
        check(Format::Q6_K, (3584, 18_944), false, (8, 16, 132, 2));
    }

    #[test]
    fn products_of_a_small_model_start_beside_its_gates_and_one_to_a_multiprocessor() {
        // What all blocks of a multiprocessor share, and what each of them needs besides.
        let (all, each) = (228 << 10, 1 << 10);
        let shape = |format, shape, gates| GemvPlan::one(&part(format, shape), gates, 227 << 10).unwrap();
        for format in [Format::BF16, Format::Q8_0, Format::Q5_0] {
            let (gates, down) = (shape(format, (9728, 896), true), shape(format, (896, 4864), false));
            assert!(2 * (gates.shared + each) > all, "{format:?}: {gates:?}");
            assert!(gates.shared + down.shared + 2 * each <= all, "{format:?}: {gates:?}, {down:?}");
            assert!(gates.shared + 2 * down.shared + 3 * each > all, "{format:?}: {down:?}");
            assert!(gates.early && down.early);
        }
        // All weights of Q8_0 are requested before their row is there; those of BF16 are too many for that.
        assert!(shape(Format::Q8_0, (896, 4864), false).all_ahead);
        assert!(!shape(Format::BF16, (896, 4864), false).all_ahead);
        // Products of a larger model, and a head, do not run beside such blocks.
        for wide in [(4608, 3584), (3584, 18_944), (151_936, 896)] {
            let wide = shape(Format::Q8_0, wide, false);
            assert!(2 * (wide.shared + each) > all && !wide.early, "{wide:?}");
        }
    }

    #[test]
    fn how_columns_are_shared_does_not_depend_on_the_batch() {
        for format in [Format::BF16, Format::Q8_0, Format::Q4_K] {
            for rows in [16, 512, 3584, 8192, 25_344, 152_064] {
                for columns in [256, 1024, 3584, 18_944, 32_768] {
                    let part = part(format, (rows, columns));
                    let one = [false, true].map(|gates| GemvPlan::one(&part, gates, 219 << 10));
                    let several =
                        [1, 2, 17, 512].map(|limit| Some(GemvPlan::several(&part, limit, SHARED_MIN)));
                    for shape in one.into_iter().chain(several).flatten() {
                        assert_eq!(shape.slices, slices(&part), "{format:?} {rows} x {columns}");
                    }
                }
            }
        }
    }

    #[test]
    fn no_block_asks_for_more_shared_memory_or_warps_than_every_chip_has() {
        for format in [Format::F16, Format::Q8_0, Format::Q4_K, Format::Q5_K, Format::Q6_K, Format::Q5_1] {
            for rows in [16, 512, 3584, 8192, 152_064] {
                for columns in [256, 1024, 3584, 18_944, 32_768, 262_144] {
                    let part = part(format, (rows, columns));
                    let one = [false, true].map(|gates| GemvPlan::one(&part, gates, SHARED_MIN));
                    let several =
                        [1, 2, 8, 17, 33, 512].map(|limit| Some(GemvPlan::several(&part, limit, SHARED_MIN)));
                    for shape in one.into_iter().chain(several).flatten() {
                        assert!(shape.warps <= WARPS_MAX && (1..=STAGES_MAX).contains(&shape.stages));
                        assert!(shape.shared <= SHARED_MIN, "{format:?} {rows} x {columns}: {shape:?}");
                        assert!(shape.rows > 1 || shape.each <= EACH_MAX, "{format:?} {rows} x {columns}");
                    }
                }
            }
        }
    }
}
