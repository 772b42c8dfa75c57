//! Exact products mod 2^32 on the device: `ring.cu` says how.

use std::cell::RefCell;
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;

use fornax_compute::{Error, Purpose, Ring, Usage, check_weights, check_words};

use crate::arena::{Arena, Piece};
use crate::driver::{Arg, CUDA, Device, Launch, Pinned};
use crate::memory::int;
use crate::program::{Key, Programs};

/// A tile of weights, as in ring.cu.
const TILE_ROWS: usize = 16;
const TILE_COLUMNS: usize = 32;
const TILE_BYTES: usize = TILE_ROWS * TILE_COLUMNS;
/// Room for words that go in and come out. More tokens are computed in several passes.
const WORDS_BYTES: usize = 8 << 20;
const OUT_BYTES: usize = 32 << 20;
/// The widest weight and the longest: one token of them fits that room.
const COLUMNS_MAX: usize = WORDS_BYTES / 4;
const ROWS_MAX: usize = OUT_BYTES / 4;
/// Tokens per block where there are many.
const MANY: usize = 16;
/// Warps of such a block; each has 32 rows.
const MANY_WARPS: usize = 4;
/// With more threads than this, copying is the bottleneck.
const THREADS_MAX: usize = 8;

/// How a [`CudaRing`] is made.
#[derive(Clone, Debug, Default)]
pub struct CudaRingOptions {
    /// Which device, as the driver counts them.
    pub device: usize,
    /// The most bytes to allocate; `None` means what is free on the device.
    pub memory_limit: Option<u64>,
    /// Where compiled kernels are kept; `None` compiles them anew each time.
    pub kernel_folder: Option<PathBuf>,
}

/// Ring products on an NVIDIA GPU.
pub struct CudaRing {
    staged: RefCell<Staged>,
    words: Piece,
    limbs: Piece,
    out: Piece,
    programs: Programs,
    arena: Rc<Arena>,
    device: Rc<Device>,
}

/// Pinned memory that the device copies from and to.
struct Staged {
    words: Pinned,
    out: Pinned,
}

/// Bytes on the device.
pub struct CudaRingMatrix {
    rows: usize,
    columns: usize,
    piece: Piece,
}

impl fmt::Debug for CudaRingMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaRingMatrix({} x {})", self.rows, self.columns)
    }
}

impl CudaRing {
    /// Opens the device, allocates the workspace and begins to compile.
    pub fn new(options: &CudaRingOptions) -> Result<CudaRing, Error> {
        let device = Device::open(&CUDA, options.device)?;
        let programs = Programs::new(&device, options.kernel_folder.clone())?;
        let limit = options.memory_limit.unwrap_or(u64::MAX).min(device.memory_free);
        let arena = Arena::new(device.clone(), limit);
        programs.prepare(Key::plain("ring.cu"));
        let workspace = |bytes: usize| arena.cut(Purpose::Workspace, bytes as u64);
        Ok(CudaRing {
            staged: RefCell::new(Staged {
                words: Pinned::new(&device, WORDS_BYTES)?,
                out: Pinned::new(&device, OUT_BYTES)?,
            }),
            words: workspace(WORDS_BYTES)?,
            limbs: workspace(WORDS_BYTES)?,
            out: workspace(OUT_BYTES)?,
            programs,
            arena,
            device,
        })
    }

