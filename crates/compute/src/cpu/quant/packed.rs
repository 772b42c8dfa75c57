//! Weights as the vector kernels read them: sixteen rows side by side, and activations in panels beside them.
//!
//! **A group** is sixteen weight rows. A quantised group is the codes of all its blocks, then the scales of all its
//! blocks. Codes are the file's own 32-bit words, each followed by the same word of the other fifteen rows: a vector
//! register holds one word of every row. Seen as two integers of 16 bits, a word yields *pairs* by shifting and
//! masking, and the pair of values `(4w + s, 4w + s + 2)` is pair `2w + s` of its block. A group of a float type is,
//! for each column, that column's value of all sixteen rows (BF16: of two columns; MXFP8: blocks of 32 with their
//! powers of two).
//!
//! **A panel** is a few activation rows (1, 2, 4, 8 or, for tiles, 16: its width). Integers: for each block of 32 the
//! values of every row in the order of pairs, then every row's scale, then every row's sum. Floats: for each column its
//! value in every row.
//!
//! A kernel multiplies a group by a panel: lanes are weight rows, registers are activation rows. Every output has one
//! running sum that takes the blocks in order, whatever the width: so a row has the same bits alone and among others.

#![expect(clippy::needless_range_loop, reason = "one index goes through registers, panel and tile together")]

use super::Simd;
use super::activations::{BLOCK, IntBlock};
#[cfg(target_arch = "aarch64")]
use super::bytes::{Bytes, Split, joined};
use super::lanes::Lanes;
#[cfg(target_arch = "x86_64")]
use super::tiles;

/// Weight rows of a group.
pub(crate) const GROUP: usize = 16;
/// Widths of panels, widest first. The first one is of tiles.
pub(crate) const WIDTHS: [usize; 5] = [16, 8, 4, 2, 1];
/// How many of them the other kernels take: the last ones.
const NARROW: usize = 4;

/// A quantised format, packed; implemented by the block as it lies in the file.
///
/// # Safety
///
/// Of its unsafe functions: the caller has the instructions of `L`, and the pointer is that of a whole group's codes or
/// scales, of which `block` is one.
pub(super) trait Packed: bytemuck::Pod {
    /// Values of a block.
    const VALUES: usize;
    /// Words of codes that one row has for one block.
    const WORDS: usize;
    /// Bytes of the scales of sixteen blocks side by side.
    const SCALE_BYTES: usize;
    /// Blocks of 32 values that share words of codes.
    const SHARING: usize = 1;
    /// Whether each 16 values have a scale of their own.
    const HALVES: bool = false;
    /// Whether there is a minimum beside the scale.
    const MIN: bool = false;
    /// Which pairs the four registers of a quarter of a block of 32 hold.
    const PAIRS: [[usize; 4]; 4];

    /// Places one row's block: `words[w][row]`, and its scales.
    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]);

    /// The signed codes of a quarter of a block of 32 values. `block` counts blocks of 32 and is a multiple of
    /// `SHARING`; the block meant is `block + PART`.
    unsafe fn quarter<L: Lanes, const PART: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [L::Pairs; 4];
    /// The same codes as bytes, of rows `4 * FOUR` to `4 * FOUR + 3`: in each register four values that follow one
    /// another in their row. A format overrides it where bytes come more directly.
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    unsafe fn bytes<const PART: usize, const FOUR: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [Bytes; 2] {
        // SAFETY: as the caller's.
        unsafe { joined::<Self, PART, FOUR>(codes, block, quarter) }
    }
    /// The scale of a block of 32 values, or of one half of it.
    unsafe fn scale<L: Lanes>(scales: *const u8, block: usize, half: usize) -> L::Floats;
    /// What is added to scale * code, in a block or one half of it.
    unsafe fn min<L: Lanes>(scales: *const u8, block: usize, _half: usize) -> L::Floats {
        // Never called where MIN is false.
        // SAFETY: as the caller's.
        unsafe { Self::scale::<L>(scales, block, 0) }
    }
}

