//! The crate against independent references: transformers' logits and frequencies, llama.cpp's conversions, and files
//! with one thing wrong.

#![cfg(test)]

mod adapters;
mod config;
mod document;
mod encoder;
mod export;
mod fixture;
mod flips;
mod fuzz;
mod golden;
mod images;
mod keys;
mod real;
mod refusals;
mod rig;
mod roles;
mod rope;
mod stages;
