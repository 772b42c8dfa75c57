//! Two-server private inference (`blind2`): a client has a model's linear algebra done by two servers, neither of which
//! learns what it is about.
//!
//! For each product of a weight matrix W with activations X the client sends X - R to party 0; party 1 draws the mask R
//! itself, from a seed that it got once. Both answer with the product of W and what they have, modulo 2^32; the sum is
//! W X. Everything else (norms, rotation, attention, sampling, the KV cache, the tokenizer) stays with the client.
//! `docs/private.md` has the claim with its assumptions, and why it holds.
//!
//! [`Integer`] is the client's backend, so models run on it unchanged; [`Client`] is who multiplies for it,
//! [`Reference`] the same without servers. [`Server`] is either server. [`audit`](mod@audit) judges recorded
//! transcripts.
//!
//! This crate knows matrices by number. It must never know an architecture, a token, a file of a model, HTTP or a
//! command line; and it never logs.

mod ahead;
pub mod audit;
mod backend;
mod channel;
pub mod claim;
mod client;
mod crowd;
mod error;
pub mod frame;
pub mod mask;
mod patience;
mod quantize;
mod queue;
mod reference;
mod server;
mod stats;
mod transcript;
mod verify;

pub use backend::{Integer, IntegerSizes, Products, Weight};
pub use channel::{Address, client_tls, server_tls};
pub use client::{Client, ClientOptions, Opening, Parties, Recompute};
pub use error::Error;
pub use quantize::{Collector, Fingerprint, Matrix, QUANT, quantize_row};
pub use reference::Reference;
pub use server::{Loaded, Server, ServerOptions};
pub use stats::{Snapshot, Stats};
pub use transcript::{Connection, Recorder, Transcript, Way};
