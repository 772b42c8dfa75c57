//! A matrix of codes of a few bits, with a scale and a zero point, or a bias, for each row of each group of columns.

use fornax_format::{AWQ_ORDER, CodeOrder, DType, Grid, Integers as Packed, View, Zero, ZeroOrder};
use half::f16;

use super::{float, floats};

/// Columns of a block of the types below.
const BLOCK: usize = 32;

pub(super) struct Integers<'v> {
    rows: usize,
    columns: usize,
    bytes: &'v [u8],
    packed: &'v Packed<'v>,
    /// The group of each column.
    groups: Vec<u32>,
}

/// A row's codes with what they mean: value = scale * (code - zero), or scale * code + bias.
struct Row {
    codes: Vec<u8>,
    /// By group.
    scales: Vec<f32>,
    zeros: Vec<u8>,
    biases: Vec<f32>,
}

impl<'v> Integers<'v> {
    pub(super) fn new(view: &'v View<'v>, packed: &'v Packed<'v>) -> Integers<'v> {
        let (rows, columns) = (view.shape[0], view.shape[1]);
        let each = columns / packed.group_count;
        let groups = match &packed.groups {
            Some(groups) => {
                groups.bytes.as_chunks().0.iter().map(|&group| u32::from_le_bytes(group)).collect()
            }
            None => (0..columns).map(|column| (column / each) as u32).collect(),
        };
        Integers { rows, columns, bytes: view.bytes, packed, groups }
    }

    /// The smallest type that holds its values exactly.
    pub(super) fn landing(&self) -> DType {
        let Packed { bits, scales, zero, factor, .. } = self.packed;
        let shared = self.columns.is_multiple_of(BLOCK)
            && self.groups.chunks(BLOCK).all(|block| block.iter().all(|group| *group == block[0]));
        if !shared || !has_halves(&scales.view) || factor.value() != 1.0 {
            return DType::F32;
        }
        let most = (1i32 << bits) - 1;
        let zeros = match zero {
            Zero::Biases(biases) => {
                return match bits {
                    1..=4 if has_halves(&biases.view) => DType::Q4_1,
                    5 if has_halves(&biases.view) => DType::Q5_1,
                    _ => DType::F32,
                };
            }
            Zero::Fixed(zero) => i32::from(*zero)..=i32::from(*zero),
            Zero::Codes { .. } => self.zero_range(),
        };
        // What a code less its zero point may be.
        let (least, most) = (-*zeros.end(), most - *zeros.start());
        match () {
            () if least >= -8 && most <= 7 => DType::Q4_0,
            () if least >= -16 && most <= 15 => DType::Q5_0,
            () if least >= -128 && most <= 127 => DType::Q8_0,
            () => DType::F32,
        }
    }

    /// The smallest and the largest zero point.
    fn zero_range(&self) -> std::ops::RangeInclusive<i32> {
        let (mut least, mut most) = (255, 0);
        for row in 0..self.rows {
            for group in 0..self.packed.group_count {
                let zero = self.zero(row, group);
                (least, most) = (zero.min(least), zero.max(most));
            }
        }
        i32::from(least)..=i32::from(most)
    }

    /// Rows from `first` on, a multiple of eight, as many as `out` has room for, at most eight.
    pub(super) fn write(&self, dtype: DType, first: usize, out: &mut [u8]) {
        let row_bytes = dtype.bytes_for(self.columns).expect("checked before");
        let count = out.len() / row_bytes;
        for (row, out) in self.rows(first, count).iter().zip(out.chunks_exact_mut(row_bytes)) {
            match dtype {
                DType::F32 => self.write_floats(row, out),
                DType::Q4_0 => self.write_blocks::<18>(row, out, |row, at, block| {
                    nibbles(&mut block[2..], |i| row.integer(self, at + i) + 8);
                }),
                DType::Q5_0 => self.write_blocks::<22>(row, out, |row, at, block| {
                    fives(&mut block[2..], |i| row.integer(self, at + i) + 16);
                }),
                DType::Q8_0 => self.write_blocks::<34>(row, out, |row, at, block| {
                    for (i, out) in block[2..].iter_mut().enumerate() {
                        *out = (row.integer(self, at + i) as i8).cast_unsigned();
                    }
                }),
                DType::Q4_1 => self.write_blocks::<20>(row, out, |row, at, block| {
                    block[2..4].copy_from_slice(&row.bias(self, at).to_le_bytes());
                    nibbles(&mut block[4..], |i| i32::from(row.codes[at + i]));
                }),
                DType::Q5_1 => self.write_blocks::<24>(row, out, |row, at, block| {
                    block[2..4].copy_from_slice(&row.bias(self, at).to_le_bytes());
                    fives(&mut block[4..], |i| i32::from(row.codes[at + i]));
                }),
                other => unreachable!("{other} is not among its types"),
            }
        }
    }

    fn write_floats(&self, row: &Row, out: &mut [u8]) {
        let factor = self.packed.factor.value();
        for (column, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let group = self.groups[column] as usize;
            let value = match row.biases.is_empty() {
                true => row.scales[group] * row.integer(self, column) as f32,
                false => row.scales[group] * f32::from(row.codes[column]) + row.biases[group],
            };
            *out = (value * factor).to_le_bytes();
        }
    }

    /// Blocks of 32 columns, which begin with their scale.
    fn write_blocks<const BYTES: usize>(
        &self,
        row: &Row,
        out: &mut [u8],
        write: impl Fn(&Row, usize, &mut [u8; BYTES]),
    ) {
        for (block, out) in out.as_chunks_mut::<BYTES>().0.iter_mut().enumerate() {
            let at = block * BLOCK;
            let scale = f16::from_f32(row.scales[self.groups[at] as usize]);
            out[..2].copy_from_slice(&scale.to_le_bytes());
            write(row, at, out);
        }
    }

    /// Some rows together: those whose words are neighbours.
    fn rows(&self, first: usize, count: usize) -> Vec<Row> {
        let groups = 0..self.packed.group_count;
        let mut rows: Vec<Row> = (first..first + count)
            .map(|row| {
                let value = |grid: &Grid<'_>, group: usize| {
                    float(
                        &grid.view,
                        (self.packed.first_row + row) * grid.row_stride + group * grid.group_stride,
                    )
                };
                let scales = groups.clone().map(|group| value(&self.packed.scales, group)).collect();
                let (zeros, biases) = match &self.packed.zero {
                    Zero::Biases(grid) => {
                        (Vec::new(), groups.clone().map(|group| value(grid, group)).collect())
                    }
                    _ => (groups.clone().map(|group| self.zero(row, group)).collect(), Vec::new()),
                };
                Row { codes: vec![0; self.columns], scales, zeros, biases }
            })
            .collect();
        let words = self.bytes.as_chunks::<4>().0;
        let word = |at: usize| u32::from_le_bytes(words[at]);
        let bits = self.packed.bits;
        match self.packed.order {
            CodeOrder::Along => {
                let each = words.len() / self.rows;
                for (row, to) in (first..).zip(&mut rows) {
                    unpack(bits, (0..each).map(|at| word(row * each + at)), &mut to.codes);
                }
            }
            CodeOrder::Down => {
                for (row, to) in (first..).zip(&mut rows) {
                    unpack(bits, (0..).map(|at| word(at * self.rows + row)), &mut to.codes);
                }
            }
            CodeOrder::Awq => {
                for column in 0..self.columns {
                    let eight = word(column * (self.rows / 8) + first / 8);
                    for (index, row) in rows.iter_mut().enumerate() {
                        row.codes[column] = (eight >> (4 * awq_place(index)) & 15) as u8;
                    }
                }
            }
            CodeOrder::Bytes => {
                for (row, to) in (first..).zip(&mut rows) {
                    let stored = &self.bytes[row * self.columns..][..self.columns];
                    to.codes.iter_mut().zip(stored).for_each(|(to, &byte)| *to = byte ^ 0x80);
                }
            }
        }
        rows
    }

    /// The zero point of a group of a row.
    fn zero(&self, row: usize, group: usize) -> u8 {
        let (view, order, add) = match &self.packed.zero {
            Zero::Fixed(zero) => return *zero,
            Zero::Codes { view, order, add } => (view, *order, *add),
            Zero::Biases(_) => return 0,
        };
        let row = row + self.packed.first_row;
        let words = view.bytes.as_chunks::<4>().0;
        let bits = self.packed.bits as usize;
        // Where the stream of codes begins, from word to word, and which code of it is meant.
        let (begin, stride, index) = match order {
            ZeroOrder::GroupThenRows => (group * view.shape[1], 1, row),
            ZeroOrder::Awq => (group * view.shape[1], 1, row / 8 * 8 + awq_place(row % 8)),
            ZeroOrder::RowThenGroups => (row * view.shape[1], 1, group),
            ZeroOrder::RowsDown => (group, view.shape[1], row),
        };
        let (at, shift) = (index * bits / 32, index * bits % 32);
        let word = |at: usize| u64::from(u32::from_le_bytes(words[begin + at * stride]));
        let next = if shift + bits > 32 { word(at + 1) << 32 } else { 0 };
        let mask = (1u64 << bits) - 1;
        (((next | word(at)) >> shift).wrapping_add(u64::from(add)) & mask) as u8
    }
}

