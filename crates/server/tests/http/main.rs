//! The server over real sockets, with a scripted model.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![expect(clippy::print_stdout, reason = "counts and skips are for people to read")]

mod adapters;
mod agents;
mod anthropic;
mod bad_input;
mod batches;
mod chat;
mod client;
mod completions;
mod console;
mod conversations;
mod decisions;
mod document;
mod forms;
mod fuzz;
mod images;
mod jobs;
mod kept;
mod life;
mod llama;
mod made;
mod models;
mod ollama;
mod params;
mod pressure;
mod responses;
mod templates;
mod tenants;
mod tools;
mod traces;
mod ways_in;
mod worker;
mod world;
