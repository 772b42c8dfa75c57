//! Threads that gather stored rows into pinned memory. They live as long as their ring: starting twelve of them for
//! each weight takes longer than copying a small one.
//!
//! The thread that sends a weight hands out stretches of slots ([`Gathering::give`]) and waits for slots to be full. It
//! cannot wait for ever: a thread that panics, or a file that cannot be read, is an error for the one who waits.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use fornax_compute::Part;
use fornax_format::View;

use crate::driver::PinnedRoom;
use crate::layout::Format;
use crate::memory::WeightPart;

/// Gathering less than this takes less time than waking another thread.
const STRETCH_BYTES: usize = 256 << 10;
/// The most stretches of a slot per thread: the slot waits for the slowest.
const STRETCHES: usize = 2;
/// Rows that are converted before they are sent are read in pieces of this size, which stay in the core's cache.
const READ_BYTES: usize = 256 << 10;

/// The threads.
pub(crate) struct Gatherers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Signals new stretches, or the end.
    given: Condvar,
    /// Signals that a slot may be full, or that a thread has failed or become idle.
    gathered: Condvar,
}

#[derive(Default)]
struct State {
    /// Stretches that have not started, the oldest first.
    queue: VecDeque<Stretch>,
    /// How many stretches of each slot are missing.
    missing: Vec<usize>,
    /// Threads that are working on a stretch.
    busy: usize,
    /// Why a stretch failed: the first that did.
    fault: Option<String>,
    stop: bool,
}

/// Rows for one stretch of a slot. Both lifetimes are erased: [`Gathering`] makes sure that no stretch outlives them.
struct Stretch {
    stored: &'static Stored<'static>,
    first: usize,
    count: usize,
    room: PinnedRoom,
    slot: usize,
}

impl Gatherers {
    pub(crate) fn new(threads: usize, slots: usize) -> std::io::Result<Gatherers> {
        let state = State { missing: vec![0; slots], ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), ..Shared::default() });
        let mut gatherers = Gatherers { shared, threads: Vec::with_capacity(threads) };
        for index in 0..threads {
            let shared = Arc::clone(&gatherers.shared);
            let builder = std::thread::Builder::new().name(format!("gather-{index}"));
            gatherers.threads.push(builder.spawn(move || shared.work())?);
        }
        Ok(gatherers)
    }

    /// Begins to gather some rows. There is one gathering at a time.
    pub(crate) fn begin<'r>(&'r mut self, stored: &'r Stored<'r>) -> Gathering<'r> {
        Gathering { shared: &self.shared, threads: self.threads.len(), stored }
    }
}

impl Drop for Gatherers {
    fn drop(&mut self) {
        self.shared.state().stop = true;
        self.shared.given.notify_all();
        for thread in self.threads.drain(..) {
            // Panics while gathering are caught, so the thread has ended normally.
            thread.join().ok();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        // Rows as they are stored, before they are converted.
        let mut room = Vec::new();
        while let Some(stretch) = self.next() {
            let done = catch_unwind(AssertUnwindSafe(|| stretch.gather(&mut room)));
            let mut state = self.state();
            state.busy -= 1;
            match done {
                Ok(Ok(())) => state.missing[stretch.slot] -= 1,
                Ok(Err(reason)) => state.fault = state.fault.take().or(Some(reason)),
                Err(panic) => state.fault = state.fault.take().or(Some(panic_words(&*panic))),
            }
            let wakes = state.missing[stretch.slot] == 0 || state.fault.is_some() || state.busy == 0;
            drop(state);
            if wakes {
                self.gathered.notify_all();
            }
        }
    }

    /// The next stretch; `None` at the end.
    fn next(&self) -> Option<Stretch> {
        let idle = |state: &mut State| state.queue.is_empty() && !state.stop;
        let mut state = self.given.wait_while(self.state(), idle).unwrap_or_else(PoisonError::into_inner);
        let stretch = if state.stop { None } else { state.queue.pop_front() }?;
        state.busy += 1;
        Some(stretch)
    }
}

impl Stretch {
    fn gather(&self, room: &mut Vec<u8>) -> Result<(), String> {
        // SAFETY: whoever gave the stretch leaves its room alone until it is gathered, and stretches do not overlap.
        let to = unsafe { self.room.bytes_mut() };
        self.stored.copy((self.first, self.count), to, room)
    }
}

fn panic_words(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<&str>().copied();
    let words = words.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a thread that gathers rows panicked: {}", words.unwrap_or("without words"))
}

/// Rows that are being gathered. No thread reads them, or writes to a slot, once this is dropped.
pub(crate) struct Gathering<'r> {
    shared: &'r Shared,
    threads: usize,
    stored: &'r Stored<'r>,
}

