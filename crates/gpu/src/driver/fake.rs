//! A driver for tests without a GPU. It computes nothing, remembers what it is asked, and fails where it is told to.
//!
//! Each thread has one of its own. What is put on the stream is done when somebody waits for it, and only as far as he
//! waits: whoever writes what a copy still reads, or reads what a copy still writes, gets wrong bytes here as he would on a
//! device. Device memory is memory of the host, so copies are real; what lies outside of it is an illegal address.
//! Two kernels do something, `pack` and `rows_of` for rows of f32, so that an upload can be followed to its check.

#![expect(non_snake_case, reason = "the driver's own names")]

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::ptr;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphExec, CUlaunchAttributeID, CUlaunchConfig, CUmodule, CUresult, CUstream, CUstreamCaptureMode,
};

use super::nvrtc::{Compiler, Source};

/// What the fake says that it has.
pub(crate) const MEMORY_BYTES: usize = 1 << 30;
const MULTIPROCESSORS: c_int = 132;
const SHARED_OPTIN: c_int = 232_448;
/// Dynamic shared memory of a block that was not asked for by an attribute.
const SHARED_USUAL: u32 = 48 << 10;

/// Makes images that the fake driver loads.
pub(crate) const COMPILER: Compiler = Compiler { version: || Ok((13, 0)), compile };

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
}

/// What a kernel does.
#[derive(Clone, Debug)]
enum Effect {
    Nothing,
    /// Takes so many bytes from there, for a plane that begins here.
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
        turn: u64,
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
    fails: Option<(usize, CUresult, bool)>,
    /// The next copy to the device changes a bit.
    pub(crate) flips: bool,
    /// No driver at all; an old one.
    pub(crate) absent: bool,
    pub(crate) version: Option<c_int>,
    pub(crate) memory_bytes: Option<usize>,
    slabs: BTreeMap<u64, Vec<u8>>,
    pinned: HashMap<usize, Vec<u8>>,
    /// Memory of the program's that was pinned later: its bytes by its start.
    registered: HashMap<usize, usize>,
    work: VecDeque<Work>,
    /// While a graph is recorded: what it holds so far.
    recording: Option<Vec<Work>>,
    graphs: HashMap<usize, Vec<Work>>,
    turns: HashMap<usize, u64>,
    modules: HashMap<usize, String>,
    functions: HashMap<usize, (String, u32)>,
    packed: BTreeMap<u64, Vec<u8>>,
    /// What was packed for the last weight that was checked.
    pub(crate) arrived: Vec<u8>,
    names: usize,
}

thread_local! {
    static FAKE: RefCell<Fake> = RefCell::default();
}

/// Asks or tells this thread's driver.
pub(crate) fn with<T>(ask: impl FnOnce(&mut Fake) -> T) -> T {
    FAKE.with(|fake| ask(&mut fake.borrow_mut()))
}

/// A new driver, which fails at the given call (counted from 0), with every one behind it where the device is lost.
pub(crate) fn failing(at: usize, code: CUresult, lost: bool) {
    with(|fake| *fake = Fake { fails: Some((at, code, lost)), ..Fake::default() });
}

/// A new driver that does as it is asked.
pub(crate) fn willing() {
    with(|fake| *fake = Fake::default());
}

type Done = Result<(), CUresult>;