impl Row {
    /// A code less its zero point.
    fn integer(&self, of: &Integers<'_>, column: usize) -> i32 {
        i32::from(self.codes[column]) - i32::from(self.zeros[of.groups[column] as usize])
    }

    fn bias(&self, of: &Integers<'_>, column: usize) -> f16 {
        f16::from_f32(self.biases[of.groups[column] as usize])
    }
}

/// Codes that follow each other in words without a gap, the first in the lowest bits.
fn unpack(bits: u32, mut words: impl Iterator<Item = u32>, codes: &mut [u8]) {
    let mask = (1u64 << bits) - 1;
    let (mut held, mut count) = (0u64, 0);
    for code in codes {
        if count < bits {
            held |= u64::from(words.next().expect("as many words as the shape says")) << count;
            count += 32;
        }
        *code = (held & mask) as u8;
        held >>= bits;
        count -= bits;
    }
}

/// 32 codes of four bits as Q4_0 and Q4_1 have them.
#[expect(clippy::cast_sign_loss, reason = "codes are from zero on")]
fn nibbles(out: &mut [u8], code: impl Fn(usize) -> i32) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = code(i) as u8 | (code(i + 16) as u8) << 4;
    }
}

/// 32 codes of five bits as Q5_0 and Q5_1 have them: their upper bits first.
#[expect(clippy::cast_sign_loss, reason = "codes are from zero on")]
fn fives(out: &mut [u8], code: impl Fn(usize) -> i32) {
    let upper = (0..BLOCK).fold(0u32, |upper, i| upper | (code(i) as u32 >> 4 & 1) << i);
    out[..4].copy_from_slice(&upper.to_le_bytes());
    nibbles(&mut out[4..], |i| code(i) & 15);
}

/// Whether an f16 has every value of it.
fn has_halves(view: &View<'_>) -> bool {
    view.dtype == DType::F16 || floats(view).all(|value| f16::from_f32(value).to_f32() == value)
}

/// Which nibble of a word a row of eight has in AWQ.
fn awq_place(row: usize) -> usize {
    AWQ_ORDER.iter().position(|&of| of == row).expect("below eight")
}
