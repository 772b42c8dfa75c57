//! A driver for tests without a GPU. It computes nothing, remembers what it is asked, and fails where it is told to.
//!
//! Each thread has one of its own. What is put on the stream is done when somebody waits for it, and only as far as he
//! waits: whoever writes what a copy still reads, or reads what a copy still writes, gets wrong bytes here as he would
//! on a device. Device memory is memory of the host, so copies are real; what lies outside of it is an illegal address.
//! Two kernels do something, `pack` and `rows_of` for rows of f32, so that an upload can be followed to its check.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::{CStr, c_int};
use std::ptr;

use super::libcuda::{self, Attributes, H200};
use super::nvrtc::{Compiler, Source};
use super::table::{Chip, DeviceId, Done, Driver, Failure, Handle, RawLaunch, Why};

/// The fake's table. It speaks of itself as NVIDIA's does: what people read is tested with it.
pub(crate) static FAKE: Driver = Driver {
    kind: "cuda",
    names: libcuda::NAMES,
    vendor: "NVIDIA",
    platform: "CUDA",
    library: "libcuda",
    version_min: libcuda::VERSION_MIN,
    compiler: Compiler { version: || Ok((13, 0)), compile },
    is_installed: || with(|fake| !fake.absent),
    start: || call("start", |_| Ok(())),
    version: || call("version", |fake| Ok(fake.version.unwrap_or(13_000))),
    version_words: libcuda::version_words,
    device_count: || call("device_count", |_| Ok(1)),
    device: |ordinal| call("device", |_| Ok(ordinal)),
    chip: |_| call("chip", |fake| Ok(fake.chip())),
    device_name: |_| call("device_name", |_| Ok("fake card".to_owned())),
    retain_context,
    release_context: |_| give_back("release_context", |fake| fake.live.contexts -= 1),
    use_context: |_| call("use_context", |_| Ok(())),
    memory_info: || call("memory_info", |fake| Ok((fake.memory(), fake.memory()))),
    create_stream,
    destroy_stream: |_| give_back("destroy_stream", |fake| fake.live.streams -= 1),
    wait_stream: |_| call("wait_stream", |fake| fake.wait(None)),
    alloc,
    free,
    alloc_pinned,
    free_pinned,
    register,
    unregister,
    copy_in,
    copy_out,
    copy_inside: |to, from, bytes, _| call("copy_inside", |fake| fake.put(Work::Inside { to, from, bytes })),
    fill: |to, byte, bytes, _| call("fill", |fake| fake.put(Work::Fill { to, byte, bytes })),
    create_event,
    destroy_event: |_| give_back("destroy_event", |fake| fake.live.events -= 1),
    record_event,
    wait_event,
    query_event,
    elapsed_ms: |_, _| call("elapsed_ms", |_| Ok(1.0)),
    load_module,
    unload_module,
    find_function,
    allow_shared,
    prefer_shared: |function| call("prefer_shared", |fake| fake.function(function).map(|_| ())),
    allow_clusters: |function| call("allow_clusters", |fake| fake.function(function).map(|_| ())),
    launch,
    begin_recording,
    end_recording,
    destroy_graph: |graph| give_back("destroy_graph", |fake| fake.drop_graph(graph)),
    instantiate,
    destroy_instance: |graph| give_back("destroy_instance", |fake| fake.drop_graph(graph)),
    replay,
};

const fn failure(code: u32, why: Why) -> Failure {
    Failure { code, why, words: "the fake driver was told to fail" }
}

/// Failures, by the numbers that CUDA has for them.
pub(crate) const INVALID_VALUE: Failure = failure(1, Why::Other);
pub(crate) const OUT_OF_MEMORY: Failure = failure(2, Why::OutOfMemory);
const INVALID_HANDLE: Failure = failure(400, Why::Other);
const NOT_FOUND: Failure = failure(500, Why::Other);
const NOT_READY: Failure = failure(600, Why::NotReady);
pub(crate) const ILLEGAL_ADDRESS: Failure = failure(700, Why::Lost);
const ALREADY_REGISTERED: Failure = failure(712, Why::Other);
pub(crate) const LAUNCH_FAILED: Failure = failure(719, Why::Lost);
pub(crate) const NOT_SUPPORTED: Failure = failure(801, Why::Other);
const RECORDING_UNSUPPORTED: Failure = failure(900, Why::Other);
const ILLEGAL_STATE: Failure = failure(401, Why::Other);

