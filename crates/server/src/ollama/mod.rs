//! What Ollama's clients speak: answers as lines of JSON, with their timings.
//!
//! A request becomes a conversation (or, raw, a text to continue), which is checked and asked like any other.

pub(crate) mod chat;
pub(crate) mod embed;
pub(crate) mod generate;
pub(crate) mod lines;
pub(crate) mod make;
pub(crate) mod models;
pub(crate) mod request;