/// A float type, packed.
///
/// # Safety
///
/// Of its unsafe functions: the caller has the instructions of `L`, and a group that holds these columns.
pub(super) trait PackedFloat: 'static {
    /// Values of a row that are stored together,
    const VALUES: usize;
    /// in this many bytes,
    const STORED_BYTES: usize;
    /// and sixteen rows of them packed in this many.
    const PACKED_BYTES: usize;
    /// Writes one row's values: `out` is the group.
    fn pack(stored: &[u8], row: usize, out: &mut [u8]);
    /// Columns `2 * pair` and `2 * pair + 1`.
    unsafe fn two<L: Lanes>(group: *const u8, pair: usize) -> [L::Floats; 2];
}

/// Values of the 32-bit word `word` whose first pair is `pair`: where activation `index` of a block goes.
fn place(index: usize) -> usize {
    // Pair 2w + s holds (4w + s, 4w + s + 2).
    let (word, within) = (index / 4, index % 4);
    (2 * word + within % 2) * 2 + within / 2
}

/// Bytes of one block of 32 integer activations for each row of a panel.
pub(crate) const PANEL_BLOCK_BYTES: usize = BLOCK * size_of::<i16>() + 2 * size_of::<f32>();

/// Writes a row's block into a panel of integers, as the kernels of a level read it.
pub(crate) fn store_block(
    simd: Simd,
    panel: &mut [u8],
    width: usize,
    row: usize,
    index: usize,
    block: &IntBlock,
) {
    let panel = &mut panel[index * width * PANEL_BLOCK_BYTES..][..width * PANEL_BLOCK_BYTES];
    let (values, floats) = panel.split_at_mut(width * BLOCK * size_of::<i16>());
    let floats: &mut [f32] = bytemuck::cast_slice_mut(floats);
    (floats[row], floats[width + row]) = (block.scale, block.sum);
    #[cfg(target_arch = "aarch64")]
    if let Some(split) = Split::of(simd, width) {
        return split.store(values, row, &block.values);
    }
    #[cfg(target_arch = "x86_64")]
    if simd == Simd::Amx && width == tiles::WIDTH {
        return tiles::store(values, row, &block.values);
    }
    // All others have the order of pairs.
    let _ = simd;
    store_pairs(&mut bytemuck::cast_slice_mut(values)[row], &block.values);
}

fn store_pairs(out: &mut [i16; BLOCK], values: &[i16; BLOCK]) {
    for (word, (out, values)) in
        out.as_chunks_mut::<4>().0.iter_mut().zip(values.as_chunks::<4>().0).enumerate()
    {
        debug_assert_eq!(place(4 * word + 1), 4 * word + 2);
        *out = [values[0], values[2], values[1], values[3]];
    }
}

/// How one stored type is packed and multiplied at one SIMD level.
pub(crate) struct Kernels {
    /// Bytes of a group of this many columns; a multiple of 64.
    pub(crate) group_bytes: fn(usize) -> usize,
    /// Packs up to sixteen stored rows; the rows that are missing stay as `out` is, which must be zeros.
    pub(crate) pack: fn(&mut dyn Iterator<Item = &[u8]>, usize, &mut [u8]),
    /// Expands columns `first..first + count` of a group, both multiples of 32 or the end: (column, row).
    dequantize: unsafe fn(group: *const u8, columns: usize, first: usize, count: usize, out: *mut f32),
    /// Products of integers, widest panel first; `None` for float types.
    integers: Option<[Multiply; NARROW]>,
    /// Products of integers with panels of the first width.
    tiles: Option<MultiplyAll>,
    /// Products of floats with a group of this float type, widest panel first; `None` for quantised types.
    floats: Option<[Multiply; NARROW]>,
    /// The widest panel it takes.
    pub(crate) width_max: usize,
}

/// Multiplies a group of `columns` columns by a panel: `tile` is (panel row, weight row). Integers write the tile,
/// floats add to it.
type Multiply = unsafe fn(group: *const u8, columns: usize, panel: *const u8, tile: *mut f32);
/// The same with `count` panels that follow each other.
type MultiplyAll =
    unsafe fn(group: *const u8, columns: usize, panels: *const u8, count: usize, tile: *mut f32);