impl Gathering<'_> {
    /// Gathers `count` rows from `first` on into a slot; each thread takes some stretches of it.
    ///
    /// # Safety
    /// `room` stays allocated as long as the gathering, and nobody else touches it until [`wait`](Gathering::wait) for
    /// the slot has returned. Nothing else of this slot is on its way.
    pub(crate) unsafe fn give(&self, slot: usize, (first, count): (usize, usize), room: PinnedRoom) {
        // SAFETY: only the lifetime changes. The reference is in a stretch, and `drop` does not return before every
        // stretch is thrown away or done.
        let stored = unsafe { std::mem::transmute::<&Stored<'_>, &'static Stored<'static>>(self.stored) };
        let sent = self.stored.sent_bytes;
        let each = count.div_ceil((count * sent / STRETCH_BYTES).clamp(1, STRETCHES * self.threads));
        let mut state = self.shared.state();
        for start in (0..count).step_by(each) {
            let count = each.min(count - start);
            let room = room.part(start * sent, count * sent);
            state.queue.push_back(Stretch { stored, first: first + start, count, room, slot });
            state.missing[slot] += 1;
        }
        drop(state);
        self.shared.given.notify_all();
    }

    /// Waits until a slot is full, or says why it will never be.
    pub(crate) fn wait(&self, slot: usize) -> Result<(), String> {
        let wait = |state: &mut State| state.missing[slot] > 0 && state.fault.is_none();
        let state = self.shared.gathered.wait_while(self.shared.state(), wait);
        let state = state.unwrap_or_else(PoisonError::into_inner);
        state.fault.clone().map_or(Ok(()), Err)
    }
}

impl Drop for Gathering<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.queue.clear();
        let state = self.shared.gathered.wait_while(state, |state| state.busy > 0);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        state.missing.fill(0);
        state.fault = None;
    }
}

/// The stored rows of a weight's part, from one tensor or several.
pub(crate) struct Stored<'a> {
    /// (first output row, tensor)
    parts: Vec<(usize, &'a Part<'a>)>,
    row_bytes: usize,
    /// Bytes of a row as it is sent.
    pub(crate) sent_bytes: usize,
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

    /// An output row as it is stored, or why it cannot be read.
    pub(crate) fn row(&self, row: usize) -> Result<Vec<u8>, String> {
        let (part, bytes) = self.run(row, 1);
        read(&part.view, bytes)
    }

    /// Copies `count` output rows from `first` on to the beginning of `to`, as they are sent. Rows that have to be
    /// converted are read into `room` first. Fails where their file cannot be read any more.
    fn copy(
        &self,
        (mut first, count): (usize, usize),
        to: &mut [u8],
        room: &mut Vec<u8>,
    ) -> Result<(), String> {
        let as_stored = self.format.sends_as_stored();
        let most = if as_stored { usize::MAX } else { (READ_BYTES / self.row_bytes.max(1)).max(1) };
        let mut to = &mut to[..count * self.sent_bytes];
        while !to.is_empty() {
            let (part, run) = self.run(first, most.min(to.len() / self.sent_bytes));
            let rows = run.len() / self.row_bytes;
            let (here, rest) = to.split_at_mut(rows * self.sent_bytes);
            if as_stored {
                read_into(&part.view, run, here)?;
            } else {
                room.resize(run.len(), 0);
                read_into(&part.view, run, room)?;
                self.format.send(room, here);
            }
            first += rows;
            to = rest;
        }
        Ok(())
    }

    /// The bytes of consecutive rows of one tensor, from output row `row` on: at least one row, at most `most`.
    fn run(&self, row: usize, most: usize) -> (&'a Part<'a>, &'a [u8]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let at = self.parts.partition_point(|(first, _)| *first <= row) - 1;
        let (first, part) = self.parts[at];
        let (stored, count) = match &part.rows {
            Some(order) => (order[row - first] as usize, 1),
            None => (row - first, most.min(part.view.shape[0] - (row - first))),
        };
        (part, &part.view.bytes[stored * self.row_bytes..][..count * self.row_bytes])
    }
}

/// Some bytes of a tensor, or why its file does not give them.
pub(crate) fn read(view: &View<'_>, bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut to = vec![0; bytes.len()];
    read_into(view, bytes, &mut to)?;
    Ok(to)
}

