//! Runs open-weight language models: the binary and its library facade.

pub mod catalog;