impl Kernels {
    /// Whether weights of this type meet integer activations.
    pub(crate) fn takes_integers(&self) -> bool {
        self.integers.is_some()
    }

    /// The products of a group with a panel of integers, or with several of the first width that follow each other:
    /// `tile` is (row of the panels, weight row).
    pub(crate) fn multiply_integers(
        &self,
        group: &[u8],
        columns: usize,
        panel: &[u8],
        tile: &mut [[f32; GROUP]],
    ) {
        assert_eq!(group.len(), (self.group_bytes)(columns), "a group of {columns} columns");
        assert_eq!(panel.len(), tile.len() * columns / BLOCK * PANEL_BLOCK_BYTES, "an integer panel");
        if let Some(tiles) = self.tiles.filter(|_| tile.len().is_multiple_of(WIDTHS[0])) {
            let count = tile.len() / WIDTHS[0];
            // SAFETY: as below.
            return unsafe {
                tiles(group.as_ptr(), columns, panel.as_ptr(), count, tile.as_mut_ptr().cast())
            };
        }
        let multiply = self.integers.expect("a quantised type")[self.width_index(tile.len())];
        // SAFETY: the lengths are those that the kernel reads and writes; tables are handed out only after
        // `Simd::assert_present`.
        unsafe { multiply(group.as_ptr(), columns, panel.as_ptr(), tile.as_mut_ptr().cast()) }
    }

    /// Adds the products of a group with a panel of floats to `tile`.
    pub(crate) fn multiply_floats(
        &self,
        group: &[u8],
        columns: usize,
        panel: &[f32],
        tile: &mut [[f32; GROUP]],
    ) {
        assert_eq!(group.len(), (self.group_bytes)(columns), "a group of {columns} columns");
        assert_eq!(panel.len(), tile.len() * columns.next_multiple_of(2), "a float panel");
        let multiply = self.floats.expect("a float type")[self.width_index(tile.len())];
        // SAFETY: as above.
        unsafe { multiply(group.as_ptr(), columns, panel.as_ptr().cast(), tile.as_mut_ptr().cast()) }
    }

    /// Expands some columns of a group: (column, row). `first` is a multiple of 32, and so is the number of columns
    /// unless they are the last ones.
    pub(crate) fn dequantize(&self, group: &[u8], columns: usize, first: usize, out: &mut [[f32; GROUP]]) {
        assert_eq!(group.len(), (self.group_bytes)(columns), "a group of {columns} columns");
        assert!(first.is_multiple_of(BLOCK) && first + out.len() <= columns, "columns of a group");
        assert!(out.len().is_multiple_of(BLOCK) || first + out.len() == columns, "whole blocks");
        // SAFETY: as above.
        unsafe { (self.dequantize)(group.as_ptr(), columns, first, out.len(), out.as_mut_ptr().cast()) }
    }

    fn width_index(&self, width: usize) -> usize {
        assert!(width <= self.width_max);
        let narrow = &WIDTHS[WIDTHS.len() - NARROW..];
        narrow.iter().position(|&possible| possible == width).expect("a width of panels")
    }
}

