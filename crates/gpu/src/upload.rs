//! Weights on their way in: stored rows are gathered by several threads into pinned memory, copied to the device from
//! there while the next are gathered, and packed into their planes by a kernel (`pack.cu`).

use std::rc::Rc;
use std::time::{Duration, Instant};

use fornax_compute::{Error, Part};

use crate::abi::{Layout, layout};
use crate::check::Checks;
use crate::cuda::Cuda;
use crate::driver::{Arg, Device, Event, Function, LatePinned};
use crate::gather::{Gatherers, Stored};
use crate::grid::Grid;
use crate::layout::{Format, PART_BYTES, TILE_ROWS};
use crate::memory::{PARTIALS_BYTES, Weight, WeightPart, int};
use crate::program::Key;

/// Little memory is pinned, and used again and again: eight slots were slower.
pub(crate) const SLOTS: usize = 4;
const SLOT_BYTES: usize = 16 << 20;
/// Slots that are filled while those before them are copied.
const GATHERED: usize = SLOTS - 1;
// Copied rows wait for packing in the room of attention's partial results: no step runs during an upload.
const _: () = assert!(SLOTS * SLOT_BYTES <= PARTIALS_BYTES as usize);
/// With this many threads, copying is the bottleneck.
const THREADS_MAX: usize = 15;
/// The most rows per packing launch: the height of a grid, 16 rows each.
const ROWS_MAX: usize = 1 << 19;

/// `Rows` of pack.cu.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct StoredRows {
    stored: u64,
    bytes: i32,
    rows: i32,
    columns: i32,
    pad: i32,
}

pub(crate) const LAYOUTS: &[Layout] =
    &[layout!(StoredRows, "Rows" in "pack.cu", { stored, bytes, rows, columns, pad })];

/// Where the time of a load went, on the thread that sends.
#[derive(Clone, Copy, Debug, Default)]
pub struct UploadTimes {
    /// Parts of weights that were sent.
    pub parts: usize,
    /// Taking memory from the driver.
    pub memory: Duration,
    /// Beginning to compile kernels and waiting for those that pack.
    pub kernels: Duration,
    /// Pinning memory, once, after the first rows were written to it.
    pub pinning: Duration,
    /// Waiting until threads have gathered rows.
    pub gathering: Duration,
    /// Waiting for the device to take a slot's bytes: then copying is the bottleneck.
    pub slots: Duration,
    /// Putting copies and kernels on the stream.
    pub launching: Duration,
    /// Reading rows back and comparing them.
    pub checking: Duration,
}

/// Slots of pinned memory that are used in rotation, and the threads that fill them.
pub(crate) struct Ring {
    slots: Vec<Slot>,
    next: usize,
    gatherers: Gatherers,
}

struct Slot {
    pinned: LatePinned,
    /// Passed when the slot's bytes are on the device.
    sent: Event,
}

impl Slot {
    fn new(device: &Rc<Device>) -> Result<Slot, Error> {
        Ok(Slot { pinned: LatePinned::new(device, SLOT_BYTES)?, sent: Event::new(device)? })
    }
}

impl Ring {
    pub(crate) fn new(device: &Rc<Device>) -> Result<Ring, Error> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // One core is for the thread that sends.
        let threads = cores.saturating_sub(1).clamp(1, THREADS_MAX);
        let gatherers = Gatherers::new(threads, SLOTS).map_err(|error| Error::Device {
            backend: device.name(),
            operation: "upload",
            reason: format!("no thread can be started: {error}"),
        })?;
        let slots = (0..SLOTS).map(|_| Slot::new(device)).collect::<Result<_, _>>()?;
        Ok(Ring { slots, next: 0, gatherers })
    }
}

/// The program that packs rows of a format.
pub(crate) fn packer(format: Format) -> Key {
    // As pack.cu calls them: (format, minima, upper bits).
    let (name, mins, bits) = match format {
        Format::F32 => ("F32", 0, 0),
        Format::F16 => ("HALVES", 0, 0),
        Format::BF16 => ("HALVES", 0, 1),
        Format::Q8_0 => ("Q8_0", 0, 0),
        Format::MXFP8 => ("Q8_0", 0, 1),
        Format::Q4_0 => ("BLOCKS32", 0, 0),
        Format::Q4_1 => ("BLOCKS32", 1, 0),
        Format::Q5_0 => ("BLOCKS32", 0, 1),
        Format::Q5_1 => ("BLOCKS32", 1, 1),
        Format::Q4_K => ("SUPERBLOCKS", 0, 0),
        Format::Q5_K => ("SUPERBLOCKS", 0, 1),
        Format::Q6_K => ("Q6_K", 0, 0),
        Format::FP8_128 | Format::FP8_A8 => ("FP8_128", 0, 0),
        Format::Coded(_) => ("CODED", u8::from(format.runs().is_some_and(|runs| runs.mins)), 0),
    };
    let defines = vec![format!("FORMAT={name}"), format!("MINS={mins}"), format!("BITS={bits}")];
    Key { unit: "pack.cu", defines }
}

