//! The crate against independent references: transformers' logits and frequencies, llama.cpp's conversions, and files
//! with one thing wrong.

#![cfg(test)]

mod config;
mod fixture;
mod refusals;
mod rope;
