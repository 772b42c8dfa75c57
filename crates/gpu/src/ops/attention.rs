//! Rotation, pages and attention over them.

use fornax_compute::{Attention, Error, Heads, KvDType, KvLayer, Rope, Rows};

use super::fits;
use crate::cuda::{Check, Cuda};
use crate::driver::Arg;
use crate::memory::{Buf, Kv, int};
use crate::program::Key;
use crate::step::Slot;

/// Keys of a split, and threads of a block: as in attention.cu.
const SPLIT_KEYS: usize = 512;
const THREADS: u32 = 256;
/// Query heads that share a K/V head, and values of a head: what a block's shared memory holds.
const SHARED_MAX: usize = 16;
const OUTPUTS_MAX: usize = 4096;

/// `HeadCounts` of rope.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct HeadCounts {
    query: i32,
    kv: i32,
    dim: i32,
}

/// `Rotation` of rope.cu.
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
    pad: i32,
    partials: u64,
    splits: i32,
    pad_end: i32,
}

impl From<Heads> for HeadCounts {
    fn from(heads: Heads) -> HeadCounts {
        HeadCounts { query: int(heads.query), kv: int(heads.kv), dim: int(heads.dim) }
    }
}

/// How keys and values are stored, for the compiler.
fn storage(dtype: KvDType) -> Vec<String> {
    vec![format!("KV_BYTES={}", dtype.bytes()), format!("KV_BF16={}", i32::from(dtype == KvDType::BF16))]
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
        self.scratch.forget();
        let function =
            self.programs.function(&Key { unit: "rope.cu", defines: storage(KvDType::F16) }, "rope")?;
        let heads_counted = HeadCounts::from(heads);
        let args = [
            Arg::Pointer(slot.pointer()),
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
        let function =
            self.programs.function(&Key { unit: "rope.cu", defines: storage(kv.dtype) }, "kv_write")?;
        let heads_counted = HeadCounts::from(heads);
        let args = [
            Arg::Pointer(slot.pointer()),
            Arg::Struct(bytemuck::bytes_of(&heads_counted)),
            Arg::Int(int(layer.group)),
            Arg::Pointer(qkv.pointer()),
            Arg::Pointer(kv.pages(layer)),
        ];
        self.launch("kv_write", function, [heads.kv, self.grid_rows(slot, Rows::Tokens), 1], (64, 0), &args)
    }

    /// `rope` and `kv_write` in one pass.
    pub(crate) fn op_rope_and_write(
        &self,
        slot: &Slot,
        attention: &Attention,
        rope: &Rope<Buf>,
        qkv: &mut Buf,
        kv: &mut Kv,
    ) -> Result<(), Error> {
        let (heads, layer) = (attention.heads, attention.layer);
        let rotation = rotation(slot, heads, rope, qkv)?;
        self.pages_fit("attend", slot, heads, layer, kv)?;
        self.scratch.forget();
        let key = Key { unit: "rope.cu", defines: storage(kv.dtype) };
        let function = self.programs.function(&key, "rope_and_write")?;
        let heads_counted = HeadCounts::from(heads);
        let args = [
            Arg::Pointer(slot.pointer()),
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
        attention: &Attention,
        qkv: &Buf,
        kv: &Kv,
        out: &mut Buf,
    ) -> Result<(), Error> {
        let (heads, layer) = (attention.heads, attention.layer);
        fits("attention", "qkv", qkv, (slot.tokens, heads.qkv_columns()))?;
        fits("attention", "out", out, (slot.tokens, heads.query * heads.dim))?;
        self.pages_fit("attention", slot, heads, layer, kv)?;
        let (shared, rest) = (heads.query / heads.kv, heads.query % heads.kv);
        if rest > 0 || shared > SHARED_MAX || shared * heads.dim > OUTPUTS_MAX {
            let what =
                format!("attention of {shared} query heads, {rest} over, per K/V head of {}", heads.dim);
            return Err(Error::Unsupported { what, backend: self.device.name() });
        }
        self.scratch.forget();
        let window = kv.group(layer).window;
        let tokens = self.grid_rows(slot, Rows::Tokens);
        let splits = self.splits(slot, heads, tokens, window);
        let shape = Shape {
            query: int(heads.query),
            kv: int(heads.kv),
            group: int(layer.group),
            window: window.map_or(0, u32::cast_signed),
            scale: attention.scale,
            pad: 0,
            partials: self.partials.pointer(),
            splits: int(splits),
            pad_end: 0,
        };
        let mut defines = storage(kv.dtype);
        defines.extend([format!("DIM={}", heads.dim), format!("SHARED={shared}")]);
        let key = Key { unit: "attention.cu", defines };
        let function = self.programs.function(&key, "attention")?;
        let args = [
            Arg::Pointer(slot.pointer()),
            Arg::Struct(bytemuck::bytes_of(&shape)),
            Arg::Pointer(qkv.pointer()),
            Arg::Pointer(kv.pages(layer)),
            Arg::Pointer(out.pointer()),
        ];
        self.launch("attention", function, [heads.kv, tokens, splits], (THREADS, 0), &args)?;
        if splits > 1 {
            let function = self.programs.function(&key, "merge_splits")?;
            let args = [
                Arg::Pointer(slot.pointer()),
                Arg::Struct(bytemuck::bytes_of(&shape)),
                Arg::Pointer(out.pointer()),
            ];
            self.launch("attention", function, [heads.kv, tokens, 1], (THREADS, 0), &args)?;
        }
        Ok(())
    }

    /// How many blocks share a token's keys: one, unless there are few tokens with long contexts and room for their
    /// partial results. The result has the same bits either way.
    fn splits(&self, slot: &Slot, heads: Heads, tokens: usize, window: Option<u32>) -> usize {
        let places = self.grid_places(slot);
        // A window that begins inside a split touches one more.
        let seen = window.map_or(places, |window| places.min(window as usize + SPLIT_KEYS));
        let splits = seen.div_ceil(SPLIT_KEYS);
        let blocks = tokens * heads.kv;
        let bytes = (blocks * splits * (heads.query / heads.kv) * (heads.dim + 2) * 4) as u64;
        let busy = blocks >= 2 * self.device.multiprocessors as usize;
        if splits < 2 || busy || bytes > self.partials.bytes() { 1 } else { splits }
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
