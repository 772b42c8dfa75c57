//! The seam to the vendor's libraries: the only place that knows their functions. Libraries are opened at run time. Tests of
//! this crate have a fake driver and a fake compiler in their place.

mod cuda;
#[cfg(test)]
pub(crate) mod fake;
mod nvrtc;

pub use cuda::Found;
pub(crate) use cuda::{
    Arg, CLUSTER_USUAL, Device, Event, Function, Graph, LatePinned, Launch, Module, Pinned, PinnedRoom,
    probe, version_words,
};
#[cfg(test)]
pub(crate) use fake::COMPILER;
#[cfg(not(test))]
pub(crate) use nvrtc::NVRTC as COMPILER;
#[cfg(test)]
pub(crate) use nvrtc::NVRTC;
pub(crate) use nvrtc::{Compiler, Source, compile, version};
