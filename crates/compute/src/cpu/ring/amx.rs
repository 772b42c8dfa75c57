//! Tiles of sixteen by sixteen words (AMX): four rows of activations, each as four limbs of a byte, times a group.
//!
//! A *block* is sixteen quads, 64 columns. A group's block is a tile as it lies. A panel has for each block one tile
//! for each four rows: limb by limb the bytes of the 64 columns, so that a line of the tile is one limb of one row.

use core::arch::asm;
use core::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::sync::LazyLock;

use super::{GROUP, Kernel, QUAD, QUAD_BYTES, avx512};

/// Quads of a block.
pub(super) const BLOCK: usize = 16;
/// Columns of a block, and bytes of a tile's line.
const LINE: usize = BLOCK * QUAD;
/// Bytes of a tile.
const TILE: usize = 16 * LINE;
/// Bytes of a word.
const LIMBS: usize = 4;
/// Rows of activations in a tile.
const TILE_ROWS: usize = TILE / LINE / LIMBS;

pub(super) static KERNEL: Kernel = Kernel {
    widths: &[16, 4, 2, 1],
    tiles: &[wide::<4>, wide::<1>, avx512::tile::<2>, avx512::tile::<1>],
    lay_out,
    block: BLOCK,
};

/// Whether the processor has tiles of bytes and the system lets this process use them: they are large to save.
pub(super) fn present() -> bool {
    static GRANTED: LazyLock<bool> = LazyLock::new(|| {
        const TILES_AND_BYTES: u32 = 0b11 << 24;
        let described = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILES_AND_BYTES == TILES_AND_BYTES;
        described && grant()
    });
    *GRANTED
}

#[cfg(target_os = "linux")]
fn grant() -> bool {
    /// `ARCH_REQ_XCOMP_PERM`, and the number of the tiles among the states of a processor.
    const ASK: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: a question with two numbers; nothing of this process is touched.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ASK, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn grant() -> bool {
    false
}

/// Panels of whole tiles as said above; narrower ones as the vector code has them.
fn lay_out(x: &[u32], columns: usize, width: usize, panel: &mut [[u8; QUAD_BYTES]]) {
    if width < TILE_ROWS {
        return avx512::lay_out(x, columns, width, panel);
    }
    let lines = panel.as_flattened_mut();
    for (row, x) in x.chunks(columns).enumerate() {
        let blocks = lines[row * LIMBS * LINE..].chunks_mut(width * LIMBS * LINE);
        for (words, place) in x.chunks(LINE).zip(blocks) {
            let place = &mut place[..LIMBS * LINE];
            if words.len() < LINE {
                place.fill(0);
            }
            for (limb, line) in place.chunks_exact_mut(LINE).enumerate() {
                for (byte, word) in line.iter_mut().zip(words) {
                    *byte = (word >> (8 * limb)) as u8;
                }
            }
        }
    }
}

/// How the tile registers are shaped, as the processor reads it: all eight of sixteen lines of 64 bytes.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    line_bytes: [u16; 16],
    lines: [u8; 16],
}

static SHAPES: Shapes = Shapes {
    palette: 1,
    start: 0,
    reserved: [0; 14],
    line_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    lines: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// A group times a panel of `TILES` tiles. Behind the group's last quad lie readable bytes up to a whole block, which
/// meet zeros.
fn wide<const TILES: usize>(
    group: &[[u8; GROUP * QUAD]],
    panel: &[[u8; QUAD_BYTES]],
    out: &mut [[u32; GROUP]],
) {
    let blocks = group.len().div_ceil(BLOCK);
    assert!(panel.len() * QUAD_BYTES == blocks * TILES * TILE, "a panel of {TILES} tiles");
    assert!(out.len() == TILES * TILE_ROWS && blocks > 0, "whole tiles");
    let mut sums = MaybeUninit::<[[[u32; GROUP]; LIMBS]; 4 * TILE_ROWS]>::uninit();
    // SAFETY: a kernel is chosen only where its instructions are present and granted. The panel and the sums were
    // checked; the group's owner lays readable bytes behind it. As many rows of sums are written as are read.
    unsafe {
        let (group, panel) = (group.as_ptr().cast(), panel.as_ptr().cast());
        let rows = sums.as_mut_ptr().cast::<[[u32; GROUP]; LIMBS]>();
        if TILES == 4 {
            four(group, panel, blocks, rows.cast());
        } else {
            one(group, panel, blocks, rows.cast());
        }
        put_together(std::slice::from_raw_parts(rows, out.len()), out);
    }
}

/// Limbs of one row each, shifted into place and added.
#[target_feature(enable = "avx512f")]
fn put_together(rows: &[[[u32; GROUP]; LIMBS]], out: &mut [[u32; GROUP]]) {
    for (limbs, out) in rows.iter().zip(out) {
        // SAFETY: sixteen words each.
        unsafe {
            let limb = |limb: usize| _mm512_loadu_si512(limbs[limb].as_ptr().cast());
            let low = _mm512_add_epi32(limb(0), _mm512_slli_epi32::<8>(limb(1)));
            let high = _mm512_add_epi32(_mm512_slli_epi32::<16>(limb(2)), _mm512_slli_epi32::<24>(limb(3)));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_add_epi32(low, high));
        }
    }
}

