//! Products by tiles of bytes (AMX): sixteen activation rows times a group, 32 values at a time.
//!
//! An activation of 16 bits is `256 * high + low`, a signed byte and an unsigned one, and a code is a signed byte. So
//! the exact integers of a block are `256 * (codes . high) + codes . low`: two products of tiles, whose bits are those
//! of every other level. Four bytes of each row of a group are a line of a tile. What follows, the scales, is done by
//! vectors of AVX-512 as for narrower panels.
//!
//! A panel of sixteen rows has for each block of 32 the high bytes of every row, then the low ones, then scales and sums
//! as others have. A kernel takes any number of such panels: codes become bytes once for all of them, as many blocks at
//! a time as stay in the first cache.

use core::arch::asm;
use core::arch::x86_64::*;

use super::activations::BLOCK;
use super::avx512::Avx512;
use super::lanes::Lanes;
use super::packed::{GROUP, PANEL_BLOCK_BYTES, Packed, code_bytes};
use crate::cpu::ring;

/// Activation rows of a panel that tiles take.
pub(crate) const WIDTH: usize = 16;
/// Blocks whose codes are bytes at the same time: 8 KB of them.
const STRETCH: usize = 16;
/// Bytes of a tile of codes, and of all high or low bytes of a panel's block.
const TILE_BYTES: usize = BLOCK * GROUP;
/// Values of half a block.
const HALF: usize = BLOCK / 2;

/// Products of the high bytes, then of the low ones: (activation row, weight row).
#[repr(C, align(64))]
struct Integers([[[i32; GROUP]; WIDTH]; 2]);

/// Codes of blocks as tiles: (four values, weight row, value).
#[repr(C, align(64))]
struct Codes([[u8; TILE_BYTES]; STRETCH]);

/// Whether there are tiles. Tests compute what tiles would where there are none.
pub(super) fn present() -> bool {
    cfg!(test) || ring::has_tiles()
}

/// Writes a row's block among those of its panel.
pub(super) fn store(values: &mut [u8], row: usize, block: &[i16; BLOCK]) {
    let (high, low) = values.split_at_mut(TILE_BYTES);
    let (high, low) = (&mut high[row * BLOCK..][..BLOCK], &mut low[row * BLOCK..][..BLOCK]);
    for ((high, low), value) in high.iter_mut().zip(low).zip(block) {
        [*low, *high] = value.to_le_bytes();
    }
}

/// Multiplies a group by `count` panels that follow each other: `tile` is (row of all panels, weight row).
#[inline(always)]
pub(super) unsafe fn multiply<F: Packed>(
    group: *const u8,
    columns: usize,
    panels: *const u8,
    count: usize,
    tile: *mut f32,
) {
    let blocks = columns / BLOCK;
    let mut codes = Codes([[0; TILE_BYTES]; STRETCH]);
    let mut integers = [const { Integers([[[0; GROUP]; WIDTH]; 2]) }; 2];
    // SAFETY: the caller has a group of `columns` columns, as many in each panel, room for the tile, and AVX-512 and
    // tiles, whose registers are this function's alone from their shaping to their release.
    unsafe {
        let scales = group.add(code_bytes::<F>(columns));
        shape();
        for first in (0..blocks).step_by(STRETCH) {
            let many = STRETCH.min(blocks - first);
            for at in (0..many).step_by(F::SHARING) {
                expand::<F, 0>(group, first + at, &mut codes.0[at]);
                if F::SHARING == 2 {
                    expand::<F, 1>(group, first + at, &mut codes.0[at + 1]);
                }
            }
            for index in 0..count {
                let panel = panels.add((index * blocks + first) * WIDTH * PANEL_BLOCK_BYTES);
                let sums = tile.add(index * WIDTH * GROUP);
                add_stretch::<F>(sums, scales, first, &codes.0[..many], panel, &mut integers);
            }
        }
        release();
    }
}

