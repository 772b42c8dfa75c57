//! NVIDIA's driver: the table filled with the functions of libcuda, which is opened at run time. The only file that
//! knows them, and the only one that compares compute capabilities.

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::ptr;

use cudarc::driver::sys::{self, CUfunction_attribute as FunctionAttribute, CUresult};

use super::nvrtc::NVRTC;
use super::table::{Abilities, Chip, DeviceId, Done, Driver, Failure, Handle, RawLaunch, Why};

pub(crate) static LIBCUDA: Driver = Driver {
    kind: "cuda",
    names: NAMES,
    vendor: "NVIDIA",
    platform: "CUDA",
    library: "libcuda",
    version_min: VERSION_MIN,
    compiler: NVRTC,
    is_installed,
    start,
    version,
    version_words,
    device_count,
    device,
    chip,
    device_name,
    retain_context,
    release_context,
    use_context,
    memory_info,
    create_stream,
    destroy_stream,
    wait_stream,
    alloc,
    free,
    alloc_pinned,
    free_pinned,
    register,
    unregister,
    copy_in,
    copy_out,
    copy_inside,
    fill,
    create_event,
    destroy_event,
    record_event,
    wait_event,
    query_event,
    elapsed_ms,
    load_module,
    unload_module,
    find_function,
    allow_shared,
    prefer_shared,
    allow_clusters,
    launch,
    begin_recording,
    end_recording,
    destroy_graph,
    instantiate,
    destroy_instance,
    replay,
};

pub(super) const NAMES: [&str; 8] =
    ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4", "cuda:5", "cuda:6", "cuda:7"];

/// The driver that CUDA 12 came with: graphs with programmatic launches need it.
pub(super) const VERSION_MIN: c_int = 12_000;
/// Ampere: the tensor-core instructions that the kernels are made of.
const CAPABILITY_MIN: c_int = 80;
/// The chip that has wgmma, and the largest clusters. Chips of the same generation and later have what came with it.
const HOPPER: c_int = 90;

/// Shared memory of a block that is not dynamic: what the driver keeps, and what kernels declare.
const SHARED_STATIC: usize = 8 << 10;

/// Numbers that the driver tells about a chip.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attributes {
    /// 90 for 9.0.
    pub(super) capability: c_int,
    pub(super) warp: c_int,
    pub(super) multiprocessors: c_int,
    /// Bytes of shared memory that a block may ask for.
    pub(super) shared: c_int,
}

/// What a chip can do, or why it cannot be used.
pub(super) fn chip_of(attributes: Attributes) -> Result<Chip, String> {
    let Attributes { capability, warp, multiprocessors, shared } = attributes;
    let words = format!("compute capability {}.{}", capability / 10, capability % 10);
    if capability < CAPABILITY_MIN {
        return Err(format!("{words}, 8.0 or newer is needed"));
    }
    let count = |number: c_int| usize::try_from(number).unwrap_or(0);
    let abilities = Abilities {
        warp: count(warp),
        multiprocessors: count(multiprocessors).max(1),
        shared_max: count(shared).saturating_sub(SHARED_STATIC),
        wgmma: capability == HOPPER,
        bulk_copies: capability >= HOPPER,
        // Hopper has 16 blocks in one, later chips 8.
        clusters_max: match capability {
            HOPPER => 16,
            _ if capability > HOPPER => super::CLUSTER_USUAL,
            _ => 1,
        },
        early_start: capability >= HOPPER,
    };
    // Hopper has instructions of its own that only the `a` target knows.
    let own = if capability == HOPPER { "a" } else { "" };
    Ok(Chip { words, target: format!("sm_{capability}{own}"), abilities })
}

