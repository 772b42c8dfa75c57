//! The server over real sockets, with a scripted model.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod bad_input;
mod chat;
mod client;
mod completions;
mod document;
mod jobs;
mod life;
mod params;
mod pressure;
mod traces;
mod ways_in;
mod worker;
mod world;
