//! Texts as completions and embeddings take them: one or several, as text or as tokens.

use fornax_text::{Snippet, Special};
use serde::Deserialize;
use utoipa::ToSchema;

use super::prepare::{Preparing, check_length};
use crate::error::{ApiError, Code, Fault};

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

    /// The tokens that ask for what stands between each text and this one.
    pub(crate) fn around(&self, suffix: &str, served: &Preparing<'_>) -> Result<Vec<Vec<u32>>, ApiError> {
        match self {
            Prompt::Text(text) => Ok(vec![infill(served, text, suffix, &[])?]),
            Prompt::Texts(texts) => texts.iter().map(|text| infill(served, text, suffix, &[])).collect(),
            Prompt::Tokens(_) | Prompt::TokenLists(_) => {
                Err(ApiError::fault(Fault::rule("suffix", "cannot be combined with a prompt of tokens")))
            }
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

/// The tokens that ask for what stands between two texts.
pub(crate) fn infill(
    served: &Preparing<'_>,
    before: &str,
    behind: &str,
    others: &[Snippet],
) -> Result<Vec<u32>, ApiError> {
    let others_bytes = others.iter().map(|other| other.name.len() + other.text.len()).sum::<usize>();
    check_length(served, before.len() + behind.len() + others_bytes)?;
    let prompt = served.tokenizer.encode_infill(before, behind, others)?;
    prompt.ok_or_else(|| {
        let message =
            format!("{:?} has no tokens to ask for what stands between two texts", served.card.name);
        ApiError::new(Code::ModelUnsupported, message)
    })
}
