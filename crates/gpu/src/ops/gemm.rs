//! Products with many rows of activations (prompts and large batches) on Hopper's tensor cores, by wgmma
//! (`kernels/gemm.cu`).
//!
//! Sums have the same order and the same bits as for one row. The number of rows decides only which block computes
//! what.

use fornax_compute::{Error, Rows};

use super::gemm_few;
use super::gemv::{Inputs, Product, slices, steps};
use super::products::RowCounts;
use crate::abi::{Layout, layout};
use crate::cuda::Cuda;
use crate::driver::{Abilities, Arg};
use crate::grid::Grid;
use crate::layout::{Format, TILE_ROWS};
use crate::memory::{DevicePart, PARTIALS_BYTES, TICKETS, WeightPart, int};
use crate::program::Key;
use crate::step::DeviceStep;

/// From this many rows on, these products (or those of `gemm_few.rs`) are faster than those of gemv.cu.
const ROWS_MIN: usize = 2;
/// Weight rows per warpgroup; usually two warpgroups of a block multiply.
const GROUP_ROWS: usize = 64;
const GROUPS: usize = 2;
/// Three multiply up to this many rows of activations, since the sums leave enough registers. This is faster where
/// unpacking a weight takes many instructions, and as fast where a value has two bytes.
const GROUPS_TALL: usize = 3;
const TALL_WIDTH: usize = 192;
/// Blocks per cluster. They have tiles below each other and copy the rows of activations that they share only once.
/// Clusters of two fit every chip without leaving multiprocessors over.
const TALL: usize = 2;
/// Rows of activations per block: with one slice, and where several slices are added up in registers.
const WIDTHS: [usize; 7] = [64, 96, 128, 160, 192, 224, 256];
const WIDTHS_SLICED: [usize; 4] = [64, 128, 160, 192];
/// The same where products of 8-bit floats leave the tensor cores after each step: their sums need as many registers.
const WIDTHS_FLOATS8: [usize; 6] = [64, 96, 128, 160, 192, 256];
const WIDTHS_FLOATS8_SLICED: [usize; 3] = [64, 128, 160];
/// The same for experts, which never have as many rows as a tile.
const WIDTHS_EXPERTS: [usize; 4] = [64, 128, 192, 256];
/// Up to this many tiles of activations beside each other, the steps may be divided evenly among blocks (stream-K):
/// each tile goes through the whole weight.
const EVEN_ACROSS: usize = 2;
/// Warps of a warpgroup; each has its own tickets.
const GROUP_WARPS: usize = 4;
/// Measured cycles for a block of stream-K to continue another block's sums, and to add up the sums of slices.
const EVEN_PASSED: usize = 5000;
const EVEN_ADDED: usize = 15_000;
/// A weight with up to this many slices may have its steps divided evenly.
const EVEN_SLICES: usize = 8;
const STAGES_MAX: usize = 8;
/// The most sums (of half of its own) that a lane of a block with gates hands over at a time.
const PASSED: usize = 16;

/// `Inputs` of gemm.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Many {
    pub(super) values: u64,
    pub(super) factors: u64,
    pub(super) first: i32,
    pub(super) limit: i32,
    pub(super) rows: i32,
    pub(super) tiles: i32,
    pub(super) slices: i32,
    pub(super) pad: i32,
    pub(super) partials: u64,
    pub(super) tickets: u64,
}

pub(super) const LAYOUTS: &[Layout] = &[layout!(Many, "Inputs" in "gemm.cu", {
    values, factors, first, limit, rows, tiles, slices, pad, partials, tickets,
})];

/// How a weight is divided: whether gates and their counterparts are multiplied together, and the slices of its
/// columns.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    pub(super) gates: bool,
    pub(super) slices: usize,
}

/// What a block multiplies, with the names of [`GemmPlan`].
#[derive(Clone, Copy)]
struct Block {
    groups: usize,
    width: usize,
    even: bool,
}

