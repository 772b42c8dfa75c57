//! One file per architecture: its row of facts. A row begins from another's and says what differs.

mod llama;
mod qwen2;
mod qwen3;

use crate::Facts;

/// Every architecture.
pub(crate) const TABLE: &[Facts] = &[llama::LLAMA, llama::MISTRAL, qwen2::QWEN2, qwen3::QWEN3];