/// 13000 as people write it.
pub(super) fn version_words(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn is_installed() -> bool {
    // SAFETY: asks the loader whether a library can be opened.
    unsafe { sys::is_culib_present() }
}

/// Calls that succeed or fail.
macro_rules! calls {
    ($($name:ident($($arg:ident: $type:ty),*) = $call:ident($($given:expr),*);)*) => { $(
        unsafe fn $name($($arg: $type),*) -> Done {
            // SAFETY: the caller's promise, as `Driver` states it.
            done(unsafe { sys::$call($($given),*) })
        }
    )* };
}

calls! {
    start() = cuInit(0);
    release_context(device: DeviceId) = cuDevicePrimaryCtxRelease_v2(device);
    use_context(context: Handle) = cuCtxSetCurrent(context.cast());
    destroy_stream(stream: Handle) = cuStreamDestroy_v2(stream.cast());
    wait_stream(stream: Handle) = cuStreamSynchronize(stream.cast());
    free(pointer: u64) = cuMemFree_v2(pointer);
    free_pinned(start: *mut u8) = cuMemFreeHost(start.cast());
    register(start: *mut u8, bytes: usize) = cuMemHostRegister_v2(start.cast(), bytes, 0);
    unregister(start: *mut u8) = cuMemHostUnregister(start.cast());
    copy_in(to: u64, from: *const u8, bytes: usize, stream: Handle)
        = cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream.cast());
    copy_out(to: *mut u8, from: u64, bytes: usize, stream: Handle)
        = cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream.cast());
    copy_inside(to: u64, from: u64, bytes: usize, stream: Handle)
        = cuMemcpyDtoDAsync_v2(to, from, bytes, stream.cast());
    fill(to: u64, byte: u8, bytes: usize, stream: Handle)
        = cuMemsetD8Async(to, byte, bytes, stream.cast());
    destroy_event(event: Handle) = cuEventDestroy_v2(event.cast());
    record_event(event: Handle, stream: Handle) = cuEventRecord(event.cast(), stream.cast());
    wait_event(event: Handle) = cuEventSynchronize(event.cast());
    query_event(event: Handle) = cuEventQuery(event.cast());
    unload_module(module: Handle) = cuModuleUnload(module.cast());
    allow_shared(function: Handle, bytes: c_int) = cuFuncSetAttribute(
        function.cast(), FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes
    );
    prefer_shared(function: Handle) = cuFuncSetAttribute(
        function.cast(), FunctionAttribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100
    );
    allow_clusters(function: Handle) = cuFuncSetAttribute(
        function.cast(), FunctionAttribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1
    );
    begin_recording(stream: Handle) = cuStreamBeginCapture_v2(
        stream.cast(), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    );
    destroy_graph(graph: Handle) = cuGraphDestroy(graph.cast());
    destroy_instance(instance: Handle) = cuGraphExecDestroy(instance.cast());
    replay(instance: Handle, stream: Handle) = cuGraphLaunch(instance.cast(), stream.cast());
}

/// Calls that write a value, which is their first argument.
macro_rules! values {
    ($($name:ident($($arg:ident: $type:ty),*) -> $out:ty = $call:ident($($given:expr),*);)*) => { $(
        unsafe fn $name($($arg: $type),*) -> Result<$out, Failure> {
            // SAFETY: the caller's promise, as `Driver` states it.
            unsafe { filled(|to| sys::$call(to, $($given),*)) }
        }
    )* };
}

values! {
    version() -> c_int = cuDriverGetVersion();
    device_count() -> c_int = cuDeviceGetCount();
    device(ordinal: c_int) -> DeviceId = cuDeviceGet(ordinal);
    alloc(bytes: usize) -> u64 = cuMemAlloc_v2(bytes);
    elapsed_ms(earlier: Handle, later: Handle) -> f32 = cuEventElapsedTime_v2(earlier.cast(), later.cast());
}

/// Calls that make something, whose handle is their first argument.
macro_rules! handles {
    ($($name:ident($($arg:ident: $type:ty),*) -> $out:ty = $call:ident($($given:expr),*);)*) => { $(
        unsafe fn $name($($arg: $type),*) -> Result<$out, Failure> {
            // SAFETY: the caller's promise, as `Driver` states it.
            unsafe { filled(|to| sys::$call(to, $($given),*)) }.map(|made| made.cast())
        }
    )* };
}

handles! {
    retain_context(device: DeviceId) -> Handle = cuDevicePrimaryCtxRetain(device);
    create_stream() -> Handle = cuStreamCreate(sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32);
    alloc_pinned(bytes: usize) -> *mut u8 = cuMemHostAlloc(bytes, 0);
    create_event() -> Handle = cuEventCreate(0);
    load_module(image: &[u8]) -> Handle = cuModuleLoadData(image.as_ptr().cast());
    find_function(module: Handle, name: &CStr) -> Handle = cuModuleGetFunction(module.cast(), name.as_ptr());
    instantiate(graph: Handle) -> Handle = cuGraphInstantiateWithFlags(graph.cast(), 0);
}

unsafe fn chip(device: DeviceId) -> Result<Result<Chip, String>, Failure> {
    use sys::CUdevice_attribute as A;
    // SAFETY: the device is valid; writes one integer.
    let attribute = |which| unsafe { filled(|to| sys::cuDeviceGetAttribute(to, which, device)) };
    Ok(chip_of(Attributes {
        capability: 10 * attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
            + attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        warp: attribute(A::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?,
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
    }))
}

unsafe fn device_name(device: DeviceId) -> Result<String, Failure> {
    let mut name = [0; 128];
    // SAFETY: writes at most the length it is given.
    done(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 127, device) })?;
    // SAFETY: the array is longer than what may be written, so it ends with a zero.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

