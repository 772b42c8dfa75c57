//! Model files: untrusted bytes become named, typed, shaped views.
//!
//! Knows GGUF and safetensors containers and nothing of what the tensors mean. It must never compute on weights,
//! trust a length, or panic on input.
//!
//! A file is checked as a whole when it is opened: every length, count, offset and product against the bytes that are
//! there, before anything is allocated for them. After that a [`View`] cannot fail.

mod adapter;
mod checkpoint;
mod dtype;
mod error;
mod gguf;
mod huggingface;
mod json;
mod map;
mod metadata;
mod packing;
mod reader;
mod safetensors;
mod table;
mod view;
pub mod write;

pub use adapter::AdapterFiles;
pub use checkpoint::Checkpoint;
pub use dtype::DType;
pub use error::Error;
pub use gguf::Gguf;
pub use huggingface::{Dense, HuggingFace};
pub use metadata::{Array, Metadata, Value};
pub use packing::{
    AWQ_ORDER, CodeOrder, Factor, Float4, Grid, Integers, Nested, Packing, RunScale, Table as ValueTable,
    Zero, ZeroOrder,
};
pub use safetensors::Safetensors;
pub use view::View;
