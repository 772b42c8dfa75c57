//! Rotation, pages and attention over them.

use fornax_compute::{Attention, Error, Heads, KvDType, KvLayer, Rope, Rows};

use super::fits;
use crate::cuda::{Check, Cuda};
use crate::driver::Arg;
use crate::memory::{Buf, Kv, TICKETS, int};
use crate::program::Key;
use crate::step::Slot;

/// Tiles that the last of their blocks merges: as in attention.cu. A kernel of its own is faster for more.
const MERGED_HERE: usize = 32;
/// Blocks whose tiles are merged through each other's shared memory: what every chip with clusters allows.
const CLUSTER_MAX: usize = 8;
/// Keys of a tile, and threads of a block: as in attention.cu.
const TILE: usize = 64;
const THREADS: u32 = 256;
/// Query heads that share a K/V head, and values of a head: what a block's shared memory holds.
const SHARED_MAX: usize = 16;
const OUTPUTS_MAX: usize = 2048;

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
struct Rotation {
    frequencies: u64,
    pairs: i32,
    magnitude: f32,
}

/// `Attention` of attention.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Shape {
    query: i32,
    kv: i32,
    group: i32,
    window: i32,
    scale: f32,
    tiles: i32,
    partials: u64,
    tickets: u64,
    clusters: i32,
    pad: i32,
    rope: Rotation,
    sinks: u64,
    cap: f32,
    pad2: i32,
}

impl From<Heads> for HeadCounts {
    fn from(heads: Heads) -> HeadCounts {
        HeadCounts { query: int(heads.query), kv: int(heads.kv), dim: int(heads.dim) }
    }
}

/// Dynamic shared memory of a block of attention.cu: a tile of keys and values, later the results of groups of threads;
/// queries; a partial result. `stored` are the bytes of a head's keys.
fn shared_bytes(dim: usize, shared: usize, stored: usize) -> u32 {
    let outputs = shared * dim;
    let groups = (THREADS as usize / dim.div_ceil(4)).min((8192 / outputs).max(1));
    let staged = TILE * (2 * stored + 32);
    int(staged.max(groups * outputs * 4) + (2 * outputs + 2 * shared) * 4).cast_unsigned()
}

/// How keys and values are stored, for the compiler.
pub(crate) fn storage(dtype: KvDType) -> Vec<String> {
    vec![format!("KV_BYTES={}", dtype.bytes_of(1)), format!("KV_BF16={}", i32::from(dtype == KvDType::BF16))]
}

/// The program for heads of `dim` values of which `shared` have the same keys.
pub(crate) fn program<Buf>((dim, shared): (usize, usize), dtype: KvDType, attention: &Attention<Buf>) -> Key {
    let mut defines = storage(dtype);
    let (capped, sinks) = (attention.soft_cap.is_some(), attention.sinks.is_some());
    defines.extend([format!("DIM={dim}"), format!("SHARED={shared}")]);
    let flags = [("CAPPED", capped), ("SINKS", sinks), ("BOTH", !attention.causal)];
    defines.extend(flags.map(|(name, on)| format!("{name}={}", i32::from(on))));
    Key { unit: "attention.cu", defines }
}

impl Cuda {
    /// Rotation alone stores nothing: any storage will do.
    pub(crate) fn op_rope(
        &self,
        slot: &Slot,
        heads: Heads,
        rope: &Rope<Buf>,
        qkv: &mut Buf,
    ) -> Result<(), Error> {
        let rotation = rotation(slot, heads, rope, qkv)?;
        self.touch_read(slot, qkv)?;
        self.touch_written(slot, &[Some(qkv.pointer())])?;
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
        self.launch("rope", function, grid, (64, 0), &args)
    }

    pub(crate) fn op_kv_write(
        &self,
        slot: &Slot,
        heads: Heads,
        layer: KvLayer,
        qkv: &Buf,
        kv: &mut Kv,
    ) -> Result<(), Error> {
        fits("kv_write", "qkv", qkv, (slot.tokens, heads.qkv_columns()))?;
        self.pages_fit("kv_write", slot, heads, layer, kv)?;
        self.touch_read(slot, qkv)?;
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
        self.launch("kv_write", function, [heads.kv, self.grid_rows(slot, Rows::Tokens), 1], (64, 0), &args)
    }

