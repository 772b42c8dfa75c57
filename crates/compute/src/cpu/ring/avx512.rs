//! Sixteen rows in one register: a word is four bytes without sign, which VNNI multiplies with signed ones.

use core::arch::asm;
use core::arch::x86_64::*;

use super::{GROUP, Kernel, QUAD, QUAD_BYTES, quad_panel};

pub(super) static KERNEL: Kernel =
    Kernel { widths: &[6, 4, 2, 1], tiles: &[tile::<6>, tile::<4>, tile::<2>, tile::<1>], lay_out, block: 1 };

pub(super) fn lay_out(x: &[u32], columns: usize, width: usize, panel: &mut [[u8; QUAD_BYTES]]) {
    quad_panel(x, columns, width, panel, limbs);
}

/// How far ahead of its use a weight is asked for.
const AHEAD_BYTES: usize = 16 << 10;
/// Bytes of a word.
const LIMBS: usize = 4;

/// The lowest bytes of the four words, then the next ones.
fn limbs(words: &[u32; QUAD], out: &mut [u8; QUAD_BYTES]) {
    for (at, word) in words.iter().enumerate() {
        for (limb, byte) in word.to_le_bytes().into_iter().enumerate() {
            out[limb * QUAD + at] = byte;
        }
    }
}

pub(super) fn tile<const WIDTH: usize>(
    group: &[[u8; GROUP * QUAD]],
    panel: &[[u8; QUAD_BYTES]],
    out: &mut [[u32; GROUP]],
) {
    assert!(panel.len() == group.len() * WIDTH && out.len() == WIDTH, "a panel of {WIDTH} rows");
    // SAFETY: a kernel is chosen only where its instructions are present; the lengths were checked.
    unsafe { sums::<WIDTH>(group, panel, out) }
}

/// # Safety
/// The panel has `WIDTH` quads for each of the group's, and `out` has `WIDTH` rows.
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn sums<const WIDTH: usize>(
    group: &[[u8; GROUP * QUAD]],
    panel: &[[u8; QUAD_BYTES]],
    out: &mut [[u32; GROUP]],
) {
    let mut sums = [[_mm512_setzero_si512(); LIMBS]; WIDTH];
    let mut limbs = panel.as_ptr().cast::<i32>();
    for weights in group {
        // SAFETY: 64 bytes of a group; the panel has 4 limbs of 4 bytes for each row and quad.
        unsafe {
            // Few rows wait for memory. Asking never faults, also beyond the weight; asked for in the second cache,
            // which has more lines under way at a time than the first.
            if WIDTH <= 2 {
                _mm_prefetch::<_MM_HINT_T1>(weights.as_ptr().wrapping_add(AHEAD_BYTES).cast());
            }
            let weights = _mm512_loadu_si512(weights.as_ptr().cast());
            for (row, sums) in sums.iter_mut().enumerate() {
                for (limb, sum) in sums.iter_mut().enumerate() {
                    let bytes = _mm512_set1_epi32(limbs.add(row * LIMBS + limb).read_unaligned());
                    *sum = dot(*sum, bytes, weights);
                }
            }
            limbs = limbs.add(WIDTH * LIMBS);
        }
    }
    for (out, [a, b, c, d]) in out.iter_mut().zip(sums) {
        let low = _mm512_add_epi32(a, _mm512_slli_epi32::<8>(b));
        let high = _mm512_add_epi32(_mm512_slli_epi32::<16>(c), _mm512_slli_epi32::<24>(d));
        // SAFETY: sixteen words.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_add_epi32(low, high)) };
    }
}

/// `sum` + four products of bytes in each lane, mod 2^32. Not the intrinsic, which the compiler takes apart where
/// several add to one sum.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn dot(sum: __m512i, unsigned: __m512i, signed: __m512i) -> __m512i {
    let mut sum = sum;
    // SAFETY: one instruction on registers, of features that the caller has.
    unsafe {
        asm!(
            "vpdpbusd {sum}, {unsigned}, {signed}",
            sum = inout(zmm_reg) sum,
            unsigned = in(zmm_reg) unsigned,
            signed = in(zmm_reg) signed,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}
