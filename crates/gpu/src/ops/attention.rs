//! Rotation, pages and attention over them.

use fornax_compute::{
    Attention, Error, GROUP_MAX, GROUP_VALUES_MAX, Heads, KvDType, KvLayer, Need, Rope, Rows, operands,
};

use crate::abi::{Constant, Layout, layout};
use crate::cuda::{Check, Cuda};
use crate::driver::{Arg, CLUSTER_USUAL};
use crate::grid::Grid;
use crate::memory::{Buf, Kv, int};
use crate::program::Key;
use crate::step::{Run, Slot};

/// Keys of a tile, threads of a block, rows of a block of attention_rows.cu, and the most tiles that a cluster merges:
/// they stand in attention*.cu, too.
pub(super) const TILE: usize = 64;
const THREADS: usize = 128;
const BLOCK_ROWS: usize = 64;
const CLUSTER_TILES: usize = 32;
/// Threads and rows of a block of attention_wgmma.cu.
const WGMMA_THREADS: usize = 384;
const WGMMA_ROWS: usize = 128;
/// Up to this many runs of single tokens among prompts are launched on their own.
const RUNS_MAX: usize = 4;

/// `HeadCounts` of rope.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct HeadCounts {
    query: i32,
    kv: i32,
    dim: i32,
}

/// `Rotation` of rope.cuh.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Rotation {
    frequencies: u64,
    pairs: i32,
    magnitude: f32,
}

/// `Attention` of attention.cuh.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct AttentionParams {
    query: i32,
    kv: i32,
    group: i32,
    window: i32,
    scale: f32,
    first: i32,
    stages: i32,
    clusters: i32,
    partials: u64,
    rope: Rotation,
    sinks: u64,
    cap: f32,
    tiles: i32,
    columns: i32,
    chunk: i32,
}

pub(super) const LAYOUTS: &[Layout] = &[
    layout!(HeadCounts, "HeadCounts" in "rope.cu", { query, kv, dim }),
    layout!(Rotation, "Rotation" in "rope.cuh", { frequencies, pairs, magnitude }),
    layout!(AttentionParams, "Attention" in "attention.cuh", {
        query, kv, group, window, scale, first, stages, clusters, partials, rope, sinks, cap, tiles, columns, chunk,
    }),
];
pub(super) const CONSTANTS: &[Constant] = &[
    Constant::new("attention.cuh", "TILE", TILE),
    Constant::new("attention.cu", "THREADS", THREADS),
    Constant::new("attention.cu", "CLUSTER_TILES", CLUSTER_TILES),
    Constant::new("attention_rows.cu", "THREADS", THREADS),
    Constant::new("attention_rows.cu", "ROWS", BLOCK_ROWS),
    Constant::new("attention_wgmma.cu", "THREADS", WGMMA_THREADS),
    Constant::new("attention_wgmma.cu", "ROWS", WGMMA_ROWS),
];

/// Heads of a GQA group, which kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadGroup {
    /// Values of a head.
    pub(crate) dim: usize,
    /// Query heads that share a K/V head.
    pub(crate) group: usize,
}

impl From<Heads> for HeadGroup {
    fn from(heads: Heads) -> HeadGroup {
        HeadGroup { dim: heads.dim, group: heads.query / heads.kv }
    }
}

/// What attention of a step reads and writes.
pub(super) struct Attended<'a> {
    pub(super) slot: &'a Slot,
    pub(super) attention: &'a Attention<Buf>,
    /// Where queries and keys still have to be rotated, and keys and values to be stored.
    pub(super) rope: Option<Rotation>,
    pub(super) qkv: &'a Buf,
    pub(super) kv: &'a Kv,
    pub(super) out: &'a Buf,
}

/// How the tiles of single tokens are divided among blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Split {
    /// Blocks per token: they form a cluster, unless another kernel merges the tiles.
    blocks: usize,
    tiles: usize,
    /// Tiles that a block keeps in shared memory at the same time.
    stages: usize,
    /// Whether each tile has its own block and another kernel merges them.
    merged: bool,
}

impl Rotation {
    /// Queries are already rotated, and keys already stored.
    pub(super) const NONE: Rotation = Rotation { frequencies: 0, pairs: 0, magnitude: 0.0 };
}

impl From<Heads> for HeadCounts {
    fn from(heads: Heads) -> HeadCounts {
        HeadCounts { query: int(heads.query), kv: int(heads.kv), dim: int(heads.dim) }
    }
}

