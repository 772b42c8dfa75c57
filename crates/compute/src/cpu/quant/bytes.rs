//! Products by ARM's instructions for bytes: dotprod, and i8mm where there is it.
//!
//! An activation of 16 bits is `256 * high + low`, a signed byte and an unsigned one; a code is a signed byte. So the
//! exact integer of a block is `256 * (codes . high) + codes . low`, and its bits are those of every other level. A
//! word of a group, four bytes of a row, is what one lane of these instructions takes: four rows of a block of 32 are
//! eight registers, which stay while activation rows go by, each with one sum that takes the high bytes, is shifted,
//! and takes the low ones.
//!
//! dotprod has no product of bytes of different signs. Its low bytes are stored 128 too low, and 128 times the sum of
//! the codes, which all activation rows share, makes up for it.

#![expect(clippy::needless_range_loop, reason = "one index goes through registers, panel and tile together")]

use core::arch::aarch64::*;
use std::arch::asm;

use super::Simd;
use super::activations::BLOCK;
use super::lanes::Lanes;
use super::neon::Neon;
use super::packed::{GROUP, PANEL_BLOCK_BYTES, Packed, ask_ahead, code_bytes};

/// Four rows, four bytes of each.
pub(super) type Bytes = int8x16_t;
type Sixteen = Neon<8>;
/// Registers of four rows: a group has as many.
const FOURS: usize = 4;
/// Activation bytes of a row's block.
const ROW_BYTES: usize = BLOCK * 2;

/// How a panel has the two bytes of its activations.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Split {
    /// Of each row the high bytes, then the low ones less 128.
    Biased,
    /// Of each row the high bytes, then the low ones.
    Rows,
    /// Of each two rows the high bytes, eight of the one and eight of the other in turn, then the low ones likewise.
    Twos,
}

impl Split {
    /// `None` for levels that do not multiply bytes.
    pub(super) fn of(simd: Simd, width: usize) -> Option<Split> {
        match simd {
            Simd::Scalar | Simd::Neon => None,
            Simd::Dotprod => Some(Split::Biased),
            Simd::I8mm => Some(if width == 1 { Split::Rows } else { Split::Twos }),
        }
    }

    /// Writes a row's block among those of its panel.
    pub(super) fn store(self, panel: &mut [u8], row: usize, values: &[i16; BLOCK]) {
        for (eight, values) in values.as_chunks::<8>().0.iter().enumerate() {
            let at = match self {
                Split::Biased | Split::Rows => row * ROW_BYTES + eight * 8,
                Split::Twos => row / 2 * 2 * ROW_BYTES + eight * 16 + row % 2 * 8,
            };
            let low_at = at + if self == Split::Twos { ROW_BYTES } else { BLOCK };
            let bias = if self == Split::Biased { 128 } else { 0 };
            panel[at..][..8].copy_from_slice(&values.map(|value| value.to_le_bytes()[1]));
            panel[low_at..][..8].copy_from_slice(&values.map(|value| value.to_le_bytes()[0] ^ bias));
        }
    }
}

/// An instruction set that multiplies bytes.
///
/// # Safety
///
/// Of its functions: the processor has the instructions, and `values` points at the activations of a block of a panel
/// of `N` rows.
pub(super) trait Products: 'static {
    /// The products of four rows with each of `N` activation rows: of a block (`words` has all eight), or of its half
    /// that begins with word `first`.
    unsafe fn products<const N: usize>(words: &[Bytes], first: usize, values: *const u8) -> [int32x4_t; N];
}

pub(super) enum Dotprod {}
pub(super) enum I8mm {}

impl Products for Dotprod {
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn products<const N: usize>(words: &[Bytes], first: usize, values: *const u8) -> [int32x4_t; N] {
        let mut codes = vdupq_n_s32(0);
        for &word in words {
            codes = dot(codes, word, vdupq_n_s8(1));
        }
        let bias = vshlq_n_s32::<7>(codes);
        let mut sums = [vdupq_n_s32(0); N];
        for n in 0..N {
            // SAFETY: the caller has the panel's rows.
            let values = unsafe { values.add(n * ROW_BYTES + first * 4) };
            let mut sum = vdupq_n_s32(0);
            for (four, words) in words.as_chunks().0.iter().enumerate() {
                // SAFETY: as above.
                sum = dot_four(sum, words, unsafe { vld1q_s8(values.add(four * 16).cast()) });
            }
            sum = vaddq_s32(vshlq_n_s32::<8>(sum), bias);
            for (four, words) in words.as_chunks().0.iter().enumerate() {
                // SAFETY: as above.
                sum = dot_four(sum, words, unsafe { vld1q_s8(values.add(BLOCK + four * 16).cast()) });
            }
            sums[n] = sum;
        }
        sums
    }
}