    /// `rope`, `kv_write` and `attention`: the first two in one pass, or where every row is one token all three. Then no
    /// key that a token sees is stored by another block.
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
        let turns = rotation(slot, attention.heads, rope, qkv)?;
        if slot.decode && self.fuses() && attention.causal {
            return self.attention(slot, attention, Some(turns), qkv, kv, out);
        }
        self.op_rope_and_write(slot, attention, rope, qkv, kv)?;
        self.op_attention(slot, attention, qkv, kv, out)
    }

    fn op_rope_and_write(
        &self,
        slot: &Slot,
        attention: &Attention<Buf>,
        rope: &Rope<Buf>,
        qkv: &mut Buf,
        kv: &mut Kv,
    ) -> Result<(), Error> {
        let (heads, layer) = (attention.heads, attention.layer);
        let rotation = rotation(slot, heads, rope, qkv)?;
        self.pages_fit("attend", slot, heads, layer, kv)?;
        self.touch_read(slot, qkv)?;
        self.touch_written(slot, &[Some(qkv.pointer())])?;
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
        ];
        let grid = [heads.query + 2 * heads.kv, self.grid_rows(slot, Rows::Tokens), 1];
        self.launch("attend", function, grid, (64, 0), &args)
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

    /// With `rope`, queries and keys are yet to be turned, and keys and values to be stored.
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
        fits("attention", "qkv", qkv, (slot.tokens, heads.qkv_columns()))?;
        fits("attention", "out", out, (slot.tokens, heads.query * heads.dim))?;
        if let Some(sinks) = &attention.sinks {
            fits("attention", "sinks", sinks, (1, heads.query))?;
        }
        self.pages_fit("attention", slot, heads, layer, kv)?;
        let (shared, rest) = (heads.query / heads.kv, heads.query % heads.kv);
        let odd = !heads.dim.is_multiple_of(4);
        if rest > 0 || odd || shared > SHARED_MAX || shared * heads.dim > OUTPUTS_MAX {
            let what =
                format!("attention of {shared} query heads, {rest} over, per K/V head of {}", heads.dim);
            return Err(Error::Unsupported { what, backend: self.device.name() });
        }
        self.touch_read(slot, qkv)?;
        self.touch_written(slot, &[Some(out.pointer()), rope.map(|_| qkv.pointer())])?;
        let window = kv.group(layer).window;
        let tokens = self.grid_rows(slot, Rows::Tokens);
        let tiles = self.tiles(slot, heads, tokens, window);
        // A thread merges one output.
        let share = (shared * heads.dim).div_ceil(tiles);
        let clusters = (2..=CLUSTER_MAX).contains(&tiles)
            && share <= THREADS as usize
            && self.device.found.capability >= 90;
        let merges = tiles <= MERGED_HERE && tokens * heads.kv <= TICKETS;
        let shape = Shape {
            query: int(heads.query),
            kv: int(heads.kv),
            group: int(layer.group),
            window: window.map_or(0, u32::cast_signed),
            scale: attention.scale,
            tiles: int(tiles),
            partials: self.partials.pointer(),
            tickets: if merges { self.tickets.pointer() } else { 0 },
            clusters: i32::from(clusters),
            pad: 0,
            rope: rope.unwrap_or(Rotation { frequencies: 0, pairs: 0, magnitude: 0.0 }),
            sinks: attention.sinks.as_ref().map_or(0, Buf::pointer),
            cap: attention.soft_cap.unwrap_or(0.0),
            pad2: 0,
        };
        let key = program((heads.dim, shared), kv.dtype, attention);
        let function = self.programs.function(&key, "attention")?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Struct(bytemuck::bytes_of(&shape)),
            Arg::Pointer(qkv.pointer()),
            Arg::Pointer(kv.pages(layer)),
            Arg::Pointer(out.pointer()),
        ];
        let cluster = if clusters { tiles } else { 1 };
        let memory = shared_bytes(heads.dim, shared, kv.dtype.bytes_of(heads.dim));
        self.launch_clusters(
            "attention",
            function,
            [heads.kv, tokens, tiles],
            (THREADS, memory, cluster),
            &args,
        )?;
        if tiles > 1 && !merges && !clusters {
            let function = self.programs.function(&key, "merge_tiles")?;
            let device_step = self.device_step(slot);
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&shape)),
                Arg::Pointer(out.pointer()),
            ];
            let threads = super::gemv::row_threads(heads.dim);
            self.launch("attention", function, [heads.query, tokens, 1], (threads, 0), &args)?;
        }
        Ok(())
    }

    /// How many blocks share a token's keys: one, unless there are few tokens with long contexts and room for their
    /// partial results. The result has the same bits either way.
    fn tiles(&self, slot: &Slot, heads: Heads, tokens: usize, window: Option<u32>) -> usize {
        let places = self.grid_places(slot);
        // A window that begins inside a tile touches one more.
        let seen = window.map_or(places, |window| places.min(window as usize + TILE));
        let tiles = seen.div_ceil(TILE);
        let blocks = tokens * heads.kv;
        let bytes = (blocks * tiles * (heads.query / heads.kv) * (heads.dim + 2) * 4) as u64;
        let busy = blocks >= 2 * self.device.multiprocessors as usize;
        if tiles < 2 || busy || bytes > self.partials.bytes() { 1 } else { tiles }
    }

    /// Refuses pages that are not of this layer's shape, and page tables that name other pages than the pool has.
    fn pages_fit(
        &self,
        operation: &'static str,
        slot: &Slot,
        heads: Heads,
        layer: KvLayer,
        kv: &Kv,
    ) -> Result<(), Error> {
        let group = kv.group(layer);
        if (group.heads, group.dim) != (heads.kv, heads.dim) {
            let (got, wanted) = ((group.heads, group.dim), (heads.kv, heads.dim));
            return Err(Error::OperandShape { operation, operand: "kv", got, wanted });
        }
        self.check(slot, Check::Pages { group: layer.group, pages: group.pages })
    }
}

fn rotation(slot: &Slot, heads: Heads, rope: &Rope<Buf>, qkv: &Buf) -> Result<Rotation, Error> {
    fits("rope", "qkv", qkv, (slot.tokens, heads.qkv_columns()))?;
    fits("rope", "frequencies", &rope.frequencies, (1, rope.pairs.min(heads.dim / 2)))?;
    Ok(Rotation {
        frequencies: rope.frequencies.pointer(),
        pairs: int(rope.pairs),
        magnitude: rope.magnitude,
    })
}