/// Bytes of a head's keys, or queries, in shared memory: `STRIDE` of attention.cuh.
fn row_bytes(dim: usize) -> usize {
    let bytes = dim.next_multiple_of(16) * 2;
    if bytes.is_multiple_of(128) { bytes } else { bytes + 16 }
}

/// Tiles of keys and values in shared memory: `TILES_BYTES` of attention.cuh, where the two are compared.
fn tiles_bytes(dim: usize, dtype: KvDType, stages: usize) -> usize {
    match dtype {
        KvDType::F8 => 2 * TILE * (row_bytes(dim) + stages * dtype.bytes_of(dim)),
        _ => stages * 2 * TILE * row_bytes(dim),
    }
}

/// Dynamic shared memory of a block of attention.cu; in a cluster with room for what `blocks` blocks send of this many
/// tiles.
fn singles_bytes(heads: HeadGroup, dtype: KvDType, stages: usize, tiles: usize, blocks: usize) -> usize {
    let HeadGroup { dim, group } = heads;
    // Query heads in groups of eight: `EIGHTS` of attention.cu.
    let eights = group.div_ceil(8);
    let (queries, weights) = (2 * 8 * eights * row_bytes(dim), 2048 * eights);
    let ends = group * CLUSTER_TILES * 8;
    let share = (group * dim).div_ceil(2 * blocks) * 2;
    let sent = if tiles == 0 { 0 } else { ends + tiles * share * 4 };
    tiles_bytes(dim, dtype, stages) + queries + weights + sent
}

/// Dynamic shared memory of a block of attention_rows.cu.
fn rows_bytes(dim: usize, dtype: KvDType, stages: usize) -> usize {
    tiles_bytes(dim, dtype, stages) + 2 * BLOCK_ROWS * row_bytes(dim)
}

/// Whether the kernels support such heads.
fn takes(heads: Heads) -> bool {
    let group = heads.query / heads.kv;
    heads.query.is_multiple_of(heads.kv)
        && heads.dim.is_multiple_of(4)
        && group <= GROUP_MAX
        && group * heads.dim <= GROUP_VALUES_MAX
}

/// How keys and values are stored, for the compiler.
pub(crate) fn storage(dtype: KvDType) -> Vec<String> {
    let bytes = if dtype == KvDType::F8 { 1 } else { dtype.bytes_of(1) };
    vec![format!("KV_BYTES={bytes}"), format!("KV_BF16={}", i32::from(dtype == KvDType::BF16))]
}

/// The program for heads of `dim` values, `group` of which share their keys.
pub(crate) fn program<Buf>(heads: HeadGroup, dtype: KvDType, attention: &Attention<Buf>) -> Key {
    let HeadGroup { dim, group } = heads;
    let mut defines = storage(dtype);
    let (capped, sinks) = (attention.soft_cap.is_some(), attention.sinks.is_some());
    defines.extend([format!("DIM={dim}"), format!("GROUP={group}")]);
    let flags = [("CAPPED", capped), ("SINKS", sinks), ("BOTH", !attention.causal)];
    // Other programs do not name it, and are what they were.
    defines.extend(attention.chunk.filter(|_| dtype != KvDType::F32).map(|_| "CHUNKED=1".to_owned()));
    defines.extend(flags.map(|(name, on)| format!("{name}={}", i32::from(on))));
    if dtype == KvDType::F32 {
        return Key { unit: "attention_f32.cu", defines };
    }
    // Compared there with what the kernel takes.
    defines.push(format!("HOST_TILES_BYTES={}", tiles_bytes(dim, dtype, 1)));
    Key { unit: "attention.cu", defines }
}

/// The program for many tokens of a sequence by wgmma, and the dynamic shared memory of a block, where it supports such
/// heads. With `rotates` it rotates queries itself.
pub(crate) fn wgmma_program<Buf>(
    heads: HeadGroup,
    dtype: KvDType,
    attention: &Attention<Buf>,
    rotates: bool,
) -> Option<(Key, usize)> {
    let HeadGroup { dim, group } = heads;
    // Tiles of the ring: as many as keep copies under way.
    let ring = match (dim, dtype) {
        (64, KvDType::F16 | KvDType::BF16) => 6,
        (128, KvDType::F16 | KvDType::BF16) => 4,
        _ => return None,
    };
    let mut key = Key { unit: "attention_wgmma.cu", ..program(heads, dtype, attention) };
    key.defines.extend([format!("RING={ring}"), format!("ROTATES={}", i32::from(rotates))]);
    let angles = if rotates { WGMMA_ROWS / group * dim / 2 * 8 } else { 0 };
    // Groups of eight rows are aligned to 1024 bytes; 2048 bytes hold ones.
    Some((key, 1024 + tiles_bytes(dim, dtype, ring) + 2 * WGMMA_ROWS * row_bytes(dim) + 2048 + angles))
}