/// How a product is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GemmPlan {
    pub(super) slices: usize,
    gates: bool,
    /// Warpgroups of a block that multiply.
    groups: usize,
    /// Rows of activations per block.
    width: usize,
    /// Whether blocks get equal shares of all steps (stream-K) instead of whole tiles.
    even: bool,
    /// Blocks of a cluster.
    tall: usize,
    /// Stages of weights, and of activations.
    stages: [usize; 2],
    /// Dynamic shared memory of a block.
    pub(super) shared: usize,
    /// Tiles below each other, the same in whole clusters, and all tiles.
    pub(super) tiles: usize,
    tiles_all: usize,
}

impl GemmPlan {
    /// The fastest plan for this many rows of activations.
    fn of(part: &WeightPart, gates: bool, limit: usize, able: &Abilities) -> GemmPlan {
        GemmPlan::every(part, gates, limit, able)
            .min_by_key(|plan| plan.cost(part, able.multiprocessors))
            .expect("there is always one")
    }

    fn every(
        part: &WeightPart,
        gates: bool,
        limit: usize,
        able: &Abilities,
    ) -> impl Iterator<Item = GemmPlan> + use<> {
        let Abilities { multiprocessors, shared_max: room, .. } = *able;
        let slices = slices(part);
        let (undivided, sliced): (&[usize], &[usize]) = match part.format.takes_floats8() {
            true => (&WIDTHS_FLOATS8, &WIDTHS_FLOATS8_SLICED),
            false => (&WIDTHS, &WIDTHS_SLICED),
        };
        let widths = if slices == 1 { undivided } else { sliced };
        let part = *part;
        let whole = widths.iter().filter(move |width| passes(gates, slices, width));
        let whole = whole.map(|&width| Block { groups: GROUPS, width, even: false });
        // Gates have one slice here.
        let slices_max = if gates { 1 } else { EVEN_SLICES };
        let even = undivided.iter().filter(move |_| slices <= slices_max);
        let even = even.map(|&width| Block { groups: GROUPS, width, even: true });
        let takes_tall = slices == 1 && matches!(part.format, Format::Q4_K | Format::Q6_K | Format::Q8_0);
        let tall = WIDTHS
            .into_iter()
            .filter(move |&width| takes_tall && (limit..=TALL_WIDTH).contains(&width))
            .flat_map(|width| [false, true].map(|even| Block { groups: GROUPS_TALL, width, even }));
        whole
            .chain(even)
            .chain(tall)
            .map(move |block| GemmPlan::new(&part, Cut { gates, slices }, block, TALL, limit, room))
            .filter(move |plan| !plan.even || plan.fits_workspace(multiprocessors))
    }

    /// The fastest plan for `experts` with a part of this shape, each with about `each` rows of activations.
    pub(super) fn of_experts(
        part: &WeightPart,
        cut: Cut,
        experts: usize,
        each: usize,
        able: &Abilities,
    ) -> GemmPlan {
        let (Cut { gates, slices }, room) = (cut, able.shared_max);
        let widths: &[usize] = if slices == 1 { &WIDTHS_EXPERTS } else { &WIDTHS_SLICED };
        widths
            .iter()
            .filter(move |width| passes(gates, slices, width))
            .map(|&width| {
                // Some experts have an eighth fewer rows, others more.
                let groups = experts * ((7 * each).div_ceil(8 * width) + (9 * each).div_ceil(8 * width));
                let groups = groups.div_ceil(2);
                let block = Block { groups: GROUPS, width, even: false };
                GemmPlan::new(part, cut, block, 1, groups * width, room)
            })
            .min_by_key(|plan| plan.cost(part, able.multiprocessors))
            .expect("there is always one")
    }

    fn new(
        part: &WeightPart,
        Cut { gates, slices }: Cut,
        Block { groups, width, even }: Block,
        tall: usize,
        limit: usize,
        room: usize,
    ) -> GemmPlan {
        let rows = if gates { part.rows / 2 } else { part.rows };
        let block_rows = groups * GROUP_ROWS;
        let tiles = rows.div_ceil(if gates { block_rows / 2 } else { block_rows });
        let tall = tall.min(tiles);
        let tiles = tiles.next_multiple_of(tall);
        let weights = block_rows / TILE_ROWS * part.format.step_bytes();
        let activations = width * 128;
        // The starts of groups of eight rows; what is handed over.
        let fixed = 1024 + if gates { passed(groups, width) * groups * 128 * 4 } else { 0 };
        let room = room - fixed;
        // Half is for activations. Weights get two steps or more, or three where blocks share activations.
        let least = if tall > 1 && room < 4 * activations + 3 * weights { 3 } else { 4 };
        let wanted =
            (room / 2 / activations).clamp(least, STAGES_MAX).min((room - 2 * weights) / activations);
        let stages = [((room - wanted * activations) / weights).min(STAGES_MAX), wanted];
        let shared = fixed + stages[0] * weights + stages[1] * activations;
        GemmPlan {
            slices,
            gates,
            groups,
            width,
            even,
            tall,
            stages,
            shared,
            tiles,
            tiles_all: tiles * limit.div_ceil(width),
        }
    }

