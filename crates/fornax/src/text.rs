//! The text side of a model: prompts to tokens and what may be a token at all. It computes nothing.

use std::sync::Arc;

use fornax_chat::{Bounds, Model, READS_NO_IMAGES, Sight};
use fornax_format::Checkpoint;
use fornax_text::{ChatTemplate, Special, Tokenizer};

use crate::{Error, Prompt, Request};

/// Tokenizer and chat template of a model.
#[derive(Clone)]
pub struct Text {
    /// Some checkpoints carry none: they take and give ids.
    tokenizer: Option<Arc<Tokenizer>>,
    template: Arc<Result<ChatTemplate, fornax_text::Error>>,
    /// Rows of the model's embedding.
    rows: usize,
    asks_anew: bool,
    /// What looks at pictures, or why nothing does.
    sight: Result<Arc<dyn Sight>, &'static str>,
}

impl Text {
    pub(crate) fn open(
        checkpoint: &Checkpoint,
        template: Option<&str>,
        rows: usize,
        asks_anew: bool,
    ) -> Result<Text, Error> {
        Ok(Text {
            asks_anew,
            tokenizer: tokenizer(checkpoint)?.map(Arc::new),
            template: Arc::new(match template {
                Some(source) => Ok(ChatTemplate::new(source)?),
                // A model whose template is missing or broken still continues texts.
                None => ChatTemplate::open(checkpoint),
            }),
            rows,
            sight: Err(READS_NO_IMAGES),
        })
    }

    /// The same with what looks at pictures, or why nothing does.
    pub(crate) fn with_sight(self, sight: Result<Arc<dyn Sight>, &'static str>) -> Text {
        Text { sight, ..self }
    }

    /// What looks at pictures for the model, or why it reads none.
    pub fn sight(&self) -> Result<Arc<dyn Sight>, &'static str> {
        self.sight.clone()
    }

    /// The model's tokenizer, if it has one.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// The chat template, or why there is none.
    pub fn template(&self) -> Result<&ChatTemplate, &fornax_text::Error> {
        (*self.template).as_ref()
    }

    /// The chat template or why there is none, for whoever outlives this.
    pub fn shared_template(&self) -> Arc<Result<ChatTemplate, fornax_text::Error>> {
        Arc::clone(&self.template)
    }

    /// Whether the model may be asked anew in the middle of an answer.
    pub fn asks_anew(&self) -> bool {
        self.asks_anew
    }

    /// Tokens that exist. The model's table may have more rows: padding, which is never chosen.
    pub fn vocab(&self) -> usize {
        self.tokenizer.as_ref().map_or(self.rows, |tokenizer| tokenizer.vocab_len().min(self.rows))
    }

    /// The tokens of a prompt, checked against the vocabulary.
    pub fn prompt_tokens(&self, prompt: &Prompt) -> Result<Vec<u32>, Error> {
        self.request_tokens(&Request::new(prompt.clone()))
    }

    /// The tokens of a request's prompt, with all that its tools and its form add to it.
    pub fn request_tokens(&self, request: &Request) -> Result<Vec<u32>, Error> {
        let tokens = match &request.prompt {
            Prompt::Text { text, special } => {
                let tokenizer = self.tokenizer.as_ref().ok_or(Error::NoTokenizer)?;
                tokenizer.encode_prompt(text, if *special { Special::Parse } else { Special::AsText })?
            }
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Chat(_) => {
                let question = request.question().unwrap_or_default();
                question.prompt(self.model()?)?
            }
        };
        self.check_tokens(&tokens)?;
        Ok(tokens)
    }

    /// The tokens of a text by itself: nothing is added, and what it says never becomes control tokens.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>, Error> {
        let tokenizer = self.tokenizer.as_ref().ok_or(Error::NoTokenizer)?;
        Ok(tokenizer.encode(text, Special::AsText)?)
    }

    /// As conversations know it.
    pub(crate) fn model(&self) -> Result<Model<'_>, Error> {
        let tokenizer = self.tokenizer.as_ref().ok_or(Error::NoTokenizer)?;
        let sight = self.sight.as_deref().map_err(|reason| *reason);
        // Whoever asks knows the context, and says what is too long with what else would fit.
        let bounds = Bounds::NONE;
        Ok(Model { tokenizer, template: self.template(), asks_anew: self.asks_anew, sight, bounds })
    }

    /// Refuses an empty prompt and ids that the model does not have.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<(), Error> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let vocab = self.vocab();
        match tokens.iter().position(|&token| token as usize >= vocab) {
            Some(position) => Err(Error::UnknownToken { token: tokens[position], position, vocab }),
            None => Ok(()),
        }
    }
}

/// The checkpoint's tokenizer; `None` where it has none. One that it has and that cannot be used is an error.
fn tokenizer(checkpoint: &Checkpoint) -> Result<Option<Tokenizer>, Error> {
    let present = match checkpoint {
        Checkpoint::Gguf(gguf) => gguf.metadata().get("tokenizer.ggml.model").is_some(),
        Checkpoint::HuggingFace(directory) => directory.tokenizer_json().is_some(),
    };
    Ok(if present { Some(Tokenizer::open(checkpoint)?) } else { None })
}
