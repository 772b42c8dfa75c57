//! The seam to the vendor's libraries: the only place that knows their functions. A driver is a table of functions
//! (`table.rs`); libcuda fills it, and so does the fake driver of this crate's tests. Libraries are opened at run time.

mod device;
#[cfg(test)]
pub(crate) mod fake;
mod libcuda;
mod nvrtc;
mod table;

pub use device::Found;
pub(crate) use device::{
    Arg, Device, Event, Function, Graph, LatePinned, Launch, Module, Pinned, PinnedRoom,
};
#[cfg(test)]
pub(crate) use fake::FAKE as CUDA;
#[cfg(test)]
pub(crate) use libcuda::LIBCUDA;
/// The driver that devices of this crate are opened with. This is the one place where tests have another.
#[cfg(not(test))]
pub(crate) use libcuda::LIBCUDA as CUDA;
#[cfg(test)]
pub(crate) use libcuda::chip_of_capability;
#[cfg(test)]
pub(crate) use nvrtc::NVRTC;
pub(crate) use nvrtc::{Compiler, Source, compile, version};
pub(crate) use table::{Abilities, Chip};

/// Blocks of a cluster that every chip with clusters takes.
pub(crate) const CLUSTER_USUAL: usize = 8;
