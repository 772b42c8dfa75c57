//! A register of 16-bit numbers is a quad of two rows; a word is two signed halves.

use core::arch::aarch64::*;

use super::{GROUP, Kernel, QUAD, QUAD_BYTES, half_limbs, quad_panel};

pub(super) static KERNEL: Kernel =
    Kernel { widths: &[6, 4, 2, 1], tiles: &[tile::<6>, tile::<4>, tile::<2>, tile::<1>], lay_out, block: 1 };

fn lay_out(x: &[u32], columns: usize, width: usize, panel: &mut [[u8; QUAD_BYTES]]) {
    quad_panel(x, columns, width, panel, half_limbs);
}

fn tile<const WIDTH: usize>(
    group: &[[u8; GROUP * QUAD]],
    panel: &[[u8; QUAD_BYTES]],
    out: &mut [[u32; GROUP]],
) {
    assert!(panel.len() == group.len() * WIDTH && out.len() == WIDTH, "a panel of {WIDTH} rows");
    for first in (0..GROUP).step_by(2) {
        // SAFETY: a kernel is chosen only where its instructions are present; the lengths were checked.
        unsafe { sums::<WIDTH>(group, panel, first, out) }
    }
}

/// Sums of two rows from row `first` on.
///
/// # Safety
/// The panel has `WIDTH` quads for each of the group's, and `out` has `WIDTH` rows.
#[target_feature(enable = "neon")]
unsafe fn sums<const WIDTH: usize>(
    group: &[[u8; GROUP * QUAD]],
    panel: &[[u8; QUAD_BYTES]],
    first: usize,
    out: &mut [[u32; GROUP]],
) {
    // A lane for each column, of each row of activations, each weight row and each limb.
    let mut sums = [[[vdupq_n_s32(0); 2]; 2]; WIDTH];
    for (weights, quads) in group.iter().zip(panel.chunks_exact(WIDTH)) {
        // SAFETY: 8 bytes inside 64, and 16 bytes of a quad.
        let weights = unsafe { vmovl_s8(vld1_s8(weights.as_ptr().add(first * QUAD).cast())) };
        let weights = [vget_low_s16(weights), vget_high_s16(weights)];
        for (sums, quad) in sums.iter_mut().zip(quads) {
            // SAFETY: as above.
            let halves = unsafe { vld1q_s16(quad.as_ptr().cast()) };
            let halves = [vget_low_s16(halves), vget_high_s16(halves)];
            for (sums, weights) in sums.iter_mut().zip(weights) {
                for (sum, half) in sums.iter_mut().zip(halves) {
                    *sum = vmlal_s16(*sum, weights, half);
                }
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        for (out, [low, high]) in out[first..].iter_mut().zip(sums) {
            *out = vaddvq_s32(low).cast_unsigned().wrapping_add(vaddvq_s32(high).cast_unsigned() << 16);
        }
    }
}
