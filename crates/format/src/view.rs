//! One stored tensor, borrowed from its file.

use crate::DType;

/// Dtype, shape and bytes of one stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View<'a> {
    /// The name the file gives it; errors repeat it.
    pub name: &'a str,
    /// Encoding of the values.
    pub dtype: DType,
    /// Slowest dimension first: (rows, columns) for a matrix, whatever order the container writes.
    pub shape: Vec<usize>,
    /// Exactly the tensor's bytes: `shape` product values in whole blocks.
    pub bytes: &'a [u8],
}
