//! A matrix of AWQ or GPTQ: codes of four bits, with a scale and a zero point for each row of each group of columns.

use fornax_format::{AWQ_ORDER, DType, Packing, View};
use half::f16;

use super::{float, floats};

pub(super) struct FourBits<'v> {
    rows: usize,
    columns: usize,
    /// The file's words of eight codes.
    words: &'v [[u8; 4]],
    awq: bool,
    scales: &'v View<'v>,
    /// (groups, rows)
    zeros: Vec<u8>,
    /// The group of each column.
    groups: Vec<u32>,
}

impl<'v> FourBits<'v> {
    pub(super) fn new(view: &'v View<'v>) -> FourBits<'v> {
        let (rows, columns) = (view.shape[0], view.shape[1]);
        let (awq, scales, zeros, zeros_add, groups) = match view.packing.as_deref() {
            Some(Packing::Gptq { scales, zeros, zeros_add, groups }) => {
                (false, scales, zeros, *zeros_add, groups.as_ref())
            }
            Some(Packing::Awq { scales, zeros }) => (true, scales, zeros, 0, None),
            other => unreachable!("{other:?} is no packing of four bits"),
        };
        let words = |view: &'v View<'v>| view.bytes.as_chunks::<4>().0;
        let zero = |word: &[u8; 4], row: usize| (nibble(word, place(awq, row)) + zeros_add) & 15;
        let zeros = words(zeros).iter().flat_map(|word| (0..8).map(move |row| zero(word, row))).collect();
        let each = columns / scales.shape[0];
        let groups = match groups {
            Some(groups) => words(groups).iter().map(|&group| u32::from_le_bytes(group)).collect(),
            None => (0..columns).map(|column| (column / each) as u32).collect(),
        };
        FourBits { rows, columns, words: words(view), awq, scales, zeros, groups }
    }

    /// The smallest type that holds its values exactly.
    pub(super) fn landing(&self) -> DType {
        let shared = self.columns.is_multiple_of(32)
            && self.groups.chunks(32).all(|block| block.iter().all(|group| *group == block[0]));
        let half = self.scales.dtype == DType::F16
            || floats(self.scales).all(|scale| f16::from_f32(scale).to_f32() == scale);
        match () {
            () if !shared || !half => DType::F32,
            () if self.zeros.iter().all(|&zero| zero == 8) => DType::Q4_0,
            () => DType::Q8_0,
        }
    }

    /// Rows from `first` on, a multiple of eight, as many as `out` has room for, at most eight.
    pub(super) fn write(&self, dtype: DType, first: usize, out: &mut [u8]) {
        let row_bytes = dtype.bytes_for(self.columns).expect("checked before");
        // All eight together: their words are neighbours.
        let mut codes = vec![[0u8; 8]; self.columns];
        if self.awq {
            for (column, codes) in codes.iter_mut().enumerate() {
                let word = &self.words[column * (self.rows / 8) + first / 8];
                *codes = std::array::from_fn(|row| nibble(word, place(true, row)));
            }
        } else {
            for (eight, codes) in codes.chunks_exact_mut(8).enumerate() {
                for row in 0..8 {
                    let word = &self.words[eight * self.rows + first + row];
                    codes
                        .iter_mut()
                        .enumerate()
                        .for_each(|(column, codes)| codes[row] = nibble(word, column));
                }
            }
        }
        for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
            let column = |column: usize| {
                let at = self.groups[column] as usize * self.rows + first + row;
                (codes[column][row].cast_signed() - self.zeros[at].cast_signed(), float(self.scales, at))
            };
            match dtype {
                DType::F32 => {
                    for (index, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
                        let (integer, scale) = column(index);
                        *out = (scale * f32::from(integer)).to_le_bytes();
                    }
                }
                DType::Q8_0 => {
                    for (block, out) in out.as_chunks_mut::<34>().0.iter_mut().enumerate() {
                        out[..2].copy_from_slice(&f16::from_f32(column(block * 32).1).to_le_bytes());
                        for (i, out) in out[2..].iter_mut().enumerate() {
                            *out = column(block * 32 + i).0.cast_unsigned();
                        }
                    }
                }
                DType::Q4_0 => {
                    for (block, out) in out.as_chunks_mut::<18>().0.iter_mut().enumerate() {
                        out[..2].copy_from_slice(&f16::from_f32(column(block * 32).1).to_le_bytes());
                        for (i, out) in out[2..].iter_mut().enumerate() {
                            let code = |column: usize| codes[block * 32 + column][row];
                            *out = code(i) | code(i + 16) << 4;
                        }
                    }
                }
                other => unreachable!("{other} is not among its types"),
            }
        }
    }
}

/// Which nibble of a word a row of eight has: in AWQ its own order, in GPTQ's zero points the plain one.
fn place(awq: bool, row: usize) -> usize {
    if awq { AWQ_ORDER.iter().position(|&of| of == row).expect("below eight") } else { row }
}

fn nibble(word: &[u8; 4], index: usize) -> u8 {
    word[index / 2] >> (index % 2 * 4) & 15
}