/// What the fake says that it has.
pub(crate) const MEMORY_BYTES: usize = 1 << 30;
/// Dynamic shared memory of a block that was not asked for by an attribute.
const SHARED_USUAL: u32 = 48 << 10;

/// An ELF file's beginning, the length of the text and the text: names of kernels are looked up in it.
/// What is defined as a fault is one.
fn compile(source: &Source<'_>, options: &[String]) -> Result<Vec<u8>, String> {
    match options.last().map(String::as_str) {
        Some("-DFAULT=1") => return Err(format!("{}: a fault", source.name)),
        Some("-DFAULT=2") => panic!("a fault of the compiler"),
        _ => {}
    }
    let mut image = b"\x7fELF\0\0\0\0".to_vec();
    image.extend((source.text.len() as u64).to_le_bytes());
    image.extend(source.text.as_bytes());
    Ok(image)
}

/// A kernel as it was launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Launched {
    pub(crate) kernel: String,
    pub(crate) grid: [u32; 3],
    pub(crate) block: u32,
    pub(crate) shared: u32,
    pub(crate) cluster: u32,
    pub(crate) early_start: bool,
}

/// What a kernel does.
#[derive(Clone, Debug)]
enum Effect {
    Nothing,
    /// Takes this many bytes from there, for a plane that begins here.
    Pack {
        plane: u64,
        stored: u64,
        bytes: usize,
    },
    /// Writes every `stride`-th row of what was packed from a plane on.
    RowsOf {
        plane: u64,
        stride: usize,
        to: u64,
        rows: usize,
        columns: usize,
    },
}

/// Something on the stream.
#[derive(Clone, Debug)]
enum Work {
    /// From pinned memory.
    ToDevice {
        to: u64,
        from: usize,
        bytes: usize,
    },
    /// From other memory, of which the driver keeps a copy.
    Kept {
        to: u64,
        bytes: Vec<u8>,
    },
    /// To pinned memory.
    FromDevice {
        to: usize,
        from: u64,
        bytes: usize,
    },
    Inside {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Fill {
        to: u64,
        byte: u8,
        bytes: usize,
    },
    Launch(Effect),
    Reach {
        event: usize,
        round: u64,
    },
}

/// What exists, by kind; zeros where everything was given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) contexts: i32,
    pub(crate) streams: i32,
    pub(crate) slabs: i32,
    pub(crate) pinned: i32,
    pub(crate) events: i32,
    pub(crate) modules: i32,
    pub(crate) graphs: i32,
}

/// The driver of this thread.
#[derive(Default)]
pub(crate) struct Fake {
    /// The functions that were called, in their order.
    pub(crate) calls: Vec<&'static str>,
    /// The kernels that were launched: run at once, or recorded.
    pub(crate) launched: Vec<Launched>,
    /// Replays of recorded graphs, each by the kernels it holds.
    pub(crate) replayed: Vec<usize>,
    pub(crate) live: Live,
    /// What no program may do, in words.
    pub(crate) faults: Vec<String>,
    /// The call that fails, by its place among all; whether every one after it does, too.
    fails: Option<(usize, Failure, bool)>,
    /// The next copy to the device changes a bit.
    pub(crate) flips: bool,
    /// No driver at all; an old one.
    pub(crate) absent: bool,
    pub(crate) version: Option<c_int>,
    pub(crate) memory_bytes: Option<usize>,
    /// Another chip than an H200, by its compute capability.
    pub(crate) capability: Option<c_int>,
    slabs: BTreeMap<u64, Vec<u8>>,
    pinned: HashMap<usize, Vec<u8>>,
    /// Memory of the program's that was pinned later: its bytes by its start.
    registered: HashMap<usize, usize>,
    work: VecDeque<Work>,
    /// While a graph is recorded: what it holds so far.
    recording: Option<Vec<Work>>,
    graphs: HashMap<usize, Vec<Work>>,
    rounds: HashMap<usize, u64>,
    modules: HashMap<usize, String>,
    functions: HashMap<usize, (String, u32)>,
    packed: BTreeMap<u64, Vec<u8>>,
    /// What was packed for the last weight that was checked.
    pub(crate) arrived: Vec<u8>,
    names: usize,
}