/// The codes of block `block + PART` as bytes: of four values that follow one another, those of every row.
#[inline(always)]
unsafe fn expand<F: Packed, const PART: usize>(group: *const u8, block: usize, to: &mut [u8; TILE_BYTES]) {
    for quarter in 0..4 {
        // SAFETY: the block is one of the group's, the words are the tile's, and the caller has AVX-512.
        unsafe {
            let [a, b, c, d] = F::quarter::<Avx512, PART>(group, block, quarter);
            let [at, next, after, _] = F::PAIRS[quarter];
            // Pairs (0, 2) and (1, 3) of a word lie side by side, or every other one.
            let (x, y, other) = if next == at + 1 {
                (joined(a, b), joined(c, d), after)
            } else {
                (joined(a, c), joined(b, d), next)
            };
            let words = to.as_mut_ptr();
            _mm512_storeu_si512(words.add(at / 2 * 64).cast(), x);
            _mm512_storeu_si512(words.add(other / 2 * 64).cast(), y);
        }
    }
}

/// The low bytes of two registers of pairs in turn.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn joined(even: __m512i, odd: __m512i) -> __m512i {
    // The truth table of a & b | c.
    _mm512_ternarylogic_epi32::<0b1110_1010>(even, _mm512_set1_epi16(0xff), _mm512_slli_epi16::<8>(odd))
}

/// Adds the products of some blocks, the first of which is `first`, to the sums of sixteen rows, or begins them.
#[inline(always)]
unsafe fn add_stretch<F: Packed>(
    to: *mut f32,
    scales: *const u8,
    first: usize,
    codes: &[[u8; TILE_BYTES]],
    panel: *const u8,
    [even, odd]: &mut [Integers; 2],
) {
    // Runs of values with one scale: blocks, or their halves.
    let runs = if F::HALVES { 2 * codes.len() } else { codes.len() };
    let place = |run: usize| if F::HALVES { (run / 2, run % 2) } else { (run, 1) };
    // SAFETY: the caller has as many blocks in the panel, and their scales; sixteen rows of sums; and the instructions.
    unsafe {
        let block_of = |block: usize| panel.add(block * WIDTH * PANEL_BLOCK_BYTES);
        let products = |run: usize, integers: &mut Integers| {
            let (block, half) = place(run);
            if F::HALVES {
                let codes = codes[block].as_ptr().add(half * HALF * GROUP);
                half_products(block_of(block).add(half * HALF), codes, integers);
            } else {
                whole_products(block_of(block), codes[block].as_ptr(), integers);
            }
        };
        let mut sums = [Avx512::splat(&0.0); WIDTH];
        if first > 0 {
            for (n, sum) in sums.iter_mut().enumerate() {
                *sum = Avx512::floats(to.add(n * GROUP));
            }
        }
        products(0, even);
        for run in 0..runs {
            // Tiles work on the next one meanwhile.
            let (these, next) = if run % 2 == 0 { (&mut *even, &mut *odd) } else { (&mut *odd, &mut *even) };
            if run + 1 < runs {
                products(run + 1, next);
            }
            let (block, half) = place(run);
            let floats = block_of(block).add(2 * TILE_BYTES).cast::<f32>();
            add_scaled(&mut sums, these, F::scale::<Avx512>(scales, first + block, half), floats);
            if F::MIN {
                let min = F::min::<Avx512>(scales, first + block, half);
                if F::HALVES {
                    static ONES: [u8; HALF * GROUP] = [1; HALF * GROUP];
                    half_products(block_of(block).add(half * HALF), ONES.as_ptr(), these);
                    add_scaled(&mut sums, these, min, floats);
                } else {
                    for (n, sum) in sums.iter_mut().enumerate() {
                        *sum = Avx512::fma(min, Avx512::splat(floats.add(WIDTH + n)), *sum);
                    }
                }
            }
        }
        for (n, sum) in sums.iter().enumerate() {
            Avx512::store(*sum, to.add(n * GROUP));
        }
    }
}

#[inline(always)]
unsafe fn add_scaled(
    sums: &mut [__m512; WIDTH],
    integers: &Integers,
    scale: __m512,
    activation_scales: *const f32,
) {
    for (n, sum) in sums.iter_mut().enumerate() {
        // SAFETY: the caller has AVX-512 and sixteen scales; a row is sixteen integers.
        unsafe {
            let row = |part: usize| _mm512_load_si512(integers.0[part][n].as_ptr().cast());
            let exact = _mm512_add_epi32(_mm512_slli_epi32::<8>(row(0)), row(1));
            let product = Avx512::mul(Avx512::to_floats(exact), Avx512::splat(activation_scales.add(n)));
            *sum = Avx512::fma(scale, product, *sum);
        }
    }
}

