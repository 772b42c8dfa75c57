//! One file per architecture: its row of facts, and its blocks where they are its own.

mod llama;
mod qwen2;

pub(crate) use llama::{LLAMA, Llama, MISTRAL};
pub(crate) use qwen2::QWEN2;
