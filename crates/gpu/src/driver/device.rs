//! One device, one context, one stream, over whichever driver's table it was opened with.
//!
//! Everything is ordered by the stream: what is launched, copied or freed later never overtakes what came before, so
//! memory can be used again as soon as the host has released it. The result of every call is checked where it is made,
//! and errors carry the name of the operation.

use std::cell::Cell;
use std::ffi::{CString, c_int, c_void};
use std::rc::Rc;

use fornax_compute::Error;
use memmap2::MmapMut;

use super::table::{Abilities, Chip, DeviceId, Driver, Failure, Handle, RawLaunch, Why};

/// Lanes of a warp, as the host lays out blocks: `WARP` of `kernels/chip`.
const WARP: usize = 32;

/// A description of a device, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The card's name.
    pub name: String,
    /// Bytes of memory it has.
    pub memory_total: u64,
    /// Bytes of it that are free.
    pub memory_free: u64,
    /// Which chip it is: `compute capability 9.0`.
    pub chip: String,
    /// What its driver knows: `CUDA 13.0`.
    pub driver: String,
}

/// An open device. Holding an `Rc` of it ties memory to the thread that opened it.
#[derive(Debug)]
pub(crate) struct Device {
    driver: &'static Driver,
    name: &'static str,
    id: DeviceId,
    stream: Handle,
    pub(crate) chip: Chip,
    memory_total: u64,
    pub(crate) memory_free: u64,
    version: c_int,
    card: String,
    /// Set by a call after which nothing on the device can be trusted.
    lost: Cell<bool>,
}

/// The driver's own words for a failure.
fn words(failure: Failure) -> String {
    format!("{} ({})", failure.words, failure.code)
}

/// Starts a driver, or says why it cannot be used, and tells its version.
fn started(driver: &'static Driver) -> Result<c_int, String> {
    let Driver { vendor, platform, library, version_words, version_min, .. } = driver;
    if !(driver.is_installed)() {
        return Err(format!(
            "the {vendor} driver is not installed (no {library}); install it, or use --device cpu"
        ));
    }
    // SAFETY: it is installed.
    unsafe { (driver.start)() }
        .map_err(|failure| format!("the driver does not start: {}", words(failure)))?;
    // SAFETY: just started.
    let version = unsafe { (driver.version)() }
        .map_err(|failure| format!("the driver does not tell its version: {}", words(failure)))?;
    if version < *version_min {
        return Err(format!(
            "its driver knows {platform} {} and Fornax needs {} or newer; update the {vendor} driver",
            version_words(version),
            version_words(*version_min)
        ));
    }
    Ok(version)
}

impl Device {
    /// Opens a device on this thread, or says what is missing.
    pub(crate) fn open(driver: &'static Driver, ordinal: usize) -> Result<Rc<Device>, Error> {
        let unavailable = |reason: String| Error::DeviceUnavailable {
            device: format!("{}:{ordinal}", driver.kind),
            reason,
        };
        let refuse = |what: &'static str| move |failure| unavailable(format!("{what}: {}", words(failure)));
        let version = started(driver).map_err(unavailable)?;
        // SAFETY: started, as are all below.
        let count =
            unsafe { (driver.device_count)() }.map_err(refuse("the driver does not count its devices"))?;
        let at = c_int::try_from(ordinal).ok().filter(|&ordinal| ordinal < count);
        let at = at.ok_or_else(|| {
            unavailable(format!("the driver finds {count} devices; use one of them, or --device cpu"))
        })?;
        // SAFETY: the ordinal is below the count.
        let id = unsafe { (driver.device)(at) }.map_err(refuse("cannot be opened"))?;
        // SAFETY: the device is valid.
        let chip = unsafe { (driver.chip)(id) }.map_err(refuse("does not describe itself"))?;
        let chip = chip.map_err(unavailable)?;
        if chip.abilities.warp != WARP {
            let reason =
                format!("{}: warps of {} threads, {WARP} are needed", chip.words, chip.abilities.warp);
            return Err(unavailable(reason));
        }
        // SAFETY: the device is valid.
        let card = unsafe { (driver.device_name)(id) }.map_err(refuse("has no name"))?;
        // SAFETY: the device is valid; the context is released in `drop`.
        let context = unsafe { (driver.retain_context)(id) }.map_err(refuse("no context can be made"))?;
        // From here on, `drop` releases what was taken.
        let mut opened = Device {
            driver,
            name: driver.names.get(ordinal).copied().unwrap_or(driver.kind),
            id,
            stream: std::ptr::null_mut(),
            chip,
            memory_total: 0,
            memory_free: 0,
            version,
            card,
            lost: Cell::new(false),
        };
        // SAFETY: the context was just retained.
        unsafe { (driver.use_context)(context) }.map_err(refuse("its context cannot be used"))?;
        // SAFETY: a context is current.
        let (free, total) = unsafe { (driver.memory_info)() }.map_err(refuse("does not tell its memory"))?;
        (opened.memory_free, opened.memory_total) = (free as u64, total as u64);
        // SAFETY: a context is current; the stream is destroyed in `drop`.
        opened.stream = unsafe { (driver.create_stream)() }.map_err(refuse("no stream can be made"))?;
        Ok(Rc::new(opened))
    }

