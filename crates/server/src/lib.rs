//! The HTTP surface of Fornax: OpenAI's clients, durable jobs, workers behind a scheduler, operators.
//!
//! A request comes in through the front door (identity, origin, key), is read and checked against the very schema that
//! the API document publishes (`shape`), becomes questions for the engine on a thread that may block
//! (`ask`, and `fornax_chat` for what every chat means), is let in (`app`), and is answered piece by piece (`work`),
//! whole or as
//! events (`sse`). Every error passes one mapping (`error`).
//!
//! This is the only crate that knows HTTP, JSON bodies or anyone's API. It must never know a backend, a model file or
//! an environment variable: the binary hands it models that can be loaded
//! ([`Offer`], [`Served`]), a listener, and what tells it to stop. It
//! never writes what was asked or answered into a log.

mod anthropic;
mod app;
mod ask;
mod ceiling;
mod elsewhere;
mod error;
mod front;
mod jobs;
mod json;
mod llama;
mod metrics;
mod models;
mod ollama;
mod openai;
mod openapi;
mod ops;
mod options;
mod responses;
mod secret;
mod served;
mod server;
mod shape;
mod shares;
mod sse;
mod tls;
mod trace;
mod turns;
mod work;
mod worker;

pub use app::{Failed, Progress};
pub use ceiling::Ceiling;
pub use error::Code;
pub use front::keys::KeysError;
pub use jobs::durable::JobsOptions;
pub use models::{Load, Offer, Plan, Room};
pub use options::{Callback, ServerOptions, TlsFiles};
pub use secret::exposure;
pub use served::{Device, Keeper, LoadAdapter, ModelCard, ModelFiles, Served};
pub use server::{Error, Server};
pub use tls::TlsError;
