//! What a vendor's driver must do for us, as a table of functions. [`Device`](super::Device) and everything above it
//! call nothing else, so a second vendor is a second table, opened at run time beside the first one.
//!
//! Functions have the meaning of CUDA's driver calls, whose names stand beside them; HIP has the same calls under its
//! own names. Streams, events, modules, functions and graphs are addresses that only the library understands.

use std::ffi::{CStr, c_int, c_void};

use super::nvrtc::Compiler;

/// What the library calls by an address: a context, stream, event, module, function or graph.
pub(crate) type Handle = *mut c_void;
/// A device, as the library counts them.
pub(crate) type DeviceId = c_int;

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The library's own number.
    pub(crate) code: u32,
    pub(crate) why: Why,
    /// And its own words.
    pub(crate) words: &'static str,
}

/// What the rest of the crate tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    OutOfMemory,
    /// The device has not come to an event yet.
    NotReady,
    /// Nothing on the device can be trusted any more: every later call fails as well.
    Lost,
    Other,
}

pub(crate) type Done = Result<(), Failure>;

/// What a chip can do. The driver fills it once, when a device is opened; the rest of the host code asks for an ability
/// by its name and knows no chip. Kernels ask `HAS_...` (`kernels/chip`), and whenever one is compiled the two are
/// compared.
///
/// Every chip has the tensor-core instructions of a warp (`mma.m16n8k16`) and asynchronous copies: kernels are made of
/// them, so a chip without them is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Abilities {
    /// Threads of a warp.
    pub(crate) warp: usize,
    pub(crate) multiprocessors: usize,
    /// Bytes of dynamic shared memory that a block may have.
    pub(crate) shared_max: usize,
    /// Asynchronous tensor-core instructions of a warpgroup (`HAS_WGMMA`).
    pub(crate) wgmma: bool,
    /// Copies to shared memory by an engine of their own (TMA), which count at barriers (`HAS_BULK`).
    pub(crate) bulk_copies: bool,
    /// Blocks of the largest cluster; 1 where there are no clusters (`HAS_CLUSTERS`).
    pub(crate) clusters_max: usize,
    /// Whether a kernel may start before the one in front of it has ended (programmatic dependent launch).
    pub(crate) early_start: bool,
}

/// A chip, as the driver and the compiler know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chip {
    /// For people: `compute capability 9.0`.
    pub(crate) words: String,
    /// What the compiler calls it: `sm_90a`.
    pub(crate) target: String,
    pub(crate) abilities: Abilities,
}

/// A kernel, where and with what, in the library's terms.
#[derive(Debug)]
pub(crate) struct RawLaunch<'a> {
    pub(crate) stream: Handle,
    pub(crate) function: Handle,
    pub(crate) grid: [u32; 3],
    pub(crate) block: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
    /// Blocks of a cluster, neighbours in the grid's third dimension; 1: none.
    pub(crate) cluster: u32,
    pub(crate) early_start: bool,
    /// Where each argument lies.
    pub(crate) args: &'a [*mut c_void],
}