    /// What there is to say of it.
    pub(crate) fn found(&self) -> Found {
        Found {
            name: self.card.clone(),
            memory_total: self.memory_total,
            memory_free: self.memory_free,
            chip: self.chip.words.clone(),
            driver: format!("{} {}", self.driver.platform, (self.driver.version_words)(self.version)),
        }
    }

    /// What its chip can do.
    pub(crate) fn abilities(&self) -> &Abilities {
        &self.chip.abilities
    }

    /// What makes kernels for it.
    pub(crate) fn compiler(&self) -> super::Compiler {
        self.driver.compiler
    }

    /// `cuda:0`.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Names the operation that a failed call belonged to.
    fn check<T>(&self, operation: &'static str, result: Result<T, Failure>) -> Result<T, Error> {
        let backend = self.name;
        match result {
            Ok(_) if self.lost.get() => Err(Error::DeviceLost {
                backend,
                reason: format!("{operation} after an operation that broke it"),
            }),
            Ok(value) => Ok(value),
            Err(failure) if failure.why == Why::Lost => {
                self.lost.set(true);
                Err(Error::DeviceLost { backend, reason: format!("{operation}: {}", words(failure)) })
            }
            Err(failure) => Err(Error::Device { backend, operation, reason: words(failure) }),
        }
    }

