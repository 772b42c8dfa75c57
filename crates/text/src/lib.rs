//! Text on its way into a model and out of it.
//!
//! In: a [`ChatTemplate`] turns a conversation into the text that the model was trained on, and a [`Tokenizer`] cuts
//! text into tokens, from GGUF metadata or a `tokenizer.json`. Out: a [`Detokenizer`] turns tokens into text as they
//! come, whole characters only, [`StopStrings`] watches that text for where it should end, and a [`Reader`] tells what
//! of it is thinking, what is said and which tools are called, in the [`Dialect`] that the template shows.
//!
//! It knows vocabularies, the pre-tokenizers of each family of models, Jinja, and one rule above all: what a user
//! wrote never becomes a control token. That is decided character by character ([`ChatPrompt`]) before anything is
//! merged, so that a message without control tokens is encoded exactly as if the whole prompt had been one text.
//!
//! It must never know an engine, a model's weights, a socket or a clock (the time that templates ask for is handed
//! in with the [`Chat`]). What an engine needs of a vocabulary are token bytes ([`Tokenizer::token_bytes`]); it never
//! sees the tokenizer. An unknown family is an error that names it, not a guess.

mod allowance;
mod answer;
mod bpe;
mod detokenizer;
mod error;
mod export;
mod infill;
mod pipeline;
mod pretokenizer;
mod python;
mod sentencepiece;
mod special;
mod spm;
mod stop;
mod template;
mod tokenizer;
mod tokenizer_json;
mod vocab;

pub use answer::{Delta, Dialect, Reader, Tool};
pub use detokenizer::Detokenizer;
pub use error::Error;
pub use export::gguf_pairs;
pub use infill::Snippet;
pub use stop::{Released, StopStrings};
pub use template::{Chat, ChatPrompt, ChatTemplate, is_template_name};
pub use tokenizer::{Special, Tokenizer};
