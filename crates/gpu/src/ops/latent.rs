//! Latent attention: a matrix for each head, the writing of rows, attention over them.

use fornax_compute::{
    Error, HeadProducts, KvDType, LatentAttention, LatentHeads, PAGE_TOKENS, Rows, operands,
};

use super::attention::storage;
use super::experts::{Piece, pieces};
use super::gemv::steps;
use crate::abi::{Constant, Layout, layout};
use crate::cuda::{Check, Cuda};
use crate::driver::{Abilities, Arg};
use crate::grid::Grid;
use crate::layout::{Format, TILE_COLUMNS};
use crate::memory::{Buf, Kv, Weight, WeightPart, int};
use crate::program::Key;
use crate::step::Slot;

/// Threads of the kernels over pages, places of a span, and parts of a score: they stand in latent.cu, too.
const THREADS: usize = 256;
const SPAN: usize = 1024;
const QUARTERS: usize = 4;
/// Floats of shared memory for the scores of a query.
const SCORES: usize = 36;
/// Queries of a block, and pages that it has in shared memory at once.
const ROWS: [usize; 3] = [64, 32, 16];
const STAGES_MAX: usize = 3;
/// Queries of a block of latent_wgmma.cu, its threads, times as many rows in its ring, and the most latent values: two
/// warpgroups keep half of them each in registers.
const WGMMA_ROWS: usize = 64;
const WGMMA_THREADS: usize = 384;
const WGMMA_RING: usize = 2;
const WGMMA_LATENT_MAX: usize = 512;
/// Models with more query heads than these take it: with fewer, most of its queries are none. It follows from the model
/// alone, for the bits of the two kernels differ.
const WGMMA_HEADS: usize = 32;
/// Threads of a block of `latent_merge` and of `latent_write`.
const MERGE_THREADS: usize = 128;
const WRITE_THREADS: usize = 192;
/// Warps of a block of `head_products`, each with a tile; rows of activations; the most stages of its ring.
const HEAD_WARPS: usize = 8;
const HEAD_ROWS: [usize; 2] = [32, 8];
const HEAD_STAGES_MAX: usize = 4;
/// The most blocks of a grid in its second and third dimension.
const GRID_MAX: usize = 65_535;

/// `Latent` of latent.cuh.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct DeviceLatent {
    heads: i32,
    each: i32,
    group: i32,
    window: i32,
    scale: f32,
    block_heads: i32,
    tokens: i32,
    first: i32,
    spans: i32,
    limit: i32,
    partials: u64,
}

/// `LatentRows` of latent_f32.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct DeviceRows {
    heads: i32,
    each: i32,
    group: i32,
    window: i32,
    scale: f32,
    pad: i32,
}

/// `HeadProducts` of head_products.cuh.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct DeviceProducts {
    x: u64,
    out: u64,
    x_columns: i32,
    each: i32,
    column: i32,
    out_columns: i32,
    rows: i32,
    first: i32,
    head: i32,
    fours: i32,
}

pub(super) const LAYOUTS: &[Layout] = &[
    layout!(DeviceLatent, "Latent" in "latent.cuh", {
        heads, each, group, window, scale, block_heads, tokens, first, spans, limit, partials,
    }),
    layout!(DeviceRows, "LatentRows" in "latent_f32.cu", { heads, each, group, window, scale, pad }),
    layout!(DeviceProducts, "HeadProducts" in "head_products.cuh", {
        x, out, x_columns, each, column, out_columns, rows, first, head, fours,
    }),
];
pub(super) const CONSTANTS: &[Constant] = &[
    Constant::new("latent.cu", "THREADS", THREADS),
    Constant::new("latent.cuh", "SPAN", SPAN),
    Constant::new("latent_wgmma.cu", "ROWS", WGMMA_ROWS),
    Constant::new("latent_wgmma.cu", "THREADS", WGMMA_THREADS),
    Constant::new("latent_wgmma.cu", "RING", WGMMA_RING),
    Constant::new("latent_f32.cu", "THREADS", THREADS),
    Constant::new("head_products.cu", "WARPS", HEAD_WARPS),
];

/// How attention over rows of 16 and 8 bits is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    /// Queries of a block.
    rows: usize,
    /// Pages in shared memory at once; none of latent_wgmma.cu, whose ring has one length.
    stages: usize,
    /// Dynamic shared memory of a block.
    shared: usize,
}