thread_local! {
    static THREADS_OWN: RefCell<Fake> = RefCell::default();
}

/// Asks or tells this thread's driver.
pub(crate) fn with<T>(ask: impl FnOnce(&mut Fake) -> T) -> T {
    THREADS_OWN.with(|fake| ask(&mut fake.borrow_mut()))
}

/// A new driver, which fails at the given call (counted from 0), with every one behind it where the device is lost.
pub(crate) fn failing(at: usize, failure: Failure, lost: bool) {
    with(|fake| *fake = Fake { fails: Some((at, failure, lost)), ..Fake::default() });
}

/// A new driver that does as it is asked.
pub(crate) fn willing() {
    with(|fake| *fake = Fake::default());
}

impl Fake {
    /// Lets one call fail.
    pub(crate) fn fail_next(&mut self, at: usize, failure: Failure) {
        self.fails = Some((at, failure, false));
    }

    /// Does everything that is on the stream.
    pub(crate) fn wait_all(&mut self) {
        self.wait(None).expect("nothing fails by itself");
    }

    /// Kernels on the stream that nobody has waited for.
    pub(crate) fn launches_waiting(&self) -> usize {
        self.work.iter().filter(|work| matches!(work, Work::Launch(_))).count()
    }

    /// Remembers a call; how it fails, if it does.
    fn asked(&mut self, name: &'static str) -> Done {
        let at = self.calls.len();
        self.calls.push(name);
        match self.fails {
            Some((call, failure, lost)) if at == call || lost && at > call => Err(failure),
            _ => Ok(()),
        }
    }

    /// A name for something new, never used twice.
    fn name(&mut self) -> Handle {
        self.names += 16;
        ptr::without_provenance_mut(self.names)
    }

    fn put(&mut self, work: Work) -> Done {
        match (&mut self.recording, work) {
            (Some(recording), work @ Work::Launch(_)) => recording.push(work),
            // A step's recording holds kernels and nothing else.
            (Some(_), _) => return self.unsupported("a copy or an event while a graph is recorded"),
            (None, work) => self.work.push_back(work),
        }
        Ok(())
    }

    fn unsupported(&mut self, what: &str) -> Done {
        self.faults.push(what.to_owned());
        Err(RECORDING_UNSUPPORTED)
    }

    fn is_pinned(&self, at: usize) -> bool {
        let registered = self.registered.iter().map(|(start, bytes)| (*start, *bytes));
        let mut pinned = self.pinned.iter().map(|(start, pinned)| (*start, pinned.len())).chain(registered);
        pinned.any(|(start, bytes)| (start..start + bytes).contains(&at))
    }

    /// Bytes of device memory, if they are inside one slab.
    fn slab(&mut self, at: u64, bytes: usize) -> Result<&mut [u8], Failure> {
        let (start, slab) = self.slabs.range_mut(..=at).next_back().ok_or(ILLEGAL_ADDRESS)?;
        let offset = usize::try_from(at - start).expect("a host's memory");
        slab.get_mut(offset..).and_then(|rest| rest.get_mut(..bytes)).ok_or(ILLEGAL_ADDRESS)
    }

    /// How much memory it has.
    fn memory(&self) -> usize {
        self.memory_bytes.unwrap_or(MEMORY_BYTES)
    }

    fn chip(&self) -> Result<Chip, String> {
        libcuda::chip_of(Attributes { capability: self.capability.unwrap_or(H200.capability), ..H200 })
    }

    fn function(&mut self, function: Handle) -> Result<&mut (String, u32), Failure> {
        self.functions.get_mut(&function.addr()).ok_or(INVALID_HANDLE)
    }

    fn graph(&self, graph: Handle) -> Result<Vec<Work>, Failure> {
        self.graphs.get(&graph.addr()).cloned().ok_or(INVALID_HANDLE)
    }

    fn keep_graph(&mut self, recorded: Vec<Work>) -> Handle {
        let name = self.name();
        self.graphs.insert(name.addr(), recorded);
        self.live.graphs += 1;
        name
    }

    fn drop_graph(&mut self, graph: Handle) {
        self.live.graphs -= i32::from(self.graphs.remove(&graph.addr()).is_some());
    }

