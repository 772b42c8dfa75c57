//! OpenAI's newer API, without its memory: nothing is stored, so every request brings its whole conversation.
//!
//! A request becomes a conversation with its tools, which is checked and asked like any other; an answer's parts become
//! items.

pub(crate) mod create;
pub(crate) mod items;
pub(crate) mod request;
