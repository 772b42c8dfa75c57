//! The routes of llama.cpp's server that its own clients call. What it shares with OpenAI's API goes the same way here.

pub(crate) mod aliases;
pub(crate) mod completion;
pub(crate) mod props;
pub(crate) mod template;
