//! What an assistant's text means: what it thought, what it says, which tools it calls.
//!
//! Models write all three into one text, each family in its own way, and the chat template shows which: a [`Dialect`]
//! is found in the template, and a [`Reader`] takes the text in pieces and tells its parts.

mod dialect;
mod json;
mod reader;
mod values;

pub use dialect::Dialect;
pub use reader::{Delta, Reader, Tool};
