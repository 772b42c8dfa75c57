//! Texts as completions and embeddings take them: one or several, as text or as tokens.

use fornax_text::Special;
use serde::Deserialize;
use utoipa::ToSchema;

use super::prepare::{Preparing, check_length};
use crate::error::ApiError;

/// A string, an array of strings, an array of token ids, or an array of such arrays.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

impl Prompt {
    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        match self {
            Prompt::Text(_) | Prompt::Tokens(_) => 1,
            Prompt::Texts(texts) => texts.len(),
            Prompt::TokenLists(lists) => lists.len(),
        }
    }

    /// The tokens of each.
    pub(crate) fn tokens(&self, served: &Preparing<'_>) -> Result<Vec<Vec<u32>>, ApiError> {
        let encode = |text: &String| {
            check_length(served, text.len())?;
            Ok(served.tokenizer.encode_prompt(text, Special::AsText)?)
        };
        match self {
            Prompt::Text(text) => Ok(vec![encode(text)?]),
            Prompt::Texts(texts) => texts.iter().map(encode).collect(),
            Prompt::Tokens(tokens) => Ok(vec![tokens.clone()]),
            Prompt::TokenLists(lists) => Ok(lists.clone()),
        }
    }
}
