//! What Anthropic's clients speak: messages made of blocks.
//!
//! A request becomes a conversation with its tools, which is checked and asked like any other; an answer's parts become
//! blocks.

pub(crate) mod blocks;
pub(crate) mod count;
pub(crate) mod messages;
pub(crate) mod request;
