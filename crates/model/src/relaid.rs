//! Matrices of Hugging Face files that are laid out anew on their way into memory: rows and columns exchanged, rows of
//! several matrices that alternate, blocks of four bits with their scales apart.

use fornax_compute::Part;
use fornax_compute::cpu::expand_rows;
use fornax_format::{DType, View};

use crate::Error;

/// Values of a block of four bits, and bytes that hold them.
pub(crate) const BLOCK: usize = 32;
pub(crate) const BLOCK_BYTES: usize = BLOCK / 2;

/// Which of `of` matrices is meant whose rows alternate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interleave {
    /// How many there are.
    pub of: usize,
    /// Which it is.
    pub at: usize,
}

/// A matrix in its new layout.
pub(crate) struct Relaid {
    pub(crate) dtype: DType,
    /// (rows, columns)
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Relaid {
    /// What is stored as (columns, rows of all), which alternate. Where nobody reads the values there is but room for them, which takes no
    /// memory.
    pub(crate) fn transposed(view: &View<'_>, interleave: Interleave, reads: bool) -> Result<Relaid, Error> {
        let (&[columns, all], 1) = (&view.shape[..], view.dtype.block_values()) else {
            return Err(Error::Unsupported {
                what: format!(
                    "tensor {:?} of type {} with rows and columns exchanged",
                    view.name, view.dtype
                ),
                supported: "F32, F16, BF16".to_owned(),
            });
        };
        let rows = all / interleave.of;
        Ok(Relaid::chosen(view, [rows, columns], |row| row * interleave.of + interleave.at, reads))
    }

    /// The same of matrices whose rows lie behind each other.
    pub(crate) fn transposed_behind(view: &View<'_>, turn: Interleave, reads: bool) -> Result<Relaid, Error> {
        // What cannot be transposed is refused as above.
        let whole = Relaid::transposed(view, Interleave { of: 1, at: 0 }, false)?;
        let &[all, columns] = &whole.shape[..] else { panic!("{} is a matrix", view.name) };
        let rows = all / turn.of;
        Ok(Relaid::chosen(view, [rows, columns], |row| turn.at * rows + row, reads))
    }

    /// Some rows of what is stored as (columns, all rows).
    fn chosen(
        view: &View<'_>,
        [rows, columns]: [usize; 2],
        stored: impl Fn(usize) -> usize,
        reads: bool,
    ) -> Relaid {
        /// Rows at a time, so that what is written stays in the first cache.
        const TILE: usize = 64;
        let (all, size) = (view.shape[1], view.dtype.block_bytes());
        let mut bytes = vec![0; rows * columns * size];
        for first in (0..rows).step_by(TILE).filter(|_| reads) {
            for column in 0..columns {
                for row in first..rows.min(first + TILE) {
                    let from = (column * all + stored(row)) * size;
                    let to = (row * columns + column) * size;
                    bytes[to..to + size].copy_from_slice(&view.bytes[from..from + size]);
                }
            }
        }
        Relaid { dtype: view.dtype, shape: vec![rows, columns], bytes }
    }

    /// The same of any type: one whose values do not stand alone is laid out as floats.
    pub(crate) fn turned(view: &View<'_>, reads: bool) -> Result<Relaid, Error> {
        let alone = Interleave { of: 1, at: 0 };
        if view.dtype.block_values() == 1 && view.packing.is_none() {
            return Relaid::transposed(view, alone, reads);
        }
        let &[columns, rows] = &view.shape[..] else { panic!("{} is a matrix", view.name) };
        let mut bytes = vec![0; rows * columns * size_of::<f32>()];
        if reads {
            let mut whole = Vec::with_capacity(bytes.len());
            expand_rows(&Part::from(view.clone()), |_, values| {
                whole.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                Ok(())
            })?;
            let whole = View::new(view.name, DType::F32, view.shape.clone(), &whole)?;
            bytes = Relaid::transposed(&whole, alone, true)?.bytes;
        }
        Ok(Relaid { dtype: DType::F32, shape: vec![rows, columns], bytes })
    }

    /// Blocks of a matrix, (rows of all, blocks, bytes), and their scales, (rows of all, blocks). There a byte holds two
    /// neighbours; in memory it holds a value of each half of the block, and the scale stands before them.
    pub(crate) fn from_blocks(
        blocks: &View<'_>,
        scales: &View<'_>,
        interleave: Interleave,
        reads: bool,
    ) -> Result<Relaid, Error> {
        for view in [blocks, scales] {
            if view.dtype != DType::U8 {
                return Err(Error::Unsupported {
                    what: format!("tensor {:?} of type {} as blocks of four bits", view.name, view.dtype),
                    supported: "U8".to_owned(),
                });
            }
        }
        let (all, count) = (scales.shape[0], scales.shape[1]);
        let rows = all / interleave.of;
        let mut bytes = vec![0; rows * count * (1 + BLOCK_BYTES)];
        let chosen = |index: usize| index / count % interleave.of == interleave.at;
        let stored = blocks.bytes.chunks_exact(BLOCK_BYTES).zip(scales.bytes).enumerate();
        let stored = stored.filter(|(index, _)| chosen(*index)).take(if reads { usize::MAX } else { 0 });
        for ((_, (block, scale)), made) in stored.zip(bytes.chunks_exact_mut(1 + BLOCK_BYTES)) {
            made[0] = *scale;
            let (first, second) = block.split_at(BLOCK_BYTES / 2);
            for ((pair, first), second) in made[1..].chunks_exact_mut(2).zip(first).zip(second) {
                pair[0] = first & 15 | second << 4;
                pair[1] = first >> 4 | second & 0xf0;
            }
        }
        Ok(Relaid { dtype: DType::MXFP4, shape: vec![rows, count * BLOCK], bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_are_exchanged_and_alternating_rows_taken_apart() {
        // Three columns of 2 x 70 rows: more rows than a tile.
        let bytes: Vec<u8> = (0..3 * 140u16).flat_map(|value| value.to_le_bytes()).collect();
        let view = View::new("w", DType::F16, vec![3, 140], &bytes).unwrap();
        for at in [0, 1] {
            let relaid = Relaid::transposed(&view, Interleave { of: 2, at }, true).unwrap();
            assert_eq!(relaid.shape, [70, 3]);
            let wanted = (0..70u16).flat_map(|row| [0, 140, 280].map(|column| column + 2 * row + at as u16));
            assert!(
                relaid.bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).eq(wanted)
            );
            let room = Relaid::transposed(&view, Interleave { of: 2, at }, false).unwrap();
            assert_eq!(room.bytes, vec![0; relaid.bytes.len()]);
        }
    }

    #[test]
    fn blocks_get_their_scale_and_the_halves_that_memory_wants() {
        // Two rows of one block: values 0 to 31 without their fifth bit, and the same backwards.
        let forwards: Vec<u8> = (0..16).map(|byte| (2 * byte) & 15 | ((2 * byte + 1) & 15) << 4).collect();
        let backwards: Vec<u8> = forwards.iter().rev().copied().collect();
        let (blocks, scales) = ([forwards, backwards].concat(), [7, 9]);
        let blocks = View::new("w_blocks", DType::U8, vec![2, 1, 16], &blocks).unwrap();
        let scales = View::new("w_scales", DType::U8, vec![2, 1], &scales).unwrap();
        let first = Relaid::from_blocks(&blocks, &scales, Interleave { of: 2, at: 0 }, true).unwrap();
        assert_eq!((first.shape, first.dtype), (vec![1, 32], DType::MXFP4));
        let values: Vec<u8> = (0..16).map(|value| value | value << 4).collect();
        assert_eq!(first.bytes, [&[7][..], &values].concat());
        let both = Relaid::from_blocks(&blocks, &scales, Interleave { of: 1, at: 0 }, true).unwrap();
        assert_eq!((both.bytes.len(), both.bytes[17]), (34, 9));
        let floats = View::new("w", DType::F32, vec![2, 1], &[0; 8]).unwrap();
        assert!(Relaid::from_blocks(&blocks, &floats, Interleave { of: 1, at: 0 }, true).is_err());
    }
}
