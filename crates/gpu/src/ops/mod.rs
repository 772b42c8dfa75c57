//! Operations: check shapes, choose a kernel, size its grid, launch. A file here for a file in `kernels/`.

mod attention;
mod fuse;
mod gemv;
mod rows;
mod sample;

pub(crate) use fuse::Fuse;
pub(crate) use gemv::{Scratch, programs};

use fornax_compute::{Error, Need};

use crate::memory::Buf;

/// What has no kernels yet. Models that need it are refused when they are planned and when they are loaded.
const LACKING: [Need; 10] = Need::ALL;

/// Refuses what has no kernels.
pub(crate) fn supports(need: Need) -> Result<(), Error> {
    if LACKING.contains(&need) { Err(lacks(need)) } else { Ok(()) }
}

/// The refusal.
pub(crate) fn lacks(need: Need) -> Error {
    Error::Unsupported { what: need.to_string(), backend: "cuda" }
}

/// Refuses a buffer with too few rows or other columns than the operation has.
pub(crate) fn fits(
    operation: &'static str,
    operand: &'static str,
    buf: &Buf,
    (rows, columns): (usize, usize),
) -> Result<(), Error> {
    if buf.rows >= rows && buf.columns == columns {
        return Ok(());
    }
    Err(Error::OperandShape { operation, operand, got: (buf.rows, buf.columns), wanted: (rows, columns) })
}
