//! The commands, a file each, and what they share.

pub(crate) mod args;
pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod config;
mod conformance;
mod device;
pub(crate) mod doctor;
pub(crate) mod embed;
pub(crate) mod failure;
pub(crate) mod generate;
pub(crate) mod inspect;
mod interrupt;
pub(crate) mod jobs;
mod locate;
pub(crate) mod logits;
mod machine;
mod meter;
pub(crate) mod models;
mod output;
pub(crate) mod perplexity;
pub(crate) mod plan;
pub(crate) mod private;
pub(crate) mod run;
mod sampling;
pub(crate) mod serve;
pub(crate) mod tokenize;
pub(crate) mod trial;
