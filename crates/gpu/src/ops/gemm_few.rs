//! Products with few rows of activations (several streams at once) on Hopper's tensor cores, by wgmma
//! (`kernels/gemm_few.cu`).
//!
//! Sums have the same order and the same bits as for one row.

use fornax_compute::{Error, Rows};

use super::gemm::{Gemm, room_for};
use super::gemv::slices;
use super::products::RowCounts;
use crate::abi::{Layout, layout};
use crate::cuda::Cuda;
use crate::driver::{Abilities, Arg};
use crate::grid::Grid;
use crate::memory::{WeightPart, int};
use crate::program::Key;

/// Widths of a block in rows of activations.
const WIDTHS: [usize; 6] = [8, 16, 32, 64, 96, 128];
const ROWS_MAX: usize = WIDTHS[WIDTHS.len() - 1];
/// The widest with one slice: beyond it, blocks of `gemm.rs` are faster.
const ROWS_MAX_WHOLE: usize = 64;
/// Tiles of 16 rows that a warpgroup works on at the same time.
const GROUP_TILES: usize = 4;
/// Blocks in clusters that an H200 runs at once (15 clusters of 8, 30 of 4): a cluster does not cross a GPC.
const CLUSTERED: usize = 120;
const STAGES_MAX: usize = 8;
/// Activations are copied 64 columns at a time, or twice as many where rows are few.
const WIDTH_WIDE: usize = 64;

/// Products with a part take these kernels up to this many rows.
pub(super) fn rows_max(part: &WeightPart) -> usize {
    if slices(part) == 1 { ROWS_MAX_WHOLE } else { ROWS_MAX }
}

/// `Inputs` of gemm_few.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Few {
    values: u64,
    factors: u64,
    first: i32,
    limit: i32,
    rows: i32,
    units: i32,
    eps: f32,
    pad: i32,
    x: u64,
    norm: u64,
}

pub(super) const LAYOUTS: &[Layout] = &[
    layout!(Few, "Inputs" in "gemm_few.cu", { values, factors, first, limit, rows, units, eps, pad, x, norm }),
];

/// What a block multiplies, with the names of [`FewPlan`].
#[derive(Clone, Copy)]
struct Block {
    gates: bool,
    width: usize,
    one: Option<usize>,
}

/// How a product is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FewPlan {
    slices: usize,
    gates: bool,
    /// Rows of activations.
    width: usize,
    /// Where every block converts the one row itself: the most groups of 128 columns of a slice.
    one: Option<usize>,
    /// Warpgroups that multiply.
    groups: usize,
    /// The most tiles that a block works on at the same time.
    tiles: usize,
    /// Stages of weights, and of activations.
    stages: [usize; 2],
    /// Dynamic shared memory of a block.
    shared: usize,
    /// Tiles of 16 rows, or of gates; and the blocks that they are divided among.
    units: usize,
    blocks: usize,
}

impl FewPlan {
    /// The plan for this many rows of activations; `None` where they are too many, or nothing fits.
    fn of(part: &WeightPart, gates: bool, limit: usize, able: &Abilities) -> Option<FewPlan> {
        let room = able.shared_max;
        let one = Some(part).filter(|part| limit == 1 && part.format.takes_floats8());
        let one = one.map(|part| part.groups().div_ceil(slices(part)));
        let width = WIDTHS.into_iter().find(|&width| limit <= width && width <= rows_max(part))?;
        let slices = slices(part);
        // With several slices, gates are multiplied first and gated by another kernel.
        if gates && (slices > 1 || !part.row_tiles().is_multiple_of(2)) {
            return None;
        }
        let block = Block { gates, width, one };
        let sides = if gates { 2 } else { 1 };
        let units = part.row_tiles() / sides;
        let at_once = match slices {
            1 => able.multiprocessors,
            _ => CLUSTERED.min(able.multiprocessors) / slices,
        };
        // Sums need registers: of 8-bit floats twice as many.
        let groups_max = match (width, slices) {
            (33..=64, _) if part.format.takes_floats8() => 4,
            (65..=96, _) if part.format.takes_floats8() => 3,
            (97.., _) if part.format.takes_floats8() => 2,
            (0..=WIDTH_WIDE, _) => 5,
            (_, 1) => 3,
            _ => 4,
        };
        let most = (1..=groups_max * GROUP_TILES / sides)
            .rev()
            .find(|&units| FewPlan::stages(part, block, units * sides, room).is_some())?;
        // As few rounds as possible, all of the same length; a block of a slice has one round.
        let blocks = units.min(at_once.max(1));
        let share = units.div_ceil(blocks);
        let each = share.div_ceil(share.div_ceil(most));
        let blocks = if slices == 1 { blocks } else { units.div_ceil(each) };
        let tiles = each * sides;
        let (stages, shared) = FewPlan::stages(part, block, tiles, room)?;
        let groups = tiles.div_ceil(GROUP_TILES);
        let sums = if slices > 1 { 1024 + groups * GROUP_TILES * 64 * width } else { 0 };
        let shared = shared.max(sums);
        (shared <= room).then_some(FewPlan {
            slices,
            gates,
            width,
            one,
            groups,
            tiles,
            stages,
            shared,
            units,
            blocks,
        })
    }