/// The kernels of a type at one level, compiled for its features.
macro_rules! kernels {
    ($lanes:ty, $features:literal, quantised $format:ty) => {
        $crate::cpu::quant::packed::kernels!(
            $lanes, $features, quantised, packed::integers::<$lanes>, expand, $format
        )
    };
    ($lanes:ty, $features:literal, float $format:ty) => {
        $crate::cpu::quant::packed::kernels!(
            $lanes, $features, float, packed::floats::<$lanes>, widen, $format
        )
    };
    ($lanes:ty, $features:literal, tiles quantised $format:ty) => {{
        #[target_feature(enable = $features)]
        unsafe fn multiply_all(
            group: *const u8,
            columns: usize,
            panels: *const u8,
            count: usize,
            tile: *mut f32,
        ) {
            // SAFETY: as the caller's.
            unsafe { $crate::cpu::quant::tiles::multiply::<$format>(group, columns, panels, count, tile) }
        }
        $crate::cpu::quant::packed::kernels!($lanes, $features, quantised $format).with_tiles(multiply_all)
    }};
    ($lanes:ty, $features:literal, tiles float $format:ty) => {
        $crate::cpu::quant::packed::kernels!($lanes, $features, float $format)
    };
    ($products:ty, $features:literal, bytes quantised $format:ty) => {
        $crate::cpu::quant::packed::kernels!(
            $crate::cpu::quant::Neon<8>, $features, quantised, bytes::integers::<$products>, expand, $format
        )
    };
    ($products:ty, $features:literal, bytes float $format:ty) => {
        $crate::cpu::quant::packed::kernels!($crate::cpu::quant::Neon<8>, $features, float $format)
    };
    ($lanes:ty, $features:literal, $make:ident, $module:ident::$multiply:ident::<$with:ty>, $expand:ident, $format:ty) => {{
        #[target_feature(enable = $features)]
        unsafe fn multiply<const N: usize>(
            group: *const u8,
            columns: usize,
            panel: *const u8,
            tile: *mut f32,
        ) {
            // SAFETY: as the caller's.
            unsafe {
                $crate::cpu::quant::$module::$multiply::<$with, $format, N>(group, columns, panel, tile)
            }
        }
        #[target_feature(enable = $features)]
        unsafe fn dequantize(group: *const u8, columns: usize, first: usize, count: usize, out: *mut f32) {
            // SAFETY: as the caller's.
            unsafe {
                $crate::cpu::quant::packed::$expand::<$lanes, $format>(group, columns, first, count, out)
            }
        }
        $crate::cpu::quant::packed::Kernels::$make::<$lanes, $format>(
            dequantize,
            [multiply::<8>, multiply::<4>, multiply::<2>, multiply::<1>],
        )
    }};
}

/// The kernels of a type at every level that has them.
macro_rules! packed_kernels {
    ($simd:expr, $kind:ident $format:ty) => {{
        use $crate::cpu::quant::packed::{Kernels, kernels};
        match $simd {
            $crate::cpu::quant::Simd::Scalar => None,
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::quant::Simd::Avx2 => {
                static AVX2: Kernels =
                kernels!($crate::cpu::quant::avx2::Avx2, "avx2,fma,f16c", $kind $format);
                Some(&AVX2)
            }
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::quant::Simd::Avx512 => {
                static AVX512: Kernels = kernels!(
                    $crate::cpu::quant::avx512::Avx512,
                    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni",
                    $kind $format
                );
                Some(&AVX512)
            }
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::quant::Simd::Amx => {
                static AMX: Kernels = kernels!(
                    $crate::cpu::quant::avx512::Avx512,
                    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni",
                    tiles $kind $format
                );
                Some(&AMX)
            }
            #[cfg(target_arch = "aarch64")]
            $crate::cpu::quant::Simd::Neon => {
            static NEON: Kernels = kernels!($crate::cpu::quant::Neon<4>, "neon", $kind $format);
                Some(&NEON)
            }
            #[cfg(target_arch = "aarch64")]
            $crate::cpu::quant::Simd::Dotprod => {
                static DOTPROD: Kernels =
                kernels!($crate::cpu::quant::bytes::Dotprod, "neon,dotprod", bytes $kind $format);
                Some(&DOTPROD)
            }
            #[cfg(target_arch = "aarch64")]
            $crate::cpu::quant::Simd::I8mm => {
                static I8MM: Kernels =
                kernels!($crate::cpu::quant::bytes::I8mm, "neon,dotprod,i8mm", bytes $kind $format);
                Some(&I8MM)
            }
        }
    }};
}
pub(super) use {kernels, packed_kernels};

impl Kernels {
    pub(super) const fn quantised<L: Lanes, F: Packed>(
        dequantize: unsafe fn(*const u8, usize, usize, usize, *mut f32),
        integers: [Multiply; NARROW],
    ) -> Kernels {
        Kernels {
            group_bytes: quantised_bytes::<F>,
            pack: pack_quantised::<F>,
            dequantize,
            integers: Some(integers),
            tiles: None,
            floats: None,
            width_max: L::WIDTH_MAX,
        }
    }