impl Products for I8mm {
    #[inline]
    #[target_feature(enable = "neon,dotprod,i8mm")]
    unsafe fn products<const N: usize>(words: &[Bytes], first: usize, values: *const u8) -> [int32x4_t; N] {
        let mut sums = [vdupq_n_s32(0); N];
        if N == 1 {
            // SAFETY: the caller has the panel's row.
            let values = unsafe { values.add(first * 4) };
            let mut sum = vdupq_n_s32(0);
            for (four, words) in words.as_chunks().0.iter().enumerate() {
                // SAFETY: as above.
                sum = dot_four(sum, words, unsafe { vld1q_s8(values.add(four * 16).cast()) });
            }
            sum = vshlq_n_s32::<8>(sum);
            for (four, words) in words.as_chunks().0.iter().enumerate() {
                // SAFETY: as above.
                sum = dot_four_unsigned(sum, words, unsafe { vld1q_u8(values.add(BLOCK + four * 16)) });
            }
            sums[0] = sum;
            return sums;
        }
        for two in 0..N / 2 {
            // SAFETY: the caller has the panel's rows.
            let values = unsafe { values.add(two * 2 * ROW_BYTES + first * 8) };
            // Each (row of the panel, weight row): those of the first two weight rows, those of the others.
            let (mut low, mut high) = (vdupq_n_s32(0), vdupq_n_s32(0));
            for (eight, words) in words.as_chunks().0.iter().enumerate() {
                let [x, y] = eights(words);
                // SAFETY: as above.
                let values = unsafe { vld1q_s8(values.add(eight * 16).cast()) };
                (low, high) = (matrices(low, values, x), matrices(high, values, y));
            }
            (low, high) = (vshlq_n_s32::<8>(low), vshlq_n_s32::<8>(high));
            for (eight, words) in words.as_chunks().0.iter().enumerate() {
                let [x, y] = eights(words);
                // SAFETY: as above.
                let values = unsafe { vld1q_u8(values.add(ROW_BYTES + eight * 16)) };
                (low, high) = (unsigned_matrices(low, values, x), unsigned_matrices(high, values, y));
            }
            let (low, high) = (vreinterpretq_s64_s32(low), vreinterpretq_s64_s32(high));
            sums[two * 2] = vreinterpretq_s32_s64(vzip1q_s64(low, high));
            sums[two * 2 + 1] = vreinterpretq_s32_s64(vzip2q_s64(low, high));
        }
        sums
    }
}

/// Two words of four rows as eight bytes of the first two rows and of the others. Does not depend on the activations,
/// so it is done once for all of their rows.
#[inline]
#[target_feature(enable = "neon")]
fn eights(&[x, y]: &[Bytes; 2]) -> [Bytes; 2] {
    let (x, y) = (vreinterpretq_s32_s8(x), vreinterpretq_s32_s8(y));
    [vreinterpretq_s8_s32(vzip1q_s32(x, y)), vreinterpretq_s8_s32(vzip2q_s32(x, y))]
}