    /// Stages of weights and of activations, and the shared memory that they need: for two tiles and for more.
    fn stages(
        part: &WeightPart,
        Block { gates, width, one }: Block,
        tiles: usize,
        room: usize,
    ) -> Option<([usize; 2], usize)> {
        let weights = tiles * part.format.step_bytes();
        let pieces = if width < WIDTH_WIDE { 128 / part.format.piece_columns() } else { 1 };
        let activations = pieces * width * 128;
        // The starts of groups of eight rows; what is handed over.
        let passed = tiles.next_multiple_of(GROUP_TILES) * (width / 4).min(8) * 128;
        let fixed = 1024 + if gates { passed } else { 0 };
        if let Some(groups) = one {
            // Eight rows' room for one.
            let fixed = fixed + groups * 1024;
            let room = room.checked_sub(fixed + 2 * weights)?;
            let stages = (2 + room / weights).min(STAGES_MAX);
            return Some(([stages, 1], fixed + stages * weights));
        }
        let room = room.checked_sub(fixed + 2 * weights)?;
        // Weights get what activations leave,
        let ahead = (room / activations).min(if width < WIDTH_WIDE { 3 } else { 4 });
        if ahead < 2 {
            return None;
        }
        let more = (room - ahead * activations) / weights;
        let stages = [(2 + more).min(STAGES_MAX), ahead];
        // and activations get what weights leave.
        let rest = room + 2 * weights - stages[0] * weights;
        let stages = [stages[0], (rest / activations).min(STAGES_MAX)];
        Some((stages, fixed + stages[0] * weights + stages[1] * activations))
    }

    fn program(&self, part: &WeightPart) -> Key {
        let mut key = Key::quant("gemm_few.cu", part.format);
        key.defines.extend([
            format!("WIDTH={}", self.width),
            format!("WARPGROUPS={}", self.groups),
            format!("TILES={}", self.tiles),
            format!("SLICES={}", self.slices),
            format!("GATES={}", i32::from(self.gates)),
            format!("STAGES_A={}", self.stages[0]),
            format!("STAGES_B={}", self.stages[1]),
        ]);
        key.defines.extend(self.one.map(|groups| format!("ONE={groups}")));
        key
    }
}

/// The programs of products with `often` rows or fewer, and sometimes with up to `most`. Gates have none where they are
/// gated by another kernel.
pub(crate) fn programs(
    part: &WeightPart,
    gates: bool,
    RowCounts { often, most }: RowCounts,
    able: &Abilities,
) -> Vec<Key> {
    let most = most.min(rows_max(part));
    // One row is done here, too, where no other kernel does it.
    let mut below = if part.format.takes_floats8() { 0 } else { 1 };
    let needed = WIDTHS.into_iter().filter(|width| {
        // A number of rows between two widths takes the wider one; rare numbers of rows share a few widths.
        let rare = [WIDTHS[0], WIDTH_WIDE, ROWS_MAX].contains(width) || most <= *width;
        let needed = below < most && (below < often || rare);
        below = *width;
        needed
    });
    let one = Some(1).filter(|_| part.format.takes_floats8());
    let plans = one.into_iter().chain(needed).filter_map(|width| FewPlan::of(part, gates, width, able));
    plans.map(|plan| plan.program(part)).collect()
}

impl Cuda {
    /// Whether a product with this many rows takes this kernel.
    pub(super) fn takes_few(&self, part: &WeightPart, gates: bool, limit: usize) -> bool {
        FewPlan::of(part, gates, limit, self.device.abilities()).is_some()
    }

    /// Whether these kernels convert one row themselves.
    pub(super) fn converts_one(&self, part: &WeightPart) -> bool {
        FewPlan::of(part, false, 1, self.device.abilities()).is_some_and(|plan| plan.one.is_some())
    }