impl Cuda {
    /// Sends the stored rows of a weight's parts to their planes.
    pub(crate) fn send(
        &self,
        ring: &mut Ring,
        checks: &mut Option<Checks>,
        weight: &Weight,
        parts: &[Part<'_>],
    ) -> Result<(), Error> {
        let mut parts = weight.parts.iter().map(|part| (part, Stored::new(parts, part)));
        parts.try_for_each(|(part, rows)| self.send_part(ring, checks, weight, part, &rows))
    }

    fn send_part(
        &self,
        ring: &mut Ring,
        checks: &mut Option<Checks>,
        weight: &Weight,
        part: &WeightPart,
        rows: &Stored<'_>,
    ) -> Result<(), Error> {
        let at_once = SLOT_BYTES / rows.sent_bytes.max(1) / TILE_ROWS * TILE_ROWS;
        let at_once = at_once.clamp(TILE_ROWS, ROWS_MAX);
        assert!(at_once * rows.sent_bytes <= SLOT_BYTES, "16 rows of {} bytes", rows.sent_bytes);
        if let Some(whole) = weight.whole(part) {
            self.device.fill("upload", whole, 0, PART_BYTES as usize)?;
        }
        let pack = |function: Function, index: usize, slot: &Slot, (start, count): (usize, usize)| {
            let staged = self.partials.pointer() + (index * SLOT_BYTES) as u64;
            let sent = slot.pinned.room().part(0, count * rows.sent_bytes);
            self.device.write_pinned("upload", staged, sent)?;
            let device_part = weight.device_part_from(part, start / TILE_ROWS);
            let stored = StoredRows {
                stored: staged,
                bytes: int(rows.sent_bytes),
                rows: int(count),
                columns: int(part.columns),
                pad: 0,
            };
            let args =
                [Arg::Struct(bytemuck::bytes_of(&device_part)), Arg::Struct(bytemuck::bytes_of(&stored))];
            let grid = [part.groups(), count.div_ceil(TILE_ROWS), 1];
            self.launching(|| self.launch("upload", function, Grid::new(grid, 64), &args))?;
            slot.sent.record()
        };
        let Ring { slots, next, gatherers } = ring;
        let gathering = gatherers.begin(rows);
        let mut times = self.upload_times.get();
        times.parts += 1;
        let (chunks, first_slot) = (part.rows.div_ceil(at_once), *next);
        let chunk = |index: usize| (index * at_once, at_once.min(part.rows - index * at_once));
        let mut function = None;
        let mut opened = 0;
        for index in 0..chunks {
            while opened < chunks.min(index + GATHERED) {
                let slot = (first_slot + opened) % SLOTS;
                let Slot { pinned, sent } = &slots[slot];
                times.slots += timed(|| sent.wait("upload"))?;
                // SAFETY: the ring outlives the gathering; the device has taken what the slot held, and nobody writes
                // it before `wait` has returned.
                unsafe { gathering.give(slot, chunk(opened), pinned.room()) };
                opened += 1;
            }
            let slot = (first_slot + index) % SLOTS;
            if let (0, Some(checks)) = (index, &mut *checks) {
                // Rows of the weights before are compared while the first of this one are gathered.
                times.checking += timed(|| checks.settle_arrived())?;
            }
            times.gathering += timed(|| {
                gathering.wait(slot).map_err(|reason| Error::Device {
                    backend: self.device.name(),
                    operation: "upload",
                    reason,
                })
            })?;
            times.pinning += timed(|| slots[slot].pinned.pin())?;
            let function = match function {
                Some(function) => function,
                // Only once the threads have something to do: the program may have to be read and loaded.
                None => {
                    let started = Instant::now();
                    let found = self.programs.function(&packer(part.format), "pack")?;
                    times.kernels += started.elapsed();
                    *function.insert(found)
                }
            };
            times.launching += timed(|| pack(function, slot, &slots[slot], chunk(index)))?;
            // The next part begins with the slot after the last one used, also where this part fails.
            *next = (slot + 1) % SLOTS;
        }
        self.upload_times.set(times);
        drop(gathering);
        if part.format.part_plane().is_some() { self.to_f16(weight, part) } else { Ok(()) }
    }
}

/// Measures how long something takes.
pub(crate) fn timed(body: impl FnOnce() -> Result<(), Error>) -> Result<Duration, Error> {
    let started = Instant::now();
    body()?;
    Ok(started.elapsed())
}

impl Cuda {
    /// Multiplies the values of a packed part, or their scales, by the part's power of two: BF16 becomes f16.
    fn to_f16(&self, weight: &Weight, part: &WeightPart) -> Result<(), Error> {
        const THREADS: usize = 256;
        let function = self.programs.function(&packer(part.format), "to_f16")?;
        let eights = part.row_tile_bytes()[0] * part.row_tiles() / 16;
        let device_part = weight.device_part(part);
        let args = [Arg::Struct(bytemuck::bytes_of(&device_part))];
        let blocks = eights.div_ceil(THREADS).min(16 * self.device.abilities().multiprocessors);
        let grid = Grid::new([blocks, 1, 1], THREADS);
        self.launching(|| self.launch("upload", function, grid, &args))
    }
}
