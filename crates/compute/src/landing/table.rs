//! A matrix of bitsandbytes' 4-bit floats: codes of a table's values, times the largest value of their block.

use fornax_format::{DType, Nested, ValueTable as Packed, View};
use half::{bf16, f16};

use super::float;

pub(super) struct Table<'v> {
    columns: usize,
    bytes: &'v [u8],
    packed: &'v Packed<'v>,
    values: Vec<f32>,
}

impl<'v> Table<'v> {
    pub(super) fn new(view: &'v View<'v>, packed: &'v Packed<'v>) -> Table<'v> {
        let values = (0..16).map(|code| float(&packed.values, code)).collect();
        Table { columns: view.shape[1], bytes: view.bytes, packed, values }
    }

    /// The type that bitsandbytes itself brings the values into, and so has them rounded to.
    pub(super) fn landing(&self) -> DType {
        self.packed.dtype
    }

    /// Rows from `first` on, as many as `out` has room for.
    pub(super) fn write(&self, dtype: DType, first: usize, out: &mut [u8]) {
        let each = dtype.block_bytes();
        let (mut block, mut largest) = (usize::MAX, 0.0);
        for (at, out) in (first * self.columns..).zip(out.chunks_exact_mut(each)) {
            // The first of two codes is in the upper half.
            let code = self.bytes[at / 2] >> (4 - at % 2 * 4) & 15;
            if at / self.packed.block != block {
                block = at / self.packed.block;
                largest = self.largest(block);
            }
            let value = self.values[usize::from(code)] * largest;
            match dtype {
                DType::BF16 => out.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                DType::F16 => out.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
                _ => out.copy_from_slice(&value.to_le_bytes()),
            }
        }
    }

    /// The largest value of a block.
    fn largest(&self, block: usize) -> f32 {
        match &self.packed.nested {
            None => float(&self.packed.largest, block),
            Some(Nested { values, largest, block: each, offset }) => {
                let code = usize::from(self.packed.largest.bytes[block]);
                float(values, code) * float(largest, block / each) + offset.value()
            }
        }
    }
}