fn read_into(view: &View<'_>, bytes: &[u8], to: &mut [u8]) -> Result<(), String> {
    view.read_part(bytes, to).map_err(|error| format!("{}: {error}", view.name))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use fornax_format::{DType, Gguf};

    use super::*;
    use crate::layout::PLANES;

    /// Rows of 8 kB, whole stretches and a rest.
    const ROW_BYTES: usize = 8 << 10;

    fn part(rows: usize) -> WeightPart {
        WeightPart { format: Format::BF16, first: 0, rows, columns: 4096, planes: [0; PLANES], slices: None }
    }

    fn random(rows: usize) -> Vec<u8> {
        (0..rows * ROW_BYTES).map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    #[test]
    fn any_number_of_threads_gathers_the_same_bytes_from_stacked_and_reordered_parts() {
        let rows = 400;
        let bytes = random(rows);
        let (one, other) = bytes.split_at(240 * ROW_BYTES);
        let mut first = Part::from(View::new("a", DType::BF16, vec![240, 4096], one).unwrap());
        first.rows = Some((0..240).rev().collect());
        let second = Part::from(View::new("b", DType::BF16, vec![160, 4096], other).unwrap());
        let parts = [first, second];
        let stored = Stored::new(&parts, &part(rows));
        let row = |index: usize| &bytes[index * ROW_BYTES..][..ROW_BYTES];
        for (index, stored_at) in [(0, 239), (240, 240), (399, 399)] {
            assert_eq!(stored.row(index).unwrap(), row(stored_at));
        }
        let wanted: Vec<u8> = (0..240).rev().chain(240..400).flat_map(|index| row(index).to_vec()).collect();
        for threads in [1, 2, 3, 8] {
            let mut gatherers = Gatherers::new(threads, 2).unwrap();
            // The threads are the same for the second weight.
            for _ in 0..2 {
                let mut rooms = [vec![0xaa; 160 * ROW_BYTES], vec![0xaa; 160 * ROW_BYTES]];
                let places = rooms.each_mut().map(|room| PinnedRoom::of(room));
                let count = |index: usize| 160.min(rows - index * 160);
                let mut got = Vec::new();
                let gathering = gatherers.begin(&stored);
                // SAFETY: the rooms live longer, and each is read between being waited for and given again.
                let give = |index| unsafe {
                    gathering.give(index % 2, (index * 160, count(index)), places[index % 2])
                };
                give(0);
                for index in 0..3 {
                    if index < 2 {
                        give(index + 1);
                    }
                    gathering.wait(index % 2).unwrap();
                    // SAFETY: as above.
                    got.extend_from_slice(unsafe {
                        places[index % 2].part(0, count(index) * ROW_BYTES).bytes_mut()
                    });
                }
                drop(gathering);
                assert!(got == wanted, "{threads} threads");
            }
        }
    }

    #[test]
    fn a_thread_that_panics_is_an_error_and_the_others_go_on() {
        let bytes = random(256);
        let mut beyond = Part::from(View::new("a", DType::BF16, vec![256, 4096], &bytes).unwrap());
        // No such row: `Cuda` refuses it before, here it makes a thread panic.
        beyond.rows = Some((0..255).chain([1000]).collect());
        let whole = Part::from(View::new("a", DType::BF16, vec![256, 4096], &bytes).unwrap());
        let mut room = vec![0; 256 * ROW_BYTES];
        let mut gatherers = Gatherers::new(3, 1).unwrap();
        let mut gather = |part_of: Part<'_>| {
            let parts = [part_of];
            let stored = Stored::new(&parts, &part(256));
            let gathering = gatherers.begin(&stored);
            // SAFETY: the room outlives the gathering and is read behind it.
            unsafe { gathering.give(0, (0, 256), PinnedRoom::of(&mut room)) };
            gathering.wait(0)
        };
        let refused = gather(beyond).unwrap_err();
        assert!(refused.starts_with("a thread that gathers rows panicked: range "), "{refused}");
        gather(whole).unwrap();
        assert!(room == bytes);
    }

    #[test]
    fn nothing_is_written_once_a_gathering_was_dropped() {
        let bytes = random(512);
        let parts = [Part::from(View::new("a", DType::BF16, vec![512, 4096], &bytes).unwrap())];
        let stored = Stored::new(&parts, &part(512));
        let mut gatherers = Gatherers::new(2, 1).unwrap();
        for _ in 0..20 {
            let mut room = vec![0; 512 * ROW_BYTES];
            let gathering = gatherers.begin(&stored);
            // SAFETY: the room outlives the gathering.
            unsafe { gathering.give(0, (0, 512), PinnedRoom::of(&mut room)) };
            drop(gathering);
            let state = gatherers.shared.state();
            assert_eq!((state.queue.len(), state.busy, state.missing[0]), (0, 0, 0));
        }
    }

    /// A GGUF file of matrices: name, type, shape and bytes of each.
    fn write_file(path: &Path, tensors: &[(&str, DType, [usize; 2], &[u8])]) {
        let mut file = [&b"GGUF"[..], &3u32.to_le_bytes()].concat();
        file.extend([tensors.len() as u64, 0].map(u64::to_le_bytes).concat());
        let mut offset = 0;
        for (name, dtype, [rows, columns], bytes) in tensors {
            file.extend([&(name.len() as u64).to_le_bytes(), name.as_bytes(), &2u32.to_le_bytes()].concat());
            file.extend([*columns as u64, *rows as u64].map(u64::to_le_bytes).concat());
            file.extend(dtype.ggml_id().unwrap().to_le_bytes());
            file.extend(u64::to_le_bytes(offset));
            offset += bytes.len().next_multiple_of(32) as u64;
        }
        for (_, _, _, bytes) in tensors {
            file.resize(file.len().next_multiple_of(32), 0);
            file.extend(*bytes);
        }
        file.resize(file.len().next_multiple_of(32), 0);
        std::fs::write(path, file).unwrap();
    }

    /// All rows of a weight, as three threads gather them.
    fn gathered(parts: &[Part<'_>], of: &WeightPart) -> Result<Vec<u8>, String> {
        let stored = Stored::new(parts, of);
        let mut room = vec![0xaa; of.rows * stored.sent_bytes];
        let mut gatherers = Gatherers::new(3, 1).unwrap();
        let gathering = gatherers.begin(&stored);
        // SAFETY: the room outlives the gathering and is read behind it.
        unsafe { gathering.give(0, (0, of.rows), PinnedRoom::of(&mut room)) };
        gathering.wait(0)?;
        drop(gathering);
        Ok(room)
    }

    /// A weight of two tensors, the rows of the first in another order.
    fn two<'v>(first: View<'v>, second: View<'v>) -> [Part<'v>; 2] {
        let mut first = Part::from(first);
        first.rows = Some((0..first.view.shape[0] as u32).rev().collect());
        [first, Part::from(second)]
    }

    #[test]
    fn rows_of_a_file_are_gathered_as_those_in_memory_and_stay_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        // As the system lists its maps.
        let path = folder.path().canonicalize().unwrap().join("m.gguf");
        // One that is sent as it is stored, and one that is not; larger than what is read at once, and no multiple of
        // it.
        for (dtype, columns) in [(DType::BF16, 4096), (DType::IQ4_NL, 2048)] {
            let row_bytes = dtype.bytes_for(columns).unwrap();
            let bytes = random(1200);
            let (one, other) = (&bytes[..301 * row_bytes], &bytes[301 * row_bytes..][..700 * row_bytes]);
            write_file(&path, &[("a", dtype, [301, columns], one), ("b", dtype, [700, columns], other)]);
            let file = Gguf::open(&path).unwrap();
            let from_file = two(file.tensor("a").unwrap(), file.tensor("b").unwrap());
            let view = |name, rows, bytes| View::new(name, dtype, vec![rows, columns], bytes).unwrap();
            let from_memory = two(view("a", 301, one), view("b", 700, other));
            let of = WeightPart { format: Format::of(dtype).unwrap(), rows: 1001, columns, ..part(0) };
            let wanted = gathered(&from_memory, &of).unwrap();
            // The header was read through the map.
            #[cfg(target_os = "linux")]
            let before = resident_kib(&path);
            assert!(gathered(&from_file, &of).unwrap() == wanted, "{dtype}");
            #[cfg(target_os = "linux")]
            assert!(resident_kib(&path) <= before, "{dtype}: more than {before} KiB of the map");
            let stored = Stored::new(&from_file, &of);
            assert_eq!(stored.row(1).unwrap(), &one[299 * row_bytes..][..row_bytes], "{dtype}");
        }
    }

    /// KiB of a mapped file that are resident in this process.
    #[cfg(target_os = "linux")]
    fn resident_kib(path: &Path) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let of_file = maps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
        let line = of_file.into_iter().find_map(|line| line.strip_prefix("Rss:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
    }

    #[test]
    #[cfg(unix)]
    fn a_file_that_became_shorter_is_an_error_with_the_tensors_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        for dtype in [DType::BF16, DType::IQ4_NL] {
            let bytes = random(600);
            let (row_bytes, columns) = (dtype.bytes_for(2048).unwrap(), 2048);
            let (one, other) = (&bytes[..300 * row_bytes], &bytes[300 * row_bytes..][..300 * row_bytes]);
            write_file(&path, &[("a", dtype, [300, columns], one), ("b", dtype, [300, columns], other)]);
            let file = Gguf::open(&path).unwrap();
            let parts = two(file.tensor("a").unwrap(), file.tensor("b").unwrap());
            let of = WeightPart { format: Format::of(dtype).unwrap(), rows: 600, columns, ..part(0) };
            gathered(&parts, &of).unwrap();
            let shorter = std::fs::File::options().write(true).open(&path).unwrap();
            shorter.set_len(file.file_bytes() * 3 / 4).unwrap();
            let wanted = format!("b: {}: became shorter", path.display());
            assert_eq!(gathered(&parts, &of).unwrap_err(), wanted);
            let stored = Stored::new(&parts, &of);
            stored.row(0).unwrap();
            assert_eq!(stored.row(599).unwrap_err(), wanted);
        }
    }
}