    /// The same with tiles for the widest panels.
    #[cfg(target_arch = "x86_64")]
    pub(super) const fn with_tiles(self, tiles: MultiplyAll) -> Kernels {
        Kernels { tiles: Some(tiles), width_max: WIDTHS[0], ..self }
    }

    pub(super) const fn float<L: Lanes, F: PackedFloat>(
        dequantize: unsafe fn(*const u8, usize, usize, usize, *mut f32),
        floats: [Multiply; NARROW],
    ) -> Kernels {
        Kernels {
            group_bytes: float_bytes::<F>,
            pack: pack_float::<F>,
            dequantize,
            integers: None,
            tiles: None,
            floats: Some(floats),
            width_max: L::WIDTH_MAX,
        }
    }
}

/// Bytes of the codes of a group.
pub(super) fn code_bytes<F: Packed>(columns: usize) -> usize {
    columns / F::VALUES * F::WORDS * GROUP * size_of::<u32>()
}

fn quantised_bytes<F: Packed>(columns: usize) -> usize {
    (code_bytes::<F>(columns) + columns / F::VALUES * F::SCALE_BYTES).next_multiple_of(64)
}

fn float_bytes<F: PackedFloat>(columns: usize) -> usize {
    (columns.next_multiple_of(2) / F::VALUES * F::PACKED_BYTES).next_multiple_of(64)
}

fn pack_quantised<F: Packed>(rows: &mut dyn Iterator<Item = &[u8]>, columns: usize, out: &mut [u8]) {
    let (codes, scales) = out.split_at_mut(code_bytes::<F>(columns));
    let words: &mut [[u32; GROUP]] = bytemuck::cast_slice_mut(codes);
    for (row, stored) in rows.enumerate() {
        let blocks: &[F] = bytemuck::cast_slice(stored);
        assert_eq!(blocks.len() * F::VALUES, columns, "a row of {columns} columns");
        let places = words.chunks_exact_mut(F::WORDS).zip(scales.chunks_exact_mut(F::SCALE_BYTES));
        for (block, (words, scales)) in blocks.iter().zip(places) {
            block.pack(row, words, scales);
        }
    }
}

fn pack_float<F: PackedFloat>(rows: &mut dyn Iterator<Item = &[u8]>, columns: usize, out: &mut [u8]) {
    for (row, stored) in rows.enumerate() {
        assert_eq!(stored.len(), columns / F::VALUES * F::STORED_BYTES, "a row of {columns} columns");
        F::pack(stored, row, out);
    }
}

/// How far ahead of its reading a kernel asks for weights. With few activation rows it streams them from memory, and
/// the processor's own prefetching stops at each page and starts anew with each group.
pub(crate) const AHEAD_BYTES: usize = 16 << 10;

/// Asks for `lines` lines of 64 bytes. They may lie beyond the weight: asking never faults.
#[inline(always)]
pub(super) unsafe fn ask_ahead<L: Lanes>(from: *const u8, lines: usize) {
    for line in 0..lines {
        // SAFETY: the caller has L's instructions; the address is not read.
        unsafe { L::prefetch(from.wrapping_add(AHEAD_BYTES + line * 64)) }
    }
}

/// A kernel of integers. Each quarter of a block is unpacked once for all `N` activation rows.
#[inline(always)]
pub(super) unsafe fn integers<L: Lanes, F: Packed, const N: usize>(
    group: *const u8,
    columns: usize,
    panel: *const u8,
    tile: *mut f32,
) {
    if N > L::WIDTH_MAX {
        // Never called: spares the compiler a kernel that would not fit the registers.
        return;
    }
    // SAFETY: the caller has a group and a panel of `columns` columns, a tile of N x 16, and L's instructions.
    unsafe {
        let scales = group.add(code_bytes::<F>(columns));
        let mut sums = [L::splat(&0.0); N];
        let mut panel = panel;
        let mut block = 0;
        while block < columns / BLOCK {
            let lines = F::WORDS * BLOCK / F::VALUES;
            ask_ahead::<L>(group.add(block * lines * 64), lines * F::SHARING);
            add_block::<L, F, N, 0>(&mut sums, group, scales, block, panel);
            panel = panel.add(N * PANEL_BLOCK_BYTES);
            if F::SHARING == 2 {
                add_block::<L, F, N, 1>(&mut sums, group, scales, block, panel);
                panel = panel.add(N * PANEL_BLOCK_BYTES);
            }
            block += F::SHARING;
        }
        for n in 0..N {
            L::store(sums[n], tile.add(n * GROUP));
        }
    }
}

