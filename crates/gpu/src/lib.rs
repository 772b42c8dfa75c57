//! The backend on NVIDIA GPUs.
//!
//! [`Cuda`] is one device on one thread: memory from one arena counted by purpose, kernels compiled at start for this
//! chip and kept on disk, one stream that orders everything. Nothing of a toolkit is needed to build this crate; the
//! driver and NVRTC are opened at run time, and what is missing is said in words ([`probe`], [`compiler`]).
//!
//! **Precision.** Buffers are f32. For products on the tensor cores, an activation is one f16, scaled by a power of two
//! for its row, and a weight's value is another; sums are f32. `Activations::Half` of `fornax_compute` specifies this,
//! and the conformance suite compares this crate with it. There is no int8 mode here.
//!
//! **Order.** An output's order of summation depends on its weight's shape and the chip alone, and attention reduces
//! over fixed tiles of absolute positions: a row's result is the same bits alone, among others or in chunks.
//!
//! **Fusion.** Inside `record`, an operation may be done by the kernel of the one before or after it (`ops::fuse`).
//! This never changes a row's bits.
//!
//! Beside the backend stands [`CudaRing`]: exact products mod 2^32, for private inference.
//!
//! This crate knows devices. It must never know an architecture, a request, a file name beyond its kernel folder, or
//! an environment variable.

#![expect(unsafe_code, reason = "the driver is C: every call is in `driver`, with what makes it sound")]

mod abi;
mod arena;
mod check;
mod cuda;
mod driver;
mod gather;
mod grid;
mod layout;
mod memory;
mod opening;
mod ops;
mod pool;
mod program;
mod rate;
mod ring;
mod step;
mod upload;

pub use cuda::{Cuda, CudaOptions};
pub use driver::Found;
pub use memory::{Buf, CudaSizes, Kv, Weight};
pub use opening::Opening;
pub use rate::{Rates, rates};
pub use ring::{CudaRing, CudaRingMatrix, CudaRingOptions};
pub use step::Step;
pub use upload::UploadTimes;

use fornax_compute::Error;

/// Looks at device `ordinal` without computing on it: what it is, or why it cannot be used.
pub fn probe(ordinal: usize) -> Result<Found, Error> {
    Ok(driver::Device::open(&driver::CUDA, ordinal)?.found())
}

/// The version of the run-time compiler, after it has compiled something; or what is missing.
pub fn compiler() -> Result<String, String> {
    let (major, minor) = driver::version()?;
    // Without its builtins library NVRTC is there and compiles nothing.
    let source =
        driver::Source { name: "probe.cu", text: "extern \"C\" __global__ void probe() {}", headers: &[] };
    driver::compile(&source, &["--gpu-architecture=sm_80".to_owned()])?;
    Ok(format!("{major}.{minor}"))
}

impl Found {
    /// One line for people.
    pub fn words(&self) -> String {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        format!(
            "{}, {}, {:.1} GiB ({:.1} free), driver for {}",
            self.name,
            self.chip,
            gib(self.memory_total),
            gib(self.memory_free),
            self.driver
        )
    }
}
