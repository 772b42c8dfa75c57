//! Fusion: operations that one kernel does together.
//!
//! Inside `record`, a product is held back until the next operation is known. If that is the gated activation of its
//! result (of one row), the product's kernel does it at its end. A norm is left to the product that reads it: the
//! norm's product is dot(w, g * x) / rms(x). Whatever else happens launches what is held back, and a norm that was left
//! out is written when another operation reads its result. Whether a norm is left out depends on how the backend was
//! made, never on the batch. A gated activation has the same bits either way.

use std::cell::Cell;

use fornax_compute::{Error, Norm, Rows};

use super::gemv::Gemv;
use crate::cuda::Cuda;
use crate::layout::TILE_ROWS;
use crate::memory::{Buf, int};
use crate::step::Slot;

/// What is held back while a step's body runs.
#[derive(Default)]
pub(crate) struct Fuse {
    on: Cell<bool>,
    /// Whether an operation is under way: only then may kernels be launched.
    inside: Cell<bool>,
    pending: Cell<Option<(Pending, u64)>>,
    due: Cell<Option<Due>>,
}

/// A norm whose result is not written, because the products that read it have applied it themselves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Due {
    pub(super) x: u64,
    pub(super) weight: u64,
    pub(super) eps: f32,
    pub(super) columns: usize,
    pub(super) rows: Rows,
    /// Where its result belongs.
    pub(super) out: u64,
    generation: u64,
}

/// A product that is held back until the next operation is known.
#[derive(Clone, Copy)]
pub(crate) struct Pending {
    pub(super) gemv: Gemv,
    /// Where its result goes.
    pub(super) out: u64,
    pub(super) columns: usize,
}

impl Cuda {
    /// Runs a step's body with operations fused. At its end nothing is held back.
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

    /// Runs an operation: `body` launches its kernels. First, what is held back is launched, what the operation reads
    /// is written if it was left out, and the scratch forgets what the operation writes. Kernels cannot be launched
    /// anywhere else, so no operation can forget to say what it reads and writes.
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

    /// Lets `body` launch kernels that belong to no operation of a step, as uploads do.
    pub(crate) fn launching<T>(&self, body: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let before = self.fuse.inside.replace(true);
        let done = body();
        self.fuse.inside.set(before);
        done
    }

    /// Whether kernels may be launched.
    pub(crate) fn is_launching(&self) -> bool {
        self.fuse.inside.get()
    }

    pub(super) fn fuses(&self) -> bool {
        self.fuse.on.get()
    }

    pub(super) fn pend(&self, pending: Pending) {
        self.fuse.pending.set(Some((pending, self.generation())));
    }

    /// The product that is held back, if it writes `out`. Anything else that is held back is launched.
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

    /// Launches the product that is held back.
    pub(crate) fn flush(&self) -> Result<(), Error> {
        let Some((pending, generation)) = self.fuse.pending.take() else { return Ok(()) };
        if generation != self.generation() {
            // Its memory may belong to another buffer by now.
            let reason = "memory was allocated or freed while a step was recorded".to_owned();
            return Err(Error::Device { backend: self.device.name(), operation: "record", reason });
        }
        self.launching(|| self.multiply(&pending.gemv))
    }

    /// The norm that yields `x`, where it is left to the product that reads it.
    pub(super) fn due_norm(&self, x: &Buf, rows: Rows) -> Option<Due> {
        let same = |due: &Due| (due.out, due.rows, due.generation) == (x.pointer(), rows, self.generation());
        self.fuse.due.get().filter(same)
    }

    /// An operation reads `buf`: a norm that was left out must be written now.
    fn touch_read(&self, slot: &Slot, buf: &Buf) -> Result<(), Error> {
        match self.fuse.due.get() {
            Some(due) if due.out == buf.pointer() => self.write_due(slot),
            _ => Ok(()),
        }
    }

    /// An operation writes these buffers: what the scratch holds of them is out of date, and a norm that reads one of
    /// them must be done before.
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

    /// Writes the result of a norm that was left out.
    fn write_due(&self, slot: &Slot) -> Result<(), Error> {
        match self.fuse.due.take() {
            Some(due) if due.generation == self.generation() => self.launching(|| self.norm_rows(slot, &due)),
            _ => Ok(()),
        }
    }

    /// `rms_norm` inside a step, left to the product that reads it. `false` where it must be done now.
    pub(super) fn fused_norm(
        &self,
        slot: &Slot,
        rows: Rows,
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

    /// Does a norm.
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

    /// `glu` inside a step, by the kernel of the product before it. `false` where it needs its own kernel.
    pub(super) fn fused_glu(&self, slot: &Slot, gate_up: &Buf, out: &Buf) -> Result<bool, Error> {
        let columns = out.columns;
        if !self.fuses() || !columns.is_multiple_of(TILE_ROWS) {
            return Ok(false);
        }
        let Some(mut pending) = self.pending_for(gate_up, Rows::Tokens)? else { return Ok(false) };
        // With several rows, the activation is a kernel of its own, with the same bits: doing both at once takes more
        // registers than there are.
        if !self.gates(&pending.gemv) {
            self.launching(|| self.multiply(&pending.gemv))?;
            return Ok(false);
        }
        let product = &mut pending.gemv.product;
        product.pairs = int(columns / TILE_ROWS);
        product.gated = out.pointer();
        // What it reads was checked when the product was asked for.
        self.op(slot, &[], &[out], || self.multiply(&pending.gemv))?;
        Ok(true)
    }
}
