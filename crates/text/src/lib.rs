//! Tokenizers, the incremental detokenizer and chat templates.