    /// The units of work that are divided: slices of tiles, or whole tiles.
    fn units(&self) -> usize {
        self.tiles_all * if self.even { self.slices } else { 1 }
    }

    fn blocks(&self, multiprocessors: usize) -> usize {
        self.units().min((multiprocessors / self.tall).max(1) * self.tall)
    }

    /// Whether there is room for what stream-K blocks hand over and add up, and whether it is worth it.
    fn fits_workspace(&self, multiprocessors: usize) -> bool {
        let blocks = self.blocks(multiprocessors);
        let (sums, tickets) = match self.slices {
            1 => (blocks, blocks),
            _ => (self.units(), blocks + self.tiles_all),
        };
        let sums_bytes = sums * self.groups * GROUP_ROWS * self.width * 4;
        self.tiles_all <= EVEN_ACROSS * self.tiles
            && sums_bytes as u64 <= PARTIALS_BYTES
            && tickets * self.groups * GROUP_WARPS <= TICKETS
    }

    /// Estimated cycles, as measured on an H200: the tensor cores' for 16 columns of two or three warpgroups, some
    /// waiting, and the ends of a tile.
    fn cost(&self, part: &WeightPart, multiprocessors: usize) -> usize {
        let sixteens = part.format.step_columns() / 16;
        let of_row = if self.groups == GROUPS { 9 } else { 14 };
        let each = match part.format.takes_floats8() {
            // Twice as many columns at once; then a lane scales and adds its sums.
            true => sixteens / 2 * (45 + self.width * of_row / 10) + 100 + self.width / 2,
            false => sixteens * (45 + self.width * of_row / 10),
        };
        let end = 1500 + 8 * self.width;
        let blocks = self.blocks(multiprocessors);
        let rounds = self.units().div_ceil(blocks);
        if self.even {
            let share = (self.units() * steps(part).div_ceil(self.slices)).div_ceil(blocks);
            share * each + rounds * end + if self.slices > 1 { EVEN_ADDED } else { EVEN_PASSED }
        } else {
            rounds * (steps(part) * each + end)
        }
    }

    pub(super) fn threads(&self) -> usize {
        (self.groups + 1) * 128
    }

    pub(super) fn program(&self, part: &WeightPart) -> Key {
        let mut key = Key::quant("gemm.cu", part.format);
        key.defines.extend([
            format!("WIDTH={}", self.width),
            format!("WARPGROUPS={}", self.groups),
            format!("SLICED={}", i32::from(self.slices > 1 && !self.even)),
            format!("STREAM_K={}", if self.even { self.slices } else { 0 }),
            format!("GATES={}", i32::from(self.gates)),
            format!("STAGES_A={}", self.stages[0]),
            format!("STAGES_B={}", self.stages[1]),
            format!("READ_ONCE={}", i32::from(self.tiles == self.tiles_all)),
            format!("TALL={}", self.tall),
        ]);
        key
    }
}

/// Whether there are registers for what a block hands over when gates have several slices.
fn passes(gates: bool, slices: usize, width: &usize) -> bool {
    !gates || slices == 1 || width.is_multiple_of(4 * PASSED)
}

/// Sums that a lane of a block with gates hands over at a time.
fn passed(groups: usize, width: usize) -> usize {
    if groups == GROUPS && width.is_multiple_of(4 * PASSED) { PASSED } else { PASSED / 2 }
}

