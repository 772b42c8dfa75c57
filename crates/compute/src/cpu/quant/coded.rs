//! What the formats of 256 values have in common whose values are small integers out of a table.
//!
//! value = scale * multiplier * unit * table\[code\]: an f16 scale for the block, an integer multiplier for each run of
//! 16 or 32 values, and codes of two to four bits. Lattices, signs and base-3 digits are ways to store such codes;
//! packed, they are all alike, and a vector register looks sixteen rows up at once. That is exact, and takes two to
//! four bits for a value where a lattice takes less: the plan counts what it takes.

use super::activations::IntBlock;
#[cfg(target_arch = "aarch64")]
use super::bytes;
use super::lanes::Lanes;
use super::packed::{GROUP, Kernels, Packed, STRAIGHT_PAIRS, byte_nibbles, looked_up, store_half, word};
use super::{Format, Run, Runs, block_pairs, blocks_and_runs, blocks_and_values, f16};
use fornax_format::DType;

/// A block of 256 values, as it lies in the file.
pub(super) trait Coded: bytemuck::Pod {
    /// Bits of a code: 2, 3 or 4.
    const BITS: usize;
    /// Multipliers of a block: 1 (which is one), 8 or 16.
    const MULTIPLIERS: usize;
    /// A power of two beside the multipliers.
    const UNIT: f32 = 1.0;
    /// What the codes stand for.
    const TABLE: [i8; 16];

    /// The f16 scale.
    fn scale(&self) -> [u8; 2];
    /// As many as there are, in front.
    fn multipliers(&self) -> [i8; 16] {
        [1; 16]
    }
    /// Below 2^BITS.
    fn codes(&self) -> [u8; 256];

    /// The table's integers, in order.
    #[inline]
    fn integers(&self) -> [i8; 256] {
        self.codes().map(|code| Self::TABLE[usize::from(code)])
    }

    /// What each 16 values are multiplied by.
    #[inline]
    fn scales(&self) -> [f32; 16] {
        let (scale, multipliers) = (f16(self.scale()), self.multipliers());
        std::array::from_fn(|run| scale * f32::from(multipliers[run * Self::MULTIPLIERS / 16]) * Self::UNIT)
    }
}

fn dequantize<F: Coded>(weights: &[u8], out: &mut [f32]) {
    for (block, out) in blocks_and_values::<F, 256>(weights, out) {
        let (integers, scales) = (block.integers(), block.scales());
        for (index, (out, integer)) in out.iter_mut().zip(integers).enumerate() {
            *out = scales[index / 16] * f32::from(integer);
        }
    }
}

fn dot<F: Coded>(weights: &[u8], activations: &[IntBlock]) -> f32 {
    let mut sum = 0.0f32;
    for (block, activations) in block_pairs::<F, 8>(weights, activations) {
        let (integers, scales) = (block.integers(), block.scales());
        for (index, a) in activations.iter().enumerate() {
            let integers = &integers[index * 32..][..32];
            if F::MULTIPLIERS == 16 {
                sum = scales[index * 2].mul_add(a.dot(0, &integers[..16]), sum);
                sum = scales[index * 2 + 1].mul_add(a.dot(16, &integers[16..]), sum);
            } else {
                sum = scales[index * 2].mul_add(a.dot(0, integers), sum);
            }
        }
    }
    sum
}

fn read_runs<F: Coded>(weights: &[u8], out: &mut [Run]) {
    for (block, out) in blocks_and_runs::<F, 16>(weights, out) {
        let (codes, scales) = (block.codes(), block.scales());
        for ((run, codes), scale) in out.iter_mut().zip(codes.as_chunks().0).zip(scales) {
            *run = Run { codes: *codes, scale, min: 0.0 };
        }
    }
}

/// What can be done with such a format.
pub(super) fn format<F: Coded>(dtype: DType, kernels: Option<&'static Kernels>) -> Format {
    let runs = Some(Runs { table: F::TABLE, mins: false, read: read_runs::<F> });
    Format { dtype, dequantize: dequantize::<F>, dot: Some(dot::<F>), kernels, runs }
}

impl<F: Coded> Packed for F {
    const VALUES: usize = 256;
    const WORDS: usize = 8 * F::BITS;
    const SCALE_BYTES: usize = (2 + if F::MULTIPLIERS == 1 { 0 } else { F::MULTIPLIERS }) * GROUP;
    const SHARING: usize = if F::BITS == 4 { 2 } else { 1 };
    const HALVES: bool = F::MULTIPLIERS == 16;
    const PAIRS: [[usize; 4]; 4] = STRAIGHT_PAIRS;

