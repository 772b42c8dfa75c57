//! The way back into the engine: an answer that is asked for anew in its middle.

use std::sync::Arc;

use fornax_engine::{Grammar, Handle, Refusal, Reply, Request};
use fornax_text::{Special, StopStrings, Tokenizer};

/// An answer so far, and the way back into the engine.
pub(crate) struct Onward {
    engine: Handle,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Its prompt grows by what is generated; its limit stays that of the whole answer.
    request: Request,
    /// Of the last tokens of the prompt, which are the answer's: the text that each completed.
    texts: Vec<String>,
    /// Stop strings before any text. They are looked for in what the model says by itself and in what it is held to,
    /// but not from one into the other.
    stops: StopStrings,
}

impl Onward {
    pub(crate) fn new(
        engine: &Handle,
        tokenizer: &Arc<Tokenizer>,
        request: &Request,
        stops: &StopStrings,
    ) -> Onward {
        Onward {
            engine: engine.clone(),
            tokenizer: Arc::clone(tokenizer),
            request: Request { choices: 1, prompt_logprobs: None, ..request.clone() },
            texts: Vec::new(),
            stops: stops.clone(),
        }
    }

    /// Fixes its random numbers, whichever choice it is.
    pub(crate) fn seed(&mut self, seed: u64) {
        self.request.seed = seed;
    }

    /// Takes a token of the answer, which completed this text.
    pub(crate) fn push(&mut self, token: u32, text: &str) {
        self.request.prompt.push(token);
        self.texts.push(text.to_owned());
    }

    /// Takes back the last bytes of the text and the tokens that made them; how many tokens fewer there are. Of a token
    /// that is taken back in part the rest is encoded anew. `None` where that is not possible.
    pub(crate) fn take_back(&mut self, mut bytes: usize) -> Option<usize> {
        let before = self.texts.len();
        while bytes > 0 {
            let text = self.pop()?;
            let kept = text.get(..text.len().saturating_sub(bytes))?;
            bytes = bytes.saturating_sub(text.len());
            if bytes > 0 {
                continue;
            }
            self.pop_beginnings();
            for token in self.tokenizer.encode(kept, Special::AsText).ok()? {
                let text = self.tokenizer.piece(token);
                self.push(token, &text);
            }
        }
        Some(before.saturating_sub(self.texts.len()))
    }

    fn pop(&mut self) -> Option<String> {
        self.request.prompt.pop()?;
        self.texts.pop()
    }

    /// Takes back the beginning of a character whose end was taken back: it completed no text, but is no control token
    /// either.
    fn pop_beginnings(&mut self) {
        while let (Some(&token), Some(text)) = (self.request.prompt.last(), self.texts.last()) {
            if !text.is_empty() || self.tokenizer.is_control(token) {
                break;
            }
            self.pop();
        }
    }

    /// From here on the answer need not be of the form that it was asked for with.
    pub(crate) fn forget_form(&mut self) {
        self.request.grammar = None;
    }

    /// Stop strings, looked for from here on.
    pub(crate) fn stops(&self) -> StopStrings {
        self.stops.clone()
    }

    /// Asks for what follows the answer so far and these tokens, of which `generated` are the answer's. `None` where
    /// its limit is reached.
    pub(crate) fn go_on(
        &self,
        tokens: &[u32],
        generated: usize,
        grammar: Option<Grammar>,
    ) -> Option<Result<Reply, Refusal>> {
        let mut request = self.request.clone();
        request.max_tokens = request.max_tokens.checked_sub(generated).filter(|&left| left > 0)?;
        request.prompt.extend(tokens);
        request.grammar = grammar.or(request.grammar);
        let submitted = self.engine.submit(request);
        Some(submitted.map(|mut replies| replies.pop().expect("one answer was asked for")))
    }
}