    /// Does what is on the stream, until an event is reached, or all of it.
    fn wait(&mut self, until: Option<(usize, u64)>) -> Done {
        if self.recording.is_some() {
            return self.unsupported("waiting while a graph is recorded");
        }
        while let Some(work) = self.work.pop_front() {
            if let Work::Reach { event, round } = work {
                if until == Some((event, round)) {
                    return Ok(());
                }
                continue;
            }
            self.work_off(&work)?;
        }
        Ok(())
    }

    fn work_off(&mut self, work: &Work) -> Done {
        match *work {
            Work::ToDevice { to, from, bytes } => {
                let flips = std::mem::take(&mut self.flips);
                let memory = self.slab(to, bytes)?;
                // SAFETY: the program promises that its memory lives until it has waited.
                unsafe { ptr::copy(ptr::with_exposed_provenance(from), memory.as_mut_ptr(), bytes) };
                if flips {
                    memory[bytes / 2] ^= 4;
                }
            }
            Work::Kept { to, ref bytes } => self.slab(to, bytes.len())?.copy_from_slice(bytes),
            Work::FromDevice { to, from, bytes } => {
                let memory = self.slab(from, bytes)?;
                // SAFETY: as above.
                unsafe { ptr::copy(memory.as_ptr(), ptr::with_exposed_provenance_mut(to), bytes) };
            }
            Work::Inside { to, from, bytes } => {
                let copied = self.slab(from, bytes)?.to_vec();
                self.slab(to, bytes)?.copy_from_slice(&copied);
            }
            Work::Fill { to, byte, bytes } => self.slab(to, bytes)?.fill(byte),
            Work::Launch(Effect::Nothing) | Work::Reach { .. } => {}
            Work::Launch(Effect::Pack { plane, stored, bytes }) => {
                let taken = self.slab(stored, bytes)?.to_vec();
                self.packed.insert(plane, taken);
            }
            Work::Launch(Effect::RowsOf { plane, stride, to, rows, columns }) => {
                let packed: Vec<u8> = self.packed.split_off(&plane).into_values().flatten().collect();
                let row_bytes = columns * 4;
                let memory = self.slab(to, rows * row_bytes)?;
                for (row, to) in memory.chunks_exact_mut(row_bytes).enumerate() {
                    // Of other formats than f32 only zeros can be shown.
                    match packed.get(row * stride * row_bytes..).and_then(|rest| rest.get(..row_bytes)) {
                        Some(stored) => to.copy_from_slice(stored),
                        None => to.fill(0),
                    }
                }
                self.arrived = packed;
            }
        }
        Ok(())
    }
}

/// A call that may fail.
fn call<T>(name: &'static str, body: impl FnOnce(&mut Fake) -> Result<T, Failure>) -> Result<T, Failure> {
    with(|fake| fake.asked(name).and_then(|()| body(fake)))
}

/// A call that gives something back: it is gone even if the driver complains.
fn give_back(name: &'static str, body: impl FnOnce(&mut Fake)) -> Done {
    with(|fake| {
        body(fake);
        fake.asked(name)
    })
}

unsafe fn retain_context(_device: DeviceId) -> Result<Handle, Failure> {
    call("retain_context", |fake| {
        fake.live.contexts += 1;
        Ok(fake.name())
    })
}

unsafe fn create_stream() -> Result<Handle, Failure> {
    call("create_stream", |fake| {
        fake.live.streams += 1;
        Ok(fake.name())
    })
}

unsafe fn alloc(bytes: usize) -> Result<u64, Failure> {
    call("alloc", |fake| {
        if fake.recording.is_some() {
            fake.unsupported("allocating while a graph is recorded")?;
        }
        let taken: usize = fake.slabs.values().map(Vec::len).sum();
        if bytes > fake.memory().saturating_sub(taken) {
            return Err(OUT_OF_MEMORY);
        }
        let slab = vec![0u8; bytes];
        let start = slab.as_ptr().expose_provenance() as u64;
        fake.slabs.insert(start, slab);
        fake.live.slabs += 1;
        Ok(start)
    })
}

unsafe fn free(pointer: u64) -> Done {
    give_back("free", |fake| {
        // The real one waits for work that uses it.
        if fake.recording.is_none() {
            fake.wait(None).ok();
        }
        match fake.slabs.remove(&pointer) {
            Some(_) => fake.live.slabs -= 1,
            None => fake.faults.push(format!("{pointer:#x} was freed and not allocated")),
        }
    })
}

