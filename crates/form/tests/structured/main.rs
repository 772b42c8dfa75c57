//! Structured output through the whole loop: what ends as an answer has its form, by the word of somebody else.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![expect(clippy::print_stdout, reason = "counts are for people to read")]

mod fuzz;
mod hostile;
mod languages;
mod schemas;
mod suite;
mod world;