    /// Four bits: as Q4_K, blocks of 32 by twos. Fewer: the low two bits as Q2_K, then the third as Q3_K has it.
    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        let codes = self.codes();
        if F::BITS == 4 {
            let (twos, _) = codes.as_chunks::<64>();
            for (words, codes) in words.chunks_exact_mut(8).zip(twos) {
                for (w, words) in words.iter_mut().enumerate() {
                    words[row] = four(|i| codes[4 * w + i] | codes[32 + 4 * w + i] << 4);
                }
            }
        } else {
            let (low, third) = words.split_at_mut(16);
            pack_crumbs(&codes, row, low);
            for (w, words) in third.iter_mut().enumerate() {
                words[row] = four(|i| (0..8).map(|block| codes[block * 32 + 4 * w + i] >> 2 << block).sum());
            }
        }
        store_half(scales, 0, row, self.scale());
        if F::MULTIPLIERS > 1 {
            for (run, multiplier) in self.multipliers()[..F::MULTIPLIERS].iter().enumerate() {
                scales[(2 + run) * GROUP + row] = multiplier.cast_unsigned();
            }
        }
    }

    #[inline(always)]
    unsafe fn quarter<L: Lanes, const PART: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [L::Pairs; 4] {
        // SAFETY: as the caller's.
        unsafe {
            let words = codes.add(block / 8 * F::WORDS * 64);
            let codes = if F::BITS == 4 {
                byte_nibbles::<L, PART>(words.add((block % 8 / 2 * 8 + quarter * 2) * 64))
            } else {
                let low = crumbs::<L>(words, block % 8, quarter);
                if F::BITS == 2 { low } else { with_third::<L>(low, words.add(16 * 64), block % 8, quarter) }
            };
            looked_up::<L>(codes, &F::TABLE)
        }
    }

    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    unsafe fn bytes<const PART: usize, const FOUR: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [bytes::Bytes; 2] {
        // SAFETY: as the caller's.
        unsafe {
            if F::BITS != 4 {
                return bytes::joined::<F, PART, FOUR>(codes, block, quarter);
            }
            let words = codes.add((block / 8 * F::WORDS + block % 8 / 2 * 8 + quarter * 2) * 64);
            bytes::looked_up(bytes::part_nibbles::<PART, FOUR>(words), &F::TABLE)
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, block: usize, half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe {
            let scales = scales.add(block / 8 * Self::SCALE_BYTES);
            let run = match F::MULTIPLIERS {
                1 => return L::halves(scales),
                8 => block % 8,
                _ => block % 8 * 2 + half,
            };
            let scale = L::mul(L::halves(scales), L::signed_bytes(scales.add((2 + run) * GROUP)));
            if F::UNIT == 1.0 { scale } else { L::mul(scale, L::splat(&F::UNIT)) }
        }
    }
}

/// Four bytes as the word that a register holds.
fn four(byte: impl Fn(usize) -> u8) -> u32 {
    word(&std::array::from_fn(byte))
}

/// Two bits of each of 256 codes: 8 words for each 128, whose byte i holds codes i, i + 32, i + 64, i + 96, lowest
/// first.
pub(super) fn pack_crumbs(codes: &[u8; 256], row: usize, words: &mut [[u32; GROUP]]) {
    for (words, codes) in words.chunks_exact_mut(8).zip(codes.as_chunks::<128>().0) {
        for (w, words) in words.iter_mut().enumerate() {
            words[row] =
                four(|i| (0..4).map(|block| (codes[block * 32 + 4 * w + i] & 3) << (2 * block)).sum());
        }
    }
}

/// A quarter of block `block` of eight, out of the words that `pack_crumbs` writes.
#[inline(always)]
pub(super) unsafe fn crumbs<L: Lanes>(words: *const u8, block: usize, quarter: usize) -> [L::Pairs; 4] {
    // SAFETY: the caller has the words of sixteen rows, and L's instructions.
    unsafe {
        let words = words.add((block / 4 * 8 + quarter * 2) * 64);
        let (x, y) = (L::pairs(words), L::pairs(words.add(64)));
        let (x, y) = (L::shr_by(x, block % 4 * 2), L::shr_by(y, block % 4 * 2));
        [L::and(x, 3), L::and(L::shr::<8>(x), 3), L::and(y, 3), L::and(L::shr::<8>(y), 3)]
    }
}

/// The same with a third bit above them: bit `block` of the bytes of eight words.
#[inline(always)]
unsafe fn with_third<L: Lanes>(
    [a, b, c, d]: [L::Pairs; 4],
    words: *const u8,
    block: usize,
    quarter: usize,
) -> [L::Pairs; 4] {
    // SAFETY: the caller has eight words of sixteen rows, and L's instructions.
    unsafe {
        let words = words.add(quarter * 2 * 64);
        let (x, y) = (L::shr_by(L::pairs(words), block), L::shr_by(L::pairs(words.add(64)), block));
        [
            L::or_masked(a, L::shl::<2>(x), 4),
            L::or_masked(b, L::shr::<6>(x), 4),
            L::or_masked(c, L::shl::<2>(y), 4),
            L::or_masked(d, L::shr::<6>(y), 4),
        ]
    }
}
