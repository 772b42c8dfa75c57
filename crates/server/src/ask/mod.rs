//! From a body of any API to questions for the engine.
//!
//! Each API reads its own body and converts it to what `fornax_chat` knows: a conversation, tools, how much to think.
//! What follows is the same for all of them: the model is found and leased (`prepare`), parameters become sampling
//! (`params`), texts become tokens (`prompt`), pictures come out
//! of base64 (`image`), and a chat becomes a prompt with the way its answer is read (`chat`).

pub(crate) mod chat;
pub(crate) mod image;
pub(crate) mod params;
pub(crate) mod prepare;
pub(crate) mod prompt;
