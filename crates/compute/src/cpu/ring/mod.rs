//! Exact products of bytes and words mod 2^32.
//!
//! The specification is [`multiply_stored`]. Vector code packs sixteen weight rows side by side, four columns of each
//! at a time (a *quad*: 64 bytes), and lays activations out in panels of a few rows, quad by quad, as limbs that fit
//! its multiplication: sums of products with a limb wrap mod 2^32, as they may, and are shifted into place once at the
//! end. Threads divide the weight rows, so that each weight byte is read once: one row of activations runs as fast as
//! memory is read.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use super::disjoint::Disjoint;
use super::memory::{Block, Ledger};
use super::pool::Pool;
use super::{NAME, Simd, memory_bytes};
use crate::{Error, Purpose, Ring, Usage, check_weights, check_words};

/// Weight rows that lie side by side.
const GROUP: usize = 16;
/// Columns of a row that lie side by side, and are multiplied at once.
const QUAD: usize = 4;
/// Bytes of a quad of one row of activations, whatever the limbs.
const QUAD_BYTES: usize = QUAD * size_of::<u32>();
/// The widest panel of any kernel.
const WIDTH_MAX: usize = 16;

/// Whether the processor has tiles of bytes and the system lets this process use them.
#[cfg(target_arch = "x86_64")]
pub(super) fn has_tiles() -> bool {
    amx::present()
}
/// Room for panels: as much as the second cache of most processors holds. More rows go in several passes.
const PANEL_BYTES: usize = 1 << 20;
/// Below this many words the panels are laid out by the caller alone: waking others takes longer.
const GRAIN_WORDS: usize = 8192;

/// How a [`CpuRing`] is made.
#[derive(Clone, Debug)]
pub struct CpuRingOptions {
    /// Threads that compute, the caller's included.
    pub threads: usize,
    /// The vector instructions to use.
    pub simd: Simd,
    /// Whether to use matrix tiles beside AVX-512, where the processor has them and the system grants them.
    pub tiles: bool,
    /// The most bytes to allocate; `None` means what the machine has.
    pub memory_limit: Option<u64>,
}

impl Default for CpuRingOptions {
    /// Every core that this process may use, the best instructions.
    fn default() -> CpuRingOptions {
        let cpu = super::CpuOptions::default();
        CpuRingOptions { threads: cpu.threads, simd: cpu.simd, tiles: true, memory_limit: None }
    }
}

/// Ring products on the CPU.
pub struct CpuRing {
    kernel: Option<&'static Kernel>,
    ledger: Arc<Ledger>,
    pool: Pool,
    panels: RefCell<Block>,
}

/// What one level of vector instructions does.
struct Kernel {
    /// The widths that panels have, widest first.
    widths: &'static [usize],
    /// A group times a panel, for each width.
    tiles: &'static [Tile],
    /// `lay_out(x, columns, width, panel)` writes `width` rows as limbs, and zeros behind them up to whole blocks.
    lay_out: fn(&[u32], usize, usize, &mut [[u8; QUAD_BYTES]]),
    /// Quads of which panels are whole multiples.
    block: usize,
}

/// `tile(group, panel, out)`: sums over all quads of the group and the panel, both of whole blocks.
type Tile = fn(&[[u8; GROUP * QUAD]], &[[u8; QUAD_BYTES]], &mut [[u32; GROUP]]);

/// Bytes on the CPU.
pub struct RingMatrix {
    rows: usize,
    columns: usize,
    /// As they came for scalar code; groups of sixteen rows for vectors, zeros where rows or columns are missing.
    block: Block,
}

impl fmt::Debug for RingMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RingMatrix({} x {})", self.rows, self.columns)
    }
}

