//! Attention over keys and values in f32, without matrix instructions.

use fornax_compute::{Attention, Error, Heads, Rows};

use super::attention::{Rotation, TILE, program};
use crate::abi::{Layout, layout};
use crate::cuda::Cuda;
use crate::driver::Arg;
use crate::memory::{Buf, Kv, TICKETS, int};
use crate::step::Slot;

/// Tiles that the last of their blocks merges: as in attention_f32.cu. A kernel of its own is faster for more.
const MERGED_HERE: usize = 32;
/// Blocks whose tiles are merged through each other's shared memory: what every chip with clusters allows.
const CLUSTER_MAX: usize = 8;
const THREADS: u32 = 256;

/// `Attention` of attention_f32.cu.
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

pub(super) const LAYOUTS: &[Layout] = &[layout!(Shape, "Attention" in "attention_f32.cu", {
    query, kv, group, window, scale, tiles, partials, tickets, clusters, pad, rope, sinks, cap, pad2,
})];

/// Dynamic shared memory of a block: a tile of keys and values, later the results of groups of threads; queries; a partial
/// result. `stored` are the bytes of a head's keys.
fn shared_bytes(dim: usize, shared: usize, stored: usize) -> u32 {
    let outputs = shared * dim;
    let groups = (THREADS as usize / dim.div_ceil(4)).min((8192 / outputs).max(1));
    let staged = TILE * (2 * stored + 32);
    int(staged.max(groups * outputs * 4) + (2 * outputs + 2 * shared) * 4).cast_unsigned()
}

impl Cuda {
    /// Operands are checked already. With `rope`, queries and keys are yet to be turned, and keys and values to be stored.
    pub(super) fn attention_f32(
        &self,
        slot: &Slot,
        attention: &Attention<Buf>,
        rope: Option<Rotation>,
        qkv: &Buf,
        kv: &Kv,
        out: &Buf,
    ) -> Result<(), Error> {
        let (heads, layer) = (attention.heads, attention.layer);
        let shared = heads.query / heads.kv;
        let window = kv.group(layer).window;
        let tokens = self.grid_rows(slot, Rows::Tokens);
        let tiles = self.tiles_f32(slot, heads, tokens, window);
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
            rope: rope.unwrap_or(Rotation::NONE),
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
    fn tiles_f32(&self, slot: &Slot, heads: Heads, tokens: usize, window: Option<u32>) -> usize {
        let places = self.grid_places(slot);
        // A window that begins inside a tile touches one more.
        let seen = window.map_or(places, |window| places.min(window as usize + TILE));
        let tiles = seen.div_ceil(TILE);
        let blocks = tokens * heads.kv;
        let bytes = (blocks * tiles * (heads.query / heads.kv) * (heads.dim + 2) * 4) as u64;
        let busy = blocks >= 2 * self.device.multiprocessors as usize;
        if tiles < 2 || busy || bytes > self.partials.bytes() { 1 } else { tiles }
    }
}