impl Plan {
    /// The kernel for such heads, whatever the step. `None` where none fits.
    fn new(heads: LatentHeads, dtype: KvDType, wanted: usize, able: &Abilities) -> Option<Plan> {
        Plan::wgmma(heads, dtype, able).or_else(|| Plan::mma(heads, dtype, wanted, able.shared_max))
    }

    /// By latent_wgmma.cu, where it takes such rows.
    fn wgmma(heads: LatentHeads, dtype: KvDType, able: &Abilities) -> Option<Plan> {
        let (width, rows) = (heads.width(), WGMMA_ROWS);
        let shared = 1024 + (WGMMA_RING + 1) * rows * width * 2;
        let takes = able.wgmma
            && dtype == KvDType::F16
            && heads.query > WGMMA_HEADS
            && width.is_multiple_of(64)
            && heads.latent.is_multiple_of(128)
            && heads.latent <= WGMMA_LATENT_MAX
            && shared <= able.shared_max;
        takes.then_some(Plan { rows, stages: 0, shared })
    }

    /// By latent.cu, with as many queries as fit, but no more than are `wanted`; `None` where not even sixteen do. The bits
    /// of a result do not depend on it.
    fn mma(heads: LatentHeads, dtype: KvDType, wanted: usize, room: usize) -> Option<Plan> {
        let fewest = ROWS[ROWS.len() - 1];
        let enough = |rows: &usize| *rows == fewest || *rows / 2 < wanted;
        let plan = |rows, stages| Plan { rows, stages, shared: shared_bytes(heads, dtype, rows, stages) };
        let fits = |rows: usize, stages: usize| Some(plan(rows, stages)).filter(|plan| plan.shared <= room);
        ROWS.into_iter()
            .filter(enough)
            .find_map(|rows| (1..=STAGES_MAX).rev().find_map(|stages| fits(rows, stages)))
    }

    fn program(&self, heads: LatentHeads, dtype: KvDType) -> Key {
        let LatentHeads { latent, turned, .. } = heads;
        let mut defines = storage(dtype);
        defines.extend([
            format!("LATENT={latent}"),
            format!("TURNED={turned}"),
            format!("HOST_SHARED_BYTES={}", self.shared),
        ]);
        if self.stages == 0 {
            return Key { unit: "latent_wgmma.cu", defines };
        }
        defines.extend([format!("ROWS={}", self.rows), format!("STAGES={}", self.stages)]);
        Key { unit: "latent.cu", defines }
    }

    /// The kernel's name, and the threads of a block.
    fn kernel(&self) -> (&'static str, usize) {
        if self.stages == 0 { ("latent_wgmma", WGMMA_THREADS) } else { ("latent_attention", THREADS) }
    }
}

/// `SHARED_BYTES` of latent.cu, where the two are compared.
fn shared_bytes(heads: LatentHeads, dtype: KvDType, rows: usize, stages: usize) -> usize {
    let width = heads.width();
    let row = width.next_multiple_of(16) * 2;
    let stride = if row.is_multiple_of(128) { row } else { row + 16 };
    let page = PAGE_TOKENS * stride;
    let parts = if dtype == KvDType::BF16 { 2 } else { 1 };
    let (staged, wide) = match dtype {
        KvDType::F8 => (PAGE_TOKENS * (width + 1), page),
        _ => (page, 0),
    };
    parts * rows * stride + stages * staged + wide + QUARTERS * rows * SCORES * 4 + 4 * rows * 4
}

fn program_f32(heads: LatentHeads) -> Key {
    let mut defines = storage(KvDType::F32);
    defines.extend([format!("LATENT={}", heads.latent), format!("TURNED={}", heads.turned)]);
    Key { unit: "latent_f32.cu", defines }
}

/// What is compiled ahead for such heads: for single tokens, for many, and for pages.
pub(crate) fn programs(heads: LatentHeads, dtype: KvDType, able: &Abilities) -> Vec<Key> {
    let mut keys = vec![Key { unit: "rope.cu", defines: storage(dtype) }];
    if dtype == KvDType::F32 {
        keys.push(program_f32(heads));
        return keys;
    }
    for wanted in [heads.query, usize::MAX] {
        let key = Plan::new(heads, dtype, wanted, able).map(|plan| plan.program(heads, dtype));
        keys.extend(key.filter(|key| !keys.contains(key)));
    }
    keys.push(merge_program(heads));
    keys
}

