//! Four rows of a quad in one register as 16-bit numbers: a word is two signed halves, whose products with bytes are
//! added in pairs.

use core::arch::x86_64::*;

use super::{GROUP, Kernel, QUAD, QUAD_BYTES, half_limbs, quad_panel};
use crate::cpu::quant::AHEAD_BYTES;

pub(super) static KERNEL: Kernel =
    Kernel { widths: &[6, 4, 2, 1], tiles: &[tile::<6>, tile::<4>, tile::<2>, tile::<1>], lay_out, block: 1 };

fn lay_out(x: &[u32], columns: usize, width: usize, panel: &mut [[u8; QUAD_BYTES]]) {
    quad_panel(x, columns, width, panel, half_limbs);
}

/// Rows that one register holds a quad of.
const ROWS: usize = 4;

fn tile<const WIDTH: usize>(
    group: &[[u8; GROUP * QUAD]],
    panel: &[[u8; QUAD_BYTES]],
    out: &mut [[u32; GROUP]],
) {
    assert!(panel.len() == group.len() * WIDTH && out.len() == WIDTH, "a panel of {WIDTH} rows");
    // SAFETY: a kernel is chosen only where its instructions are present; the lengths were checked.
    unsafe {
        if WIDTH == 1 {
            // All rows at once: the group is read from end to end, as memory likes it.
            sums::<WIDTH, { GROUP / ROWS }>(group, panel, 0, out);
        } else {
            for first in 0..GROUP / ROWS {
                sums::<WIDTH, 1>(group, panel, first, out);
            }
        }
    }
}

/// Sums of the rows of `PARTS` registers from the one of index `first` on.
///
/// # Safety
/// The panel has `WIDTH` quads for each of the group's, and `out` has `WIDTH` rows.
#[target_feature(enable = "avx2")]
unsafe fn sums<const WIDTH: usize, const PARTS: usize>(
    group: &[[u8; GROUP * QUAD]],
    panel: &[[u8; QUAD_BYTES]],
    first: usize,
    out: &mut [[u32; GROUP]],
) {
    let mut sums = [[[_mm256_setzero_si256(); 2]; WIDTH]; PARTS];
    let mut limbs = panel.as_ptr().cast::<i64>();
    for weights in group {
        // SAFETY: 16 bytes at a multiple of 16 below 64; the panel has 2 limbs of 8 bytes for each row and quad.
        unsafe {
            // Few rows wait for memory. Asking never faults, also beyond the weight; the other registers' rows are in
            // the same line.
            if first == 0 && WIDTH <= 2 {
                _mm_prefetch::<_MM_HINT_T0>(weights.as_ptr().wrapping_add(AHEAD_BYTES).cast());
            }
            for (part, sums) in sums.iter_mut().enumerate() {
                let weights = weights.as_ptr().add((first + part) * ROWS * QUAD);
                let weights = _mm256_cvtepi8_epi16(_mm_loadu_si128(weights.cast()));
                for (row, sums) in sums.iter_mut().enumerate() {
                    for (limb, sum) in sums.iter_mut().enumerate() {
                        let halves = _mm256_set1_epi64x(limbs.add(row * 2 + limb).read_unaligned());
                        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(weights, halves));
                    }
                }
            }
            limbs = limbs.add(WIDTH * 2);
        }
    }
    for (part, sums) in sums.into_iter().enumerate() {
        for (out, [low, high]) in out.iter_mut().zip(sums) {
            // Two sums lie beside each other for each row.
            let pairs = _mm256_add_epi32(low, _mm256_slli_epi32::<16>(high));
            let mut words = [0u32; 2 * ROWS];
            // SAFETY: eight words.
            unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), pairs) };
            for (out, pair) in out[(first + part) * ROWS..].iter_mut().zip(words.as_chunks::<2>().0) {
                *out = pair[0].wrapping_add(pair[1]);
            }
        }
    }
}
