//! Model files: untrusted bytes become named, typed, shaped views.
//!
//! Knows GGUF and safetensors containers and nothing of what the tensors mean. It must never compute on weights,
//! trust a length, or panic on input.

mod dtype;
mod view;

pub use dtype::DType;
pub use view::View;