/// How the tile registers are shaped, as the processor reads it.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    line_bytes: [u16; 16],
    lines: [u8; 16],
}

/// Two of integers, two of activations and one of codes for half a block (2, 3 and 7) and for a whole one (4, 5 and 6).
static SHAPES: Shapes = Shapes {
    palette: 1,
    start: 0,
    reserved: [0; 14],
    line_bytes: [64, 64, 16, 16, 32, 32, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    lines: [16, 16, 16, 16, 16, 16, 8, 4, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// # Safety
/// There are tiles, and nobody uses them.
unsafe fn shape() {
    if cfg!(test) && !ring::has_tiles() {
        return;
    }
    // SAFETY: the caller's; 64 readable bytes of a shape that all such processors have.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, preserves_flags)) }
}

/// # Safety
/// There are tiles, and they were shaped.
unsafe fn release() {
    if cfg!(test) && !ring::has_tiles() {
        return;
    }
    // SAFETY: the caller's.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
}

/// # Safety
/// Tiles are shaped; at `panel` lie the bytes of a block, at `codes` a tile of them.
#[inline(always)]
unsafe fn whole_products(panel: *const u8, codes: *const u8, to: &mut Integers) {
    if cfg!(test) && !ring::has_tiles() {
        // SAFETY: the caller's.
        return unsafe { computed(panel, codes, BLOCK, to) };
    }
    // SAFETY: the caller's; two tiles are written.
    unsafe {
        asm!(
            "tileloadd tmm6, [{codes} + {line} * 1]",
            "tileloadd tmm4, [{panel} + {row} * 1]",
            "tileloadd tmm5, [{panel} + {row} * 1 + 512]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tdpbssd tmm0, tmm4, tmm6",
            "tdpbusd tmm1, tmm5, tmm6",
            "tilestored [{to} + {line} * 1], tmm0",
            "tilestored [{to} + {line} * 1 + 1024], tmm1",
            codes = in(reg) codes,
            panel = in(reg) panel,
            to = in(reg) to.0.as_mut_ptr(),
            line = in(reg) 64_usize,
            row = in(reg) BLOCK,
            options(nostack, preserves_flags)
        );
    }
}

/// The same of half a block, whose beginning is `panel`.
///
/// # Safety
/// As of [`whole_products`].
#[inline(always)]
unsafe fn half_products(panel: *const u8, codes: *const u8, to: &mut Integers) {
    if cfg!(test) && !ring::has_tiles() {
        // SAFETY: the caller's.
        return unsafe { computed(panel, codes, HALF, to) };
    }
    // SAFETY: the caller's; two tiles are written.
    unsafe {
        asm!(
            "tileloadd tmm7, [{codes} + {line} * 1]",
            "tileloadd tmm2, [{panel} + {row} * 1]",
            "tileloadd tmm3, [{panel} + {row} * 1 + 512]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tdpbssd tmm0, tmm2, tmm7",
            "tdpbusd tmm1, tmm3, tmm7",
            "tilestored [{to} + {line} * 1], tmm0",
            "tilestored [{to} + {line} * 1 + 1024], tmm1",
            codes = in(reg) codes,
            panel = in(reg) panel,
            to = in(reg) to.0.as_mut_ptr(),
            line = in(reg) 64_usize,
            row = in(reg) BLOCK,
            options(nostack, preserves_flags)
        );
    }
}

/// What tiles compute of the first `values` values of each row, for tests where there are none.
///
/// # Safety
/// As of [`whole_products`], but for the tiles.
unsafe fn computed(panel: *const u8, codes: *const u8, values: usize, to: &mut Integers) {
    for row in 0..WIDTH {
        for lane in 0..GROUP {
            let (mut high, mut low) = (0, 0);
            for value in 0..values {
                // SAFETY: the caller's.
                let (code, first, second) = unsafe {
                    (
                        codes.add(value / 4 * 64 + lane * 4 + value % 4).cast::<i8>().read(),
                        panel.add(row * BLOCK + value).cast::<i8>().read(),
                        panel.add(TILE_BYTES + row * BLOCK + value).read(),
                    )
                };
                high += i32::from(code) * i32::from(first);
                low += i32::from(code) * i32::from(second);
            }
            (to.0[0][row][lane], to.0[1][row][lane]) = (high, low);
        }
    }
}