    fn launch(
        &self,
        name: &'static str,
        grid: [usize; 2],
        block: usize,
        args: &[Arg<'_>],
    ) -> Result<(), Error> {
        let function = self.programs.function(&Key::plain("ring.cu"), name)?;
        let [x, y, block] = [grid[0], grid[1], block].map(|count| int(count).cast_unsigned());
        let launch = Launch { function, grid: [x, y, 1], block, shared: 0, cluster: 1, args };
        self.device.launch("ring product", &launch)
    }

    /// One pass, whose words fit their room.
    fn pass(&self, matrix: &CudaRingMatrix, x: &[u32], out: &mut [u32]) -> Result<(), Error> {
        const OPERATION: &str = "ring product";
        let (rows, columns) = (matrix.rows, matrix.columns);
        let (tokens, tiles) = (x.len() / columns, columns.div_ceil(TILE_COLUMNS));
        let mut staged = self.staged.borrow_mut();
        let (x, out): (&[u8], &mut [u8]) = (bytemuck::cast_slice(x), bytemuck::cast_slice_mut(out));
        staged.words.bytes_mut()[..x.len()].copy_from_slice(x);
        self.device.write_pinned(OPERATION, self.words.pointer(), staged.words.room().part(0, x.len()))?;
        let args = [
            Arg::Pointer(self.words.pointer()),
            Arg::Int(int(columns)),
            Arg::Int(int(tiles)),
            Arg::Pointer(self.limbs.pointer()),
        ];
        self.launch("ring_limbs", [tiles, tokens], 32, &args)?;
        let args = [
            Arg::Pointer(matrix.piece.pointer()),
            Arg::Pointer(self.limbs.pointer()),
            Arg::Int(int(rows)),
            Arg::Int(int(tiles)),
            Arg::Int(int(tokens)),
            Arg::Pointer(self.out.pointer()),
        ];
        let row_tiles = rows.div_ceil(TILE_ROWS);
        let name = match tokens {
            0..=2 => "ring_2",
            3..=4 => "ring_4",
            5..=8 => "ring_8",
            9..=MANY => "ring_16",
            _ => "ring_many",
        };
        if tokens > MANY {
            let grid = [row_tiles.div_ceil(2 * MANY_WARPS), tokens.div_ceil(MANY)];
            self.launch(name, grid, MANY_WARPS * 32, &args)?;
        } else {
            // With few rows, more warps share the columns of a row, so that enough bytes are under way.
            let busy = row_tiles >= 4 * self.device.abilities().multiprocessors;
            let warps = tiles.clamp(1, if busy { 8 } else { 16 });
            self.launch(name, [row_tiles, 1], warps * 32, &args)?;
        }
        self.device.read_pinned(OPERATION, self.out.pointer(), staged.out.room().part(0, out.len()))?;
        self.device.synchronize(OPERATION)?;
        out.copy_from_slice(&staged.out.bytes()[..out.len()]);
        Ok(())
    }
}

impl Ring for CudaRing {
    type Matrix = CudaRingMatrix;

    fn name(&self) -> &'static str {
        self.device.name()
    }

    fn matrix(&self, rows: usize, columns: usize, weights: &[i8]) -> Result<CudaRingMatrix, Error> {
        check_weights(rows, columns, weights)?;
        if rows > ROWS_MAX || columns > COLUMNS_MAX {
            let what = format!("a ring product of {rows} x {columns}");
            return Err(Error::Unsupported { what, backend: self.device.name() });
        }
        let row_tile = columns.div_ceil(TILE_COLUMNS) * TILE_BYTES;
        let bytes = rows.div_ceil(TILE_ROWS) as u64 * row_tile as u64;
        let piece = self.arena.cut(Purpose::Weights, bytes)?;
        if !weights.is_empty() {
            let weights: &[u8] = bytemuck::cast_slice(weights);
            let mut staged = self.staged.borrow_mut();
            let at_once = OUT_BYTES / row_tile;
            let mut to = piece.pointer();
            for rows in weights.chunks(at_once * TILE_ROWS * columns) {
                let bytes = rows.len().div_ceil(TILE_ROWS * columns) * row_tile;
                pack(rows, columns, &mut staged.out.bytes_mut()[..bytes]);
                self.device.write_pinned("upload", to, staged.out.room().part(0, bytes))?;
                self.device.synchronize("upload")?;
                to += bytes as u64;
            }
        }
        Ok(CudaRingMatrix { rows, columns, piece })
    }