unsafe fn alloc_pinned(bytes: usize) -> Result<*mut u8, Failure> {
    call("alloc_pinned", |fake| {
        let mut pinned = vec![0u8; bytes];
        let start = pinned.as_mut_ptr();
        fake.pinned.insert(start.expose_provenance(), pinned);
        fake.live.pinned += 1;
        Ok(start)
    })
}

unsafe fn free_pinned(pointer: *mut u8) -> Done {
    give_back("free_pinned", |fake| {
        if fake.recording.is_none() {
            fake.wait(None).ok();
        }
        match fake.pinned.remove(&pointer.expose_provenance()) {
            Some(_) => fake.live.pinned -= 1,
            None => fake.faults.push(format!("{pointer:?} was freed and not pinned")),
        }
    })
}

unsafe fn register(start: *mut u8, bytes: usize) -> Done {
    call("register", |fake| {
        if fake.registered.insert(start.expose_provenance(), bytes).is_some() {
            return Err(ALREADY_REGISTERED);
        }
        fake.live.pinned += 1;
        Ok(())
    })
}

unsafe fn unregister(start: *mut u8) -> Done {
    give_back("unregister", |fake| {
        let Some(bytes) = fake.registered.remove(&start.addr()) else {
            fake.faults.push(format!("{start:?} was given back and not registered"));
            return;
        };
        fake.live.pinned -= 1;
        // A copy that is still to be done would read memory that is gone.
        let within = start.addr()..start.addr() + bytes;
        if fake.work.iter().any(|work| matches!(work, Work::ToDevice { from, .. } if within.contains(from))) {
            fake.faults.push("memory was given back that a copy still reads".to_owned());
        }
    })
}

unsafe fn copy_in(to: u64, from: *const u8, bytes: usize, _stream: Handle) -> Done {
    call("copy_in", |fake| {
        if fake.is_pinned(from.addr()) {
            return fake.put(Work::ToDevice { to, from: from.expose_provenance(), bytes });
        }
        // SAFETY: the caller's memory, during the call.
        let kept = unsafe { std::slice::from_raw_parts(from, bytes) }.to_vec();
        fake.put(Work::Kept { to, bytes: kept })
    })
}

unsafe fn copy_out(to: *mut u8, from: u64, bytes: usize, _stream: Handle) -> Done {
    call("copy_out", |fake| {
        fake.put(Work::FromDevice { to: to.expose_provenance(), from, bytes })?;
        // Into other memory than pinned the driver copies before it returns.
        if fake.is_pinned(to.addr()) { Ok(()) } else { fake.wait(None) }
    })
}

unsafe fn create_event() -> Result<Handle, Failure> {
    call("create_event", |fake| {
        fake.live.events += 1;
        Ok(fake.name())
    })
}

unsafe fn record_event(event: Handle, _stream: Handle) -> Done {
    call("record_event", |fake| {
        let round = fake.rounds.entry(event.addr()).or_default();
        *round += 1;
        let round = *round;
        fake.put(Work::Reach { event: event.addr(), round })
    })
}

unsafe fn wait_event(event: Handle) -> Done {
    call("wait_event", |fake| {
        let reached = |work: &Work| match *work {
            Work::Reach { event: reached, round } if reached == event.addr() => Some((reached, round)),
            _ => None,
        };
        // The last time that it was put on the stream; passed already where it is not there any more.
        match fake.work.iter().rev().find_map(reached) {
            Some(until) => fake.wait(Some(until)),
            None => Ok(()),
        }
    })
}

unsafe fn query_event(event: Handle) -> Done {
    call("query_event", |fake| {
        let waits =
            |work: &Work| matches!(work, Work::Reach { event: reached, .. } if *reached == event.addr());
        if fake.work.iter().any(waits) { Err(NOT_READY) } else { Ok(()) }
    })
}

unsafe fn load_module(image: &[u8]) -> Result<Handle, Failure> {
    call("load_module", |fake| {
        // As `compile` makes it: a length at byte 8, and as many bytes behind it.
        let bytes = u64::from_le_bytes(image[8..16].try_into().expect("eight bytes"));
        let text = &image[16..][..usize::try_from(bytes).expect("a text in memory")];
        let name = fake.name();
        fake.modules.insert(name.addr(), String::from_utf8_lossy(text).into_owned());
        fake.live.modules += 1;
        Ok(name)
    })
}

