//! Weights on their way in: stored rows are gathered by several threads into pinned memory, copied to the device from there
//! while the next are gathered, and packed into their planes by a kernel (`pack.cu`).

use std::rc::Rc;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use fornax_compute::{Error, Part};

use crate::cuda::Cuda;
use crate::driver::{Arg, Device, Event, Pinned, PinnedSource};
use crate::layout::{Format, PART_BYTES, TILE_ROWS};
use crate::memory::{PARTIALS_BYTES, Weight, WeightPart, int};
use crate::program::Key;

/// Pinning takes 0.2 to 0.3 s for each gigabyte: little is pinned, and used again and again. Eight slots took longer to pin
/// than they saved.
const SLOTS: usize = 4;
const SLOT_BYTES: usize = 16 << 20;
/// Slots that are gathered while those before them are copied.
const GATHERED: usize = SLOTS - 1;
// What was copied waits to be packed where attention has its partial results: no step runs while a weight is uploaded.
const _: () = assert!(SLOTS * SLOT_BYTES <= PARTIALS_BYTES as usize);
/// Beyond this many threads the copy is the slowest.
const THREADS_MAX: usize = 12;
/// Less than this is gathered sooner than a thread starts: twelve of them take half a millisecond.
const THREAD_BYTES: usize = 2 << 20;
/// From this many on, pages of a file are asked for together and given back together.
const FETCHED_BYTES: usize = 64 << 10;
/// Rows that a launch packs at most: as many as a grid has, 16 at a time.
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

/// Pinned memory in turns.
pub(crate) struct Ring {
    slots: Vec<(Pinned, Event)>,
    next: usize,
    threads: usize,
}

impl Ring {
    pub(crate) fn new(device: &Rc<Device>) -> Result<Ring, Error> {
        let slot = |_| Ok((Pinned::new(device, SLOT_BYTES)?, Event::new(device)?));
        let slots = (0..SLOTS).map(slot).collect::<Result<_, Error>>()?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Ring { slots, next: 0, threads: cores.min(THREADS_MAX) })
    }
}

/// The program that packs rows of a format.
pub(crate) fn packer(format: Format) -> Key {
    // As pack.cu counts them: (format, minima, upper bits).
    let (number, mins, bits) = match format {
        Format::F32 => (0, 0, 0),
        Format::F16 => (1, 0, 0),
        Format::BF16 => (1, 0, 1),
        Format::Q8_0 => (2, 0, 0),
        Format::MXFP8 => (2, 0, 1),
        Format::Q4_0 => (3, 0, 0),
        Format::Q4_1 => (3, 1, 0),
        Format::Q5_0 => (3, 0, 1),
        Format::Q5_1 => (3, 1, 1),
        Format::Q4_K => (4, 0, 0),
        Format::Q5_K => (4, 0, 1),
        Format::Q6_K => (5, 0, 0),
        Format::Coded(_) => (6, u8::from(format.runs().is_some_and(|runs| runs.mins)), 0),
    };
    let defines = vec![format!("FORMAT={number}"), format!("MINS={mins}"), format!("BITS={bits}")];
    Key { unit: "pack.cu", defines }
}