    fn multiply(
        &self,
        matrix: &CudaRingMatrix,
        x: &[u32],
        tokens: usize,
        out: &mut [u32],
    ) -> Result<(), Error> {
        let (rows, columns) = (matrix.rows, matrix.columns);
        check_words((rows, columns), tokens, x, out)?;
        if out.is_empty() || columns == 0 {
            out.fill(0);
            return Ok(());
        }
        let limbs = columns.next_multiple_of(TILE_COLUMNS) * 4;
        let pass = (WORDS_BYTES / limbs).min(OUT_BYTES / (rows * 4));
        let pass = if pass < MANY { pass } else { pass / MANY * MANY };
        x.chunks(pass * columns)
            .zip(out.chunks_mut(pass * rows))
            .try_for_each(|(x, out)| self.pass(matrix, x, out))
    }

    fn usage(&self) -> Usage {
        self.arena.usage()
    }
}

impl Drop for CudaRing {
    fn drop(&mut self) {
        // The device must not use any of what follows. A lost device answers with an error, which is as good.
        self.device.synchronize("close").ok();
    }
}

/// Rows in the order of ring.cu, padded with zeros; by several threads.
fn pack(rows: &[u8], columns: usize, out: &mut [u8]) {
    let row_tile = columns.div_ceil(TILE_COLUMNS) * TILE_BYTES;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let tiles_each = (out.len() / row_tile).div_ceil(cores.min(THREADS_MAX));
    let work = |rows: &[u8], out: &mut [u8]| {
        for (rows, out) in rows.chunks(TILE_ROWS * columns).zip(out.chunks_mut(row_tile)) {
            pack_row_tile(rows, columns, out);
        }
    };
    std::thread::scope(|scope| {
        let parts = rows.chunks(tiles_each * TILE_ROWS * columns);
        let last = parts.len() - 1;
        for (index, (rows, out)) in parts.zip(out.chunks_mut(tiles_each * row_tile)).enumerate() {
            if index == last {
                work(rows, out);
            } else {
                scope.spawn(move || work(rows, out));
            }
        }
    });
}

fn pack_row_tile(rows: &[u8], columns: usize, out: &mut [u8]) {
    out.fill(0);
    for (row, values) in rows.chunks(columns).enumerate() {
        for (tile, values) in out.chunks_exact_mut(TILE_BYTES).zip(values.chunks(TILE_COLUMNS)) {
            for (quad, values) in values.chunks(4).enumerate() {
                let (lane, word) = (row % 8 * 4 + quad % 4, row / 8 + quad / 4 * 2);
                tile[(lane * 4 + word) * 4..][..values.len()].copy_from_slice(values);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_lane_finds_its_rows_and_columns_where_the_instruction_wants_them() {
        // 19 rows x 70 columns, of which each byte says where it came from.
        let (rows, columns) = (19usize, 70usize);
        let value = |row: usize, column: usize| (row * 101 + column * 3 + 1) as u8;
        let weights: Vec<u8> = (0..rows * columns).map(|at| value(at / columns, at % columns)).collect();
        let mut out = vec![0xaa; 2 * 3 * TILE_BYTES];
        pack(&weights, columns, &mut out);
        for (at, &got) in out.iter().enumerate() {
            let (row_tile, tile) = (at / (3 * TILE_BYTES), at / TILE_BYTES % 3);
            let (lane, word, byte) = (at / 16 % 32, at / 4 % 4, at % 4);
            // As PTX lays out the first operand of m16n8k32.
            let row = row_tile * 16 + lane / 4 + if word % 2 == 1 { 8 } else { 0 };
            let column = tile * 32 + lane % 4 * 4 + byte + if word >= 2 { 16 } else { 0 };
            let wanted = if row < rows && column < columns { value(row, column) } else { 0 };
            assert_eq!(got, wanted, "row {row} column {column}");
        }
    }

    #[test]
    fn a_device_that_does_not_exist_is_refused_by_name() {
        let options = CudaRingOptions { device: 77, ..CudaRingOptions::default() };
        assert!(matches!(CudaRing::new(&options), Err(Error::DeviceUnavailable { .. })));
    }
}
