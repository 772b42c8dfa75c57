//! The CUDA driver: one device, one context, one stream.
//!
//! Everything is ordered by the stream: what is launched, copied or freed later never overtakes what came before, so
//! memory can be used again as soon as the host lets go of it. Every call's result is checked where it is made and
//! carries the name of the operation.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::MaybeUninit;
use std::rc::Rc;

#[cfg(not(test))]
use cudarc::driver::sys as calls;
use cudarc::driver::sys::{self, CUresult};
use fornax_compute::Error;
use memmap2::MmapMut;

#[cfg(test)]
use super::fake as calls;

/// The names that devices have in messages; more than eight cards in one machine are the others.
const NAMES: [&str; 8] = ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4", "cuda:5", "cuda:6", "cuda:7"];

/// The driver that CUDA 12 came with: graphs with programmatic launches need it.
const DRIVER_MIN: i32 = 12_000;
/// Ampere: the matrix instructions that the kernels are made of.
const CAPABILITY_MIN: i32 = 80;

/// What was found of a device, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The card's name.
    pub name: String,
    /// Bytes of memory it has.
    pub memory_total: u64,
    /// Bytes of it that are free.
    pub memory_free: u64,
    /// Compute capability, 90 for 9.0.
    pub capability: i32,
    /// The newest CUDA version the driver knows, 13000 for 13.0.
    pub driver: i32,
}

/// Shared memory of a block that is not dynamic: what the driver keeps, and what kernels declare.
const SHARED_STATIC: usize = 8 << 10;

/// Blocks of a cluster that every chip with clusters takes.
pub(crate) const CLUSTER_USUAL: usize = 8;

/// An open device. Holding an `Rc` of it ties memory to the thread that opened it.
#[derive(Debug)]
pub(crate) struct Device {
    name: &'static str,
    ordinal: sys::CUdevice,
    stream: sys::CUstream,
    pub(crate) found: Found,
    pub(crate) multiprocessors: u32,
    /// Bytes of dynamic shared memory that a block may have.
    pub(crate) shared_max: usize,
    /// Set by a call after which nothing on the device can be trusted.
    lost: Cell<bool>,
}

fn unavailable(ordinal: usize, reason: impl Into<String>) -> Error {
    Error::DeviceUnavailable { device: format!("cuda:{ordinal}"), reason: reason.into() }
}

/// Looks at a device without leaving anything open on it.
pub(crate) fn probe(ordinal: usize) -> Result<Found, Error> {
    Ok(Device::open(ordinal)?.found.clone())
}

impl Device {
    /// The largest cluster: Hopper has 16 blocks in one, later chips 8, earlier ones none.
    pub(crate) fn clusters_max(&self) -> usize {
        match self.found.capability {
            90 => 16,
            91.. => CLUSTER_USUAL,
            _ => 1,
        }
    }

