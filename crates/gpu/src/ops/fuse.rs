//! Operations that one kernel does together.
//!
//! Inside `record`, a product waits until the next operation is known: a norm of what it adds to, or the gated activation
//! of what it yields, become its last act. A norm itself is left to the product that reads it: dot(w, g * x) / rms(x) is
//! the norm's product, so only the sum of squares must travel. What waits is launched as soon as anything else happens;
//! what a product made unnecessary is written all the same if somebody reads it. Whether operations are fused depends on
//! shapes and on how the backend was made, never on the batch: a row's bits stay the same.

use std::cell::Cell;

use fornax_compute::{Error, Norm, Rows};

use super::gemv::{Gemv, Held, Split};
use crate::cuda::Cuda;
use crate::driver::Arg;
use crate::layout::{TILE_COLUMNS, TILE_ROWS};
use crate::memory::{Buf, int};
use crate::program::Key;
use crate::step::Slot;

/// What is due while a step's body runs.
#[derive(Default)]
pub(crate) struct Fuse {
    on: Cell<bool>,
    pending: Cell<Option<(Pending, u64)>>,
    due: Cell<Option<Due>>,
}

/// A norm whose result nobody has written: products have done it for themselves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Due {
    pub(super) x: u64,
    pub(super) weight: u64,
    pub(super) eps: f32,
    pub(super) columns: usize,
    pub(super) rows: Rows,
    /// Where it belongs.
    pub(super) out: u64,
    generation: u64,
}

/// A product that waits for the operation behind it.
#[derive(Clone, Copy)]
pub(crate) struct Pending {
    pub(super) gemv: Gemv,
    /// Where it goes.
    pub(super) out: u64,
    pub(super) columns: usize,
}

impl Cuda {
    /// Runs a step's body with operations fused; nothing is left undone behind it.
    pub(crate) fn fused(
        &self,
        slot: &Slot,
        body: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.fuse.on.set(true);
        let done = body().and_then(|()| self.flush()).and_then(|()| self.write_due(slot));
        self.fuse.on.set(false);
        self.fuse.pending.set(None);
        self.fuse.due.set(None);
        self.scratch.forget();
        done
    }

    pub(super) fn fuses(&self) -> bool {
        self.fuse.on.get()
    }

    /// Whether the largest step's rows of so many columns are in the scratch at once, in whole tiles.
    fn whole(&self, columns: usize) -> bool {
        columns.is_multiple_of(TILE_ROWS) && self.scratch.rows(columns) >= self.options().tokens_max
    }

    pub(super) fn pend(&self, pending: Pending) {
        self.fuse.pending.set(Some((pending, self.generation())));
    }

    /// The product that waits, if it writes `out`; whatever else waits is launched.
    fn pending_for(&self, out: &Buf, rows: Rows) -> Result<Option<Pending>, Error> {
        match self.fuse.pending.get() {
            Some((pending, generation))
                if generation == self.generation()
                    && pending.out == out.pointer()
                    && pending.gemv.rows == rows
                    && pending.columns == out.columns =>
            {
                self.fuse.pending.set(None);
                Ok(Some(pending))
            }
            _ => self.flush().map(|()| None),
        }
    }

    /// Launches the product that waits.
    pub(crate) fn flush(&self) -> Result<(), Error> {
        let Some((pending, generation)) = self.fuse.pending.take() else { return Ok(()) };
        if generation != self.generation() {
            // Its memory may be somebody else's by now.
            let reason = "memory was allocated or freed while a step was recorded".to_owned();
            return Err(Error::Device { backend: self.device.name(), operation: "record", reason });
        }
        self.multiply(&pending.gemv)
    }

    /// The epsilon of the norm that `x` is the result of, where it is left to the product that reads it.
    pub(super) fn due_norm(&self, x: &Buf, rows: Rows) -> Option<f32> {
        let held = self.scratch.held.get()?;
        let same = (held.pointer, held.rows, held.generation) == (x.pointer(), rows, self.generation());
        held.norm.filter(|_| same)
    }

    /// An operation reads `buf`: it must be there.
    pub(crate) fn touch_read(&self, slot: &Slot, buf: &Buf) -> Result<(), Error> {
        self.flush()?;
        match self.fuse.due.get() {
            Some(due) if due.out == buf.pointer() => self.write_due(slot),
            _ => Ok(()),
        }
    }

