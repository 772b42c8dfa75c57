//! One linear layer of a tower.

use fornax_compute::{Backend, Error, Linear, Memory, Norm, Rows};

/// A product, what is added to it, and the bounds of both sides.
pub(super) struct Layer<M: Memory> {
    pub(super) weight: M::Weight,
    pub(super) bias: Option<M::Buf>,
    pub(super) bounds: Option<Bounds<M>>,
}

/// The least and the most of each value; what is beyond becomes the bound.
pub(super) struct Bounds<M: Memory> {
    pub(super) read: M::Buf, // (2 x columns)
    pub(super) made: M::Buf, // (2 x rows)
}

/// Where what a branch makes is added to the residual stream.
pub(super) struct Meeting<'a, B: Backend> {
    pub(super) norm: Option<&'a Norm<B::Buf>>,
    pub(super) branch: &'a mut B::Buf,
    pub(super) room: &'a mut B::Buf,
    pub(super) residual: &'a mut B::Buf,
}

impl<B: Backend> Layer<B> {
    /// `out` = the layer of `x`, which is brought within its bounds.
    pub(super) fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        x: &mut B::Buf,
        out: &mut B::Buf,
    ) -> Result<(), Error> {
        if let Some(bounds) = &self.bounds {
            backend.clamp(step, &bounds.read, x)?;
        }
        backend.linear(step, Rows::Tokens, &self.weight, self.bias.as_ref(), x, out)?;
        match &self.bounds {
            Some(bounds) => backend.clamp(step, &bounds.made, out),
            None => Ok(()),
        }
    }

    /// `residual` += the layer of `x`, normalised where it has a norm.
    pub(super) fn join(
        &self,
        backend: &B,
        step: &B::Step,
        x: &mut B::Buf,
        meeting: Meeting<'_, B>,
    ) -> Result<(), Error> {
        let Meeting { norm, branch, room, residual } = meeting;
        match norm {
            Some(norm) => {
                self.forward(backend, step, x, room)?;
                backend.norm(step, Rows::Tokens, norm, room, branch)?;
                backend.add(step, Rows::Tokens, branch, residual)
            }
            None if self.bounds.is_some() => {
                self.forward(backend, step, x, room)?;
                backend.add(step, Rows::Tokens, room, residual)
            }
            None => {
                let linear = Linear { weight: &self.weight, bias: self.bias.as_ref() };
                backend.linear_add(step, Rows::Tokens, linear, x, room, residual)
            }
        }
    }
}