/// What merges spans, whichever kernel left them.
fn merge_program(heads: LatentHeads) -> Key {
    let defines = vec![format!("LATENT={}", heads.latent), format!("TURNED={}", heads.turned)];
    Key { unit: "latent_merge.cu", defines: [storage(KvDType::F16), defines].concat() }
}

/// How products of heads are launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HeadPlan {
    rows: usize,
    stages: usize,
    shared: usize,
}

impl HeadPlan {
    /// For this many rows of activations; `None` where not even eight fit. The bits do not depend on it.
    fn new(part: &WeightPart, rows: usize, room: usize) -> Option<HeadPlan> {
        let row_bytes = part.groups() * TILE_COLUMNS * 2 + 64;
        let most = (steps(part) + 1).clamp(2, HEAD_STAGES_MAX);
        let plan = |rows: usize, stages: usize| {
            let shared = rows * row_bytes + HEAD_WARPS * stages * part.format.step_bytes();
            Some(HeadPlan { rows, stages, shared }).filter(|plan| plan.shared <= room)
        };
        let few = HEAD_ROWS[HEAD_ROWS.len() - 1];
        let enough = |all: &usize| *all == few || rows > few;
        HEAD_ROWS
            .into_iter()
            .filter(enough)
            .find_map(|rows| (2..=most).rev().find_map(|stages| plan(rows, stages)))
    }

    fn program(&self, part: &WeightPart) -> Key {
        let mut key = Key::quant("head_products.cu", part.format);
        key.defines.extend([format!("ROWS={}", self.rows), format!("STAGES={}", self.stages)]);
        key
    }
}

/// The programs of the products with a head's rows.
pub(crate) fn head_programs(part: &WeightPart, room: usize) -> Vec<Key> {
    if part.format == Format::F32 {
        return vec![Key::plain("head_products_f32.cu")];
    }
    let mut keys: Vec<Key> = Vec::new();
    for rows in [usize::MAX, 1] {
        let key = HeadPlan::new(part, rows, room).map(|plan| plan.program(part));
        keys.extend(key.filter(|key| !keys.contains(key)));
    }
    keys
}

