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
        let stranger = |delta: &Delta| match delta {
            Delta::Reasoning(_) | Delta::Content(_) => true,
            Delta::Call { name, .. } => !self.strict.iter().any(|(tool, _)| tool == name),
            Delta::Arguments { .. } => false,
        };
        let end = if self.only_calls && !self.held { deltas.iter().position(stranger) } else { None };
        end.unwrap_or(deltas.len())
    }

    /// Whether the answer may have to be asked for anew in its middle.
    pub(crate) fn may_go_on(&self) -> bool {
        self.budget.is_some() || self.several || !self.strict.is_empty()
    }
}