impl Cuda {
    /// Rotation alone stores nothing, so any storage type will do.
    pub(crate) fn op_rope(
        &self,
        slot: &Slot,
        heads: Heads,
        rope: &Rope<Buf>,
        qkv: &mut Buf,
    ) -> Result<(), Error> {
        let rotation = rotation(slot, heads, rope, qkv)?;
        self.op(slot, &[&*qkv], &[&*qkv], || {
            let function =
                self.programs.function(&Key { unit: "rope.cu", defines: storage(KvDType::F16) }, "rope")?;
            let heads_counted = HeadCounts::from(heads);
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&heads_counted)),
                Arg::Struct(bytemuck::bytes_of(&rotation)),
                Arg::Pointer(qkv.pointer()),
            ];
            let grid = [heads.query + heads.kv, self.grid_rows(slot, Rows::Tokens), 1];
            self.launch("rope", function, Grid::new(grid, 64), &args)
        })
    }

    pub(crate) fn op_kv_write(
        &self,
        slot: &Slot,
        heads: Heads,
        layer: KvLayer,
        qkv: &Buf,
        kv: &mut Kv,
    ) -> Result<(), Error> {
        operands::fits("kv_write", "qkv", qkv, (slot.tokens, heads.qkv_columns()))?;
        self.pages_fit("kv_write", slot, heads, layer, kv)?;
        self.op(slot, &[qkv], &[], || {
            let function =
                self.programs.function(&Key { unit: "rope.cu", defines: storage(kv.dtype) }, "kv_write")?;
            let heads_counted = HeadCounts::from(heads);
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&heads_counted)),
                Arg::Int(int(layer.group)),
                Arg::Pointer(qkv.pointer()),
                Arg::Pointer(kv.pages(layer)),
            ];
            let grid = [heads.kv, self.grid_rows(slot, Rows::Tokens), 1];
            self.launch("kv_write", function, Grid::new(grid, 64), &args)
        })
    }

    /// `rope`, `kv_write` and `attention`. The first two are one pass; where every row is a single token, all three
    /// are, since then no key that a token sees is stored by another block.
    pub(crate) fn op_attend(
        &self,
        slot: &Slot,
        attention: &Attention<Buf>,
        rope: Option<&Rope<Buf>>,
        qkv: &mut Buf,
        kv: &mut Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let Some(rope) = rope else {
            self.op_kv_write(slot, attention.heads, attention.layer, qkv, kv)?;
            return self.op_attention(slot, attention, qkv, kv, out);
        };
        let rotation = rotation(slot, attention.heads, rope, qkv)?;
        // The kernels of attention rotate two neighbours at a time.
        let fuses = self.fuses() && attention.causal && rope.pairs.is_multiple_of(2);
        if slot.decode && fuses {
            return self.attention(slot, attention, Some(rotation), qkv, kv, out);
        }
        // Where attention also rotates the queries of prompts, only pages are written before it.
        let keys = fuses && self.wgmma(attention, kv.dtype, true).is_some();
        self.op_rope_and_write(slot, attention, rotation, keys, qkv, kv)?;
        self.attention(slot, attention, keys.then_some(rotation), qkv, kv, out)
    }

    /// What is compiled ahead when room for keys and values is taken: for single tokens, for many, and for pages.
    /// `rotates`: queries and keys are rotated.
    pub(crate) fn attention_programs<B>(
        &self,
        attention: &Attention<B>,
        rotates: bool,
        dtype: KvDType,
    ) -> Vec<Key> {
        let heads = attention.heads;
        if !takes(heads) {
            return Vec::new();
        }
        let key = program(heads.into(), dtype, attention);
        let mut keys = vec![Key { unit: "rope.cu", defines: storage(dtype) }];
        if dtype != KvDType::F32 && rows_bytes(heads.dim, dtype, 1) <= self.device.abilities().shared_max {
            // The same as `op_attend` uses where operations are fused, as in recorded steps.
            let rotating =
                if attention.causal && rotates { self.wgmma(attention, dtype, true) } else { None };
            let many = rotating.or_else(|| self.wgmma(attention, dtype, false)).map(|(key, _)| key);
            keys.push(many.unwrap_or_else(|| Key { unit: "attention_rows.cu", ..key.clone() }));
        }
        keys.push(key);
        keys
    }

    /// The program for many tokens by wgmma, and its shared memory, where this device supports both.
    fn wgmma<B>(&self, attention: &Attention<B>, dtype: KvDType, rotates: bool) -> Option<(Key, usize)> {
        let heads = attention.heads;
        // `attention` refuses such heads.
        let group = heads.query / heads.kv;
        if !self.device.abilities().wgmma || !(1..=GROUP_MAX).contains(&group) {
            return None;
        }
        wgmma_program(HeadGroup { dim: heads.dim, group }, dtype, attention, rotates)
            .filter(|(_, memory)| *memory <= self.device.abilities().shared_max)
    }

    /// Rotates queries and keys, or with `keys` the keys alone, and stores keys and values.
    fn op_rope_and_write(
        &self,
        slot: &Slot,
        attention: &Attention<Buf>,
        rotation: Rotation,
        keys: bool,
        qkv: &mut Buf,
        kv: &mut Kv,
    ) -> Result<(), Error> {
        let (heads, layer) = (attention.heads, attention.layer);
        self.pages_fit("attend", slot, heads, layer, kv)?;
        self.op(slot, &[&*qkv], &[&*qkv], || {
            let key = Key { unit: "rope.cu", defines: storage(kv.dtype) };
            let function = self.programs.function(&key, "rope_and_write")?;
            let heads_counted = HeadCounts::from(heads);
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&heads_counted)),
                Arg::Struct(bytemuck::bytes_of(&rotation)),
                Arg::Int(int(layer.group)),
                Arg::Pointer(qkv.pointer()),
                Arg::Pointer(kv.pages(layer)),
                Arg::Int(i32::from(keys)),
            ];
            let grid = [self.grid_rows(slot, Rows::Tokens), 1, 1];
            self.launch("attend", function, Grid::new(grid, 256), &args)
        })
    }

    pub(crate) fn op_attention(
        &self,
        slot: &Slot,
        attention: &Attention<Buf>,
        qkv: &Buf,
        kv: &Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        self.attention(slot, attention, None, qkv, kv, out)
    }

    /// With `rope`, queries and keys still have to be rotated, and keys and values to be stored.
    fn attention(
        &self,
        slot: &Slot,
        attention: &Attention<Buf>,
        rope: Option<Rotation>,
        qkv: &Buf,
        kv: &Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let (heads, layer) = (attention.heads, attention.layer);
        let group = kv.group(layer);
        operands::attention(slot.tokens, attention, qkv, group, out)?;
        self.check(slot, Check::Pages { group: layer.group, pages: group.pages })?;
        if !takes(heads) {
            let (group, rest) = (heads.query / heads.kv, heads.query % heads.kv);
            let what =
                format!("attention of {group} query heads, {rest} over, per K/V head of {}", heads.dim);
            return Err(Error::Unsupported { what, backend: self.device.name() });
        }
        if attention.reach.is_some() {
            return Err(Error::Unsupported { what: Need::Reach.to_string(), backend: self.device.name() });
        }
        // The largest score is looked for before scaling.
        if attention.scale <= 0.0 {
            let what = format!("attention whose scores are multiplied by {}", attention.scale);
            return Err(Error::Unsupported { what, backend: self.device.name() });
        }
        let attended = Attended { slot, attention, rope, qkv, kv, out };
        // Queries and keys that are rotated here are written back.
        let written = if rope.is_some() { qkv } else { &*out };
        self.op(slot, &[qkv], &[&*out, written], || {
            if kv.dtype == KvDType::F32 {
                return self.attention_f32(&attended);
            }
            let whole =
                Run { first: 0, tokens: self.grid_rows(slot, Rows::Tokens), places: self.grid_places(slot) };
            let rows_bytes = rows_bytes(heads.dim, kv.dtype, 1);
            // A few runs of single tokens among prompts are launched on their own; more launches would cost more than
            // they save.
            let runs = match &slot.singles[..] {
                _ if slot.decode || rows_bytes > self.device.abilities().shared_max => &[whole][..],
                runs if runs.len() <= RUNS_MAX => runs,
                _ => &[],
            };
            if !slot.decode && rows_bytes <= self.device.abilities().shared_max {
                self.attention_rows(&attended, !runs.is_empty())?;
            }
            runs.iter().try_for_each(|run| self.attention_singles(&attended, *run))
        })
    }

    /// Single tokens of sequences: one launch, or two where another kernel merges the tiles.
    fn attention_singles(&self, attended: &Attended<'_>, run: Run) -> Result<(), Error> {
        let Attended { slot, attention, rope, qkv, kv, out } = *attended;
        let heads = attention.heads;
        let window = kv.group(attention.layer).window;
        let split = self.split(heads, kv.dtype, run, window);
        let clusters = split.blocks > 1 && !split.merged;
        let mut params = self.params(attention, kv, (qkv.columns, split.stages));
        params.first = int(run.first);
        params.clusters = i32::from(clusters);
        params.tiles = int(split.blocks);
        params.rope = rope.unwrap_or(Rotation::NONE);
        let tiles = if clusters { split.tiles.next_multiple_of(split.blocks) } else { 0 };
        let memory = singles_bytes(heads.into(), kv.dtype, split.stages, tiles, split.blocks);
        let key = program(heads.into(), kv.dtype, attention);
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Struct(bytemuck::bytes_of(&params)),
            Arg::Pointer(qkv.pointer()),
            Arg::Pointer(kv.pages(attention.layer)),
            Arg::Pointer(out.pointer()),
        ];
        let grid = Grid::new([heads.kv, run.tokens, split.blocks], THREADS).with_shared(memory);
        let grid = if clusters { grid.in_clusters(split.blocks) } else { grid };
        self.launch("attention", self.programs.function(&key, "attention")?, grid, &args)?;
        if !split.merged {
            return Ok(());
        }
        let args = [args[0], args[1], args[4]];
        let grid = Grid::new([heads.query, run.tokens, 1], super::gemv::row_threads(heads.dim));
        self.launch("attention", self.programs.function(&key, "merge_tiles")?, grid, &args)
    }

    /// Tokens of one sequence side by side: all but the single ones where those have their own launch (`alone`).
    fn attention_rows(&self, attended: &Attended<'_>, alone: bool) -> Result<(), Error> {
        let Attended { slot, attention, rope, qkv, kv, out } = *attended;
        let heads = attention.heads;
        let group = heads.query / heads.kv;
        let stages =
            if rows_bytes(heads.dim, kv.dtype, 2) <= self.device.abilities().shared_max { 2 } else { 1 };
        let mut params = self.params(attention, kv, (qkv.columns, stages));
        params.rope = rope.unwrap_or(Rotation::NONE);
        let wgmma = self.wgmma(attention, kv.dtype, rope.is_some());
        let (name, threads, rows) = match wgmma {
            Some(_) => ("attention_wgmma", WGMMA_THREADS, WGMMA_ROWS),
            None => ("attention_rows", THREADS, BLOCK_ROWS),
        };
        let (key, memory) = wgmma.unwrap_or_else(|| {
            let key = Key { unit: "attention_rows.cu", ..program(heads.into(), kv.dtype, attention) };
            (key, rows_bytes(heads.dim, kv.dtype, stages))
        });
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Struct(bytemuck::bytes_of(&params)),
            Arg::Pointer(qkv.pointer()),
            Arg::Pointer(kv.pages(attention.layer)),
            Arg::Pointer(out.pointer()),
            Arg::Int(i32::from(alone)),
        ];
        let function = self.programs.function(&key, name)?;
        let tokens = self.grid_rows(slot, Rows::Tokens).div_ceil(rows / group);
        let grid = Grid::new([heads.kv, tokens, 1], threads).with_shared(memory);
        self.launch("attention", function, grid, &args)
    }

    fn params(
        &self,
        attention: &Attention<Buf>,
        kv: &Kv,
        (columns, stages): (usize, usize),
    ) -> AttentionParams {
        let heads = attention.heads;
        AttentionParams {
            query: int(heads.query),
            kv: int(heads.kv),
            group: int(attention.layer.group),
            window: kv.group(attention.layer).window.map_or(0, u32::cast_signed),
            scale: attention.scale,
            first: 0,
            stages: int(stages),
            clusters: 0,
            partials: self.partials.pointer(),
            rope: Rotation::NONE,
            sinks: attention.sinks.as_ref().map_or(0, Buf::pointer),
            cap: attention.soft_cap.unwrap_or(0.0),
            tiles: 0,
            columns: int(columns),
            chunk: attention.chunk.map_or(0, u32::cast_signed),
        }
    }

    /// How many blocks share a token's tiles. The bits of the result do not depend on it.
    fn split(&self, heads: Heads, dtype: KvDType, run: Run, window: Option<u32>) -> Split {
        // A window that begins inside a tile touches one more tile.
        let seen = window.map_or(run.places, |window| run.places.min(window as usize + TILE));
        let tiles = seen.div_ceil(TILE);
        let alone = run.tokens * heads.kv;
        let room = 2 * self.device.abilities().multiprocessors;
        let fits = |stages, tiles: usize, blocks| {
            singles_bytes(heads.into(), dtype, stages, tiles, blocks) <= self.device.abilities().shared_max
        };
        // Two tiles in shared memory leave room for fewer blocks: this pays where blocks are few, or small.
        let stages = if (alone <= room || heads.dim <= 64) && fits(2, 0, 1) { 2 } else { 1 };
        let one = Split { blocks: 1, tiles, stages, merged: false };
        if tiles < 2 || alone >= room {
            return one;
        }
        let largest = self.device.abilities().clusters_max;
        if tiles <= CLUSTER_TILES && largest > 1 {
            // As many as fill the device, but not more than there are tiles; more than eight only where that saves
            // rounds.
            let mut blocks = if tiles > 8 { largest } else { largest.min(CLUSTER_USUAL) };
            while blocks > 1 && (alone * blocks > room || blocks / 2 >= tiles) {
                blocks /= 2;
            }
            let stages = if tiles > blocks { stages } else { 1 };
            if fits(stages, tiles.next_multiple_of(blocks), blocks) {
                return Split { blocks, tiles, stages, merged: false };
            }
        }
        let bytes = (alone * tiles * (heads.query / heads.kv) * (heads.dim + 2) * 4) as u64;
        if bytes > self.partials.bytes() {
            one
        } else {
            Split { blocks: tiles, tiles, stages: 1, merged: true }
        }
    }

    /// Refuses pages that do not have this layer's shape, and page tables that name pages which the pool does not have.
    fn pages_fit(
        &self,
        operation: &'static str,
        slot: &Slot,
        heads: Heads,
        layer: KvLayer,
        kv: &Kv,
    ) -> Result<(), Error> {
        let group = kv.group(layer);
        operands::pages_fit(operation, heads, group)?;
        self.check(slot, Check::Pages { group: layer.group, pages: group.pages })
    }
}