unsafe fn unload_module(module: Handle) -> Done {
    give_back("unload_module", |fake| {
        fake.modules.remove(&module.addr());
        fake.live.modules -= 1;
    })
}

unsafe fn find_function(module: Handle, name: &CStr) -> Result<Handle, Failure> {
    call("find_function", |fake| {
        let kernel = name.to_string_lossy().into_owned();
        let text = fake.modules.get(&module.addr()).ok_or(INVALID_HANDLE)?;
        let declared = |line: &str| line.starts_with("KERNEL") && line.contains(&format!(" {kernel}("));
        if !text.lines().any(declared) {
            return Err(NOT_FOUND);
        }
        let name = fake.name();
        fake.functions.insert(name.addr(), (kernel, SHARED_USUAL));
        Ok(name)
    })
}

unsafe fn allow_shared(function: Handle, bytes: c_int) -> Done {
    call("allow_shared", |fake| {
        let (_, room) = fake.function(function)?;
        if bytes > H200.shared {
            return Err(INVALID_VALUE);
        }
        *room = bytes.cast_unsigned();
        Ok(())
    })
}

unsafe fn launch(launch: &RawLaunch<'_>) -> Done {
    call("launch", |fake| {
        let able = fake.chip().map_err(|_| INVALID_VALUE)?.abilities;
        let (kernel, room) = fake.function(launch.function)?.clone();
        let RawLaunch { grid, block, shared, cluster, early_start, args, .. } = *launch;
        let launched = Launched { kernel, grid, block, shared, cluster, early_start };
        let fits = launched.shared <= room
            && launched.grid.iter().all(|count| *count > 0)
            && (1..=able.clusters_max).contains(&(launched.cluster as usize))
            && launched.grid[2].is_multiple_of(launched.cluster)
            && launched.early_start <= able.early_start;
        if !fits {
            fake.faults.push(format!("no card takes {launched:?}"));
            return Err(INVALID_VALUE);
        }
        // SAFETY: these kernels' arguments, as embed.cu and pack.cu declare them.
        let effect = unsafe {
            match launched.kernel.as_str() {
                "pack" => {
                    let rows: *const u64 = args[1].cast();
                    let counts: *const i32 = rows.add(1).cast();
                    let bytes = i64::from(*counts) * i64::from(*counts.add(1));
                    let bytes = usize::try_from(bytes).map_err(|_| INVALID_VALUE)?;
                    Effect::Pack { plane: *args[0].cast::<u64>(), stored: *rows, bytes }
                }
                "rows_of" => {
                    let count =
                        |at: usize| usize::try_from(*args[at].cast::<i32>()).map_err(|_| INVALID_VALUE);
                    Effect::RowsOf {
                        plane: *args[0].cast::<u64>(),
                        stride: count(2)?,
                        to: *args[3].cast::<u64>(),
                        rows: launched.grid[0] as usize,
                        columns: count(4)?,
                    }
                }
                _ => Effect::Nothing,
            }
        };
        fake.launched.push(launched);
        fake.put(Work::Launch(effect))
    })
}

unsafe fn begin_recording(_stream: Handle) -> Done {
    call("begin_recording", |fake| {
        fake.recording = Some(Vec::new());
        Ok(())
    })
}

unsafe fn end_recording(_stream: Handle) -> Result<Handle, Failure> {
    // However it goes, nothing is recorded any more.
    let recorded = with(|fake| fake.recording.take());
    call("end_recording", |fake| Ok(fake.keep_graph(recorded.ok_or(ILLEGAL_STATE)?)))
}

unsafe fn instantiate(graph: Handle) -> Result<Handle, Failure> {
    call("instantiate", |fake| {
        let recorded = fake.graph(graph)?;
        Ok(fake.keep_graph(recorded))
    })
}

unsafe fn replay(graph: Handle, _stream: Handle) -> Done {
    call("replay", |fake| {
        let recorded = fake.graph(graph)?;
        fake.replayed.push(recorded.len());
        recorded.into_iter().try_for_each(|work| fake.put(work))
    })
}