    /// Opens a device on this thread, or says what is missing.
    pub(crate) fn open(ordinal: usize) -> Result<Rc<Device>, Error> {
        // SAFETY: asks the loader whether a library can be opened.
        if !unsafe { calls::is_culib_present() } {
            return Err(unavailable(
                ordinal,
                "the NVIDIA driver is not installed (no libcuda); install it, or use --device cpu",
            ));
        }
        let refuse =
            |what: &'static str| move |code| unavailable(ordinal, format!("{what}: {}", words(code)));
        // SAFETY: cuInit has no preconditions.
        checked(unsafe { calls::cuInit(0) }).map_err(refuse("the driver does not start"))?;
        // SAFETY: writes one integer.
        let driver = unsafe { filled(|to| calls::cuDriverGetVersion(to)) }
            .map_err(refuse("the driver does not tell its version"))?;
        if driver < DRIVER_MIN {
            let reason = format!(
                "its driver knows CUDA {} and Fornax needs {} or newer; update the NVIDIA driver",
                version_words(driver),
                version_words(DRIVER_MIN)
            );
            return Err(unavailable(ordinal, reason));
        }
        // SAFETY: writes one integer.
        let count = unsafe { filled(|to| calls::cuDeviceGetCount(to)) }
            .map_err(refuse("the driver does not count its devices"))?;
        let device = c_int::try_from(ordinal).ok().filter(|&ordinal| ordinal < count);
        let device = device.ok_or_else(|| {
            unavailable(
                ordinal,
                format!("the driver finds {count} devices; use one of them, or --device cpu"),
            )
        })?;
        // SAFETY: the ordinal is below the count; writes one handle.
        let device =
            unsafe { filled(|to| calls::cuDeviceGet(to, device)) }.map_err(refuse("cannot be opened"))?;
        let attribute = |which| {
            // SAFETY: the device is valid; writes one integer.
            unsafe { filled(|to| calls::cuDeviceGetAttribute(to, which, device)) }
                .map_err(refuse("does not describe itself"))
        };
        use sys::CUdevice_attribute as A;
        let capability = 10 * attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
            + attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if capability < CAPABILITY_MIN {
            let reason =
                format!("compute capability {}.{}, 8.0 or newer is needed", capability / 10, capability % 10);
            return Err(unavailable(ordinal, reason));
        }
        let multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared = attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let mut name = [0; 128];
        // SAFETY: writes at most the length it is given.
        checked(unsafe { calls::cuDeviceGetName(name.as_mut_ptr(), 127, device) })
            .map_err(refuse("has no name"))?;
        // SAFETY: the array is longer than what may be written, so it ends with a zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        // SAFETY: the device is valid; the context is released in `drop`.
        let context = unsafe { filled(|to| calls::cuDevicePrimaryCtxRetain(to, device)) }
            .map_err(refuse("no context can be made"))?;
        // From here on `drop` gives back what was taken.
        let mut opened = Device {
            name: NAMES.get(ordinal).copied().unwrap_or("cuda"),
            ordinal: device,
            stream: std::ptr::null_mut(),
            found: Found { name, memory_total: 0, memory_free: 0, capability, driver },
            multiprocessors: u32::try_from(multiprocessors).unwrap_or(1),
            shared_max: usize::try_from(shared).unwrap_or(0).saturating_sub(SHARED_STATIC),
            lost: Cell::new(false),
        };
        // SAFETY: the context was just retained.
        checked(unsafe { calls::cuCtxSetCurrent(context) }).map_err(refuse("its context cannot be used"))?;
        let mut total = 0;
        // SAFETY: a context is current; writes two integers.
        let free = unsafe { filled(|to| calls::cuMemGetInfo_v2(to, &raw mut total)) }
            .map_err(refuse("does not tell its memory"))?;
        opened.found.memory_free = free as u64;
        opened.found.memory_total = total as u64;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; the stream is destroyed in `drop`.
        opened.stream = unsafe { filled(|to| calls::cuStreamCreate(to, flags)) }
            .map_err(refuse("no stream can be made"))?;
        Ok(Rc::new(opened))
    }

    /// `cuda:0`.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Names the operation that a failed call belonged to.
    fn check(&self, operation: &'static str, result: CUresult) -> Result<(), Error> {
        let backend = self.name;
        match result {
            CUresult::CUDA_SUCCESS if self.lost.get() => Err(Error::DeviceLost {
                backend,
                reason: format!("{operation} after an operation that broke it"),
            }),
            CUresult::CUDA_SUCCESS => Ok(()),
            code if breaks(code) => {
                self.lost.set(true);
                Err(Error::DeviceLost { backend, reason: format!("{operation}: {}", words(code)) })
            }
            code => Err(Error::Device { backend, operation, reason: words(code) }),
        }
    }

    fn filled<T>(&self, operation: &'static str, call: impl FnOnce(*mut T) -> CUresult) -> Result<T, Error> {
        let mut value = MaybeUninit::uninit();
        self.check(operation, call(value.as_mut_ptr()))?;
        // SAFETY: the driver fills what it is given when it reports success.
        Ok(unsafe { value.assume_init() })
    }

