//! Attention over keys and values in f32, the reference precision, without tensor cores.

use fornax_compute::{Error, Rows};

use super::attention::{Attended, Rotation, program};
use crate::abi::{Constant, Layout, layout};
use crate::cuda::Cuda;
use crate::driver::Arg;
use crate::grid::Grid;
use crate::memory::{Buf, int};

const THREADS: usize = 256;

/// `Attention` of attention_f32.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct AttentionParams {
    query: i32,
    kv: i32,
    group: i32,
    window: i32,
    scale: f32,
    cap: f32,
    rope: Rotation,
    sinks: u64,
    columns: i32,
    chunk: i32,
}

pub(super) const LAYOUTS: &[Layout] = &[layout!(AttentionParams, "Attention" in "attention_f32.cu", {
    query, kv, group, window, scale, cap, rope, sinks, columns, chunk,
})];
pub(super) const CONSTANTS: &[Constant] = &[Constant::new("attention_f32.cu", "THREADS", THREADS)];

impl Cuda {
    /// The operands are already checked.
    pub(super) fn attention_f32(&self, attended: &Attended<'_>) -> Result<(), Error> {
        let Attended { slot, attention, rope, qkv, kv, out } = *attended;
        let (heads, layer) = (attention.heads, attention.layer);
        let params = AttentionParams {
            query: int(heads.query),
            kv: int(heads.kv),
            group: int(layer.group),
            window: kv.group(layer).window.map_or(0, u32::cast_signed),
            scale: attention.scale,
            cap: attention.soft_cap.unwrap_or(0.0),
            rope: rope.unwrap_or(Rotation::NONE),
            sinks: attention.sinks.as_ref().map_or(0, Buf::pointer),
            columns: int(qkv.columns),
            chunk: attention.chunk.map_or(0, u32::cast_signed),
        };
        let key = program(heads.into(), kv.dtype, attention);
        let function = self.programs.function(&key, "attention")?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Struct(bytemuck::bytes_of(&params)),
            Arg::Pointer(qkv.pointer()),
            Arg::Pointer(kv.pages(layer)),
            Arg::Pointer(out.pointer()),
        ];
        let grid = [heads.kv, self.grid_rows(slot, Rows::Tokens), 1];
        self.launch("attention", function, Grid::new(grid, THREADS), &args)
    }
}
