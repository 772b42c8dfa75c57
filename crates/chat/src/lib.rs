//! What it means to chat with a model, whoever asks: an HTTP client of any API, a job, the terminal, a program.
//!
//! A [`Conversation`] has messages of typed content: text, images, thoughts, calls of tools and their results.
//! A [`Question`] is a conversation with everything that decides how it is answered: [`Tools`], how much to think, a
//! form. [`Question::prepare`] makes of it the prompt's tokens and a [`Reading`], which says how the answer is read. An
//! [`Ask`] is a request to the engine with that reading, and an [`Answer`] is the way back: tokens become text, text
//! becomes parts. It is also where thinking is ended at its budget and where the arguments of a strict call are held to
//! their schema: the answer is let go there and asked for anew behind what stands already.
//!
//! Whoever has an API of its own converts to these types directly, and names its own fields where something is wrong
//! ([`Place`]). This crate uses `engine` and `text`. It must never know HTTP, anyone's API, a file or a backend, and it
//! never prints.

mod answer;
mod ask;
mod conversation;
mod error;
mod onward;
mod question;
mod reading;
mod sight;
mod thinking;
mod tools;

pub use answer::{Answer, Answers, Counts, Failed, Finish, Piece, TokenScore};
pub use ask::Ask;
pub use conversation::{Call, Content, Conversation, Image, Message, Outcome, Role};
pub use error::{Error, Fault, Place, ToolField};
pub use question::{Compile, Model, Prepared, Question};
pub use reading::Reading;
pub use sight::{Bounds, Frame, IMAGES_MAX, Placeholder, READS_NO_IMAGES, Seen, Shown, Sight, Unseen};
pub use thinking::{Effort, Thinking};
pub use tools::{Choice, Definition, Tools, call_id};