    /// Takes memory from the driver; `None` where it has none left.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<Option<u64>, Error> {
        // SAFETY: a context is current on this thread.
        match unsafe { (self.driver.alloc)(bytes) } {
            Err(Failure { why: Why::OutOfMemory, .. }) => Ok(None),
            result => self.check("alloc", result).map(Some),
        }
    }

    /// Gives memory back. The driver waits for work that still uses it. Nobody could do anything about an error.
    pub(crate) fn free(&self, pointer: u64) {
        // SAFETY: the pointer came from `alloc` and its owner is gone.
        let _ = unsafe { (self.driver.free)(pointer) };
    }

    /// Copies to the device, and waits.
    pub(crate) fn write(&self, operation: &'static str, to: u64, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the source is `bytes`; the caller's memory holds as many at `to`, and the copy is over when waited
        // for.
        self.check(operation, unsafe {
            (self.driver.copy_in)(to, bytes.as_ptr(), bytes.len(), self.stream)
        })?;
        self.synchronize(operation)
    }

    /// Copies to the device without waiting: of memory that is not pinned, the driver keeps a copy of what it has not
    /// sent yet.
    pub(crate) fn write_kept(&self, operation: &'static str, to: u64, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the source is `bytes`, of which the driver has its own copy when it returns; the caller's memory
        // holds as many at `to`.
        self.check(operation, unsafe { (self.driver.copy_in)(to, bytes.as_ptr(), bytes.len(), self.stream) })
    }

    /// Copies pinned memory to the device. The caller must not change it until an event after the copy has passed.
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
        self.check(operation, unsafe { (self.driver.copy_in)(to, from.start, from.bytes, self.stream) })
    }

    /// Copies from the device, and waits.
    pub(crate) fn read(&self, operation: &'static str, from: u64, bytes: &mut [u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the target is `bytes`, which outlives the wait below.
        self.check(operation, unsafe {
            (self.driver.copy_out)(bytes.as_mut_ptr(), from, bytes.len(), self.stream)
        })?;
        self.synchronize(operation)
    }

    /// Copies from the device to pinned memory, which may be read once an event after the copy has passed.
    pub(crate) fn read_pinned(
        &self,
        operation: &'static str,
        from: u64,
        to: PinnedRoom,
    ) -> Result<(), Error> {
        // SAFETY: `to` is pinned memory of that size; `from` is memory of the caller's that holds as much.
        self.check(operation, unsafe { (self.driver.copy_out)(to.start, from, to.bytes, self.stream) })
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
        self.check(operation, unsafe { (self.driver.copy_inside)(to, from, bytes, self.stream) })
    }

    /// Fills device memory with a byte.
    pub(crate) fn fill(&self, operation: &'static str, to: u64, byte: u8, bytes: usize) -> Result<(), Error> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: memory of the caller's of that size.
        self.check(operation, unsafe { (self.driver.fill)(to, byte, bytes, self.stream) })
    }

    /// Waits for everything.
    pub(crate) fn synchronize(&self, operation: &'static str) -> Result<(), Error> {
        // SAFETY: the stream is open.
        self.check(operation, unsafe { (self.driver.wait_stream)(self.stream) })
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
        let args: Vec<*mut c_void> = args.iter().map(Arg::pointer).collect();
        let raw = RawLaunch {
            stream: self.stream,
            function: function.0,
            grid: *grid,
            block: *block,
            shared: *shared,
            cluster: *cluster,
            // A kernel may start before the one in front of it has ended: it waits by itself where it has to.
            early_start: self.abilities().early_start,
            args: &args,
        };
        // SAFETY: the arguments outlive the call, which copies them; what they point to is the caller's promise.
        self.check(operation, unsafe { (self.driver.launch)(&raw) })
    }
}

/// A kernel, where and with what.
pub(crate) struct Launch<'a> {
    pub(crate) function: Function,
    pub(crate) grid: [u32; 3],
    pub(crate) block: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
    /// Blocks, neighbours in the third dimension of the grid, that see each other's shared memory: 1 where there are
    /// none.
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
                let _ = (self.driver.wait_stream)(self.stream);
                let _ = (self.driver.destroy_stream)(self.stream);
            }
            let _ = (self.driver.release_context)(self.id);
        }
    }
}

/// Compiled kernels on the device.
#[derive(Debug)]
pub(crate) struct Module {
    device: Rc<Device>,
    module: Handle,
}

/// One kernel of a module; modules live as long as the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Function(Handle);

impl Module {
    pub(crate) fn load(device: &Rc<Device>, image: &[u8]) -> Result<Module, Error> {
        // SAFETY: the image is a whole cubin, which carries its own length; the driver checks it.
        let module = device.check("load module", unsafe { (device.driver.load_module)(image) })?;
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
        let found = unsafe { (device.driver.find_function)(self.module, &name) };
        device.check("find kernel", found).map(Function)
    }
}

impl Function {
    /// Lets launches of it ask for as much dynamic shared memory as a block may have.
    pub(crate) fn allow_shared(self, device: &Device) -> Result<(), Error> {
        let bytes = crate::memory::int(device.abilities().shared_max);
        // SAFETY: the function belongs to a loaded module; only an attribute of it is set.
        device.check("find kernel", unsafe { (device.driver.allow_shared)(self.0, bytes) })
    }

