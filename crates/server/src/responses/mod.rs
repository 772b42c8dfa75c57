//! OpenAI's newer API.
//!
//! A request becomes a conversation with its tools, which is checked and asked like any other; an answer's parts become
//! items. Where the server keeps jobs it keeps responses, too: later requests go on from them, and those in the
//! background are jobs.

pub(crate) mod conversations;
pub(crate) mod create;
pub(crate) mod items;
pub(crate) mod memory;
pub(crate) mod request;
pub(crate) mod stored;