/// Asks for the tile of weights that comes sixteen later, in the second cache.
macro_rules! prefetch {
    ($($line:literal)*) => {
        concat!($("prefetcht1 [{group} + 16384 + ", $line, "]\n"),*)
    };
}

macro_rules! prefetch_tile {
    () => {
        prefetch!("0" "64" "128" "192" "256" "320" "384" "448" "512" "576" "640" "704" "768" "832" "896" "960")
    };
}

/// # Safety
/// `blocks`, at least one, tiles can be read at `group` and four times as many at `panel`; four can be written at
/// `sums`.
unsafe fn four(group: *const u8, panel: *const u8, blocks: usize, sums: *mut u8) {
    // SAFETY: the caller's; the tile registers are this function's alone from their shaping to their release.
    unsafe {
        asm!(
            "ldtilecfg [{shapes}]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            prefetch_tile!(),
            "tileloadd tmm7, [{group} + {line} * 1]",
            "tileloadd tmm4, [{panel} + {line} * 1]",
            "tdpbusd tmm0, tmm4, tmm7",
            "tileloadd tmm5, [{panel} + {line} * 1 + 1024]",
            "tdpbusd tmm1, tmm5, tmm7",
            "tileloadd tmm6, [{panel} + {line} * 1 + 2048]",
            "tdpbusd tmm2, tmm6, tmm7",
            "tileloadd tmm4, [{panel} + {line} * 1 + 3072]",
            "tdpbusd tmm3, tmm4, tmm7",
            "add {group}, 1024",
            "add {panel}, 4096",
            "dec {blocks}",
            "jnz 2b",
            "tilestored [{sums} + {line} * 1], tmm0",
            "tilestored [{sums} + {line} * 1 + 1024], tmm1",
            "tilestored [{sums} + {line} * 1 + 2048], tmm2",
            "tilestored [{sums} + {line} * 1 + 3072], tmm3",
            "tilerelease",
            shapes = in(reg) &raw const SHAPES,
            line = in(reg) LINE,
            group = inout(reg) group => _,
            panel = inout(reg) panel => _,
            blocks = inout(reg) blocks => _,
            sums = in(reg) sums,
            options(nostack)
        );
    }
}

/// # Safety
/// `blocks`, at least one, tiles can be read at `group` and at `panel`; one can be written at `sums`.
unsafe fn one(group: *const u8, panel: *const u8, blocks: usize, sums: *mut u8) {
    // SAFETY: the caller's; the tile registers are this function's alone from their shaping to their release.
    unsafe {
        asm!(
            "ldtilecfg [{shapes}]",
            "tilezero tmm0",
            "2:",
            prefetch_tile!(),
            "tileloadd tmm7, [{group} + {line} * 1]",
            "tileloadd tmm4, [{panel} + {line} * 1]",
            "tdpbusd tmm0, tmm4, tmm7",
            "add {group}, 1024",
            "add {panel}, 1024",
            "dec {blocks}",
            "jnz 2b",
            "tilestored [{sums} + {line} * 1], tmm0",
            "tilerelease",
            shapes = in(reg) &raw const SHAPES,
            line = in(reg) LINE,
            group = inout(reg) group => _,
            panel = inout(reg) panel => _,
            blocks = inout(reg) blocks => _,
            sums = in(reg) sums,
            options(nostack)
        );
    }
}
