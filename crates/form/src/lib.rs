//! What an answer must look like: JSON schemas, regular expressions, grammars, choices.
//!
//! A [`Form`] is checked (what would be ignored or bent is refused), written for the compiler, and compiled against a
//! model's [`Vocabulary`] into a grammar that masks tokens, which is all that the engine sees of it. A [`Schema`]
//! judges a finished answer. This crate knows text and the languages that forms are written in. It must never know a
//! model, a tokenizer, a request or anyone's API.

mod compiler;
mod form;
mod formats;
mod gbnf;
mod guide;
mod judge;
mod meeting;
mod pattern;
mod schema;
mod vocabulary;

pub use compiler::{Grammars, Owner, Trial};
pub use form::{Form, FormError};
pub use judge::Schema;
pub use vocabulary::{Encode, Vocabulary};