impl Fake {
    /// Lets one call fail.
    pub(crate) fn fail_next(&mut self, at: usize, code: CUresult) {
        self.fails = Some((at, code, false));
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
            Some((call, code, lost)) if at == call || lost && at > call => Err(code),
            _ => Ok(()),
        }
    }

    /// A name for something new, never used twice.
    fn name(&mut self) -> usize {
        self.names += 16;
        self.names
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
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    }

    fn is_pinned(&self, at: usize) -> bool {
        let registered = self.registered.iter().map(|(start, bytes)| (*start, *bytes));
        let mut pinned = self.pinned.iter().map(|(start, pinned)| (*start, pinned.len())).chain(registered);
        pinned.any(|(start, bytes)| (start..start + bytes).contains(&at))
    }

    /// Bytes of device memory, if they are inside one slab.
    fn memory(&mut self, at: u64, bytes: usize) -> Result<&mut [u8], CUresult> {
        let illegal = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
        let (start, slab) = self.slabs.range_mut(..=at).next_back().ok_or(illegal)?;
        let offset = usize::try_from(at - start).expect("a host's memory");
        slab.get_mut(offset..).and_then(|rest| rest.get_mut(..bytes)).ok_or(illegal)
    }

    /// Does what is on the stream, until an event is reached, or all of it.
    fn wait(&mut self, until: Option<(usize, u64)>) -> Done {
        if self.recording.is_some() {
            return self.unsupported("waiting while a graph is recorded");
        }
        while let Some(work) = self.work.pop_front() {
            if let Work::Reach { event, turn } = work {
                if until == Some((event, turn)) {
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
                let memory = self.memory(to, bytes)?;
                // SAFETY: the program promises that its memory lives until it has waited.
                unsafe { ptr::copy(ptr::with_exposed_provenance(from), memory.as_mut_ptr(), bytes) };
                if flips {
                    memory[bytes / 2] ^= 4;
                }
            }
            Work::Kept { to, ref bytes } => self.memory(to, bytes.len())?.copy_from_slice(bytes),
            Work::FromDevice { to, from, bytes } => {
                let memory = self.memory(from, bytes)?;
                // SAFETY: as above.
                unsafe { ptr::copy(memory.as_ptr(), ptr::with_exposed_provenance_mut(to), bytes) };
            }
            Work::Inside { to, from, bytes } => {
                let copied = self.memory(from, bytes)?.to_vec();
                self.memory(to, bytes)?.copy_from_slice(&copied);
            }
            Work::Fill { to, byte, bytes } => self.memory(to, bytes)?.fill(byte),
            Work::Launch(Effect::Nothing) | Work::Reach { .. } => {}
            Work::Launch(Effect::Pack { plane, stored, bytes }) => {
                let taken = self.memory(stored, bytes)?.to_vec();
                self.packed.insert(plane, taken);
            }
            Work::Launch(Effect::RowsOf { plane, stride, to, rows, columns }) => {
                let packed: Vec<u8> = self.packed.split_off(&plane).into_values().flatten().collect();
                let row_bytes = columns * 4;
                let memory = self.memory(to, rows * row_bytes)?;
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
fn call(name: &'static str, body: impl FnOnce(&mut Fake) -> Done) -> CUresult {
    let done = with(|fake| fake.asked(name).and_then(|()| body(fake)));
    done.err().unwrap_or(CUresult::CUDA_SUCCESS)
}

/// A call that gives something back: it is gone even if the driver complains.
fn give_back(name: &'static str, body: impl FnOnce(&mut Fake)) -> CUresult {
    let done = with(|fake| {
        body(fake);
        fake.asked(name)
    });
    done.err().unwrap_or(CUresult::CUDA_SUCCESS)
}

/// Writes what a call yields.
fn tell<T>(to: *mut T, value: T) -> Done {
    // SAFETY: every caller hands in memory for one value.
    unsafe { to.write(value) };
    Ok(())
}

pub(crate) unsafe fn is_culib_present() -> bool {
    with(|fake| !fake.absent)
}

pub(crate) unsafe fn cuInit(_flags: c_uint) -> CUresult {
    call("cuInit", |_| Ok(()))
}

pub(crate) unsafe fn cuDriverGetVersion(to: *mut c_int) -> CUresult {
    call("cuDriverGetVersion", |fake| tell(to, fake.version.unwrap_or(13_000)))
}

pub(crate) unsafe fn cuDeviceGetCount(to: *mut c_int) -> CUresult {
    call("cuDeviceGetCount", |_| tell(to, 1))
}

pub(crate) unsafe fn cuDeviceGet(to: *mut CUdevice, ordinal: c_int) -> CUresult {
    call("cuDeviceGet", |_| tell(to, ordinal))
}

pub(crate) unsafe fn cuDeviceGetAttribute(
    to: *mut c_int,
    which: CUdevice_attribute,
    _device: CUdevice,
) -> CUresult {
    use CUdevice_attribute as A;
    call("cuDeviceGetAttribute", |_| {
        tell(
            to,
            match which {
                A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
                A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => 0,
                A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => MULTIPROCESSORS,
                A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => SHARED_OPTIN,
                _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
            },
        )
    })
}

pub(crate) unsafe fn cuDeviceGetName(to: *mut c_char, bytes: c_int, _device: CUdevice) -> CUresult {
    call("cuDeviceGetName", |_| {
        let name = c"fake card";
        assert!(name.count_bytes() < usize::try_from(bytes).unwrap_or(0), "room for the name");
        // SAFETY: as long as was just checked.
        unsafe { ptr::copy(name.as_ptr(), to, name.count_bytes() + 1) };
        Ok(())
    })
}

pub(crate) unsafe fn cuDevicePrimaryCtxRetain(to: *mut CUcontext, _device: CUdevice) -> CUresult {
    call("cuDevicePrimaryCtxRetain", |fake| {
        fake.live.contexts += 1;
        tell(to, ptr::without_provenance_mut(fake.name()))
    })
}

pub(crate) unsafe fn cuDevicePrimaryCtxRelease_v2(_device: CUdevice) -> CUresult {
    give_back("cuDevicePrimaryCtxRelease", |fake| fake.live.contexts -= 1)
}

pub(crate) unsafe fn cuCtxSetCurrent(_context: CUcontext) -> CUresult {
    call("cuCtxSetCurrent", |_| Ok(()))
}

pub(crate) unsafe fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    call("cuMemGetInfo", |fake| {
        tell(total, fake.memory_bytes.unwrap_or(MEMORY_BYTES))?;
        tell(free, fake.memory_bytes.unwrap_or(MEMORY_BYTES))
    })
}

pub(crate) unsafe fn cuStreamCreate(to: *mut CUstream, _flags: c_uint) -> CUresult {
    call("cuStreamCreate", |fake| {
        fake.live.streams += 1;
        tell(to, ptr::without_provenance_mut(fake.name()))
    })
}

pub(crate) unsafe fn cuStreamDestroy_v2(_stream: CUstream) -> CUresult {
    give_back("cuStreamDestroy", |fake| fake.live.streams -= 1)
}

pub(crate) unsafe fn cuStreamSynchronize(_stream: CUstream) -> CUresult {
    call("cuStreamSynchronize", |fake| fake.wait(None))
}

pub(crate) unsafe fn cuMemAlloc_v2(to: *mut CUdeviceptr, bytes: usize) -> CUresult {
    call("cuMemAlloc", |fake| {
        if fake.recording.is_some() {
            return fake.unsupported("allocating while a graph is recorded");
        }
        let taken: usize = fake.slabs.values().map(Vec::len).sum();
        if bytes > fake.memory_bytes.unwrap_or(MEMORY_BYTES).saturating_sub(taken) {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let slab = vec![0u8; bytes];
        let start = slab.as_ptr().expose_provenance() as u64;
        fake.slabs.insert(start, slab);
        fake.live.slabs += 1;
        tell(to, start)
    })
}

pub(crate) unsafe fn cuMemFree_v2(pointer: CUdeviceptr) -> CUresult {
    give_back("cuMemFree", |fake| {
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

pub(crate) unsafe fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, _flags: c_uint) -> CUresult {
    call("cuMemHostAlloc", |fake| {
        let mut pinned = vec![0u8; bytes];
        let start = pinned.as_mut_ptr();
        fake.pinned.insert(start.expose_provenance(), pinned);
        fake.live.pinned += 1;
        tell(to, start.cast())
    })
}

pub(crate) unsafe fn cuMemFreeHost(pointer: *mut c_void) -> CUresult {
    give_back("cuMemFreeHost", |fake| {
        if fake.recording.is_none() {
            fake.wait(None).ok();
        }
        match fake.pinned.remove(&pointer.expose_provenance()) {
            Some(_) => fake.live.pinned -= 1,
            None => fake.faults.push(format!("{pointer:?} was freed and not pinned")),
        }
    })
}

pub(crate) unsafe fn cuMemHostRegister_v2(start: *mut c_void, bytes: usize, _flags: c_uint) -> CUresult {
    call("cuMemHostRegister", |fake| {
        if fake.registered.insert(start.expose_provenance(), bytes).is_some() {
            return Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        fake.live.pinned += 1;
        Ok(())
    })
}

pub(crate) unsafe fn cuMemHostUnregister(start: *mut c_void) -> CUresult {
    give_back("cuMemHostUnregister", |fake| {
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

pub(crate) unsafe fn cuMemcpyHtoDAsync_v2(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
    _stream: CUstream,
) -> CUresult {
    call("cuMemcpyHtoD", |fake| {
        if fake.is_pinned(from.addr()) {
            return fake.put(Work::ToDevice { to, from: from.expose_provenance(), bytes });
        }
        // SAFETY: the caller's memory, during the call.
        let kept = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec();
        fake.put(Work::Kept { to, bytes: kept })
    })
}

pub(crate) unsafe fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
    _stream: CUstream,
) -> CUresult {
    call("cuMemcpyDtoH", |fake| {
        fake.put(Work::FromDevice { to: to.expose_provenance(), from, bytes })?;
        // Into other memory than pinned the driver copies before it returns.
        if fake.is_pinned(to.addr()) { Ok(()) } else { fake.wait(None) }
    })
}

pub(crate) unsafe fn cuMemcpyDtoDAsync_v2(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    _stream: CUstream,
) -> CUresult {
    call("cuMemcpyDtoD", |fake| fake.put(Work::Inside { to, from, bytes }))
}

pub(crate) unsafe fn cuMemsetD8Async(
    to: CUdeviceptr,
    byte: c_uchar,
    bytes: usize,
    _stream: CUstream,
) -> CUresult {
    call("cuMemsetD8", |fake| fake.put(Work::Fill { to, byte, bytes }))
}

pub(crate) unsafe fn cuEventCreate(to: *mut CUevent, _flags: c_uint) -> CUresult {
    call("cuEventCreate", |fake| {
        fake.live.events += 1;
        tell(to, ptr::without_provenance_mut(fake.name()))
    })
}

pub(crate) unsafe fn cuEventDestroy_v2(_event: CUevent) -> CUresult {
    give_back("cuEventDestroy", |fake| fake.live.events -= 1)
}

pub(crate) unsafe fn cuEventRecord(event: CUevent, _stream: CUstream) -> CUresult {
    call("cuEventRecord", |fake| {
        let turn = fake.turns.entry(event.addr()).or_default();
        *turn += 1;
        let turn = *turn;
        fake.put(Work::Reach { event: event.addr(), turn })
    })
}

pub(crate) unsafe fn cuEventSynchronize(event: CUevent) -> CUresult {
    call("cuEventSynchronize", |fake| {
        let reached = |work: &Work| match *work {
            Work::Reach { event: reached, turn } if reached == event.addr() => Some((reached, turn)),
            _ => None,
        };
        // The last time that it was put on the stream; passed already where it is not there any more.
        match fake.work.iter().rev().find_map(reached) {
            Some(until) => fake.wait(Some(until)),
            None => Ok(()),
        }
    })
}

pub(crate) unsafe fn cuEventQuery(event: CUevent) -> CUresult {
    call("cuEventQuery", |fake| {
        let waits =
            |work: &Work| matches!(work, Work::Reach { event: reached, .. } if *reached == event.addr());
        if fake.work.iter().any(waits) { Err(CUresult::CUDA_ERROR_NOT_READY) } else { Ok(()) }
    })
}

pub(crate) unsafe fn cuEventElapsedTime_v2(to: *mut f32, _start: CUevent, _end: CUevent) -> CUresult {
    call("cuEventElapsedTime", |_| tell(to, 1.0))
}

pub(crate) unsafe fn cuModuleLoadData(to: *mut CUmodule, image: *const c_void) -> CUresult {
    call("cuModuleLoadData", |fake| {
        let image: *const u8 = image.cast();
        // SAFETY: made by `compile`: a length at byte 8, and as many bytes behind it.
        let text = unsafe {
            let bytes = u64::from_le_bytes(*image.add(8).cast::<[u8; 8]>());
            std::slice::from_raw_parts(image.add(16), usize::try_from(bytes).expect("a text in memory"))
        };
        let name = fake.name();
        fake.modules.insert(name, String::from_utf8_lossy(text).into_owned());
        fake.live.modules += 1;
        tell(to, ptr::without_provenance_mut(name))
    })
}

pub(crate) unsafe fn cuModuleUnload(module: CUmodule) -> CUresult {
    give_back("cuModuleUnload", |fake| {
        fake.modules.remove(&module.addr());
        fake.live.modules -= 1;
    })
}

pub(crate) unsafe fn cuModuleGetFunction(
    to: *mut CUfunction,
    module: CUmodule,
    name: *const c_char,
) -> CUresult {
    call("cuModuleGetFunction", |fake| {
        // SAFETY: ends with a zero.
        let kernel = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let text = fake.modules.get(&module.addr()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        let declared = |line: &str| line.starts_with("KERNEL") && line.contains(&format!(" {kernel}("));
        if !text.lines().any(declared) {
            return Err(CUresult::CUDA_ERROR_NOT_FOUND);
        }
        let name = fake.name();
        fake.functions.insert(name, (kernel, SHARED_USUAL));
        tell(to, ptr::without_provenance_mut(name))
    })
}

pub(crate) unsafe fn cuFuncSetAttribute(
    function: CUfunction,
    which: CUfunction_attribute,
    value: c_int,
) -> CUresult {
    call("cuFuncSetAttribute", |fake| {
        let shared = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let clusters = CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        let split = CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        match fake.functions.get_mut(&function.addr()) {
            Some((_, room)) if which == shared && value <= SHARED_OPTIN => *room = value.cast_unsigned(),
            Some(_) if which == clusters => {}
            Some(_) if which == split && (-1..=100).contains(&value) => {}
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
        Ok(())
    })
}

pub(crate) unsafe fn cuLaunchKernelEx(
    config: *const CUlaunchConfig,
    function: CUfunction,
    args: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> CUresult {
    call("cuLaunchKernelEx", |fake| {
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        // SAFETY: the caller's configuration, alive during the call; its attributes are as many as it says.
        let (config, attributes) = unsafe {
            let config = &*config;
            (config, std::slice::from_raw_parts(config.attrs, config.numAttrs as usize))
        };
        let (kernel, room) =
            fake.functions.get(&function.addr()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
        let cluster = attributes.iter().find_map(|attribute| {
            if attribute.id != CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION {
                return None;
            }
            // SAFETY: the member that belongs to this attribute.
            Some(unsafe { attribute.value.clusterDim.z })
        });
        let launched = Launched {
            kernel: kernel.clone(),
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            block: config.blockDimX,
            shared: config.sharedMemBytes,
            cluster: cluster.unwrap_or(1),
        };
        let fits = launched.shared <= *room
            && launched.grid.iter().all(|count| *count > 0)
            && (1..=16).contains(&launched.cluster)
            && launched.grid[2].is_multiple_of(launched.cluster);
        if !fits {
            fake.faults.push(format!("no card takes {launched:?}"));
            return Err(invalid);
        }
        // SAFETY: these kernels' arguments, as embed.cu and pack.cu declare them.
        let effect = unsafe {
            let args = std::slice::from_raw_parts(args, 2);
            match launched.kernel.as_str() {
                "pack" => {
                    let rows: *const u64 = args[1].cast();
                    let counts: *const i32 = rows.add(1).cast();
                    let bytes = i64::from(*counts) * i64::from(*counts.add(1));
                    let bytes = usize::try_from(bytes).map_err(|_| invalid)?;
                    Effect::Pack { plane: *args[0].cast::<u64>(), stored: *rows, bytes }
                }
                "rows_of" => {
                    let args = std::slice::from_raw_parts(args.as_ptr(), 5);
                    let count = |at: usize| usize::try_from(*args[at].cast::<i32>()).map_err(|_| invalid);
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

pub(crate) unsafe fn cuStreamBeginCapture_v2(_stream: CUstream, _mode: CUstreamCaptureMode) -> CUresult {
    call("cuStreamBeginCapture", |fake| {
        fake.recording = Some(Vec::new());
        Ok(())
    })
}

pub(crate) unsafe fn cuStreamEndCapture(_stream: CUstream, to: *mut CUgraph) -> CUresult {
    // However it goes, nothing is recorded any more.
    let recorded = with(|fake| fake.recording.take());
    call("cuStreamEndCapture", |fake| {
        let recorded = recorded.ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        let name = fake.name();
        fake.graphs.insert(name, recorded);
        fake.live.graphs += 1;
        tell(to, ptr::without_provenance_mut(name))
    })
}

pub(crate) unsafe fn cuGraphInstantiateWithFlags(
    to: *mut CUgraphExec,
    graph: CUgraph,
    _flags: c_ulonglong,
) -> CUresult {
    call("cuGraphInstantiate", |fake| {
        let recorded = fake.graphs.get(&graph.addr()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?.clone();
        let name = fake.name();
        fake.graphs.insert(name, recorded);
        fake.live.graphs += 1;
        tell(to, ptr::without_provenance_mut(name))
    })
}

pub(crate) unsafe fn cuGraphDestroy(graph: CUgraph) -> CUresult {
    give_back("cuGraphDestroy", |fake| {
        fake.live.graphs -= i32::from(fake.graphs.remove(&graph.addr()).is_some());
    })
}

pub(crate) unsafe fn cuGraphExecDestroy(graph: CUgraphExec) -> CUresult {
    give_back("cuGraphExecDestroy", |fake| {
        fake.live.graphs -= i32::from(fake.graphs.remove(&graph.addr()).is_some());
    })
}

pub(crate) unsafe fn cuGraphLaunch(graph: CUgraphExec, _stream: CUstream) -> CUresult {
    call("cuGraphLaunch", |fake| {
        let recorded = fake.graphs.get(&graph.addr()).ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?.clone();
        fake.replayed.push(recorded.len());
        recorded.into_iter().try_for_each(|work| fake.put(work))
    })
}

pub(crate) unsafe fn cuGetErrorString(_code: CUresult, to: *mut *const c_char) -> CUresult {
    tell(to, c"the fake driver was told to fail".as_ptr()).err().unwrap_or(CUresult::CUDA_SUCCESS)
}
