//! One stored tensor, borrowed from its file.

use std::ops::Range;
use std::{fmt, io};

use crate::map::Map;
use crate::{DType, Error, Packing};

/// Dtype, shape and bytes of one stored tensor.
#[derive(Clone)]
pub struct View<'a> {
    /// The name the file gives it; errors repeat it.
    pub name: &'a str,
    /// Encoding of the values.
    pub dtype: DType,
    /// Slowest dimension first: (rows, columns) for a matrix, whatever order the container writes.
    pub shape: Vec<usize>,
    /// Exactly the tensor's bytes: `shape` product values in whole blocks. They start at any address: safetensors
    /// promises no alignment, and many blocks are not a multiple of four bytes.
    pub bytes: &'a [u8],
    /// The map that `bytes` lie in, to give its pages back; `None` for bytes from elsewhere.
    map: Option<&'a Map>,
    /// What its values need beside its bytes, where the file keeps that in other tensors.
    pub packing: Option<Box<Packing<'a>>>,
    /// The type that it is to be brought into when it is loaded.
    pub lands: Option<DType>,
}

impl<'a> View<'a> {
    /// A view of bytes that come from no file.
    pub fn new(name: &'a str, dtype: DType, shape: Vec<usize>, bytes: &'a [u8]) -> Result<View<'a>, Error> {
        let want = tensor_bytes(name, dtype, &shape)?;
        if want != bytes.len() {
            return Err(Error::TensorSize { tensor: name.to_owned(), dtype, shape, want, got: bytes.len() });
        }
        Ok(View { name, dtype, shape, bytes, map: None, packing: None, lands: None })
    }

    /// The same bytes as a matrix that is made of several tensors. There are as many of them as the shape says.
    pub(crate) fn packed(
        self,
        name: &'a str,
        dtype: DType,
        shape: Vec<usize>,
        packing: Packing<'a>,
    ) -> View<'a> {
        debug_assert_eq!(dtype.bytes_for(shape.iter().product()), Some(self.bytes.len()));
        View { name, dtype, shape, packing: Some(Box::new(packing)), ..self }
    }

    /// A view whose size was checked when its file was opened.
    pub(crate) fn mapped(
        name: &'a str,
        dtype: DType,
        shape: Vec<usize>,
        bytes: &'a [u8],
        map: &'a Map,
    ) -> View<'a> {
        View { name, dtype, shape, bytes, map: Some(map), packing: None, lands: None }
    }

    /// How many values the tensor has.
    pub fn values(&self) -> usize {
        self.bytes.len() / self.dtype.block_bytes() * self.dtype.block_values()
    }

    /// The part made of some of the rows (slices of the slowest dimension), for tensors that fuse several matrices.
    pub fn rows(&self, range: Range<usize>) -> Result<View<'a>, Error> {
        let rows = self.shape.first().copied().unwrap_or(1);
        if range.start > range.end || range.end > rows {
            return Err(Error::Rows {
                tensor: self.name.to_owned(),
                rows,
                begin: range.start,
                end: range.end,
            });
        }
        let mut shape = self.shape.clone();
        if let Some(slowest) = shape.first_mut() {
            *slowest = range.len();
        }
        // A vector's rows are its single values, which in a block type do not exist on their own.
        let row_values: usize = self.shape.iter().skip(1).product();
        let Some(row_bytes) = self.dtype.bytes_for(row_values) else {
            return Err(Error::RaggedRow {
                tensor: self.name.to_owned(),
                row: row_values,
                dtype: self.dtype,
                block: self.dtype.block_values(),
            });
        };
        let packing = match self.packing.as_deref().map(|packing| packing.rows_from(range.start)) {
            None => None,
            Some(Some(packing)) => Some(Box::new(packing)),
            // Their rows do not lie one after the other.
            Some(None) => {
                return Err(Error::PackedRows { tensor: self.name.to_owned(), dtype: self.dtype });
            }
        };
        let bytes = &self.bytes[range.start * row_bytes..range.end * row_bytes];
        Ok(View { shape, bytes, packing, ..self.clone() })
    }

    /// Copies `part`, some of this tensor's bytes, to `to`, which is as long. Of a file it is read and not mapped:
    /// nothing becomes resident, and a file that does not hold it any more is an error and not the end of the process.
    pub fn read_part(&self, part: &[u8], to: &mut [u8]) -> io::Result<()> {
        match self.map {
            Some(map) => map.read(part, to),
            None => {
                to.copy_from_slice(part);
                Ok(())
            }
        }
    }

    /// Tells the operating system that the tensor's pages are not needed for now, so that a backend which copied
    /// them keeps no second copy resident. The view stays valid: reading it again fetches the pages from the file.
    pub fn release(&self) {
        if let Some(map) = self.map {
            map.release(self.bytes);
        }
    }
}