    /// The narrowest plan whose program was compiled ahead, with that program: no plan is worth waiting for the
    /// compiler while requests are running.
    fn ready_few(&self, part: &WeightPart, gates: bool, limit: usize) -> Option<(FewPlan, Key)> {
        // One row that is not prepared has a program of its own.
        let alone = FewPlan::of(part, gates, 1, self.device.abilities())
            .filter(|plan| limit == 1 && plan.one.is_some());
        if let Some(plan) = alone {
            return Some((plan, plan.program(part)));
        }
        let wider = WIDTHS.into_iter().filter(|&width| limit <= width);
        let plans = wider.filter_map(|width| FewPlan::of(part, gates, width, self.device.abilities()));
        let mut plans = plans.map(|plan| (plan, plan.program(part))).peekable();
        let narrowest = plans.peek().cloned();
        plans.find(|(_, key)| self.programs.has(key)).or(narrowest)
    }

    /// The program that launches such a product.
    #[cfg(test)]
    pub(super) fn few_key(&self, part: &WeightPart, gates: bool, limit: usize) -> Option<Key> {
        self.ready_few(part, gates, limit).map(|(_, key)| key)
    }

    /// Launches a product, where it has this kernel.
    pub(super) fn multiply_few(&self, gemm: &Gemm) -> Result<(), Error> {
        let Gemm { operation, part, device_part, step, rows, inputs, product } = *gemm;
        let limit = inputs.limit.cast_unsigned() as usize;
        let (plan, key) = self.ready_few(&part, product.pairs > 0, limit).expect("asked before");
        let function = self.programs.function(&key, "gemm_few")?;
        let few = Few {
            values: inputs.values,
            factors: inputs.factors,
            first: inputs.first,
            limit: inputs.limit,
            rows: int(room_for(limit)),
            units: int(plan.units),
            eps: inputs.eps,
            pad: 0,
            x: inputs.x,
            norm: inputs.norm,
        };
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_part)),
            Arg::Struct(bytemuck::bytes_of(&step)),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Struct(bytemuck::bytes_of(&few)),
            Arg::Struct(bytemuck::bytes_of(&product)),
        ];
        let grid = Grid::new([plan.blocks, 1, plan.slices], (plan.groups + 1) * 128);
        let grid = grid.with_shared(plan.shared).in_clusters(plan.slices);
        self.launch(operation, function, grid, &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Format;
    use crate::ops::shapes::{HOPPER, part};

    #[test]
    fn blocks_have_equal_shares_of_a_weight_and_all_run_at_once() {
        let check = |shape, gates, limit, wanted| {
            let shape = FewPlan::of(&part(Format::BF16, shape), gates, limit, &HOPPER).unwrap();
            let FewPlan { slices, groups, tiles, blocks, .. } = shape;
            assert_eq!((slices, groups, tiles, blocks), wanted, "{shape:?}, {limit} rows, gates {gates}");
        };
        check((4608, 3584), false, 64, (4, 3, 10, 29));
        check((3584, 3584), false, 64, (4, 2, 8, 28));
        check((3584, 18_944), false, 64, (8, 4, 15, 15));
        check((37_888, 3584), true, 64, (1, 5, 18, 132));
        assert_eq!(FewPlan::of(&part(Format::BF16, (37_888, 3584)), true, 65, &HOPPER), None);
    }

    #[test]
    fn every_shape_fits_a_block_and_reads_ahead() {
        let some = [Format::F16, Format::Q8_0, Format::Q4_K, Format::Q5_K, Format::Q6_K, Format::Q5_1];
        for format in some.into_iter().chain([Format::FP8_A8]) {
            for rows in [16, 512, 9728, 16_000, 37_888, 152_064] {
                for columns in [256, 1024, 3584, 8192, 18_944] {
                    for gates in [false, true] {
                        for limit in [1, 2, 8, 17, 64, 65, 128] {
                            let part = part(format, (rows, columns));
                            let shape = FewPlan::of(&part, gates, limit, &HOPPER);
                            if gates && (rows == 16 || slices(&part) > 1) || limit > rows_max(&part) {
                                continue;
                            }
                            let shape = shape
                                .unwrap_or_else(|| panic!("{format:?} {rows} x {columns}, {limit} rows"));
                            assert!(
                                shape.shared <= HOPPER.shared_max,
                                "{format:?} {rows} x {columns}: {shape:?}"
                            );
                            let [weights, activations] = shape.stages;
                            assert!(weights >= 2 && (activations >= 2 || shape.one.is_some()), "{shape:?}");
                            assert_eq!(shape.slices, slices(&part));
                            let unit = if gates { 2 } else { 1 };
                            let share = shape.units.div_ceil(shape.blocks);
                            assert!(shape.slices == 1 || share * unit <= shape.tiles, "{shape:?}");
                            assert!(shape.tiles <= shape.groups * GROUP_TILES && shape.blocks <= shape.units);
                        }
                    }
                }
            }
        }
    }
}