impl Cuda {
    /// Sends the stored rows of a weight's parts to their planes.
    pub(crate) fn send(&self, ring: &mut Ring, weight: &Weight, parts: &[Part<'_>]) -> Result<(), Error> {
        weight.parts.iter().try_for_each(|part| self.send_part(ring, weight, part, &Stored::new(parts, part)))
    }

    fn send_part(
        &self,
        ring: &mut Ring,
        weight: &Weight,
        part: &WeightPart,
        rows: &Stored<'_>,
    ) -> Result<(), Error> {
        let at_once = SLOT_BYTES / rows.sent_bytes.max(1) / TILE_ROWS * TILE_ROWS;
        let at_once = at_once.clamp(TILE_ROWS, ROWS_MAX);
        assert!(at_once * rows.sent_bytes <= SLOT_BYTES, "16 rows of {} bytes", rows.sent_bytes);
        let function = self.programs.function(&packer(part.format), "pack")?;
        if let Some(whole) = weight.whole(part) {
            self.device.fill("upload", whole, 0, PART_BYTES as usize)?;
        }
        let pack = |slot: usize, source: PinnedSource, start: usize, count: usize| {
            let staged = self.partials.pointer() + (slot * SLOT_BYTES) as u64;
            self.device.write_from("upload", staged, source, 0, count * rows.sent_bytes)?;
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
            self.launch("upload", function, grid, (64, 0), &args)
        };
        let threads = (part.rows * rows.sent_bytes / THREAD_BYTES).clamp(1, ring.threads);
        let first_slot = ring.next;
        ring.next = (first_slot + part.rows.div_ceil(at_once)) % SLOTS;
        let mut slots: Vec<(&mut [u8], PinnedSource, &Event)> = Vec::new();
        for (pinned, event) in &mut ring.slots {
            let (bytes, source) = pinned.split();
            slots.push((&mut bytes[..at_once * rows.sent_bytes], source, event));
        }
        slots.rotate_left(first_slot);
        let (sources, mut rooms): (Vec<_>, Vec<_>) =
            slots.into_iter().map(|(bytes, source, event)| ((source, event), bytes)).unzip();
        let gathering = Gathering::new(rows, at_once);
        std::thread::scope(|scope| {
            let _ended = Ended(&gathering);
            let stretches = gathering.start(scope, threads, &mut rooms);
            let chunks = part.rows.div_ceil(at_once);
            let mut opened = 0;
            for (index, start) in (0..part.rows).step_by(at_once).enumerate() {
                while opened < chunks.min(index + GATHERED) {
                    sources[opened % SLOTS].1.wait("upload")?;
                    opened += 1;
                    gathering.open(opened);
                }
                gathering.wait(index, stretches);
                let ((source, event), count) = (sources[index % SLOTS], at_once.min(part.rows - start));
                pack((first_slot + index) % SLOTS, source, start, count)?;
                event.record()?;
            }
            Ok::<(), Error>(())
        })?;
        if part.format.part_plane().is_some() { self.to_f16(weight, part) } else { Ok(()) }
    }
}

impl Cuda {
    /// Multiplies the values of a part that is packed, or their scales, by its power of two: BF16 becomes f16.
    fn to_f16(&self, weight: &Weight, part: &WeightPart) -> Result<(), Error> {
        const THREADS: usize = 256;
        let function = self.programs.function(&packer(part.format), "to_f16")?;
        let eights = part.row_tile_bytes()[0] * part.row_tiles() / 16;
        let device_part = weight.device_part(part);
        let args = [Arg::Struct(bytemuck::bytes_of(&device_part))];
        let blocks = eights.div_ceil(THREADS).min(16 * self.device.multiprocessors as usize);
        self.launch("upload", function, [blocks, 1, 1], (THREADS as u32, 0), &args)
    }
}

/// Threads that gather rows into slots, each its own stretch of every slot, as far ahead as slots are free: nobody is woken for
/// each of them, so that the copy to the device never waits.
struct Gathering<'r> {
    rows: &'r Stored<'r>,
    /// Rows of a slot.
    at_once: usize,
    progress: Mutex<Progress>,
    opened: Condvar,
    gathered: Condvar,
}

#[derive(Default)]
struct Progress {
    /// Slots, counted over all rounds, that may be written to.
    opened: usize,
    /// Stretches that are there, for each of them.
    gathered: Vec<usize>,
    /// Nobody waits for anything any more.
    ended: bool,
}

/// Ends a gathering, whatever its caller or its thread ended by.
struct Ended<'g, 'r>(&'g Gathering<'r>);

impl Drop for Ended<'_, '_> {
    fn drop(&mut self) {
        self.0.progress().ended = true;
        self.0.opened.notify_all();
        self.0.gathered.notify_all();
    }
}