/// Adds the products of block `block + PART`.
#[inline(always)]
unsafe fn add_block<L: Lanes, F: Packed, const N: usize, const PART: usize>(
    sums: &mut [L::Floats; N],
    codes: *const u8,
    scales: *const u8,
    block: usize,
    panel: *const u8,
) {
    // SAFETY: as in `integers`: the block is one of the group's, and `panel` points at its activations.
    unsafe {
        let values = panel.cast::<i16>();
        let activation_scales = panel.add(N * BLOCK * size_of::<i16>()).cast::<f32>();
        let mut integers = [L::no_ints(); N];
        add_quarter::<L, F, N, PART>(&mut integers, codes, block, 0, values);
        add_quarter::<L, F, N, PART>(&mut integers, codes, block, 1, values);
        if F::HALVES {
            let scale = F::scale::<L>(scales, block + PART, 0);
            add_scaled::<L, N>(sums, &integers, scale, activation_scales);
            if F::MIN {
                let min = F::min::<L>(scales, block + PART, 0);
                add_scaled::<L, N>(sums, &half_sums::<L, N>(values, 0), min, activation_scales);
            }
            integers = [L::no_ints(); N];
        }
        add_quarter::<L, F, N, PART>(&mut integers, codes, block, 2, values);
        add_quarter::<L, F, N, PART>(&mut integers, codes, block, 3, values);
        let scale = F::scale::<L>(scales, block + PART, 1);
        add_scaled::<L, N>(sums, &integers, scale, activation_scales);
        if F::MIN && F::HALVES {
            let min = F::min::<L>(scales, block + PART, 1);
            add_scaled::<L, N>(sums, &half_sums::<L, N>(values, 1), min, activation_scales);
        } else if F::MIN {
            let min = F::min::<L>(scales, block + PART, 1);
            for n in 0..N {
                sums[n] = L::fma(min, L::splat(activation_scales.add(N + n)), sums[n]);
            }
        }
    }
}

#[inline(always)]
unsafe fn add_quarter<L: Lanes, F: Packed, const N: usize, const PART: usize>(
    integers: &mut [L::Ints; N],
    codes: *const u8,
    block: usize,
    quarter: usize,
    values: *const i16,
) {
    // SAFETY: as in `add_block`.
    unsafe {
        let pairs = F::quarter::<L, PART>(codes, block, quarter);
        let places = F::PAIRS[quarter];
        for n in 0..N {
            integers[n] = L::dot(integers[n], pairs[0], values.add(n * BLOCK + places[0] * 2));
        }
        for n in 0..N {
            integers[n] = L::dot(integers[n], pairs[1], values.add(n * BLOCK + places[1] * 2));
        }
        for n in 0..N {
            integers[n] = L::dot(integers[n], pairs[2], values.add(n * BLOCK + places[2] * 2));
        }
        for n in 0..N {
            integers[n] = L::dot(integers[n], pairs[3], values.add(n * BLOCK + places[3] * 2));
        }
    }
}

/// The sums of 16 activations of each row, in every lane: panels have those of 32.
#[inline(always)]
unsafe fn half_sums<L: Lanes, const N: usize>(values: *const i16, half: usize) -> [L::Ints; N] {
    static ONES: [i16; 2 * GROUP] = [1; 2 * GROUP];
    // SAFETY: as in `add_block`.
    unsafe {
        let ones = L::pairs(ONES.as_ptr().cast());
        let mut sums = [L::no_ints(); N];
        for n in 0..N {
            for pair in half * 8..half * 8 + 8 {
                sums[n] = L::dot(sums[n], ones, values.add(n * BLOCK + pair * 2));
            }
        }
        sums
    }
}