/// One instruction that adds products of the second and third operand to the first. Not intrinsics: they are not
/// stable.
macro_rules! instruction {
    ($(#[$doc:meta])* $name:ident, $features:literal, $text:literal, $x:ty, $y:ty) => {
        $(#[$doc])*
        #[inline]
        #[target_feature(enable = $features)]
        fn $name(sum: int32x4_t, x: $x, y: $y) -> int32x4_t {
            let mut sum = sum;
            // SAFETY: one instruction of features that the function has, on registers alone.
            unsafe {
                asm!($text, sum = inout(vreg) sum, x = in(vreg) x, y = in(vreg) y,
                    options(pure, nomem, nostack, preserves_flags));
            }
            sum
        }
    };
}

/// The same with each of four words of `x` and one lane of `y`.
macro_rules! four_instructions {
    ($(#[$doc:meta])* $name:ident, $features:literal, $instruction:literal, $y:ty) => {
        $(#[$doc])*
        #[inline]
        #[target_feature(enable = $features)]
        fn $name(sum: int32x4_t, x: &[Bytes; 4], y: $y) -> int32x4_t {
            let mut sum = sum;
            // SAFETY: instructions of features that the function has, on registers alone.
            unsafe {
                asm!(
                    concat!($instruction, " {sum:v}.4s, {a:v}.16b, {y:v}.4b[0]"),
                    concat!($instruction, " {sum:v}.4s, {b:v}.16b, {y:v}.4b[1]"),
                    concat!($instruction, " {sum:v}.4s, {c:v}.16b, {y:v}.4b[2]"),
                    concat!($instruction, " {sum:v}.4s, {d:v}.16b, {y:v}.4b[3]"),
                    sum = inout(vreg) sum, a = in(vreg) x[0], b = in(vreg) x[1], c = in(vreg) x[2],
                    d = in(vreg) x[3], y = in(vreg) y, options(pure, nomem, nostack, preserves_flags)
                );
            }
            sum
        }
    };
}

instruction!(
    /// Four bytes of each lane.
    dot, "neon,dotprod", "sdot {sum:v}.4s, {x:v}.16b, {y:v}.16b", Bytes, Bytes
);
four_instructions!(
    /// Sixteen columns of four rows with sixteen activations.
    dot_four, "neon,dotprod", "sdot", Bytes
);
four_instructions!(
    /// Sixteen columns of four rows with sixteen activations that have no sign.
    dot_four_unsigned, "neon,i8mm", "sudot", uint8x16_t
);
instruction!(
    /// Two rows of eight with two rows of eight: (row of x, row of y).
    matrices, "neon,i8mm", "smmla {sum:v}.4s, {x:v}.16b, {y:v}.16b", Bytes, Bytes
);
instruction!(
    /// The same where those of `x` have no sign.
    unsigned_matrices, "neon,i8mm", "usmmla {sum:v}.4s, {x:v}.16b, {y:v}.16b", uint8x16_t, Bytes
);

/// The kernel of integers of such a level: as [`packed::integers`](super::packed::integers), four rows at a time.
#[inline(always)]
pub(super) unsafe fn integers<P: Products, F: Packed, const N: usize>(
    group: *const u8,
    columns: usize,
    panel: *const u8,
    tile: *mut f32,
) {
    // SAFETY: the caller has a group and a panel of `columns` columns, a tile of N x 16, and P's instructions.
    unsafe {
        let scales = group.add(code_bytes::<F>(columns));
        let mut sums = [[vdupq_n_f32(0.0); FOURS]; N];
        let mut panel = panel;
        let mut block = 0;
        while block < columns / BLOCK {
            let lines = F::WORDS * BLOCK / F::VALUES;
            ask_ahead::<Sixteen>(group.add(block * lines * 64), lines * F::SHARING);
            add_block::<P, F, N, 0>(&mut sums, group, scales, block, panel);
            panel = panel.add(N * PANEL_BLOCK_BYTES);
            if F::SHARING == 2 {
                add_block::<P, F, N, 1>(&mut sums, group, scales, block, panel);
                panel = panel.add(N * PANEL_BLOCK_BYTES);
            }
            block += F::SHARING;
        }
        for n in 0..N {
            Sixteen::store(sums[n], tile.add(n * GROUP));
        }
    }
}

/// Adds the products of block `block + PART`.
#[inline(always)]
unsafe fn add_block<P: Products, F: Packed, const N: usize, const PART: usize>(
    sums: &mut [[float32x4_t; FOURS]; N],
    codes: *const u8,
    scales: *const u8,
    block: usize,
    panel: *const u8,
) {
    // SAFETY: as in `integers`: the block is one of the group's, and `panel` points at its activations.
    unsafe {
        add_four::<P, F, N, PART, 0>(sums, codes, scales, block, panel);
        add_four::<P, F, N, PART, 1>(sums, codes, scales, block, panel);
        add_four::<P, F, N, PART, 2>(sums, codes, scales, block, panel);
        add_four::<P, F, N, PART, 3>(sums, codes, scales, block, panel);
    }
}

/// The same for rows `4 * FOUR` and the next three.
#[inline(always)]
unsafe fn add_four<P: Products, F: Packed, const N: usize, const PART: usize, const FOUR: usize>(
    sums: &mut [[float32x4_t; FOURS]; N],
    codes: *const u8,
    scales: *const u8,
    block: usize,
    panel: *const u8,
) {
    // SAFETY: as in `add_block`.
    unsafe {
        let activation_scales = panel.add(N * ROW_BYTES).cast::<f32>();
        let mut words = [vdupq_n_s8(0); 8];
        for quarter in 0..4 {
            let [x, y] = F::bytes::<PART, FOUR>(codes, block, quarter);
            let [at, next, after, _] = F::PAIRS[quarter];
            words[at / 2] = x;
            words[(if next == at + 1 { after } else { next }) / 2] = y;
        }
        // Runs of values with one scale: eight words of the block, or twice four.
        let run_words = if F::HALVES { 4 } else { 8 };
        for first in (0..8).step_by(run_words) {
            let half = if F::HALVES { first / 4 } else { 1 };
            let scale = F::scale::<Sixteen>(scales, block + PART, half)[FOUR];
            let products = P::products::<N>(&words[first..first + run_words], first, panel);
            for n in 0..N {
                let product = scaled(products[n], activation_scales.add(n));
                sums[n][FOUR] = vfmaq_f32(sums[n][FOUR], scale, product);
            }
            if F::MIN {
                let min = F::min::<Sixteen>(scales, block + PART, half)[FOUR];
                // Panels have the sums of 32 activations; those of 16 are products with ones.
                let ones = [vdupq_n_s8(1); 4];
                let halves = if F::HALVES { Some(P::products::<N>(&ones, first, panel)) } else { None };
                for n in 0..N {
                    let sum = match halves {
                        Some(halves) => scaled(halves[n], activation_scales.add(n)),
                        None => vdupq_n_f32(activation_scales.add(N + n).read_unaligned()),
                    };
                    sums[n][FOUR] = vfmaq_f32(sums[n][FOUR], min, sum);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn scaled(integers: int32x4_t, scale: *const f32) -> float32x4_t {
    // SAFETY: the caller has a readable f32, and NEON.
    unsafe { vmulq_n_f32(vcvtq_f32_s32(integers), scale.read_unaligned()) }
}

/// A quarter's pairs of 16 bits as bytes: what serves every format.
#[inline(always)]
pub(super) unsafe fn joined<F: Packed, const PART: usize, const FOUR: usize>(
    codes: *const u8,
    block: usize,
    quarter: usize,
) -> [Bytes; 2] {
    // SAFETY: as the caller's.
    unsafe {
        let [a, b, c, d] = F::quarter::<Sixteen, PART>(codes, block, quarter);
        // Pairs (0, 2) and (1, 3) of a word lie side by side, or every other one.
        let [b, c] = if F::PAIRS[quarter][1] == F::PAIRS[quarter][0] + 1 { [b, c] } else { [c, b] };
        let join = |even: [int16x8_t; 4], odd: [int16x8_t; 4]| {
            vreinterpretq_s8_s16(vsliq_n_s16::<8>(even[FOUR], odd[FOUR]))
        };
        [join(a, b), join(c, d)]
    }
}

/// The word at `words` of four rows.
#[inline(always)]
pub(super) unsafe fn word<const FOUR: usize>(words: *const u8) -> Bytes {
    // SAFETY: the caller has a word of sixteen rows.
    unsafe { vld1q_s8(words.add(FOUR * 16).cast()) }
}

/// The low nibbles of each byte, and the high ones.
#[inline(always)]
pub(super) unsafe fn nibbles(word: Bytes) -> [Bytes; 2] {
    // SAFETY: the caller has NEON.
    unsafe {
        let word = vreinterpretq_u8_s8(word);
        [vreinterpretq_s8_u8(vandq_u8(word, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8::<4>(word))]
    }
}

/// The same of two words, of which `PART` says which.
#[inline(always)]
pub(super) unsafe fn part_nibbles<const PART: usize, const FOUR: usize>(words: *const u8) -> [Bytes; 2] {
    // SAFETY: the caller has two words of sixteen rows, and NEON.
    unsafe { [nibbles(word::<FOUR>(words))[PART], nibbles(word::<FOUR>(words.add(64)))[PART]] }
}

/// Nibbles as signed numbers: the low ones, the high ones.
#[inline(always)]
pub(super) unsafe fn signed_nibbles(word: Bytes) -> [Bytes; 2] {
    // SAFETY: the caller has NEON.
    unsafe { [vshrq_n_s8::<4>(vshlq_n_s8::<4>(word)), vshrq_n_s8::<4>(word)] }
}

/// What codes below 16 stand for.
#[inline(always)]
pub(super) unsafe fn looked_up([x, y]: [Bytes; 2], table: &[i8; 16]) -> [Bytes; 2] {
    // SAFETY: sixteen readable bytes; the caller has NEON.
    unsafe {
        let table = vld1q_s8(table.as_ptr());
        [vqtbl1q_s8(table, vreinterpretq_u8_s8(x)), vqtbl1q_s8(table, vreinterpretq_u8_s8(y))]
    }
}

/// `code | (the two bits of `high` from bit `bit` on) << 4`, less 32.
#[inline(always)]
pub(super) unsafe fn six_bits(code: Bytes, high: Bytes, bit: usize) -> Bytes {
    // SAFETY: the caller has NEON.
    unsafe {
        let high = vshlq_u8(vreinterpretq_u8_s8(high), vdupq_n_s8(4 - bit as i8));
        let high = vandq_s8(vreinterpretq_s8_u8(high), vdupq_n_s8(48));
        vsubq_s8(vorrq_s8(code, high), vdupq_n_s8(32))
    }
}
