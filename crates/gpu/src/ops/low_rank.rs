//! LoRA: two small products that are added to a product.

use fornax_compute::{Error, LowRank, Rows, operands};

use crate::abi::{Constant, Layout, layout};
use crate::cuda::{Check, Cuda};
use crate::driver::Arg;
use crate::grid::Grid;
use crate::memory::{Buf, int};
use crate::program::Key;
use crate::step::Slot;

/// The most changes per launch: the same as in low_rank.cu. A kernel's parameters have 4 kB.
const CHANGES_MAX: usize = 32;
/// Warps of a block of `low_rank_down`; each computes one inner value.
const WARPS: usize = 8;
/// Threads of a block of `low_rank_up`.
const THREADS: usize = 256;
/// The most rows per launch: the height of a grid.
const ROWS_MAX: usize = 65_535;

/// `Change` of low_rank.cu.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct DeviceChange {
    down: u64,
    up: u64,
    adapter: i32,
    rank: i32,
    column: i32,
    columns: i32,
    place: i32,
    scale: f32,
}

/// `Changes` of low_rank.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct DeviceChanges {
    each: [DeviceChange; CHANGES_MAX],
    x: u64,
    inner: u64,
    out: u64,
    count: i32,
    in_columns: i32,
    stride: i32,
    columns: i32,
    first: i32,
    pad: i32,
}

pub(super) const LAYOUTS: &[Layout] = &[
    layout!(DeviceChange, "Change" in "low_rank.cu", { down, up, adapter, rank, column, columns, place, scale }),
    layout!(DeviceChanges, "Changes" in "low_rank.cu", {
        each, x, inner, out, count, in_columns: in, stride, columns, first, pad,
    }),
];
pub(super) const CONSTANTS: &[Constant] = &[Constant::new("low_rank.cu", "CHANGES_MAX", CHANGES_MAX)];

impl Cuda {
    pub(crate) fn op_low_rank(
        &self,
        slot: &Slot,
        changes: &[Vec<LowRank<Buf>>],
        x: &Buf,
        out: &mut Buf,
    ) -> Result<(), Error> {
        operands::low_rank(slot.tokens, changes, x, out)?;
        self.check(slot, Check::Adapters { count: changes.len() })?;
        // A step with an adapter is recorded apart from those without.
        if slot.adapter_max.is_none() {
            return Ok(());
        }
        self.op(slot, &[x, &*out], &[&*out], || {
            for launch in launches(changes) {
                self.launch_changes(slot, &launch, x, out)?;
            }
            Ok(())
        })
    }

    /// Both products of some changes, for as many rows at a time as there is room for the inner values.
    fn launch_changes(&self, slot: &Slot, changes: &[DeviceChange], x: &Buf, out: &Buf) -> Result<(), Error> {
        let most =
            |size: fn(&DeviceChange) -> i32| changes.iter().map(size).max().unwrap_or(0).cast_unsigned();
        let (rank, stride) = (most(|change| change.rank), most(|change| change.place + change.rank));
        let room = usize::try_from(self.partials.bytes()).unwrap_or(usize::MAX) / 4;
        let rows_max = (room / stride.max(1) as usize).clamp(1, ROWS_MAX);
        let rows = self.grid_rows(slot, Rows::Tokens);
        let mut each = [DeviceChange::default(); CHANGES_MAX];
        each[..changes.len()].copy_from_slice(changes);
        let device_step = self.device_step(slot);
        for first in (0..rows).step_by(rows_max) {
            let rows = (rows - first).min(rows_max);
            let device_changes = DeviceChanges {
                each,
                x: x.pointer(),
                inner: self.partials.pointer(),
                out: out.pointer(),
                count: int(changes.len()),
                in_columns: int(x.columns),
                stride: stride.cast_signed(),
                columns: int(out.columns),
                first: int(first),
                pad: 0,
            };
            let args = [
                Arg::Struct(bytemuck::bytes_of(&device_step)),
                Arg::Struct(bytemuck::bytes_of(&device_changes)),
            ];
            let key = Key::plain("low_rank.cu");
            let down = self.programs.function(&key, "low_rank_down")?;
            let grid = [(rank as usize).div_ceil(WARPS), rows, changes.len()];
            self.launch("low_rank", down, Grid::new(grid, WARPS * 32), &args)?;
            let up = self.programs.function(&key, "low_rank_up")?;
            let grid = [out.columns.div_ceil(THREADS), rows, 1];
            self.launch("low_rank", up, Grid::new(grid, THREADS), &args)?;
        }
        Ok(())
    }
}

/// All changes, divided into launches. A row has one adapter, so different adapters share their room.
fn launches(changes: &[Vec<LowRank<Buf>>]) -> Vec<Vec<DeviceChange>> {
    let mut launches: Vec<Vec<DeviceChange>> = Vec::new();
    for (adapter, changes) in changes.iter().enumerate() {
        let mut place = 0;
        for change in changes {
            if launches.last().is_none_or(|launch| launch.len() == CHANGES_MAX) {
                launches.push(Vec::with_capacity(CHANGES_MAX));
                place = 0;
            }
            let device_change = DeviceChange {
                down: change.down.pointer(),
                up: change.up.pointer(),
                adapter: int(adapter),
                rank: int(change.rank),
                column: int(change.column),
                columns: int(change.columns),
                place,
                scale: change.scale,
            };
            place += device_change.rank;
            launches.last_mut().expect("one was begun").push(device_change);
        }
    }
    launches
}