/// A driver. An unsafe function trusts its caller: `is_installed` has said yes and `start` has succeeded; a context is
/// current on the thread, where something is made or launched; handles are alive and of the kind that is asked for; an
/// address is of memory that holds as many bytes and stays until the stream has passed.
#[derive(Debug)]
pub(crate) struct Driver {
    /// What `--device` calls its devices, and what its first ones are called in messages.
    pub(crate) kind: &'static str,
    pub(crate) names: [&'static str; 8],
    /// For messages: `NVIDIA`, `CUDA`, `libcuda`.
    pub(crate) vendor: &'static str,
    pub(crate) platform: &'static str,
    pub(crate) library: &'static str,
    /// The oldest version that has what is called here.
    pub(crate) version_min: c_int,
    /// What makes kernels for its chips.
    pub(crate) compiler: Compiler,

    /// Whether the library can be opened.
    pub(crate) is_installed: fn() -> bool,
    /// cuInit.
    pub(crate) start: unsafe fn() -> Done,
    /// cuDriverGetVersion, and how people write such a number.
    pub(crate) version: unsafe fn() -> Result<c_int, Failure>,
    pub(crate) version_words: fn(c_int) -> String,
    /// cuDeviceGetCount.
    pub(crate) device_count: unsafe fn() -> Result<c_int, Failure>,
    /// cuDeviceGet, of an ordinal below the count.
    pub(crate) device: unsafe fn(c_int) -> Result<DeviceId, Failure>,
    /// cuDeviceGetAttribute: what the chip can do, or in words which one would be new enough.
    pub(crate) chip: unsafe fn(DeviceId) -> Result<Result<Chip, String>, Failure>,
    /// cuDeviceGetName.
    pub(crate) device_name: unsafe fn(DeviceId) -> Result<String, Failure>,
    /// cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRelease, cuCtxSetCurrent.
    pub(crate) retain_context: unsafe fn(DeviceId) -> Result<Handle, Failure>,
    pub(crate) release_context: unsafe fn(DeviceId) -> Done,
    pub(crate) use_context: unsafe fn(Handle) -> Done,
    /// cuMemGetInfo: bytes that are free, and all.
    pub(crate) memory_info: unsafe fn() -> Result<(usize, usize), Failure>,

    /// cuStreamCreate (one that does not wait for the default stream), cuStreamDestroy, cuStreamSynchronize.
    pub(crate) create_stream: unsafe fn() -> Result<Handle, Failure>,
    pub(crate) destroy_stream: unsafe fn(Handle) -> Done,
    pub(crate) wait_stream: unsafe fn(Handle) -> Done,

    /// cuMemAlloc, cuMemFree: memory of the device.
    pub(crate) alloc: unsafe fn(bytes: usize) -> Result<u64, Failure>,
    pub(crate) free: unsafe fn(u64) -> Done,
    /// cuMemHostAlloc, cuMemFreeHost: pinned memory of the host.
    pub(crate) alloc_pinned: unsafe fn(bytes: usize) -> Result<*mut u8, Failure>,
    pub(crate) free_pinned: unsafe fn(*mut u8) -> Done,
    /// cuMemHostRegister, cuMemHostUnregister: pins memory that is there already.
    pub(crate) register: unsafe fn(*mut u8, bytes: usize) -> Done,
    pub(crate) unregister: unsafe fn(*mut u8) -> Done,

    /// cuMemcpyHtoDAsync, cuMemcpyDtoHAsync, cuMemcpyDtoDAsync, cuMemsetD8Async: (to, from, bytes, stream).
    pub(crate) copy_in: unsafe fn(u64, *const u8, usize, Handle) -> Done,
    pub(crate) copy_out: unsafe fn(*mut u8, u64, usize, Handle) -> Done,
    pub(crate) copy_inside: unsafe fn(u64, u64, usize, Handle) -> Done,
    pub(crate) fill: unsafe fn(u64, u8, usize, Handle) -> Done,

    /// cuEventCreate, cuEventDestroy, cuEventRecord (event, stream), cuEventSynchronize, cuEventQuery.
    pub(crate) create_event: unsafe fn() -> Result<Handle, Failure>,
    pub(crate) destroy_event: unsafe fn(Handle) -> Done,
    pub(crate) record_event: unsafe fn(Handle, Handle) -> Done,
    pub(crate) wait_event: unsafe fn(Handle) -> Done,
    pub(crate) query_event: unsafe fn(Handle) -> Done,
    /// cuEventElapsedTime: from the first to the second.
    pub(crate) elapsed_ms: unsafe fn(Handle, Handle) -> Result<f32, Failure>,

    /// cuModuleLoadData of a whole image, cuModuleUnload, cuModuleGetFunction.
    pub(crate) load_module: unsafe fn(&[u8]) -> Result<Handle, Failure>,
    pub(crate) unload_module: unsafe fn(Handle) -> Done,
    pub(crate) find_function: unsafe fn(Handle, &CStr) -> Result<Handle, Failure>,
    /// cuFuncSetAttribute: how much dynamic shared memory launches may ask for; that as much of a multiprocessor's
    /// memory as there is shall be shared; that clusters may be larger than every chip's.
    pub(crate) allow_shared: unsafe fn(Handle, bytes: c_int) -> Done,
    pub(crate) prefer_shared: unsafe fn(Handle) -> Done,
    pub(crate) allow_clusters: unsafe fn(Handle) -> Done,
    /// cuLaunchKernelEx. The library copies the arguments.
    pub(crate) launch: unsafe fn(&RawLaunch<'_>) -> Done,

    /// cuStreamBeginCapture of this thread's calls, cuStreamEndCapture (no graph where recording failed),
    /// cuGraphDestroy.
    pub(crate) begin_recording: unsafe fn(Handle) -> Done,
    pub(crate) end_recording: unsafe fn(Handle) -> Result<Handle, Failure>,
    pub(crate) destroy_graph: unsafe fn(Handle) -> Done,
    /// cuGraphInstantiate of a graph, cuGraphExecDestroy, cuGraphLaunch (what was made, stream).
    pub(crate) instantiate: unsafe fn(Handle) -> Result<Handle, Failure>,
    pub(crate) destroy_instance: unsafe fn(Handle) -> Done,
    pub(crate) replay: unsafe fn(Handle, Handle) -> Done,
}