impl CpuRing {
    /// Starts the threads and allocates the workspace.
    pub fn new(options: &CpuRingOptions) -> Result<CpuRing, Error> {
        let CpuRingOptions { threads, simd, tiles, memory_limit } = *options;
        // Only x86-64 has them.
        let _ = tiles;
        if !Simd::present().any(|present| present == simd) {
            return Err(Error::Unsupported { what: simd.name().to_owned(), backend: NAME });
        }
        if threads == 0 {
            return Err(Error::Unsupported { what: "a ring of 0 threads".to_owned(), backend: NAME });
        }
        let kernel = match simd {
            Simd::Scalar => None,
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => Some(&avx2::KERNEL),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 | Simd::Amx if tiles && amx::present() => Some(&amx::KERNEL),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 | Simd::Amx => Some(&avx512::KERNEL),
            #[cfg(target_arch = "aarch64")]
            Simd::Neon | Simd::Dotprod | Simd::I8mm => Some(&neon::KERNEL),
        };
        let ledger = Ledger::new(memory_limit.unwrap_or_else(memory_bytes));
        let panels = Block::new(&ledger, Purpose::Workspace, PANEL_BYTES as u64)?;
        let pool = Pool::new(threads).map_err(|reason| Error::Threads { threads, reason })?;
        Ok(CpuRing { kernel, ledger, pool, panels: RefCell::new(panels) })
    }
}

impl Ring for CpuRing {
    type Matrix = RingMatrix;

    fn name(&self) -> &'static str {
        NAME
    }

    fn matrix(&self, rows: usize, columns: usize, weights: &[i8]) -> Result<RingMatrix, Error> {
        check_weights(rows, columns, weights)?;
        let quads = columns.div_ceil(QUAD);
        if self.kernel.is_some_and(|kernel| kernel.quads(columns) > PANEL_BYTES / QUAD_BYTES) {
            let what = format!("a ring product of {columns} columns");
            return Err(Error::Unsupported { what, backend: NAME });
        }
        let weights: &[u8] = bytemuck::cast_slice(weights);
        let bytes = match self.kernel {
            None => weights.len(),
            // The last group's last block is read whole.
            Some(kernel) => (rows.div_ceil(GROUP) * quads + kernel.quads(columns) - quads) * GROUP * QUAD,
        };
        let mut block = Block::new(&self.ledger, Purpose::Weights, bytes as u64)?;
        if self.kernel.is_none() {
            block.bytes_mut().copy_from_slice(weights);
        } else if bytes > 0 {
            let group_bytes = quads * GROUP * QUAD;
            let (packed, behind) = block.bytes_mut().split_at_mut(rows.div_ceil(GROUP) * group_bytes);
            behind.fill(0);
            let out = Disjoint::new(packed);
            self.pool.for_each(rows.div_ceil(GROUP), |_, groups| {
                for group in groups {
                    // SAFETY: the pool hands out each group once.
                    let out = unsafe { out.part(group * group_bytes..(group + 1) * group_bytes) };
                    let first = group * GROUP * columns;
                    pack(&weights[first..weights.len().min(first + GROUP * columns)], columns, out);
                }
            });
        }
        Ok(RingMatrix { rows, columns, block })
    }

    fn multiply(&self, matrix: &RingMatrix, x: &[u32], tokens: usize, out: &mut [u32]) -> Result<(), Error> {
        let (rows, columns) = (matrix.rows, matrix.columns);
        check_words((rows, columns), tokens, x, out)?;
        if out.is_empty() || columns == 0 {
            out.fill(0);
            return Ok(());
        }
        match self.kernel {
            None => multiply_stored(bytemuck::cast_slice(matrix.block.bytes()), columns, x, out),
            Some(kernel) => {
                let pass = PANEL_BYTES / QUAD_BYTES / kernel.quads(columns);
                let widest = kernel.widths[0];
                let pass = if pass < widest { pass } else { pass / widest * widest };
                for (x, out) in x.chunks(pass * columns).zip(out.chunks_mut(pass * rows)) {
                    self.multiply_packed(kernel, matrix, x, out);
                }
            }
        }
        Ok(())
    }

    fn usage(&self) -> Usage {
        self.ledger.usage()
    }
}

/// The specification: a product at a time.
fn multiply_stored(weights: &[i8], columns: usize, x: &[u32], out: &mut [u32]) {
    let rows = weights.chunks(columns);
    for (x, out) in x.chunks(columns).zip(out.chunks_mut(rows.len())) {
        for (out, row) in out.iter_mut().zip(rows.clone()) {
            let product =
                |(&weight, &word): (&i8, &u32)| i32::from(weight).cast_unsigned().wrapping_mul(word);
            *out = row.iter().zip(x).map(product).fold(0, u32::wrapping_add);
        }
    }
}

