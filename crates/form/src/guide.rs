//! A compiled form and how far an answer has got in it.

use std::sync::Arc;

use fornax_engine::{Constraint, Grammar};
use llguidance::{Matcher, TokenParser, api::StopReason};

use crate::compiler::first_line;

/// What the engine asks for the tokens that keep the form alive.
pub(crate) struct Guide {
    matcher: Matcher,
    end_tokens: Arc<[u32]>,
    /// Tokens that its masks speak about.
    vocab: u32,
}

impl Guide {
    pub(crate) fn new(parser: TokenParser, end_tokens: Arc<[u32]>, vocab: u32) -> Guide {
        Guide { matcher: Matcher::new(Ok(parser)), end_tokens, vocab }
    }
}

impl Constraint for Guide {
    fn vocab(&self) -> u32 {
        self.vocab
    }

    fn mask(&mut self) -> Result<Vec<u32>, String> {
        let mut mask = self.matcher.compute_mask_or_eos().map_err(|error| first_line(&error.to_string()))?;
        let may_end = self.may_end();
        for &token in self.end_tokens.iter() {
            if may_end { mask.allow_token(token) } else { mask.disallow_token(token) }
        }
        Ok(mask.into())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        // All end tokens are one to the form.
        let token = if self.end_tokens.contains(&token) { self.end_tokens[0] } else { token };
        self.matcher.consume_token(token).map_err(|error| first_line(&error.to_string()))
    }

    fn forced(&mut self) -> Vec<u32> {
        self.matcher.compute_ff_tokens()
    }

    fn may_end(&mut self) -> bool {
        self.is_over() || self.matcher.is_accepting().unwrap_or(false)
    }

    /// A form that failed is not over: what there is of the answer does not have it.
    fn is_over(&self) -> bool {
        matches!(self.matcher.stop_reason(), StopReason::NoExtension | StopReason::EndOfSentence)
    }

    fn copied(&self) -> Grammar {
        // Deep: copies work on different threads and must not share lexer caches.
        Box::new(Guide {
            matcher: self.matcher.deep_clone(),
            end_tokens: Arc::clone(&self.end_tokens),
            vocab: self.vocab,
        })
    }
}
