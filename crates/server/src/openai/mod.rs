//! What OpenAI's clients speak, with the extensions of llama.cpp and vLLM under their names.

pub(crate) mod adapters;
pub(crate) mod batches;
pub(crate) mod chat;
pub(crate) mod classify;
pub(crate) mod completions;
pub(crate) mod decisions;
pub(crate) mod echo;
pub(crate) mod embeddings;
pub(crate) mod files;
pub(crate) mod models;
pub(crate) mod reply;
pub(crate) mod rerank;
pub(crate) mod score;
pub(crate) mod tokens;
pub(crate) mod tools;