#[inline(always)]
unsafe fn add_scaled<L: Lanes, const N: usize>(
    sums: &mut [L::Floats; N],
    integers: &[L::Ints; N],
    scale: L::Floats,
    activation_scales: *const f32,
) {
    // SAFETY: as in `add_block`.
    unsafe {
        for n in 0..N {
            let product = L::mul(L::to_floats(integers[n]), L::splat(activation_scales.add(n)));
            sums[n] = L::fma(scale, product, sums[n]);
        }
    }
}

/// A kernel of floats: one multiplication and addition for each column, in order.
#[inline(always)]
pub(super) unsafe fn floats<L: Lanes, F: PackedFloat, const N: usize>(
    group: *const u8,
    columns: usize,
    panel: *const u8,
    tile: *mut f32,
) {
    if N > L::WIDTH_MAX {
        return;
    }
    if N > L::SUMS_MAX {
        const { assert!(L::SUMS_MAX >= 4 || N <= L::SUMS_MAX, "four sums fit") };
        for first in (0..N).step_by(4) {
            // SAFETY: as the caller's; the rows of these sums are among the panel's and the tile's.
            unsafe {
                float_sums::<L, F, N, 4>(
                    group,
                    columns,
                    panel.cast::<f32>().add(first),
                    tile.add(first * GROUP),
                )
            }
        }
    } else {
        // SAFETY: as the caller's.
        unsafe { float_sums::<L, F, N, N>(group, columns, panel.cast(), tile) }
    }
}

/// The sums of `M` rows of a panel of `N`.
#[inline(always)]
unsafe fn float_sums<L: Lanes, F: PackedFloat, const N: usize, const M: usize>(
    group: *const u8,
    columns: usize,
    mut panel: *const f32,
    tile: *mut f32,
) {
    // SAFETY: the caller has a group and a panel of `columns` columns (even, zeros at the end), a tile of M x 16, and
    // L's instructions.
    unsafe {
        let mut sums = [L::splat(&0.0); M];
        for n in 0..M {
            sums[n] = L::floats(tile.add(n * GROUP));
        }
        for pair in 0..columns.div_ceil(2) {
            let bytes = 2 * F::PACKED_BYTES / F::VALUES;
            ask_ahead::<L>(group.add(pair * bytes), bytes.div_ceil(64));
            let [first, second] = F::two::<L>(group, pair);
            for n in 0..M {
                sums[n] = L::fma(first, L::splat(panel.add(n)), sums[n]);
            }
            for n in 0..M {
                sums[n] = L::fma(second, L::splat(panel.add(N + n)), sums[n]);
            }
            panel = panel.add(2 * N);
        }
        for n in 0..M {
            L::store(sums[n], tile.add(n * GROUP));
        }
    }
}

/// Expands some columns of a quantised group.
#[inline(always)]
pub(super) unsafe fn expand<L: Lanes, F: Packed>(
    group: *const u8,
    columns: usize,
    first: usize,
    count: usize,
    out: *mut f32,
) {
    // SAFETY: the caller has a group of `columns` columns, room for `count` x 16 values, and L's instructions.
    unsafe {
        let scales = group.add(code_bytes::<F>(columns));
        for index in 0..count / BLOCK {
            let block = first / BLOCK + index;
            let out = out.add(index * BLOCK * GROUP);
            for quarter in 0..4 {
                let even = block / F::SHARING * F::SHARING;
                let pairs = if block == even {
                    F::quarter::<L, 0>(group, even, quarter)
                } else {
                    F::quarter::<L, 1>(group, even, quarter)
                };
                for (pairs, place) in pairs.into_iter().zip(F::PAIRS[quarter]) {
                    // Pair 2w + s holds (4w + s, 4w + s + 2).
                    let at = place / 2 * 4 + place % 2;
                    for (at, code) in [(at, L::first(pairs)), (at + 2, L::second(pairs))] {
                        let half = if F::HALVES { at / 16 } else { 1 };
                        let mut value = L::mul(F::scale::<L>(scales, block, half), L::to_floats(code));
                        if F::MIN {
                            value = L::add(value, F::min::<L>(scales, block, half));
                        }
                        L::store(value, out.add(at * GROUP));
                    }
                }
            }
        }
    }
}