    /// Asks for the largest part of a multiprocessor's memory to be shared memory. If kernels wanted different parts,
    /// the blocks of one would wait until those of the other had left a multiprocessor.
    pub(crate) fn prefer_shared(self, device: &Device) -> Result<(), Error> {
        // SAFETY: the function belongs to a loaded module; only an attribute of it is set.
        device.check("find kernel", unsafe { (device.driver.prefer_shared)(self.0) })
    }

    /// Lets launches of it ask for the largest clusters.
    pub(crate) fn allow_clusters(self, device: &Device) -> Result<(), Error> {
        // SAFETY: the function belongs to a loaded module; only an attribute of it is set.
        device.check("find kernel", unsafe { (device.driver.allow_clusters)(self.0) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once.
        let _ = unsafe { (self.device.driver.unload_module)(self.module) };
    }
}

/// A range of pinned memory, which the host fills or reads while the device uses the rest. It must not outlive the
/// memory.
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
    /// The memory is alive, and nobody else reads or writes these bytes as long as the slice lives, the device
    /// included.
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
    device: Rc<Device>,
}

impl Pinned {
    pub(crate) fn new(device: &Rc<Device>, bytes: usize) -> Result<Pinned, Error> {
        let bytes = bytes.max(1);
        // SAFETY: a context is current.
        let start = device.check("pin memory", unsafe { (device.driver.alloc_pinned)(bytes) })?;
        // SAFETY: `bytes` writable bytes, from now on initialised.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Pinned { start, bytes, device: Rc::clone(device) })
    }

    /// Its address for kernels. With unified addresses, which every 64-bit system has, it is the same as on the host.
    pub(crate) fn pointer(&self) -> u64 {
        self.start.addr() as u64
    }

    /// Where it lies.
    pub(crate) fn room(&self) -> PinnedRoom {
        PinnedRoom { start: self.start, bytes: self.bytes }
    }

    /// May be read when nothing in flight writes it: after an event.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: allocated and initialised in `new`, alive as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// May be written when nothing in flight reads it: after an event.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes the access exclusive on the host.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once; the driver waits for copies.
        let _ = unsafe { (self.device.driver.free_pinned)(self.start) };
    }
}

/// Host memory that is pinned after it has been filled: the threads that fill it bring in its pages in parallel, where
/// the driver would bring in, clear and pin one page after the other.
#[derive(Debug)]
pub(crate) struct LatePinned {
    /// A little longer, so that it holds whole large pages.
    _memory: MmapMut,
    start: *mut u8,
    bytes: usize,
    /// Whether it is pinned; not set before it was tried.
    pinned: Option<bool>,
    device: Rc<Device>,
}

impl LatePinned {
    const OPERATION: &str = "pin memory";
    /// The size of a large page.
    const PAGE: usize = 2 << 20;

    pub(crate) fn new(device: &Rc<Device>, bytes: usize) -> Result<LatePinned, Error> {
        let failed = |error: std::io::Error| Error::Device {
            backend: device.name,
            operation: Self::OPERATION,
            reason: error.to_string(),
        };
        let mut memory = MmapMut::map_anon(bytes + Self::PAGE).map_err(failed)?;
        // This is advice: small pages only take longer.
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

    /// Pins it, the first time. Where pinning is refused, copies take longer, since the driver takes the bytes before
    /// it returns.
    pub(crate) fn pin(&mut self) -> Result<(), Error> {
        if self.pinned.is_none() {
            // SAFETY: memory of this struct, which stays where it is until it was given back in `drop`.
            let result = unsafe { (self.device.driver.register)(self.start, self.bytes) };
            let can = result.is_ok();
            if can || result.is_err_and(|failure| failure.why == Why::Lost) {
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
                let _ = (self.device.driver.wait_stream)(self.device.stream);
                let _ = (self.device.driver.unregister)(self.start);
            }
        }
    }
}

/// A point in the stream.
#[derive(Debug)]
pub(crate) struct Event {
    device: Rc<Device>,
    event: Handle,
}

impl Event {
    pub(crate) fn new(device: &Rc<Device>) -> Result<Event, Error> {
        // SAFETY: a context is current.
        let event = device.check("make event", unsafe { (device.driver.create_event)() })?;
        Ok(Event { device: Rc::clone(device), event })
    }