    /// An operation writes these: what the scratch holds of them is no longer so, and a norm of one of them must be
    /// written before.
    pub(crate) fn touch_written(&self, slot: &Slot, written: &[Option<u64>]) -> Result<(), Error> {
        self.flush()?;
        if self.scratch.held.get().is_some_and(|held| written.contains(&Some(held.pointer))) {
            self.scratch.forget();
        }
        match self.fuse.due.get() {
            Some(due) if written.contains(&Some(due.out)) => self.fuse.due.set(None),
            Some(due) if written.contains(&Some(due.x)) => self.write_due(slot)?,
            _ => {}
        }
        Ok(())
    }

    /// Writes the result of a norm that is due.
    fn write_due(&self, slot: &Slot) -> Result<(), Error> {
        match self.fuse.due.take() {
            Some(due) if due.generation == self.generation() => self.norm_rows(slot, &due, &Split::none()),
            _ => Ok(()),
        }
    }

    /// `rms_norm` inside a step: by the product before it and the one behind it. `false` where it must be done alone.
    pub(super) fn fused_norm(
        &self,
        (slot, rows): (&Slot, Rows),
        norm: &Norm<Buf>,
        x: &Buf,
        out: &Buf,
    ) -> Result<bool, Error> {
        let columns = norm.weight.columns;
        if !self.fuses() || !self.whole(columns) || x.pointer() == out.pointer() {
            return Ok(false);
        }
        let pending = self.pending_for(x, rows)?;
        if pending.is_none() {
            self.touch_read(slot, x)?;
        }
        self.touch_written(slot, &[Some(out.pointer())])?;
        self.write_due(slot)?;
        let split = self.scratch.turned(columns);
        match pending {
            Some(mut pending) => {
                pending.gemv.product.norm = norm.weight.pointer();
                pending.gemv.product.split = split;
                self.multiply(&pending.gemv)?;
            }
            None => self.norm_split((slot, rows), norm, x, &split)?,
        }
        self.scratch.held.set(Some(Held { norm: Some(norm.eps), ..self.held(out, rows) }));
        self.fuse.due.set(Some(self.due(rows, norm, x, out)));
        Ok(true)
    }

    /// A norm that is to be done.
    pub(super) fn due(&self, rows: Rows, norm: &Norm<Buf>, x: &Buf, out: &Buf) -> Due {
        Due {
            x: x.pointer(),
            weight: norm.weight.pointer(),
            eps: norm.eps,
            columns: norm.weight.columns,
            rows,
            out: out.pointer(),
            generation: self.generation(),
        }
    }

    fn norm_split(
        &self,
        (slot, rows): (&Slot, Rows),
        norm: &Norm<Buf>,
        x: &Buf,
        split: &Split,
    ) -> Result<(), Error> {
        let function = self.programs.function(&Key::plain("norm.cu"), "norm_split")?;
        let device_step = self.device_step(slot);
        let args = [
            Arg::Struct(bytemuck::bytes_of(&device_step)),
            Arg::Int(i32::from(rows == Rows::Wanted)),
            Arg::Pointer(norm.weight.pointer()),
            Arg::Pointer(x.pointer()),
            Arg::Int(int(norm.weight.columns)),
            Arg::Struct(bytemuck::bytes_of(split)),
        ];
        let grid = [split.padded() / TILE_COLUMNS, self.grid_rows(slot, rows), 1];
        self.launch("rms_norm", function, grid, (TILE_COLUMNS as u32, 0), &args)
    }

    /// `glu` inside a step, by the product before it. `false` where it must be done alone.
    pub(super) fn fused_glu(&self, slot: &Slot, gate_up: &Buf, out: &Buf) -> Result<bool, Error> {
        let columns = out.columns;
        if !self.fuses() || !self.whole(columns) {
            return Ok(false);
        }
        let Some(mut pending) = self.pending_for(gate_up, Rows::Tokens)? else { return Ok(false) };
        self.touch_written(slot, &[Some(out.pointer())])?;
        let product = &mut pending.gemv.product;
        product.pairs = int(columns / TILE_ROWS);
        product.gated = out.pointer();
        product.split = self.scratch.turned(columns).plain();
        self.multiply(&pending.gemv)?;
        self.scratch.held.set(Some(self.held(out, Rows::Tokens)));
        Ok(true)
    }
}