unsafe fn memory_info() -> Result<(usize, usize), Failure> {
    let mut total = 0;
    // SAFETY: a context is current, as the caller promises; writes two integers.
    let free = unsafe { filled(|to| sys::cuMemGetInfo_v2(to, &raw mut total)) }?;
    Ok((free, total))
}

unsafe fn end_recording(stream: Handle) -> Result<Handle, Failure> {
    // SAFETY: the stream is open; writes one handle.
    unsafe { filled(|to| sys::cuStreamEndCapture(stream.cast(), to)) }.map(|graph| graph.cast())
}

unsafe fn launch(launch: &RawLaunch<'_>) -> Done {
    let RawLaunch { stream, function, grid, block, shared, cluster, early_start, args } = launch;
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
    let wanted = [(early, *early_start), (clusters, *cluster > 1)];
    let mut attributes = [early; 2];
    let mut count = 0;
    for (attribute, _) in wanted.into_iter().filter(|(_, wanted)| *wanted) {
        attributes[count] = attribute;
        count += 1;
    }
    let config = sys::CUlaunchConfig {
        gridDimX: grid[0],
        gridDimY: grid[1],
        gridDimZ: grid[2],
        blockDimX: *block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: *shared,
        hStream: stream.cast(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: u32::try_from(count).expect("two at most"),
    };
    // SAFETY: the arrays outlive the call, which copies the arguments and writes none; what they point to is the
    // caller's promise.
    done(unsafe {
        sys::cuLaunchKernelEx(&raw const config, function.cast(), args.as_ptr().cast_mut(), ptr::null_mut())
    })
}

/// Fills a value by a call.
///
/// # Safety
/// The call writes its target when it succeeds.
unsafe fn filled<T>(call: impl FnOnce(*mut T) -> CUresult) -> Result<T, Failure> {
    let mut value = MaybeUninit::uninit();
    done(call(value.as_mut_ptr()))?;
    // SAFETY: the caller's promise.
    Ok(unsafe { value.assume_init() })
}

fn done(result: CUresult) -> Done {
    use CUresult as C;
    let why = match result {
        C::CUDA_SUCCESS => return Ok(()),
        C::CUDA_ERROR_OUT_OF_MEMORY => Why::OutOfMemory,
        C::CUDA_ERROR_NOT_READY => Why::NotReady,
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
        | C::CUDA_ERROR_UNKNOWN => Why::Lost,
        _ => Why::Other,
    };
    Err(Failure { code: result as u32, why, words: words(result) })
}

/// The library's own words for a result.
fn words(result: CUresult) -> &'static str {
    let mut text = ptr::null();
    // SAFETY: writes a pointer to a string that is never freed, or leaves it null.
    let told = unsafe { sys::cuGetErrorString(result, &raw mut text) };
    if told != CUresult::CUDA_SUCCESS || text.is_null() {
        return "unknown error";
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("unknown error")
}

/// An H200, as its driver describes it.
#[cfg(test)]
pub(super) const H200: Attributes =
    Attributes { capability: 90, warp: 32, multiprocessors: 132, shared: 232_448 };

/// A chip with another capability, and else an H200's numbers.
#[cfg(test)]
pub(crate) fn chip_of_capability(capability: c_int) -> Chip {
    chip_of(Attributes { capability, ..H200 }).expect("a chip that is new enough")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shapes;

    #[test]
    fn what_a_chip_can_do_follows_its_generation() {
        let able = |capability| {
            let Chip { target, abilities, .. } = chip_of_capability(capability);
            let Abilities { wgmma, bulk_copies, clusters_max, early_start, .. } = abilities;
            (target, (wgmma, bulk_copies, clusters_max, early_start))
        };
        assert_eq!(able(80), ("sm_80".to_owned(), (false, false, 1, false)));
        assert_eq!(able(89), ("sm_89".to_owned(), (false, false, 1, false)));
        assert_eq!(able(90), ("sm_90a".to_owned(), (true, true, 16, true)));
        assert_eq!(able(120), ("sm_120".to_owned(), (false, true, 8, true)));
        let refused = chip_of(Attributes { capability: 75, ..H200 }).unwrap_err();
        assert_eq!(refused, "compute capability 7.5, 8.0 or newer is needed");
        assert_eq!(chip_of_capability(90).abilities, shapes::HOPPER);
    }
}
