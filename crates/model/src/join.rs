//! How what a branch computed joins the residual stream.

use fornax_compute::{Backend, Error, Linear, LowRank, Memory, Norm, Pointwise, Rows};

use crate::decoder::norm;
use crate::loader::Loader;
use crate::names::Tensor;

/// The norm behind a branch, and its weight in the sum.
pub(crate) struct Join<M: Memory> {
    norm: Option<Norm<M::Buf>>, // (hidden)
    scale: f32,
}

impl<M: Memory> Join<M> {
    /// `post_norm` is the norm behind the branch, which few architectures have.
    pub(crate) fn load(
        loader: &mut Loader<'_, M>,
        post_norm: Tensor,
        layer: usize,
    ) -> Result<Join<M>, crate::Error> {
        Ok(Join { norm: norm(loader, post_norm, None, layer)?, scale: loader.config.residual_scale })
    }
}

impl<M: Memory> Join<M> {
    /// The same with a factor more.
    pub(crate) fn times(self, factor: f32) -> Join<M> {
        Join { scale: self.scale * factor, ..self }
    }
}

/// Where a branch meets the residual stream.
pub(crate) struct Meeting<'a, M: Memory> {
    pub(crate) branch: &'a mut M::Buf,       // (tokens, hidden)
    pub(crate) room: &'a mut Option<M::Buf>, // (tokens, hidden), where branches are normalised
    pub(crate) residual: &'a mut M::Buf,     // (tokens, hidden)
}

impl<B: Backend> Join<B> {
    /// `residual` += `linear` of `x` with what adapters change of it, normalised and scaled. `branch` is used up.
    pub(crate) fn linear(
        &self,
        backend: &B,
        step: &B::Step,
        linear: Linear<'_, B>,
        changes: &[Vec<LowRank<B::Buf>>],
        x: &B::Buf,
        meeting: Meeting<'_, B>,
    ) -> Result<(), Error> {
        if self.norm.is_none() && self.scale == 1.0 {
            backend.linear_add(step, Rows::Tokens, linear, x, meeting.branch, meeting.residual)?;
            return match changes.is_empty() {
                true => Ok(()),
                false => backend.low_rank(step, changes, x, meeting.residual),
            };
        }
        backend.linear(step, Rows::Tokens, linear.weight, linear.bias, x, meeting.branch)?;
        if !changes.is_empty() {
            backend.low_rank(step, changes, x, meeting.branch)?;
        }
        self.add(backend, step, meeting)
    }

    /// `residual` += `branch`, normalised and scaled. `branch` is used up.
    pub(crate) fn add(&self, backend: &B, step: &B::Step, meeting: Meeting<'_, B>) -> Result<(), Error> {
        let Meeting { branch, room, residual } = meeting;
        let added = match (&self.norm, room) {
            (Some(norm), Some(room)) => {
                backend.norm(step, Rows::Tokens, norm, branch, room)?;
                room
            }
            _ => branch,
        };
        if self.scale != 1.0 {
            backend.pointwise(step, Rows::Tokens, Pointwise::Scale(self.scale), added)?;
        }
        backend.add(step, Rows::Tokens, added, residual)
    }
}