/// Up to sixteen rows side by side.
fn pack(rows: &[u8], columns: usize, out: &mut [u8]) {
    out.fill(0);
    for (row, values) in rows.chunks(columns).enumerate() {
        for (quad, values) in out.chunks_exact_mut(GROUP * QUAD).zip(values.chunks(QUAD)) {
            quad[row * QUAD..][..values.len()].copy_from_slice(values);
        }
    }
}

impl Kernel {
    /// Quads of a panel's row.
    fn quads(&self, columns: usize) -> usize {
        columns.div_ceil(QUAD).next_multiple_of(self.block)
    }

    /// Rows cut into panels, widest first: (first row, index of the width).
    fn panels(&self, rows: usize) -> impl Iterator<Item = (usize, usize)> {
        let mut first = 0;
        std::iter::from_fn(move || {
            let index = self.widths.iter().position(|width| first + width <= rows)?;
            first += self.widths[index];
            Some((first - self.widths[index], index))
        })
    }
}

/// Rows of a panel quad by quad: one quad of each row, then the next.
fn quad_panel(
    x: &[u32],
    columns: usize,
    width: usize,
    panel: &mut [[u8; QUAD_BYTES]],
    limbs: impl Fn(&[u32; QUAD], &mut [u8; QUAD_BYTES]),
) {
    for (row, x) in x.chunks(columns).enumerate() {
        let (whole, rest) = x.as_chunks();
        let mut places = panel.iter_mut().skip(row).step_by(width);
        for (words, place) in whole.iter().zip(&mut places) {
            limbs(words, place);
        }
        if !rest.is_empty()
            && let Some(place) = places.next()
        {
            let mut words = [0; QUAD];
            words[..rest.len()].copy_from_slice(rest);
            limbs(&words, place);
        }
        places.for_each(|place| place.fill(0));
    }
}

impl CpuRing {
    /// A pass whose panels fit the room for them.
    fn multiply_packed(&self, kernel: &Kernel, matrix: &RingMatrix, x: &[u32], out: &mut [u32]) {
        let (rows, columns) = (matrix.rows, matrix.columns);
        let (stored, quads, tokens) = (columns.div_ceil(QUAD), kernel.quads(columns), x.len() / columns);
        let mut room = self.panels.borrow_mut();
        let room: &mut [[u8; QUAD_BYTES]] = &mut room.bytes_mut().as_chunks_mut().0[..tokens * quads];
        let parts = Disjoint::new(room);
        let lay_out = |first: usize, index: usize| {
            let width = kernel.widths[index];
            // SAFETY: panels do not overlap, and each is laid out once.
            let panel = unsafe { parts.part(first * quads..(first + width) * quads) };
            (kernel.lay_out)(&x[first * columns..][..width * columns], columns, width, panel);
        };
        if x.len() < GRAIN_WORDS {
            kernel.panels(tokens).for_each(|(first, index)| lay_out(first, index));
        } else {
            let all: Vec<_> = kernel.panels(tokens).collect();
            self.pool.for_each(all.len(), |_, mine| {
                all[mine].iter().for_each(|&(first, index)| lay_out(first, index));
            });
        }

        let groups: &[[u8; GROUP * QUAD]] = matrix.block.bytes().as_chunks().0;
        let (room, out) = (&*room, Disjoint::new(out));
        self.pool.for_each(rows.div_ceil(GROUP), |_, mine| {
            for group in mine {
                let columns = group * GROUP..rows.min((group + 1) * GROUP);
                let group = &groups[group * stored..][..quads];
                for (first, index) in kernel.panels(tokens) {
                    let mut tile = [[0; GROUP]; WIDTH_MAX];
                    let tile = &mut tile[..kernel.widths[index]];
                    let panel = &room[first * quads..][..tile.len() * quads];
                    (kernel.tiles[index])(group, panel, tile);
                    for (row, sums) in tile.iter().enumerate() {
                        let at = (first + row) * rows;
                        // SAFETY: threads have different groups, and a thread stores one row at a time.
                        let out = unsafe { out.part(at + columns.start..at + columns.end) };
                        out.copy_from_slice(&sums[..out.len()]);
                    }
                }
            }
        });
    }
}

