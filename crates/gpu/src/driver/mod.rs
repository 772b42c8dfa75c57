//! The seam to the vendor's libraries: the only place that knows their functions. Libraries are opened at run time.

mod cuda;
mod nvrtc;

pub use cuda::Found;
pub(crate) use cuda::{
    Arg, Device, Event, Function, Graph, Launch, Module, Pinned, PinnedSource, probe, version_words,
};
pub(crate) use nvrtc::{Source, compile, version};
