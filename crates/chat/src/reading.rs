//! How an answer is read: what tells its parts apart, and where it is stopped or held to a form.

use std::sync::Arc;

use fornax_engine::Grammar;
use fornax_text::{Delta, Reader};

/// How an answer is read.
#[derive(Clone, Debug)]
pub struct Reading {
    pub(crate) reader: Reader,
    /// Control tokens that the reader looks for, ascending.
    pub(crate) shown: Arc<[u32]>,
    /// The answer ends with its first call.
    pub(crate) one_call: bool,
    /// How many tokens may be thought, and what then follows.
    pub(crate) budget: Option<(usize, Vec<u32>)>,
    /// By tool, what the arguments of a call must look like once the model makes one.
    pub(crate) strict: Arc<[(String, Grammar)]>,
    /// What the model says must look like, where it does not call, and tokens that open what is said. `None` once it is
    /// asked for.
    pub(crate) said: Option<(Grammar, Vec<u32>)>,
    /// A call whose arguments are a form is being made.
    pub(crate) held: bool,
    /// Another call may follow one whose arguments were a form; otherwise that ends the answer.
    pub(crate) several: bool,
    /// The answer is calls of those tools and nothing else: it ends before whatever else would follow.
    pub(crate) only_calls: bool,
}

impl Reading {
    /// How many of these parts belong to the answer.
    pub(crate) fn wanted(&self, deltas: &[Delta]) -> usize {
        // Words of the model's own are no part of an answer whose words have a form.
        let words = |delta: &Delta| matches!(delta, Delta::Content(_));
        let stranger = |delta: &Delta| match delta {
            Delta::Reasoning(_) | Delta::Content(_) => true,
            Delta::Call { name, .. } => !self.strict.iter().any(|(tool, _)| tool == name),
            Delta::Arguments { .. } => false,
        };
        let end = match (&self.said, self.only_calls && !self.held) {
            (Some(_), _) => deltas.iter().position(words),
            (None, true) => deltas.iter().position(stranger),
            (None, false) => None,
        };
        end.unwrap_or(deltas.len())
    }

    /// Whether the answer may have to be asked for anew in its middle.
    pub(crate) fn may_go_on(&self) -> bool {
        self.budget.is_some() || self.several || self.said.is_some() || !self.strict.is_empty()
    }
}
