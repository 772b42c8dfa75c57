use std::path::PathBuf;

/// The ways in which reading a tokenizer, encoding text or rendering a chat can fail.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The container lacks a key or holds it with another type.
    #[error(transparent)]
    Format(#[from] fornax_format::Error),
    /// `tokenizer.ggml.model` names a family that is not built here.
    #[error("unsupported tokenizer model '{model}' (supported: gpt2, gemma4, llama, bert)")]
    UnsupportedModel {
        /// The name found in the file.
        model: String,
    },
    /// `tokenizer.ggml.pre` names a pre-tokenizer that is not known; guessing one would give wrong tokens.
    #[error("unknown pre-tokenizer '{name}' (key tokenizer.ggml.pre)")]
    UnknownPreTokenizer {
        /// The name found in the file.
        name: String,
    },
    /// A pre-tokenizer's pattern did not compile.
    #[error("pre-tokenizer pattern does not compile: {reason}")]
    Pattern {
        /// What the regular expression compiler said.
        reason: String,
    },
    /// The vocabulary holds more tokens or bytes than ids and offsets of 32 bits can name.
    #[error("vocabulary too large: {tokens} tokens")]
    VocabularyTooLarge {
        /// How many tokens the file lists.
        tokens: usize,
    },
    /// A per-token array is shorter than the list of tokens.
    #[error("{key} has {got} entries for {wanted} tokens")]
    Length {
        /// The metadata key.
        key: &'static str,
        /// Number of tokens.
        wanted: usize,
        /// Number of entries found.
        got: usize,
    },
    /// A merge is not two parts whose join is a token.
    #[error("merge {index} ('{merge}') is not two tokens whose join is a token")]
    Merge {
        /// Position in the list of merges.
        index: usize,
        /// The merge as stored.
        merge: String,
    },
    /// A special token's id lies beyond the vocabulary.
    #[error("{key} is {id}, but the vocabulary has {tokens} tokens")]
    TokenId {
        /// The key that names the token.
        key: String,
        /// The id found.
        id: u64,
        /// Size of the vocabulary.
        tokens: usize,
    },
    /// A Hugging Face directory without `tokenizer.json`.
    #[error("no tokenizer.json in the model directory (other tokenizer files are not read)")]
    NoTokenizer,
    /// `tokenizer.json` cannot be used.
    #[error("{}: {reason}", path.display())]
    TokenizerJson {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// `tokenizer.model` cannot be used.
    #[error("{}: {reason}", path.display())]
    TokenizerModel {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A tokenizer that GGUF cannot describe.
    #[error("{what} cannot be written into a GGUF file")]
    Unexportable {
        /// What about it.
        what: String,
    },
    /// The encoder of a `tokenizer.json` refused a text.
    #[error("cannot encode the text: {reason}")]
    Encode {
        /// What the encoder said.
        reason: String,
    },
    /// The model carries no chat template.
    #[error("the model has no chat template; give one with --chat-template-file")]
    NoTemplate,
    /// The chat template is not valid Jinja.
    #[error("the chat template does not parse: {reason}")]
    TemplateSyntax {
        /// Where and why.
        reason: String,
    },
    /// The chat template refused the conversation with `raise_exception`.
    #[error("the chat template refuses this conversation: {message}")]
    TemplateRefused {
        /// The template's own message.
        message: String,
    },
    /// The chat template failed while rendering.
    #[error("the chat template failed: {reason}")]
    TemplateFailed {
        /// Where and why.
        reason: String,
    },
    /// A role that is not a plain word could forge the template's markers.
    #[error("message {index} has role '{role}': a role is letters, digits, '_' or '-'")]
    Role {
        /// Position of the message.
        index: usize,
        /// The role given.
        role: String,
    },
    /// An empty stop string would stop before the first character.
    #[error("stop string {index} is empty")]
    EmptyStop {
        /// Position in the list of stop strings.
        index: usize,
    },
}