/// The programs of products with more rows than `gemm_few.rs` takes: the fastest for every batch of up to `often` rows,
/// and for chunks of prompts with up to `most` rows. Chunks of other lengths use one of those.
pub(crate) fn programs(
    part: &WeightPart,
    gates: bool,
    RowCounts { often, most }: RowCounts,
    able: &Abilities,
) -> Vec<Key> {
    let few = gemm_few::rows_max(part);
    // Recorded steps are made for these numbers of rows.
    let batches = (64..=256).step_by(32).filter(|&rows| rows < often + 32);
    let chunks = [128, 256, 512, 1024, 2048, 4096, 8192].into_iter().filter(|&rows| rows < most);
    let mut keys = Vec::new();
    for limit in batches.chain(chunks).chain([most]).filter(|&rows| few < rows) {
        let key = GemmPlan::of(part, gates, limit, able).program(part);
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    keys
}

/// Every program of a part, for the compiler's test.
#[cfg(test)]
pub(crate) fn every_program(part: &WeightPart, limit: usize, able: &Abilities) -> Vec<Key> {
    let plans = [false, true].into_iter().flat_map(|gates| GemmPlan::every(part, gates, limit, able));
    plans.map(|plan| plan.program(part)).collect()
}

/// Rows of activations to reserve for this many: they are swizzled eight at a time.
pub(super) fn room_for(rows: usize) -> usize {
    rows.next_multiple_of(8)
}

/// A product that is to be launched.
#[derive(Clone, Copy)]
pub(super) struct Gemm {
    pub(super) operation: &'static str,
    pub(super) part: WeightPart,
    pub(super) device_part: DevicePart,
    pub(super) step: DeviceStep,
    pub(super) rows: Rows,
    pub(super) inputs: Inputs,
    pub(super) product: Product,
}

impl Cuda {
    /// Whether products of this many rows are done here; otherwise as those of few rows.
    pub(crate) fn takes_many(&self, rows: usize) -> bool {
        self.device.abilities().wgmma && rows >= ROWS_MIN
    }

    /// The fastest plan whose program was compiled ahead, with that program: no plan is worth waiting for the compiler
    /// while requests are running.
    fn ready_plan(&self, part: &WeightPart, gates: bool, limit: usize) -> (GemmPlan, Key) {
        let able = self.device.abilities();
        let with_key = |plan: GemmPlan| (plan, plan.program(part));
        let ready = |(_, key): &(GemmPlan, Key)| self.programs.has(key);
        // This is nearly always the fastest of all.
        let fastest = with_key(GemmPlan::of(part, gates, limit, able));
        if ready(&fastest) {
            return fastest;
        }
        let others = GemmPlan::every(part, gates, limit, able).map(with_key).filter(ready);
        others.min_by_key(|(plan, _)| plan.cost(part, able.multiprocessors)).unwrap_or(fastest)
    }

    /// The program that launches such a product.
    #[cfg(test)]
    pub(super) fn many_key(&self, part: &WeightPart, gates: bool, limit: usize) -> Key {
        match self.takes_few(part, gates, limit) {
            true => self.few_key(part, gates, limit).expect("it takes them"),
            false => self.ready_plan(part, gates, limit).1,
        }
    }

    /// Launches a product.
    pub(super) fn multiply_many(&self, gemm: &Gemm) -> Result<(), Error> {
        let Gemm { operation, part, device_part, step, rows, inputs, product } = *gemm;
        let limit = inputs.limit.cast_unsigned() as usize;
        if self.takes_few(&part, product.pairs > 0, limit) {
            return self.multiply_few(gemm);
        }
        let (plan, key) = self.ready_plan(&part, product.pairs > 0, limit);
        let function = self.programs.function(&key, "gemm")?;
        let many = Many {
            values: inputs.values,
            factors: inputs.factors,
            first: inputs.first,
            limit: inputs.limit,
            rows: int(room_for(limit)),
            tiles: int(plan.tiles),
            slices: int(plan.slices),
            pad: 0,
            partials: inputs.partials,
            tickets: inputs.tickets,
        };
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_part)),
            Arg::Struct(bytemuck::bytes_of(&step)),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Struct(bytemuck::bytes_of(&many)),
            Arg::Struct(bytemuck::bytes_of(&product)),
        ];
        let clusters = plan.blocks(self.device.abilities().multiprocessors) / plan.tall;
        let grid = Grid::new([clusters, 1, plan.tall], plan.threads()).with_shared(plan.shared);
        self.launch(operation, function, grid.in_clusters(plan.tall), &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Format;
    use crate::ops::shapes::{HOPPER, part};

    #[test]
    fn tiles_fill_whole_rounds_of_multiprocessors_or_are_shared_out() {
        let check = |shape, gates, limit, wanted| {
            let part = part(Format::BF16, shape);
            let GemmPlan { width, even, .. } = GemmPlan::of(&part, gates, limit, &HOPPER);
            assert_eq!((width, even), wanted, "{shape:?}, {limit} rows, gates {gates}");
        };
        check((4608, 3584), false, 2048, (192, false));
        check((3584, 3584), false, 2048, (160, false));
        check((3584, 18_944), false, 2048, (160, false));
        check((37_888, 3584), true, 2048, (256, false));
        check((37_888, 3584), true, 256, (256, true));
        check((3584, 3584), false, 256, (64, false));
        check((3584, 18_944), false, 256, (256, true));
        check((3584, 18_944), false, 150, (160, true));
        check((4608, 3584), false, 256, (128, false));
        check((152_064, 3584), false, 256, (256, false));
        // Shapes of the conformance suite.
        check((1100, 8192), false, 200, (128, true));
        check((1100, 8192), false, 150, (160, true));
        check((17_000, 512), false, 150, (160, false));
        check((17_024, 512), true, 300, (160, false));
        check((25_600, 2048), true, 70, (96, true));
        check((1500, 4096), false, 230, (256, true));
        check((4600, 1024), false, 210, (128, false));
        check((34_048, 512), true, 256, (256, true));
    }

    #[test]
    fn blocks_have_more_rows_of_a_weight_where_few_rows_of_activations_are_one_tile() {
        let check = |format, shape, gates, limit, wanted| {
            let GemmPlan { groups, width, even, .. } =
                GemmPlan::of(&part(format, shape), gates, limit, &HOPPER);
            assert_eq!((groups, width, even), wanted, "{format:?} {shape:?}, {limit} rows, gates {gates}");
        };
        check(Format::BF16, (37_888, 3584), true, 192, (2, 192, true));
        check(Format::Q4_K, (37_888, 3584), true, 96, (3, 96, true));
        check(Format::Q4_K, (37_888, 3584), true, 192, (3, 192, true));
        check(Format::Q4_K, (37_888, 3584), true, 224, (2, 224, true));
        check(Format::Q6_K, (152_064, 3584), false, 160, (3, 160, false));
        check(Format::Q8_0, (3584, 18_944), false, 160, (2, 160, true));
        // Shapes of the conformance suite.
        check(Format::Q4_K, (25_300, 256), false, 70, (3, 96, false));
        check(Format::Q4_K, (17_024, 512), true, 190, (3, 192, false));
        check(Format::Q4_K, (25_600, 2048), true, 70, (3, 96, true));
        check(Format::Q8_0, (17_000, 512), false, 150, (3, 160, false));
    }

    #[test]
    fn every_shape_fits_a_block_and_reads_ahead() {
        let some = [Format::F16, Format::Q8_0, Format::Q4_K, Format::Q5_K, Format::Q6_K, Format::Q5_1];
        for format in some.into_iter().chain([Format::FP8_A8]) {
            for rows in [16, 512, 9728, 37_888, 152_064] {
                for columns in [128, 896, 3584, 18_944] {
                    for (gates, limit) in [(false, 65), (true, 65), (false, 300), (true, 8192)] {
                        let part = part(format, (rows, columns));
                        for shape in GemmPlan::every(&part, gates, limit, &HOPPER) {
                            assert!(
                                shape.shared <= HOPPER.shared_max,
                                "{format:?} {rows} x {columns}: {shape:?}"
                            );
                            let [weights, activations] = shape.stages;
                            assert!(
                                weights >= 2 && activations >= 3,
                                "{format:?} {rows} x {columns}: {shape:?}"
                            );
                            assert_eq!(shape.slices, slices(&part));
                        }
                    }
                }
            }
        }
    }
}
