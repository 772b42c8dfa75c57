//! Which tokens may come next, by somebody who knows what the answer must look like.
//!
//! The engine knows no form: it asks for masks of tokens and says which of them was chosen.

use std::fmt;

/// Follows one answer, token by token.
pub trait Constraint: Send + Sync {
    /// How many tokens its masks speak about.
    fn vocab(&self) -> u32;

    /// One bit per token that may come next, 32 to a word.
    fn mask(&mut self) -> Result<Vec<u32>, String>;

    /// Moves on by a chosen token.
    fn accept(&mut self, token: u32) -> Result<(), String>;

    /// Tokens that must follow because there is only one way on. They are not accepted yet.
    fn forced(&mut self) -> Vec<u32>;

    /// Whether the answer is whole if it ends here.
    fn may_end(&mut self) -> bool;

    /// Whether the answer is whole and nothing can follow.
    fn is_over(&self) -> bool;

    /// A copy that goes its own way from here, maybe on another thread.
    fn copied(&self) -> Grammar;

    /// Whether these tokens from here on are a whole answer.
    fn admits(&self, tokens: &[u32]) -> bool {
        let mut copy = self.copied();
        tokens.iter().all(|&token| {
            !copy.is_over()
                && copy.mask().is_ok_and(|mask| allows(&mask, token))
                && copy.accept(token).is_ok()
        }) && copy.may_end()
    }
}

/// What a request carries and each of its answers gets a copy of.
pub type Grammar = Box<dyn Constraint>;

impl Clone for Grammar {
    fn clone(&self) -> Self {
        self.copied()
    }
}

impl fmt::Debug for dyn Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("vocab", &self.vocab()).finish_non_exhaustive()
    }
}

/// Whether a mask lets this token through.
pub fn allows(mask: &[u32], token: u32) -> bool {
    let (word, bit) = (token as usize / 32, token % 32);
    mask.get(word).is_some_and(|word| word >> bit & 1 == 1)
}