impl<'r> Gathering<'r> {
    fn new(rows: &'r Stored<'r>, at_once: usize) -> Gathering<'r> {
        let progress = Progress { gathered: vec![0; rows.rows.div_ceil(at_once)], ..Progress::default() };
        let progress = Mutex::new(progress);
        Gathering { rows, at_once, progress, opened: Condvar::new(), gathered: Condvar::new() }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        // Whoever holds it does nothing that panics.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts threads that fill `rooms` in turns; says how many stretches a full slot has at most.
    fn start<'scope>(
        &'scope self,
        scope: &'scope std::thread::Scope<'scope, '_>,
        threads: usize,
        rooms: &'scope mut [&mut [u8]],
    ) -> usize {
        let each = self.at_once.div_ceil(threads);
        let bytes = (each * self.rows.sent_bytes).max(1);
        let slots = rooms.len();
        let mut stretches: Vec<Vec<&mut [u8]>> =
            (0..self.at_once.div_ceil(each)).map(|_| Vec::new()).collect();
        for room in rooms {
            let parts = room.chunks_mut(bytes);
            stretches.iter_mut().zip(parts).for_each(|(stretch, part)| stretch.push(part));
        }
        let count = stretches.len();
        for (stretch, mut rooms) in stretches.into_iter().enumerate() {
            scope.spawn(move || {
                let panicked = Ended(self);
                for (index, start) in (0..self.rows.rows).step_by(self.at_once).enumerate() {
                    let progress = self.progress();
                    let wait = |progress: &mut Progress| progress.opened <= index && !progress.ended;
                    let progress = self.opened.wait_while(progress, wait);
                    if progress.unwrap_or_else(PoisonError::into_inner).ended {
                        break;
                    }
                    let (first, end) = (start + stretch * each, self.rows.rows.min(start + self.at_once));
                    if first < end {
                        self.rows.copy(first, each.min(end - first), rooms[index % slots]);
                    }
                    self.progress().gathered[index] += 1;
                    self.gathered.notify_one();
                }
                // Came to its end: the others go on.
                std::mem::forget(panicked);
            });
        }
        count
    }

    /// Lets threads write to the first `count` slots, counted over all rounds.
    fn open(&self, count: usize) {
        self.progress().opened = count;
        self.opened.notify_all();
    }

    /// Waits until a slot is full. Returns early where a thread panicked, whose panic then reaches the end of the scope.
    fn wait(&self, index: usize, stretches: usize) {
        let wait = |progress: &mut Progress| progress.gathered[index] < stretches && !progress.ended;
        drop(self.gathered.wait_while(self.progress(), wait));
    }
}

/// The stored rows of a weight's part, whichever tensors they come from.
pub(crate) struct Stored<'a> {
    /// (first output row, tensor)
    parts: Vec<(usize, &'a Part<'a>)>,
    row_bytes: usize,
    /// Bytes of a row in the form in which it is sent.
    sent_bytes: usize,
    format: Format,
    rows: usize,
}

impl<'a> Stored<'a> {
    pub(crate) fn new(parts: &'a [Part<'a>], of: &WeightPart) -> Stored<'a> {
        let mut first = 0;
        let mut within = Vec::new();
        for part in parts {
            let rows = part.rows.as_ref().map_or(part.view.shape[0], Vec::len);
            if (of.first..of.first + of.rows).contains(&first) && rows > 0 {
                within.push((first - of.first, part));
            }
            first += rows;
        }
        let row_bytes =
            within.first().map_or(0, |(_, part)| part.view.bytes.len() / part.view.shape[0].max(1));
        let sent_bytes = of.format.sent_bytes(row_bytes);
        Stored { parts: within, row_bytes, sent_bytes, format: of.format, rows: of.rows }
    }

    /// The bytes of an output row; `None` beyond the last.
    pub(crate) fn row(&self, row: usize) -> Option<&'a [u8]> {
        self.run(row, 1).map(|(_, bytes)| bytes)
    }

    /// Copies `count` output rows from `first` on to the beginning of `to`, in the form in which they are sent.
    fn copy(&self, mut first: usize, count: usize, to: &mut [u8]) {
        let mut to = &mut to[..count * self.sent_bytes];
        while !to.is_empty() {
            let (part, run) = self.run(first, to.len() / self.sent_bytes).expect("below the part's rows");
            let (here, rest) = to.split_at_mut(run.len() / self.row_bytes * self.sent_bytes);
            // By this thread, beside the others: what is mapped one page at a time takes as long as what is copied.
            let large = run.len() >= FETCHED_BYTES;
            if large {
                part.view.fetch_part(run);
            }
            self.format.send(run, here);
            if large {
                part.view.release_part(run);
            }
            first += run.len() / self.row_bytes;
            to = rest;
        }
    }

    /// The bytes of output rows from `row` on that lie behind each other in their tensor: at least one row, at most `most`.
    fn run(&self, row: usize, most: usize) -> Option<(&'a Part<'a>, &'a [u8])> {
        if row >= self.rows {
            return None;
        }
        let at = self.parts.partition_point(|(first, _)| *first <= row) - 1;
        let (first, part) = self.parts[at];
        let (stored, count) = match &part.rows {
            Some(order) => (order[row - first] as usize, 1),
            None => (row - first, most.min(part.view.shape[0] - (row - first))),
        };
        Some((part, &part.view.bytes[stored * self.row_bytes..][..count * self.row_bytes]))
    }
}

