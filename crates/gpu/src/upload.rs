//! Weights on their way in: stored rows are gathered by several threads into pinned memory, copied to the device from there
//! while the next are gathered, and packed into their planes by a kernel (`pack.cu`).

use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};

use fornax_compute::{Error, Part};

use crate::cuda::Cuda;
use crate::driver::{Arg, Device, Event, Pinned, PinnedSource};
use crate::layout::{Format, TILE_ROWS};
use crate::memory::{PARTIALS_BYTES, Weight, WeightPart, int};
use crate::program::Key;

/// Pinning takes 0.2 to 0.3 s for each gigabyte: little is pinned, and used again and again. Two would be enough, one for the
/// threads and one for the copy; with four neither waits for the other.
const SLOTS: usize = 4;
const SLOT_BYTES: usize = 16 << 20;
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
        if part.format.part_bytes() > 0 {
            self.device.fill("upload", weight.plane(part, 2), 0, part.format.part_bytes())?;
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
        std::thread::scope(|scope| {
            let mut gatherer = Gatherer::new(scope, rows, threads, at_once, &mut rooms);
            for (index, start) in (0..part.rows).step_by(at_once).enumerate() {
                let (at, count) = (index % SLOTS, at_once.min(part.rows - start));
                let (source, event) = sources[at];
                event.wait("upload")?;
                gatherer.gather(at, start, count);
                pack((first_slot + at) % SLOTS, source, start, count)?;
                event.record()?;
            }
            Ok::<(), Error>(())
        })?;
        if part.format == Format::BF16 { self.to_f16(weight, part) } else { Ok(()) }
    }
}

impl Cuda {
    /// Makes f16 of a part of BF16 that is packed.
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

/// Threads that gather rows into slots, each its own stretch of every slot. Dropped, they end.
struct Gatherer<'s, 'r> {
    rows: &'r Stored<'r>,
    /// Rows of a stretch.
    each: usize,
    /// (slot, stretch) where nobody writes to it.
    stretches: Vec<Vec<Option<&'s mut [u8]>>>,
    jobs: Vec<Sender<Job<'s>>>,
    done: Receiver<Job<'s>>,
}

/// Rows from `first` on, as many as `to` holds whole ones of and `count` says.
struct Job<'s> {
    slot: usize,
    stretch: usize,
    first: usize,
    count: usize,
    to: &'s mut [u8],
}

impl<'s, 'r> Gatherer<'s, 'r> {
    fn new<'scope>(
        scope: &'scope std::thread::Scope<'scope, '_>,
        rows: &'r Stored<'r>,
        threads: usize,
        at_once: usize,
        rooms: &'s mut [&mut [u8]],
    ) -> Gatherer<'s, 'r>
    where
        's: 'scope,
        'r: 'scope,
    {
        let each = at_once.div_ceil(threads);
        let bytes = (each * rows.sent_bytes).max(1);
        let stretches = rooms.iter_mut().map(|room| room.chunks_mut(bytes).map(Some).collect()).collect();
        let (sender, done) = channel();
        // The caller's is the first stretch.
        let jobs = (1..threads).map(|_| {
            let (job_sender, jobs) = channel::<Job<'s>>();
            let sender = sender.clone();
            scope.spawn(move || {
                for job in jobs {
                    rows.copy(job.first, job.count, job.to);
                    // Nobody waits for it any more after an error.
                    sender.send(job).ok();
                }
            });
            job_sender
        });
        Gatherer { rows, each, stretches, jobs: jobs.collect(), done }
    }

    /// Copies rows one behind the other into a slot.
    fn gather(&mut self, slot: usize, start: usize, count: usize) {
        let mut waiting = 0;
        for stretch in (1..count.div_ceil(self.each)).rev() {
            let first = stretch * self.each;
            let to = self.stretches[slot][stretch].take().expect("nobody writes to it");
            let count = self.each.min(count - first);
            let job = Job { slot, stretch, first: start + first, count, to };
            self.jobs[stretch - 1].send(job).expect("threads wait for jobs until the last");
            waiting += 1;
        }
        if let Some(Some(to)) = self.stretches[slot].first_mut() {
            self.rows.copy(start, self.each.min(count), to);
        }
        for _ in 0..waiting {
            let Job { slot, stretch, to, .. } = self.done.recv().expect("threads answer every job");
            self.stretches[slot][stretch] = Some(to);
        }
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
            std::thread::scope(|scope| {
                let mut gatherer = Gatherer::new(scope, &stored, threads, at_once, &mut slots);
                // The last is half full, in the slot of the first.
                for (index, start) in [0, 32, 64].into_iter().enumerate() {
                    gatherer.gather(index % 2, start, at_once.min(rows - start));
                }
            });
            assert!(even[..16 * bytes_each] == wanted[64 * bytes_each..], "{threads} threads");
            assert!(even[16 * bytes_each..] == wanted[16 * bytes_each..32 * bytes_each], "{threads} threads");
            assert!(odd == &wanted[32 * bytes_each..64 * bytes_each], "{threads} threads");
        }
    }
}
