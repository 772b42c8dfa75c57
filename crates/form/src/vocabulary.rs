//! The tokens of a model as bytes, and as the trie that forms are compiled against.

use std::sync::Arc;

use toktrie::{TokRxInfo, TokTrie, TokenizerEnv};

use crate::FormError;

/// Bytes to tokens.
pub type Encode = Arc<dyn Fn(&[u8]) -> Vec<u32> + Send + Sync>;

/// The tokens of a model as bytes.
pub struct Vocabulary {
    /// By id. Control tokens are empty: no form contains them.
    pub bytes: Vec<Vec<u8>>,
    /// The tokens that end an answer.
    pub end_tokens: Vec<u32>,
    /// How the model's tokenizer would write these bytes: forced text takes the tokens that the model knows it by.
    pub encode: Encode,
}

/// The trie and the encoding that forms are compiled against.
pub(crate) struct Environment {
    trie: TokTrie,
    encode: Encode,
}

impl Environment {
    pub(crate) fn new(vocabulary: Vocabulary) -> Result<Environment, FormError> {
        let Some(&end) = vocabulary.end_tokens.first() else {
            return Err(FormError::Compile("the model has no end token".to_owned()));
        };
        let count = u32::try_from(vocabulary.bytes.len()).expect("token ids fit 32 bits");
        let trie = TokTrie::from(&TokRxInfo::new(count, end), &vocabulary.bytes);
        Ok(Environment { trie, encode: vocabulary.encode })
    }
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        (self.encode)(bytes)
    }
}