impl Cuda {
    /// What is compiled ahead when the matrices of heads are loaded.
    pub(crate) fn programs_of_heads(&self, weight: &Weight, heads: usize) -> Vec<Key> {
        let room = self.device.abilities().shared_max;
        let pieces = pieces(weight, heads, weight.rows / heads.max(1));
        let mut keys: Vec<Key> = Vec::new();
        for key in pieces.iter().flat_map(|piece| head_programs(&piece.part, room)) {
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        keys
    }

    pub(crate) fn op_head_products(
        &self,
        slot: &Slot,
        products: &HeadProducts<'_, Cuda>,
        x: &Buf,
        out: &mut Buf,
    ) -> Result<(), Error> {
        operands::head_products(slot.tokens, products, x, out)?;
        let (heads, weight) = (products.heads, products.weight);
        let rows = weight.rows / heads;
        if heads > GRID_MAX {
            let what = format!("{heads} heads; at most {GRID_MAX} can be");
            return Err(Error::Unsupported { what, backend: self.device.name() });
        }
        self.op(slot, &[x], &[&*out], || {
            for piece in pieces(weight, heads, rows) {
                let share = DeviceProducts {
                    x: x.pointer(),
                    out: out.pointer(),
                    x_columns: int(x.columns),
                    each: int(x.columns / heads),
                    column: int(products.column),
                    out_columns: int(out.columns),
                    rows: int(rows),
                    first: int(piece.part.first),
                    head: int(piece.experts.start),
                    fours: i32::from(
                        [x.columns / heads, products.column, weight.columns]
                            .iter()
                            .all(|columns| columns.is_multiple_of(4)),
                    ),
                };
                self.launch_head_products(slot, &piece, &share)?;
            }
            Ok(())
        })
    }

    fn launch_head_products(&self, slot: &Slot, piece: &Piece, share: &DeviceProducts) -> Result<(), Error> {
        const OPERATION: &str = "head_products";
        let (part, rows) = (&piece.part, self.grid_rows(slot, Rows::Tokens));
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&piece.device_part)),
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Struct(bytemuck::bytes_of(share)),
        ];
        if part.format == Format::F32 {
            let function =
                self.programs.function(&Key::plain("head_products_f32.cu"), "head_products_f32")?;
            let grid = [part.rows.div_ceil(HEAD_WARPS), piece.experts.len(), rows];
            return self.launch(OPERATION, function, Grid::new(grid, HEAD_WARPS * 32), &args);
        }
        let Some(plan) = HeadPlan::new(part, rows, self.device.abilities().shared_max) else {
            let what = format!("products of heads with {} columns", part.columns);
            return Err(Error::Unsupported { what, backend: self.device.name() });
        };
        let function = self.programs.function(&plan.program(part), "head_products")?;
        let grid = [part.row_tiles().div_ceil(HEAD_WARPS), piece.experts.len(), rows.div_ceil(plan.rows)];
        let grid = Grid::new(grid, HEAD_WARPS * 32).with_shared(plan.shared);
        self.launch(OPERATION, function, grid, &args)
    }

    pub(crate) fn op_latent_write(
        &self,
        slot: &Slot,
        attention: &LatentAttention,
        latent: &Buf,
        turned: &Buf,
        kv: &mut Kv,
    ) -> Result<(), Error> {
        const OPERATION: &str = "latent_write";
        let (heads, layer) = (attention.heads, attention.layer);
        let group = kv.group(layer);
        operands::latent_write(slot.tokens, heads, latent, turned, group)?;
        self.check(slot, Check::Pages { group: layer.group, pages: group.pages })?;
        self.op(slot, &[latent, turned], &[], || {
            let key = Key { unit: "rope.cu", defines: storage(kv.dtype) };
            let function = self.programs.function(&key, OPERATION)?;
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Int(int(layer.group)),
                Arg::Int(int(heads.latent)),
                Arg::Int(int(heads.turned)),
                Arg::Pointer(latent.pointer()),
                Arg::Pointer(turned.pointer()),
                Arg::Pointer(kv.pages(layer)),
            ];
            let shared = if kv.dtype == KvDType::F8 { heads.width() * size_of::<f32>() } else { 0 };
            let grid =
                Grid::new([self.grid_rows(slot, Rows::Tokens), 1, 1], WRITE_THREADS).with_shared(shared);
            self.launch(OPERATION, function, grid, &args)
        })
    }

    pub(crate) fn op_latent_attention(
        &self,
        slot: &Slot,
        attention: &LatentAttention,
        queries: &Buf,
        absorbed: &Buf,
        kv: &Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        const OPERATION: &str = "latent_attention";
        let (heads, layer) = (attention.heads, attention.layer);
        let group = kv.group(layer);
        operands::latent_attention(slot.tokens, attention, queries, absorbed, group, out)?;
        self.check(slot, Check::Pages { group: layer.group, pages: group.pages })?;
        if heads.query == 0 {
            return Ok(());
        }
        let window = group.window.map_or(0, u32::cast_signed);
        let each = int(queries.columns / heads.query);
        self.op(slot, &[queries, absorbed], &[&*out], || {
            let device_step = self.device_step(slot);
            let rest = [queries.pointer(), kv.pages(layer), out.pointer()].map(Arg::Pointer);
            let launch = |params: &[u8], function, grid| {
                let [queries, pages, out] = rest;
                let args = [
                    Arg::Struct(bytemuck::bytes_of(&device_step)),
                    Arg::Struct(params),
                    Arg::Pointer(absorbed.pointer()),
                    queries,
                    pages,
                    out,
                ];
                self.launch(OPERATION, function, grid, &args)
            };
            let rows = self.grid_rows(slot, Rows::Tokens);
            if kv.dtype == KvDType::F32 {
                let params = DeviceRows {
                    heads: int(heads.query),
                    each,
                    group: int(layer.group),
                    window,
                    scale: attention.scale,
                    pad: 0,
                };
                let function = self.programs.function(&program_f32(heads), OPERATION)?;
                let grid = Grid::new([heads.query, rows, 1], THREADS);
                return launch(bytemuck::bytes_of(&params), function, grid);
            }
            let wanted = if slot.decode { heads.query } else { usize::MAX };
            let Some(plan) = Plan::new(heads, kv.dtype, wanted, self.device.abilities()) else {
                let what = format!("attention over latent rows of {} values", heads.width());
                return Err(Error::Unsupported { what, backend: self.device.name() });
            };
            let (key, (name, threads)) = (plan.program(heads, kv.dtype), plan.kernel());
            let spread = self.spread(heads, &plan, slot.decode, rows, self.grid_places(slot));
            let mut params = DeviceLatent {
                heads: int(heads.query),
                each,
                group: int(layer.group),
                window,
                scale: attention.scale,
                block_heads: int(spread.heads),
                tokens: int(spread.tokens),
                first: 0,
                spans: int(spread.spans),
                limit: 0,
                partials: self.partials.pointer(),
            };
            for first in (0..rows).step_by(spread.at_once) {
                let limit = spread.at_once.min(rows - first);
                (params.first, params.limit) = (int(first), int(limit));
                let blocks =
                    [heads.query.div_ceil(spread.heads), limit.div_ceil(spread.tokens), spread.spans.max(1)];
                let grid = Grid::new(blocks, threads).with_shared(plan.shared);
                let function = self.programs.function(&key, name)?;
                launch(bytemuck::bytes_of(&params), function, grid)?;
                if spread.spans == 0 {
                    continue;
                }
                let args = [
                    Arg::Struct(bytemuck::bytes_of(&device_step)),
                    Arg::Struct(bytemuck::bytes_of(&params)),
                    Arg::Pointer(out.pointer()),
                ];
                let grid = Grid::new([heads.query, limit, 1], MERGE_THREADS);
                let function = self.programs.function(&merge_program(heads), "latent_merge")?;
                self.launch(OPERATION, function, grid, &args)?;
            }
            Ok(())
        })
    }

    /// How the work is spread over blocks. The bits of the result do not depend on it.
    fn spread(&self, heads: LatentHeads, plan: &Plan, decode: bool, rows: usize, places: usize) -> Spread {
        let groups = heads.query.div_ceil(plan.rows);
        let each = heads.query.div_ceil(groups);
        let tokens = if decode { 1 } else { plan.rows / each };
        let spans = places.div_ceil(SPAN);
        let whole = Spread { heads: each, tokens, spans: 0, at_once: GRID_MAX / tokens * tokens };
        let blocks = groups * rows.div_ceil(tokens);
        // One block is resident on a multiprocessor at a time; a few less than there are leave little idle.
        if spans < 2 || blocks * 8 >= self.device.abilities().multiprocessors * 7 {
            return whole;
        }
        let bytes = heads.query * spans * (heads.latent + 2) * size_of::<f32>();
        let room = usize::try_from(self.partials.bytes()).unwrap_or(usize::MAX);
        let most = room / bytes / tokens * tokens;
        if most == 0 {
            return whole;
        }
        // Launches of equal size.
        let at_once = rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(tokens).min(most);
        Spread { spans, at_once: at_once.max(tokens), ..whole }
    }
}