/// Two views are equal when they say the same of equal bytes, wherever these lie.
impl PartialEq for View<'_> {
    fn eq(&self, other: &View<'_>) -> bool {
        (self.name, self.dtype, &self.shape, self.bytes)
            == (other.name, other.dtype, &other.shape, other.bytes)
    }
}

impl Eq for View<'_> {}

/// Without the bytes, which may be gigabytes.
impl fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "View({:?} {} {:?}, {} bytes)", self.name, self.dtype, self.shape, self.bytes.len())
    }
}

/// Bytes of a tensor of this type and shape (slowest dimension first); its rows must fill whole blocks.
pub(crate) fn tensor_bytes(name: &str, dtype: DType, shape: &[usize]) -> Result<usize, Error> {
    let row = shape.last().copied().unwrap_or(1); // a tensor without dimensions is one value
    let block = dtype.block_values();
    if !row.is_multiple_of(block) {
        return Err(Error::RaggedRow { tensor: name.to_owned(), row, dtype, block });
    }
    // A zero among the dimensions must not hide that the product of the others overflows.
    let product =
        |of: fn(usize) -> usize| shape.iter().try_fold(1, |all: usize, &dim| all.checked_mul(of(dim)));
    product(|dim| dim.max(1))
        .and_then(|bound| bound.checked_mul(dtype.block_bytes()))
        .and_then(|_| dtype.bytes_for(product(|dim| dim)?))
        .ok_or_else(|| Error::TensorOverflow { tensor: name.to_owned(), shape: shape.to_vec(), dtype })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(bytes: &[u8]) -> View<'_> {
        View::new("m", DType::Q8_0, vec![3, 64], bytes).unwrap()
    }

    #[test]
    fn rows_are_the_bytes_of_those_rows() {
        let bytes: Vec<u8> = (0..3 * 68).collect();
        let part = matrix(&bytes).rows(1..3).unwrap();
        assert_eq!((part.bytes, &*part.shape, part.values()), (&bytes[68..], &[2, 64][..], 128));
        let none = matrix(&bytes).rows(3..3).unwrap();
        assert_eq!((none.bytes, &*none.shape), (&[][..], &[0, 64][..]));
        part.release(); // bytes of no file: nothing happens
        assert_eq!(part, matrix(&bytes).rows(1..3).unwrap());
    }

    #[test]
    #[expect(clippy::reversed_empty_ranges, reason = "such a range is one of the cases")]
    fn rows_that_do_not_exist_are_refused() {
        let bytes = [0; 3 * 68];
        for range in [2..4, 4..4, 2..1, 0..usize::MAX] {
            let error = matrix(&bytes).rows(range.clone()).unwrap_err();
            assert!(matches!(error, Error::Rows { rows: 3, begin, .. } if begin == range.start), "{error}");
        }
    }

    #[test]
    fn a_vector_has_its_values_as_rows_unless_they_are_blocks() {
        let vector = View::new("v", DType::F16, vec![4], &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        assert_eq!(vector.rows(1..2).unwrap().bytes, [2, 3]);
        let blocks = View::new("v", DType::Q8_0, vec![64], &[0; 68]).unwrap();
        assert!(matches!(blocks.rows(0..32).unwrap_err(), Error::RaggedRow { row: 1, .. }));
    }

    #[test]
    fn bytes_of_another_size_than_the_shape_are_refused() {
        let error = View::new("v", DType::F32, vec![2, 2], &[0; 15]).unwrap_err();
        assert!(matches!(error, Error::TensorSize { want: 16, got: 15, .. }), "{error}");
        assert_eq!(View::new("v", DType::F32, vec![], &[0; 4]).unwrap().values(), 1);
        assert_eq!(View::new("v", DType::F32, vec![0, 7], &[]).unwrap().rows(0..0).unwrap().values(), 0);
    }

    #[test]
    fn a_view_shows_everything_but_its_bytes() {
        let shown = format!("{:?}", matrix(&[0; 204]));
        assert_eq!(shown, r#"View("m" Q8_0 [3, 64], 204 bytes)"#);
    }
}