fn rotation(slot: &Slot, heads: Heads, rope: &Rope<Buf>, qkv: &Buf) -> Result<Rotation, Error> {
    operands::rope(slot.tokens, heads, rope, qkv)?;
    if !rope.sections.is_empty() {
        return Err(Error::Unsupported { what: Need::Sections.to_string(), backend: "cuda" });
    }
    Ok(Rotation {
        frequencies: rope.frequencies.pointer(),
        pairs: int(rope.pairs),
        magnitude: rope.magnitude,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: usize = 219 << 10;

    #[test]
    fn wgmma_takes_heads_of_64_and_128_and_rotates_queries_where_their_angles_fit() {
        let heads = Heads { query: 1, kv: 1, dim: 1 };
        let causal: Attention<()> = Attention::causal(heads, KvLayer { group: 0, layer: 0 }, 1.0);
        let fits = |(dim, group), dtype, rotates| {
            let head = HeadGroup { dim, group };
            wgmma_program(head, dtype, &causal, rotates).is_some_and(|(_, memory)| memory <= HOPPER)
        };
        for dtype in [KvDType::F16, KvDType::BF16] {
            for group in 1..=GROUP_MAX {
                assert!(fits((64, group), dtype, false) && fits((128, group), dtype, false), "{group}");
                // The angles of 128 / group tokens, 512 bytes each, beside the ring and the queries.
                assert_eq!(fits((128, group), dtype, true), group >= 3, "{group}");
            }
            assert!(!fits((32, 4), dtype, false) && !fits((96, 4), dtype, false));
        }
        assert!(!fits((128, 7), KvDType::F8, false) && !fits((128, 7), KvDType::F32, false));
    }
}
