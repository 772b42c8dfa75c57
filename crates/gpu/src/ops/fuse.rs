//! Operations that one kernel does together.
//!
//! Inside `record`, a product waits until the next operation is known: of one row, the gated activation of what it
//! yields becomes its last act. A norm is left to the product that reads it: dot(w, g * x) / rms(x) is the norm's
//! product. What waits is launched as soon as anything else happens; a norm that was left undone is written if somebody
//! else reads it. Whether a norm is left depends on how the backend was made, never on the batch; a gated activation
//! has the same bits either way.

use std::cell::Cell;

use fornax_compute::{Error, Norm, Rows};

use super::gemv::Gemv;
use crate::cuda::Cuda;
use crate::layout::TILE_ROWS;
use crate::memory::{Buf, int};
use crate::step::Slot;

/// What is due while a step's body runs.
#[derive(Default)]
pub(crate) struct Fuse {
    on: Cell<bool>,
    /// Whether an operation is being done: nothing is launched otherwise.
    inside: Cell<bool>,
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

    /// Does an operation: `body` launches its kernels. Before that what waits is launched, what the operation reads is
    /// made to be there, and what was kept of what it writes is forgotten. Nothing can be launched elsewhere, so no
    /// operation can leave out what it reads and writes.
    pub(super) fn op(
        &self,
        slot: &Slot,
        reads: &[&Buf],
        writes: &[&Buf],
        body: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.launching(|| {
            self.flush()?;
            reads.iter().try_for_each(|buf| self.touch_read(slot, buf))?;
            self.touch_written(slot, writes)?;
            body()
        })
    }

    /// Lets `body` launch kernels that belong to no step's operation: those of uploads.
    pub(crate) fn launching<T>(&self, body: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let before = self.fuse.inside.replace(true);
        let done = body();
        self.fuse.inside.set(before);
        done
    }

    /// Whether something may be launched.
    pub(crate) fn is_launching(&self) -> bool {
        self.fuse.inside.get()
    }

    pub(super) fn fuses(&self) -> bool {
        self.fuse.on.get()
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
        self.launching(|| self.multiply(&pending.gemv))
    }

    /// The norm that `x` is the result of, where it is left to the product that reads it.
    pub(super) fn due_norm(&self, x: &Buf, rows: Rows) -> Option<Due> {
        let same = |due: &Due| (due.out, due.rows, due.generation) == (x.pointer(), rows, self.generation());
        self.fuse.due.get().filter(same)
    }

    /// An operation reads `buf`: it must be there.
    fn touch_read(&self, slot: &Slot, buf: &Buf) -> Result<(), Error> {
        match self.fuse.due.get() {
            Some(due) if due.out == buf.pointer() => self.write_due(slot),
            _ => Ok(()),
        }
    }

    /// An operation writes these: what the scratch holds of them is no longer so, and a norm of one of them must be
    /// written before.
    fn touch_written(&self, slot: &Slot, written: &[&Buf]) -> Result<(), Error> {
        self.scratch.forget_written(written);
        let has = |pointer: u64| written.iter().any(|buf| buf.pointer() == pointer);
        match self.fuse.due.get() {
            Some(due) if has(due.out) => self.fuse.due.set(None),
            Some(due) if has(due.x) => self.write_due(slot)?,
            _ => {}
        }
        Ok(())
    }

    /// Writes the result of a norm that is due.
    fn write_due(&self, slot: &Slot) -> Result<(), Error> {
        match self.fuse.due.take() {
            Some(due) if due.generation == self.generation() => self.launching(|| self.norm_rows(slot, &due)),
            _ => Ok(()),
        }
    }

    /// `rms_norm` inside a step, left to the product that reads it. `false` where it must be done at once.
    pub(super) fn fused_norm(
        &self,
        (slot, rows): (&Slot, Rows),
        norm: &Norm<Buf>,
        x: &Buf,
        out: &Buf,
    ) -> Result<bool, Error> {
        if !self.fuses() || x.pointer() == out.pointer() {
            return Ok(false);
        }
        self.op(slot, &[x], &[out], || {
            self.write_due(slot)?;
            self.fuse.due.set(Some(self.due(rows, norm, x, out)));
            Ok(())
        })?;
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

    /// `glu` inside a step, by the product before it. `false` where it must be done alone.
    pub(super) fn fused_glu(&self, slot: &Slot, gate_up: &Buf, out: &Buf) -> Result<bool, Error> {
        let columns = out.columns;
        if !self.fuses() || !columns.is_multiple_of(TILE_ROWS) {
            return Ok(false);
        }
        let Some(mut pending) = self.pending_for(gate_up, Rows::Tokens)? else { return Ok(false) };
        // Several rows are multiplied and gated apart, with the same bits: both at once take more registers than there
        // are.
        if !self.gates(&pending.gemv) {
            self.launching(|| self.multiply(&pending.gemv))?;
            return Ok(false);
        }
        let product = &mut pending.gemv.product;
        product.pairs = int(columns / TILE_ROWS);
        product.gated = out.pointer();
        // What it reads was looked at when the product was asked for.
        self.op(slot, &[], &[out], || self.multiply(&pending.gemv))?;
        Ok(true)
    }
}
