//! Runs open-weight language models: the binary and its library facade.
//!
//! The facade opens a model and answers requests, as many at once as it was opened for, on the CPU or on a GPU:
//!
//! ```no_run
//! use std::ops::ControlFlow;
//!
//! use fornax::{Fornax, Message, OpenOptions, Request, Sampling};
//!
//! # fn main() -> Result<(), fornax::Error> {
//! let model = Fornax::open("model.gguf")?;
//! let sampling = Sampling { temperature: 0.8, ..Sampling::greedy() };
//! let request = Request { max_tokens: Some(64), sampling, ..Request::text("The sky is blue because") };
//! println!("{}", model.generate(&request)?.text);
//!
//! // With a chat template, for four callers at once; clones share the model.
//! let model = OpenOptions::new("model.gguf").context(2048).parallel(4).open()?;
//! let question = Request::chat(vec![Message::user("Why is the sky blue?")]);
//! println!("{}", model.clone().generate(&question)?.text);
//!
//! // As it is made; breaking stops it.
//! model.stream(&question, |text| {
//!     print!("{text}");
//!     ControlFlow::Continue(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! It knows the concrete backends, and with the binary it is the only place that does. It must never print, read the
//! environment, or move work to a device that was not asked for.

mod answer;
pub mod convert;
mod device;
mod error;
mod evaluator;
mod fornax;
pub mod hub;
pub mod importance;
mod kept;
pub mod machine;
mod new_file;
mod open;
mod private;
pub mod quantize;
pub mod random_model;
mod request;
mod sight;
mod text;
pub mod units;
mod vocabulary;

pub use answer::{Answer, Part};
pub use device::{Cases, Device, DeviceRates, Loading, Suite, serve_private};
pub use error::Error;
pub use evaluator::Evaluator;
pub use fornax::{Event, Fornax, Memory};
pub use fornax_chat::{
    Call, Choice, Content, Definition, Effort, Image, Message, Outcome, Role, Thinking, Tools,
};
pub use fornax_code::Code;
pub use fornax_compute::cpu::Activations;
pub use fornax_compute::{KvDType, Mirostat, Pooling, Sampling};
pub use fornax_engine::{Change, Plan, Remedy, of_length_one};
pub use fornax_form::Form;
pub use hub::catalog;
pub use kept::KvDisk;
pub use new_file::NewFileError;
pub use open::{OpenOptions, Planned, QUANTS, Unloaded};
pub use private::{Private, RingOptions};
pub use request::{Completion, Finish, Opinion, Prompt, Request, STOP_BYTES_MAX, STOPS_MAX, Timings};
pub use sight::image;
pub use text::Text;