    /// Takes memory from the driver; `None` where it has none left.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<Option<u64>, Error> {
        let mut pointer = 0;
        // SAFETY: a context is current on this thread; writes one pointer.
        match unsafe { calls::cuMemAlloc_v2(&raw mut pointer, bytes) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(None),
            result => self.check("alloc", result).map(|()| Some(pointer)),
        }
    }

    /// Gives memory back. The driver waits for work that still uses it. An error is of no use to anybody.
    pub(crate) fn free(&self, pointer: u64) {
        // SAFETY: the pointer came from `alloc` and its owner is gone.
        let _ = unsafe { calls::cuMemFree_v2(pointer) };
    }

    /// Copies to the device, and waits.
    pub(crate) fn write(&self, operation: &'static str, to: u64, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the source is `bytes`; the caller's memory holds as many at `to`, and the copy is over when waited for.
        self.check(operation, unsafe {
            calls::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.stream)
        })?;
        self.synchronize(operation)
    }

    /// Copies to the device, and does not wait: the driver keeps what it has not sent yet of memory that is not pinned.
    pub(crate) fn write_kept(&self, operation: &'static str, to: u64, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the source is `bytes`, of which the driver has its own copy when it returns; the caller's memory holds as
        // many at `to`.
        self.check(operation, unsafe {
            calls::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.stream)
        })
    }

    /// Copies pinned memory to the device; the caller leaves it alone until an event behind the copy has passed.
    pub(crate) fn write_pinned(
        &self,
        operation: &'static str,
        to: u64,
        from: PinnedRoom,
    ) -> Result<(), Error> {
        if from.bytes == 0 {
            return Ok(());
        }
        // SAFETY: pinned memory of that size; `to` is memory of the caller's that holds as much.
        self.check(operation, unsafe {
            calls::cuMemcpyHtoDAsync_v2(to, from.start.cast(), from.bytes, self.stream)
        })
    }

    /// Copies from the device, and waits.
    pub(crate) fn read(&self, operation: &'static str, from: u64, bytes: &mut [u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the target is `bytes`, which outlives the wait below.
        self.check(operation, unsafe {
            calls::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.stream)
        })?;
        self.synchronize(operation)
    }

    /// Copies from the device to pinned memory; to be read once an event behind the copy has passed.
    pub(crate) fn read_pinned(
        &self,
        operation: &'static str,
        from: u64,
        to: PinnedRoom,
    ) -> Result<(), Error> {
        // SAFETY: `to` is pinned memory of that size; `from` is memory of the caller's that holds as much.
        self.check(operation, unsafe {
            calls::cuMemcpyDtoHAsync_v2(to.start.cast(), from, to.bytes, self.stream)
        })
    }

    /// Copies inside the device.
    pub(crate) fn copy(
        &self,
        operation: &'static str,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<(), Error> {
        // SAFETY: both are memory of the caller's of that size.
        self.check(operation, unsafe { calls::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream) })
    }

    /// Fills device memory with a byte.
    pub(crate) fn fill(&self, operation: &'static str, to: u64, byte: u8, bytes: usize) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: memory of the caller's of that size.
        self.check(operation, unsafe { calls::cuMemsetD8Async(to, byte, bytes, self.stream) })
    }

    /// Waits for everything.
    pub(crate) fn synchronize(&self, operation: &'static str) -> Result<(), Error> {
        // SAFETY: the stream is open.
        self.check(operation, unsafe { calls::cuStreamSynchronize(self.stream) })
    }

    /// Launches a kernel. Its arguments must be those that the kernel takes, and its pointers to memory that is alive:
    /// the files of `ops` see to both.
    pub(crate) fn launch(&self, operation: &'static str, launch: &Launch<'_>) -> Result<(), Error> {
        let Launch { function, grid, block, shared, cluster, args } = launch;
        assert!(*block > 0 && *block <= 1024, "{operation}: {block} threads");
        if grid.contains(&0) {
            return Ok(());
        }
        assert!(grid[0] < 1 << 31 && grid[1] < 1 << 16 && grid[2] < 1 << 16, "{operation}: grid {grid:?}");
        let mut pointers: Vec<*mut c_void> = args.iter().map(Arg::pointer).collect();
        // A kernel may start before the one in front of it has ended: it waits by itself where it must. Before Hopper
        // there is no such thing.
        let early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let dimensions = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: 1, y: 1, z: *cluster };
        let clusters = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { clusterDim: dimensions },
        };
        let mut attributes = [early, clusters];
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: *block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: *shared,
            hStream: self.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: u32::from(self.found.capability >= 90) * (1 + u32::from(*cluster > 1)),
        };
        // SAFETY: the arrays outlive the call, which copies the arguments; what they point to is the caller's promise.
        self.check(operation, unsafe {
            calls::cuLaunchKernelEx(
                &raw const config,
                function.0,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

/// A kernel, where and with what.
pub(crate) struct Launch<'a> {
    pub(crate) function: Function,
    pub(crate) grid: [u32; 3],
    pub(crate) block: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
    /// Blocks, neighbours in the third dimension of the grid, that see each other's shared memory: 1 where there are none.
    pub(crate) cluster: u32,
    pub(crate) args: &'a [Arg<'a>],
}

/// One argument of a kernel.
#[derive(Clone, Copy)]
pub(crate) enum Arg<'a> {
    Pointer(u64),
    Int(i32),
    Float(f32),
    /// A structure, in the layout that the kernel's source gives it.
    Struct(&'a [u8]),
}

impl Arg<'_> {
    /// Where its value lies. The driver only reads it.
    fn pointer(&self) -> *mut c_void {
        match self {
            Arg::Pointer(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::Int(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::Float(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Arg::Struct(bytes) => bytes.as_ptr().cast_mut().cast(),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: both were made in `open` and nothing of theirs is left: whoever holds memory holds the device.
        unsafe {
            if !self.stream.is_null() {
                let _ = calls::cuStreamSynchronize(self.stream);
                let _ = calls::cuStreamDestroy_v2(self.stream);
            }
            let _ = calls::cuDevicePrimaryCtxRelease_v2(self.ordinal);
        }
    }
}

/// Compiled kernels on the device.
#[derive(Debug)]
pub(crate) struct Module {
    device: Rc<Device>,
    module: sys::CUmodule,
}

/// One kernel of a module; modules live as long as the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Function(sys::CUfunction);

impl Module {
    pub(crate) fn load(device: &Rc<Device>, image: &[u8]) -> Result<Module, Error> {
        // SAFETY: the image is a whole cubin, which carries its own length; the driver checks it.
        let module = device
            .filled("load module", |to| unsafe { calls::cuModuleLoadData(to, image.as_ptr().cast()) })?;
        Ok(Module { device: Rc::clone(device), module })
    }

    /// A kernel by its name.
    pub(crate) fn function(&self, name: &str) -> Result<Function, Error> {
        let device = &self.device;
        let missing = |_| Error::Device {
            backend: device.name,
            operation: "find kernel",
            reason: format!("no kernel {name:?}"),
        };
        let name = CString::new(name).map_err(missing)?;
        // SAFETY: the module is loaded, the name ends with a zero.
        let get = |to| unsafe { calls::cuModuleGetFunction(to, self.module, name.as_ptr()) };
        device.filled("find kernel", get).map(Function)
    }
}

impl Function {
    /// Lets launches of it ask for as much dynamic shared memory as a block may have.
    pub(crate) fn allow_shared(self, device: &Device) -> Result<(), Error> {
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a loaded module; only an attribute of it is set.
        device.check("find kernel", unsafe {
            calls::cuFuncSetAttribute(self.0, which, crate::memory::int(device.shared_max))
        })
    }

    /// Wants as much of a multiprocessor's memory to be shared as there is. Where kernels want different shares, one's blocks wait until
    /// those of the others have left a multiprocessor.
    pub(crate) fn share_memory(self, device: &Device) -> Result<(), Error> {
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the function belongs to a loaded module; only an attribute of it is set.
        device.check("find kernel", unsafe { calls::cuFuncSetAttribute(self.0, which, 100) })
    }

    /// Lets launches of it ask for the largest clusters.
    pub(crate) fn allow_clusters(self, device: &Device) -> Result<(), Error> {
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        // SAFETY: the function belongs to a loaded module; only an attribute of it is set.
        device.check("find kernel", unsafe { calls::cuFuncSetAttribute(self.0, which, 1) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once.
        let _ = unsafe { calls::cuModuleUnload(self.module) };
    }
}

/// Some of the bytes of pinned memory, for whoever fills or reads them while the device has others. It must not outlive them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PinnedRoom {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: it is an address; whoever makes a slice of it promises that he is alone.
unsafe impl Send for PinnedRoom {}

impl PinnedRoom {
    /// A part of it.
    pub(crate) fn part(self, at: usize, bytes: usize) -> PinnedRoom {
        assert!(at + bytes <= self.bytes, "{bytes} bytes at {at} of {} pinned ones", self.bytes);
        // SAFETY: inside, as just checked.
        PinnedRoom { start: unsafe { self.start.add(at) }, bytes }
    }

    /// Its bytes.
    ///
    /// # Safety
    /// The memory is alive, and nobody else reads or writes these bytes as long as the slice lives, the device included.
    pub(crate) unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: initialised by whoever allocated it; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    #[cfg(test)]
    pub(crate) fn of(bytes: &mut [u8]) -> PinnedRoom {
        PinnedRoom { start: bytes.as_mut_ptr(), bytes: bytes.len() }
    }
}

/// Host memory that the device reads and writes by itself.
#[derive(Debug)]
pub(crate) struct Pinned {
    start: *mut u8,
    bytes: usize,
    /// The context it belongs to must outlive it.
    _device: Rc<Device>,
}

impl Pinned {
    pub(crate) fn new(device: &Rc<Device>, bytes: usize) -> Result<Pinned, Error> {
        let bytes = bytes.max(1);
        // SAFETY: a context is current; writes one pointer.
        let start = device.filled("pin memory", |to| unsafe { calls::cuMemHostAlloc(to, bytes, 0) })?;
        let start: *mut u8 = start.cast();
        // SAFETY: `bytes` writable bytes, from now on initialised.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Pinned { start, bytes, _device: Rc::clone(device) })
    }

    /// Its address for kernels: with unified addresses, which every 64-bit system has, the device sees it where the host does.
    pub(crate) fn pointer(&self) -> u64 {
        self.start.addr() as u64
    }

    /// Where it lies.
    pub(crate) fn room(&self) -> PinnedRoom {
        PinnedRoom { start: self.start, bytes: self.bytes }
    }

    /// To be read when nothing in flight writes it: behind an event.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: allocated and initialised in `new`, alive as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// To be written when nothing in flight reads it: behind an event.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes the access exclusive on the host.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once; the driver waits for copies.
        let _ = unsafe { calls::cuMemFreeHost(self.start.cast()) };
    }
}

/// Memory of the host that is pinned once somebody has filled it: his threads bring its pages, many at a time, where the driver
/// would bring, clear and pin one after the other.
#[derive(Debug)]
pub(crate) struct LatePinned {
    /// Somewhat longer, so that it holds whole large pages.
    _memory: MmapMut,
    start: *mut u8,
    bytes: usize,
    /// Whether it is; nothing before somebody wanted it.
    pinned: Option<bool>,
    device: Rc<Device>,
}

impl LatePinned {
    const OPERATION: &str = "pin memory";
    /// A large page.
    const PAGE: usize = 2 << 20;

    pub(crate) fn new(device: &Rc<Device>, bytes: usize) -> Result<LatePinned, Error> {
        let failed = |error: std::io::Error| Error::Device {
            backend: device.name,
            operation: Self::OPERATION,
            reason: error.to_string(),
        };
        let mut memory = MmapMut::map_anon(bytes + Self::PAGE).map_err(failed)?;
        // It is advice: small pages only take longer.
        #[cfg(target_os = "linux")]
        memory.advise(memmap2::Advice::HugePage).ok();
        let before = memory.as_ptr().addr().next_multiple_of(Self::PAGE) - memory.as_ptr().addr();
        let start = memory[before..][..bytes].as_mut_ptr();
        Ok(LatePinned { _memory: memory, start, bytes, pinned: None, device: Rc::clone(device) })
    }

    /// Where it lies.
    pub(crate) fn room(&self) -> PinnedRoom {
        PinnedRoom { start: self.start, bytes: self.bytes }
    }

    /// Pins it, the first time. Where that is refused, copies take longer: the driver takes the bytes before it returns.
    pub(crate) fn pin(&mut self) -> Result<(), Error> {
        if self.pinned.is_none() {
            // SAFETY: memory of this struct, which stays where it is until it was given back in `drop`.
            let result = unsafe { calls::cuMemHostRegister_v2(self.start.cast(), self.bytes, 0) };
            let can = result == CUresult::CUDA_SUCCESS;
            if can || breaks(result) {
                self.device.check(Self::OPERATION, result)?;
            }
            self.pinned = Some(can);
        }
        Ok(())
    }
}

impl Drop for LatePinned {
    fn drop(&mut self) {
        if self.pinned == Some(true) {
            // SAFETY: registered once, given back once, when no copy reads it any more.
            unsafe {
                let _ = calls::cuStreamSynchronize(self.device.stream);
                let _ = calls::cuMemHostUnregister(self.start.cast());
            }
        }
    }
}

/// A point in the stream.
#[derive(Debug)]
pub(crate) struct Event {
    device: Rc<Device>,
    event: sys::CUevent,
}

impl Event {
    pub(crate) fn new(device: &Rc<Device>) -> Result<Event, Error> {
        // SAFETY: a context is current; writes one handle.
        let event = device.filled("make event", |to| unsafe { calls::cuEventCreate(to, 0) })?;
        Ok(Event { device: Rc::clone(device), event })
    }

    /// The device that it is a point of.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether the device has come to it, or it was never put anywhere.
    pub(crate) fn passed(&self) -> Result<bool, Error> {
        // SAFETY: the event is open.
        match unsafe { calls::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => self.device.check("ask for event", result).map(|()| true),
        }
    }

    /// Puts it behind everything launched so far.
    pub(crate) fn record(&self) -> Result<(), Error> {
        // SAFETY: both are open.
        self.device.check("record event", unsafe { calls::cuEventRecord(self.event, self.device.stream) })
    }

    /// Waits until the device has passed it; at once where it was never recorded. `operation` is what is waited for.
    pub(crate) fn wait(&self, operation: &'static str) -> Result<(), Error> {
        // SAFETY: the event is open.
        self.device.check(operation, unsafe { calls::cuEventSynchronize(self.event) })
    }

    /// Milliseconds since another event, both passed.
    pub(crate) fn since(&self, earlier: &Event) -> Result<f32, Error> {
        // SAFETY: both are open.
        self.device.filled("measure time", |to| unsafe {
            calls::cuEventElapsedTime_v2(to, earlier.event, self.event)
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = unsafe { calls::cuEventDestroy_v2(self.event) };
    }
}

/// A recorded sequence of launches.
#[derive(Debug)]
pub(crate) struct Graph {
    device: Rc<Device>,
    exec: sys::CUgraphExec,
}

impl Graph {
    /// Records what `body` launches instead of running it. `body` must not compile, allocate or wait.
    pub(crate) fn record(
        device: &Rc<Device>,
        body: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<Graph, Error> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is open and not capturing.
        device.check("begin recording", unsafe { calls::cuStreamBeginCapture_v2(device.stream, mode) })?;
        let done = body();
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends what was begun above, also when the body failed.
        let ended = device
            .check("end recording", unsafe { calls::cuStreamEndCapture(device.stream, &raw mut graph) });
        let exec = done.and(ended).and_then(|()| {
            // SAFETY: the graph was just made.
            device.filled("make graph", |to| unsafe { calls::cuGraphInstantiateWithFlags(to, graph, 0) })
        });
        // It is not needed once instantiated, and there is one even where the body failed.
        if !graph.is_null() {
            // SAFETY: made once, destroyed once.
            let _ = unsafe { calls::cuGraphDestroy(graph) };
        }
        Ok(Graph { device: Rc::clone(device), exec: exec? })
    }

    pub(crate) fn launch(&self) -> Result<(), Error> {
        // SAFETY: both are open.
        self.device.check("replay", unsafe { calls::cuGraphLaunch(self.exec, self.device.stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = unsafe { calls::cuGraphExecDestroy(self.exec) };
    }
}

/// Fills a value by a call of the driver.
///
/// # Safety
/// The call writes its target when it succeeds.
unsafe fn filled<T>(call: impl FnOnce(*mut T) -> CUresult) -> Result<T, CUresult> {
    let mut value = MaybeUninit::uninit();
    checked(call(value.as_mut_ptr()))?;
    // SAFETY: the caller's promise.
    Ok(unsafe { value.assume_init() })
}

fn checked(result: CUresult) -> Result<(), CUresult> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(result) }
}

/// Errors after which every later call fails as well.
fn breaks(code: CUresult) -> bool {
    use CUresult as C;
    matches!(
        code,
        C::CUDA_ERROR_ILLEGAL_ADDRESS
            | C::CUDA_ERROR_LAUNCH_FAILED
            | C::CUDA_ERROR_LAUNCH_TIMEOUT
            | C::CUDA_ERROR_ASSERT
            | C::CUDA_ERROR_HARDWARE_STACK_ERROR
            | C::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | C::CUDA_ERROR_MISALIGNED_ADDRESS
            | C::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | C::CUDA_ERROR_INVALID_PC
            | C::CUDA_ERROR_ECC_UNCORRECTABLE
            | C::CUDA_ERROR_DEVICE_UNAVAILABLE
            | C::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | C::CUDA_ERROR_UNKNOWN
    )
}

/// The driver's own words for a result.
fn words(code: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: writes a pointer to a string that is never freed, or leaves it null.
    let told = unsafe { calls::cuGetErrorString(code, &raw mut text) };
    if told != CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("unknown error ({})", code as u32);
    }
    // SAFETY: as above.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    format!("{text} ({})", code as u32)
}

/// 13000 as people write it.
pub(crate) fn version_words(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