/// Widens some columns of a float group.
#[inline(always)]
pub(super) unsafe fn widen<L: Lanes, F: PackedFloat>(
    group: *const u8,
    _columns: usize,
    first: usize,
    count: usize,
    out: *mut f32,
) {
    // SAFETY: the caller has a group that holds these columns (and one more if they are odd), room for `count` x 16
    // values, and L's instructions.
    unsafe {
        for column in 0..count {
            let [even, odd] = F::two::<L>(group, (first + column) / 2);
            L::store(if column % 2 == 0 { even } else { odd }, out.add(column * GROUP));
        }
    }
}

/// The file's words of 4-bit codes where byte i of 16 holds code i and, above it, code i + 16.
pub(super) const NIBBLE_PAIRS: [[usize; 4]; 4] =
    [[0, 8, 1, 9], [2, 10, 3, 11], [4, 12, 5, 13], [6, 14, 7, 15]];
/// Registers in the order of their pairs.
pub(super) const STRAIGHT_PAIRS: [[usize; 4]; 4] =
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]];

/// The four nibbles of each integer of a word.
#[inline(always)]
pub(super) unsafe fn nibbles<L: Lanes>(word: *const u8) -> [L::Pairs; 4] {
    // SAFETY: the caller has a word of sixteen rows, and L's instructions.
    unsafe {
        let x = L::pairs(word);
        [L::and(x, 15), L::and(L::shr::<4>(x), 15), L::and(L::shr::<8>(x), 15), L::shr::<12>(x)]
    }
}

/// The low (`PART` 0) or the high nibbles of each byte of two words.
#[inline(always)]
pub(super) unsafe fn byte_nibbles<L: Lanes, const PART: usize>(words: *const u8) -> [L::Pairs; 4] {
    // SAFETY: the caller has two words of sixteen rows, and L's instructions.
    unsafe {
        let (x, y) = (L::pairs(words), L::pairs(words.add(64)));
        if PART == 0 {
            [L::and(x, 15), L::and(L::shr::<8>(x), 15), L::and(y, 15), L::and(L::shr::<8>(y), 15)]
        } else {
            [L::and(L::shr::<4>(x), 15), L::shr::<12>(x), L::and(L::shr::<4>(y), 15), L::shr::<12>(y)]
        }
    }
}

/// What codes stand for.
#[inline(always)]
pub(super) unsafe fn looked_up<L: Lanes>([a, b, c, d]: [L::Pairs; 4], table: &[i8; 16]) -> [L::Pairs; 4] {
    // SAFETY: the caller has L's instructions, and codes below 16.
    unsafe { [L::lookup(a, table), L::lookup(b, table), L::lookup(c, table), L::lookup(d, table)] }
}

/// 32 bits, of which bit i belongs to value i, in the order of pairs: the first of each pair in the low half.
#[inline]
pub(super) fn paired_bits(bits: u32) -> u32 {
    // Of each four bits the low two go to the low half of the word, the high two to the high half.
    let squeeze = |mut bits: u32| {
        bits = (bits | bits >> 2) & 0x0f0f_0f0f;
        bits = (bits | bits >> 4) & 0x00ff_00ff;
        (bits | bits >> 8) & 0xffff
    };
    squeeze(bits & 0x3333_3333) | squeeze(bits >> 2 & 0x3333_3333) << 16
}

/// Four bytes as the word that a register holds.
#[inline]
pub(super) fn word(bytes: &[u8; 4]) -> u32 {
    u32::from_le_bytes(*bytes)
}

/// Writes a row's f16 at place `index` of a block's scales.
#[inline]
pub(super) fn store_half(scales: &mut [u8], index: usize, row: usize, half: [u8; 2]) {
    scales[(index * GROUP + row) * 2..][..2].copy_from_slice(&half);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_and_values_meet_in_pairs() {
        for index in 0..BLOCK {
            let (pair, second) = (place(index) / 2, place(index) % 2);
            assert_eq!(paired_bits(1 << index), 1 << (pair + 16 * second), "{index}");
        }
    }
}
