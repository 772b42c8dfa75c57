//! Runs open-weight language models: the binary and its library facade.
//!
//! The facade opens a model and answers one request at a time, on the CPU:
//!
//! ```no_run
//! use std::ops::ControlFlow;
//!
//! use fornax::{Fornax, Message, OpenOptions, Prompt, Sampling};
//!
//! # fn main() -> Result<(), fornax::Error> {
//! let mut model = Fornax::open("model.gguf")?;
//! let sampling = Sampling { max_tokens: Some(64), temperature: 0.8, seed: Some(7), ..Sampling::default() };
//! println!("{}", model.generate("The sky is blue because", &sampling)?.text);
//!
//! // With a chat template, and with options.
//! let mut model = OpenOptions::new("model.gguf").context(2048).open()?;
//! let question = vec![Message::user("Why is the sky blue?")];
//! println!("{}", model.chat(&question, &sampling)?.text);
//!
//! // As it is made; breaking stops it.
//! model.stream(&Prompt::Chat(question), &sampling, |text| {
//!     print!("{text}");
//!     ControlFlow::Continue(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! It knows the concrete backend, and with the binary it is the only place that does. It must never print, read the
//! environment, or move work to a device that was not asked for.

pub mod catalog;
mod error;
mod fornax;
mod request;
mod session;

pub use error::{Code, Error};
pub use fornax::{Fornax, OpenOptions};
pub use fornax_compute::KvDType;
pub use fornax_compute::cpu::Activations;
pub use request::{Completion, Event, Finish, Message, Prompt, Sampling, Timings};
