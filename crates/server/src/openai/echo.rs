//! The prompt told again before what follows it, as OpenAI's older API does. Harnesses that compare answers by how
//! likely they are (lm-eval) ask for it, and read the log-probabilities of the prompt's own tokens.

use std::collections::BTreeMap;

use fornax_chat::TokenScore;
use fornax_text::Tokenizer;

use super::completions::CompletionLogprobs;
use crate::{ask::prompt::Prompt, error::Fault};

/// A prompt that is told again.
#[derive(Clone, Debug)]
pub(crate) struct Echo {
    pub(crate) text: String,
    tokens: Vec<u32>,
    /// No token was asked for, and the engine had to choose one all the same; it is told to nobody.
    pub(crate) hides: bool,
    /// How likely its tokens are, from the second on; empty unless that was asked for.
    scores: Vec<TokenScore>,
    /// By choice, the token that was chosen last, until the text that it makes is heard: one that ends an answer makes
    /// none.
    last: BTreeMap<usize, TokenScore>,
}

impl Echo {
    /// Of a prompt: the text that the client sent, or what its tokens say.
    pub(crate) fn new(
        prompt: &Prompt,
        index: usize,
        tokens: &[u32],
        hides: bool,
        tokenizer: &Tokenizer,
    ) -> Echo {
        let sent = match prompt {
            Prompt::Text(text) => Some(text),
            Prompt::Texts(texts) => texts.get(index),
            Prompt::Tokens(_) | Prompt::TokenLists(_) => None,
        };
        let text = sent.cloned().unwrap_or_else(|| tokenizer.decode(tokens));
        Echo { text, tokens: tokens.to_vec(), hides, scores: Vec::new(), last: BTreeMap::new() }
    }

    /// What cannot be combined with it.
    pub(crate) fn check(prompt_logprobs: bool, scored: bool, streamed: bool, choices: u32) -> Option<Fault> {
        if prompt_logprobs {
            let rule = "cannot be combined with echo, which tells them with logprobs";
            return Some(Fault::rule("prompt_logprobs", rule));
        }
        // The prompt's are known with the first choice; another may be told before.
        let several = streamed && scored && choices > 1;
        several.then(|| Fault::rule("n", "cannot be more than 1 in a stream with echo and logprobs"))
    }

    /// Hears how likely the prompt's next token was.
    pub(crate) fn hear(&mut self, score: TokenScore) {
        self.scores.push(score);
    }

    /// Hears of a chosen token before its text.
    pub(crate) fn chosen(&mut self, choice: usize, score: TokenScore) {
        self.last.insert(choice, score);
    }

    /// The text of what was chosen is heard; whether it is to be told.
    pub(crate) fn said(&mut self, choice: usize) -> bool {
        self.last.remove(&choice);
        !self.hides
    }

    /// The token that ended the answer and is no part of its text. Whoever reads these lists counts the tokens that were
    /// chosen, so it is one of them.
    pub(crate) fn ending(&mut self, choice: usize) -> Option<TokenScore> {
        self.last.remove(&choice).filter(|_| !self.hides)
    }

    /// The prompt's tokens in the lists of this API, the first with nothing before it that would make it likely; and where
    /// what follows begins.
    pub(crate) fn logprobs(&self, tokenizer: &Tokenizer) -> (CompletionLogprobs, usize) {
        let mut logprobs = CompletionLogprobs::default();
        let Some(&first) = self.tokens.first() else { return (logprobs, 0) };
        let offset = logprobs.begin(tokenizer, first);
        let offset = logprobs.extend(tokenizer, &self.scores, offset);
        (logprobs, offset)
    }
}