    /// The device whose stream it is a point of.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether the device has passed it, or it was never recorded.
    pub(crate) fn passed(&self) -> Result<bool, Error> {
        // SAFETY: the event is open.
        match unsafe { (self.device.driver.query_event)(self.event) } {
            Err(Failure { why: Why::NotReady, .. }) => Ok(false),
            result => self.device.check("ask for event", result).map(|()| true),
        }
    }

    /// Records it after everything that was launched so far.
    pub(crate) fn record(&self) -> Result<(), Error> {
        // SAFETY: both are open.
        self.device.check("record event", unsafe {
            (self.device.driver.record_event)(self.event, self.device.stream)
        })
    }

    /// Waits until the device has passed it; returns at once if it was never recorded. `operation` names what is waited
    /// for.
    pub(crate) fn wait(&self, operation: &'static str) -> Result<(), Error> {
        // SAFETY: the event is open.
        self.device.check(operation, unsafe { (self.device.driver.wait_event)(self.event) })
    }

    /// Milliseconds since another event, both passed.
    pub(crate) fn since(&self, earlier: &Event) -> Result<f32, Error> {
        // SAFETY: both are open.
        let elapsed = unsafe { (self.device.driver.elapsed_ms)(earlier.event, self.event) };
        self.device.check("measure time", elapsed)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = unsafe { (self.device.driver.destroy_event)(self.event) };
    }
}

/// A recorded sequence of launches.
#[derive(Debug)]
pub(crate) struct Graph {
    device: Rc<Device>,
    instance: Handle,
}

impl Graph {
    /// Records what `body` launches instead of running it. `body` must not compile, allocate or wait.
    pub(crate) fn record(
        device: &Rc<Device>,
        body: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<Graph, Error> {
        let driver = device.driver;
        // SAFETY: the stream is open and not recording.
        device.check("begin recording", unsafe { (driver.begin_recording)(device.stream) })?;
        let done = body();
        // SAFETY: ends what was begun above, also when the body failed.
        let ended = unsafe { (driver.end_recording)(device.stream) };
        // There is a graph even where the body failed. It is not needed once it is instantiated.
        let graph = ended.ok();
        let ended = device.check("end recording", ended);
        let instance = done.and(ended).and_then(|graph| {
            // SAFETY: the graph was just made.
            device.check("make graph", unsafe { (driver.instantiate)(graph) })
        });
        if let Some(graph) = graph {
            // SAFETY: made once, destroyed once.
            let _ = unsafe { (driver.destroy_graph)(graph) };
        }
        Ok(Graph { device: Rc::clone(device), instance: instance? })
    }

    pub(crate) fn launch(&self) -> Result<(), Error> {
        // SAFETY: both are open.
        self.device.check("replay", unsafe { (self.device.driver.replay)(self.instance, self.device.stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let _ = unsafe { (self.device.driver.destroy_instance)(self.instance) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::LIBCUDA;
    use crate::driver::fake::{self, FAKE};

    #[test]
    fn drivers_are_open_beside_each_other_each_with_its_own_table() {
        fake::willing();
        let device = Device::open(&FAKE, 0).unwrap();
        let before = fake::with(|fake| fake.calls.len());
        // Through the same functions: nobody has that many cards, and most machines that run this have no libcuda.
        let refused = Device::open(&LIBCUDA, 7777).map(|_| ()).unwrap_err();
        assert!(
            matches!(&refused, Error::DeviceUnavailable { device, .. } if device == "cuda:7777"),
            "{refused}"
        );
        assert_eq!(fake::with(|fake| fake.calls.len()), before, "the fake was asked for the other's device");
        device.synchronize("wait").unwrap();
    }
}