/// Two signed limbs of 16 bits: `word = low + high * 2^16` mod 2^32.
fn halves(word: u32) -> [i16; 2] {
    let low = word as i16;
    [low, (word.wrapping_sub(i32::from(low).cast_unsigned()) >> 16) as i16]
}

/// Four low limbs, then four high ones.
fn half_limbs(words: &[u32; QUAD], out: &mut [u8; QUAD_BYTES]) {
    for (at, &word) in words.iter().enumerate() {
        let [low, high] = halves(word).map(i16::to_ne_bytes);
        out[2 * at..][..2].copy_from_slice(&low);
        out[2 * (QUAD + at)..][..2].copy_from_slice(&high);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::run_ring;

    #[test]
    fn every_level_gives_the_exact_product_on_any_number_of_threads() {
        for simd in Simd::present() {
            for (threads, tiles) in [(1, true), (3, true), (2, false)] {
                let options = CpuRingOptions { threads, simd, tiles, memory_limit: None };
                let report = run_ring(&CpuRing::new(&options).unwrap(), &mut |_| ());
                let failed: Vec<String> = report.failed.iter().map(ToString::to_string).collect();
                assert!(report.conforms(), "{simd:?} {threads}:\n{}", failed.join("\n"));
                assert!(report.passed > 150, "only {} cases ran", report.passed);
            }
        }
    }

    /// Right but for one thing.
    struct Wrong(CpuRing, fn(&mut [u32]));

    impl Ring for Wrong {
        type Matrix = RingMatrix;

        fn name(&self) -> &'static str {
            "wrong"
        }

        fn matrix(&self, rows: usize, columns: usize, weights: &[i8]) -> Result<RingMatrix, Error> {
            self.0.matrix(rows, columns, weights)
        }

        fn multiply(
            &self,
            matrix: &RingMatrix,
            x: &[u32],
            tokens: usize,
            out: &mut [u32],
        ) -> Result<(), Error> {
            self.0.multiply(matrix, x, tokens, out)?;
            (self.1)(out);
            Ok(())
        }

        fn usage(&self) -> Usage {
            self.0.usage()
        }
    }

    #[test]
    fn a_ring_that_loses_a_carry_a_sign_or_its_last_row_does_not_conform() {
        let wrongs: [fn(&mut [u32]); 3] = [
            |out| out.iter_mut().for_each(|word| *word &= 0x7fff_ffff),
            |out| out.iter_mut().for_each(|word| *word = word.saturating_add(*word >> 31 << 16)),
            |out| {
                if let [.., last] = out {
                    *last = 0;
                }
            },
        ];
        for wrong in wrongs {
            let ring = CpuRing::new(&CpuRingOptions::default()).unwrap();
            assert!(!run_ring(&Wrong(ring, wrong), &mut |_| ()).conforms());
        }
    }

    #[test]
    fn limbs_make_up_their_word() {
        for word in [0, 1, 0x7fff, 0x8000, 0xffff, 0x7fff_8000, 0x8000_0000, u32::MAX] {
            let [low, high] = halves(word).map(i64::from);
            assert_eq!((low + (high << 16)).rem_euclid(1 << 32), i64::from(word), "{word:#x}");
        }
    }

    #[test]
    fn options_that_cannot_be_had_are_refused() {
        let none = CpuRingOptions { threads: 0, ..CpuRingOptions::default() };
        let refused = CpuRing::new(&none).err().unwrap().to_string();
        assert_eq!(refused, "a ring of 0 threads is not available on cpu");
        let small = CpuRingOptions { memory_limit: Some(1_100_000), ..CpuRingOptions::default() };
        let ring = CpuRing::new(&small).unwrap();
        let refused = ring.matrix(1000, 100, &[0; 100_000]).err().unwrap();
        assert!(matches!(refused, Error::OutOfMemory { purpose: Purpose::Weights, .. }), "{refused}");
    }
}