/// What each block of attention has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spread {
    /// Query heads of a block, and tokens.
    heads: usize,
    tokens: usize,
    /// Spans of the longest sequence where a block has one of them, else 0.
    spans: usize,
    /// Tokens of a launch.
    at_once: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shapes::HOPPER;

    #[test]
    fn rows_of_the_largest_models_fit_every_chip_and_read_ahead_where_there_is_room() {
        let heads = LatentHeads { query: 128, latent: 512, turned: 64 };
        let (small, hopper) = (92 << 10, HOPPER.shared_max);
        for dtype in [KvDType::F16, KvDType::BF16, KvDType::F8] {
            for wanted in [1, 20, 128] {
                assert!(Plan::mma(heads, dtype, wanted, small).is_some(), "{dtype} {wanted}");
            }
            let most = Plan::mma(heads, dtype, 128, hopper).unwrap();
            // In bf16 a query lies in two parts, which leave room for one stage.
            let stages = if dtype == KvDType::BF16 { 1 } else { 2 };
            assert!(most.rows == 64 && most.stages >= stages, "{dtype}: {most:?}");
        }
        let few = |query| Plan::mma(heads, KvDType::F16, query, hopper).unwrap().rows;
        assert_eq!([1, 16, 17, 32, 33, 64, 65].map(few), [16, 16, 32, 32, 64, 64, 64]);
        // Rows of f16 whose widths fill whole instructions, on Hopper alone, and then for every step.
        let wgmma = |heads, dtype, able: &Abilities| Plan::wgmma(heads, dtype, able).is_some();
        assert!(wgmma(heads, KvDType::F16, &HOPPER));
        assert!(!wgmma(heads, KvDType::F16, &Abilities { wgmma: false, ..HOPPER }));
        assert!(!wgmma(heads, KvDType::BF16, &HOPPER) && !wgmma(heads, KvDType::F8, &HOPPER));
        assert!(!wgmma(LatentHeads { latent: 448, ..heads }, KvDType::F16, &HOPPER));
        assert!(!wgmma(LatentHeads { query: 32, ..heads }, KvDType::F16, &HOPPER));
    }
}