#[cfg(test)]
mod tests {
    use fornax_format::{DType, View};

    use super::*;
    use crate::layout::PLANES;

    #[test]
    fn any_number_of_threads_gathers_the_same_bytes_from_stacked_and_reordered_parts() {
        let (bytes_each, rows) = (8 << 10, 80);
        let bytes: Vec<u8> =
            (0..rows * bytes_each).map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let (one, other) = bytes.split_at(48 * bytes_each);
        let mut first = Part::from(View::new("a", DType::BF16, vec![48, 4096], one).unwrap());
        first.rows = Some((0..48).rev().collect());
        let second = Part::from(View::new("b", DType::BF16, vec![32, 4096], other).unwrap());
        let parts = [first, second];
        let part = WeightPart { format: Format::BF16, first: 0, rows, columns: 4096, planes: [0; PLANES] };
        let stored = Stored::new(&parts, &part);
        let row = |index: usize| &bytes[index * bytes_each..][..bytes_each];
        assert_eq!(stored.row(0), Some(row(47)));
        assert_eq!(stored.row(48), Some(row(48)));
        assert_eq!(stored.row(79), Some(row(79)));
        assert_eq!(stored.row(80), None);
        let wanted: Vec<u8> = (0..48).rev().chain(48..80).flat_map(|index| row(index).to_vec()).collect();
        let at_once = 32;
        for threads in [1, 2, 3, 8, 40] {
            let mut rooms = [vec![0xaa; at_once * bytes_each], vec![0xaa; at_once * bytes_each]];
            let [even, odd] = &mut rooms;
            let mut slots = [&mut even[..], &mut odd[..]];
            let gathering = Gathering::new(&stored, at_once);
            std::thread::scope(|scope| {
                let _ended = Ended(&gathering);
                let stretches = gathering.start(scope, threads, &mut slots);
                // The last is half full, in the slot of the first.
                for index in 0..3 {
                    gathering.open(index + 1);
                    gathering.wait(index, stretches);
                }
            });
            assert!(even[..16 * bytes_each] == wanted[64 * bytes_each..], "{threads} threads");
            assert!(even[16 * bytes_each..] == wanted[16 * bytes_each..32 * bytes_each], "{threads} threads");
            assert!(odd == &wanted[32 * bytes_each..64 * bytes_each], "{threads} threads");
        }
    }

    #[test]
    fn threads_end_with_whoever_stops_waiting_for_them() {
        let bytes = vec![7; 64 * 8192];
        let parts = [Part::from(View::new("a", DType::BF16, vec![64, 4096], &bytes).unwrap())];
        let part =
            WeightPart { format: Format::BF16, first: 0, rows: 64, columns: 4096, planes: [0; PLANES] };
        let stored = Stored::new(&parts, &part);
        let mut room = vec![0; 16 * 8192];
        let mut slots = [&mut room[..]];
        let gathering = Gathering::new(&stored, 16);
        std::thread::scope(|scope| {
            let _ended = Ended(&gathering);
            let stretches = gathering.start(scope, 3, &mut slots);
            gathering.open(1);
            gathering.wait(0, stretches);
        });
        assert_eq!(gathering.progress().gathered, [3, 0, 0, 0]);
    }
}
