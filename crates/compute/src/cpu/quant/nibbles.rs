//! What the formats have in common whose blocks are one scale and 32 codes of four bits: value = scale * table\[code\].

#[cfg(target_arch = "aarch64")]
use super::bytes;
use super::lanes::Lanes;
use super::packed::{GROUP, Kernels, NIBBLE_PAIRS, Packed, looked_up, nibbles, store_half, word};
use super::plain::{self, Plain};
use super::{Format, Run, Runs, blocks_and_runs};
use fornax_format::DType;

/// The scale of such a block as it lies in the file: bytes, so that codes follow without a gap.
pub(super) trait Scale: bytemuck::Pod {
    /// What the codes stand for.
    const TABLE: [i8; 16];

    /// What the table's integers are multiplied by.
    fn value(&self) -> f32;
    /// The same in two bytes that [`Scale::load`] reads.
    fn packed(&self) -> [u8; 2];
    /// Those of sixteen rows.
    ///
    /// # Safety
    /// As [`Packed::scale`].
    unsafe fn load<L: Lanes>(scales: *const u8) -> L::Floats;
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Block<S> {
    scale: S,
    /// Byte i holds code i in its low half and code i + 16 in its high half.
    codes: [u8; 16],
}

// SAFETY: zeros are a scale, since it is `Pod`, and bytes.
unsafe impl<S: Scale> bytemuck::Zeroable for Block<S> {}
// SAFETY: in the order of C, plain bytes behind a scale that is `Pod`; there is no gap, or this does not compile.
unsafe impl<S: Scale> bytemuck::Pod for Block<S> {}

impl<S: Scale> Block<S> {
    const HAS_NO_GAP: () = assert!(align_of::<S>() == 1 && size_of::<Block<S>>() == size_of::<S>() + 16);
}

impl<S: Scale> Plain for Block<S> {
    fn scale(&self) -> f32 {
        self.scale.value()
    }

    #[inline]
    fn codes(&self) -> [i8; 32] {
        std::array::from_fn(|i| S::TABLE[usize::from(self.codes[i % 16] >> (i / 16 * 4) & 15)])
    }
}

fn read_runs<S: Scale>(weights: &[u8], out: &mut [Run]) {
    for (block, out) in blocks_and_runs::<Block<S>, 2>(weights, out) {
        for (half, run) in out.iter_mut().enumerate() {
            let codes = block.codes.map(|byte| byte >> (half * 4) & 15);
            *run = Run { codes, scale: block.scale.value(), min: 0.0 };
        }
    }
}

/// What can be done with such a format.
pub(super) fn format<S: Scale>(dtype: DType, kernels: Option<&'static Kernels>) -> Format {
    let () = Block::<S>::HAS_NO_GAP;
    let runs = Some(Runs { table: S::TABLE, mins: false, read: read_runs::<S> });
    plain::format::<Block<S>>(dtype, kernels, runs)
}

impl<S: Scale> Packed for Block<S> {
    const VALUES: usize = 32;
    const WORDS: usize = 4;
    const SCALE_BYTES: usize = 32;
    const PAIRS: [[usize; 4]; 4] = NIBBLE_PAIRS;

    fn pack(&self, row: usize, words: &mut [[u32; GROUP]], scales: &mut [u8]) {
        for (words, bytes) in words.iter_mut().zip(self.codes.as_chunks().0) {
            words[row] = word(bytes);
        }
        store_half(scales, 0, row, self.scale.packed());
    }

    #[inline(always)]
    unsafe fn quarter<L: Lanes, const PART: usize>(
        codes: *const u8,
        block: usize,
        quarter: usize,
    ) -> [L::Pairs; 4] {
        // SAFETY: as the caller's.
        unsafe { looked_up::<L>(nibbles::<L>(codes.add((block * 4 + quarter) * 64)), &S::TABLE) }
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
            let word = bytes::word::<FOUR>(codes.add((block * 4 + quarter) * 64));
            bytes::looked_up(bytes::nibbles(word), &S::TABLE)
        }
    }

    #[inline(always)]
    unsafe fn scale<L: Lanes>(scales: *const u8, block: usize, _half: usize) -> L::Floats {
        // SAFETY: as the caller's.
        unsafe { S::load::<L>(scales.add(block * 32)) }
    }
}
