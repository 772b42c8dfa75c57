//! One stream of tokens on its way through the engine.

use std::{ops::Range, sync::Arc};

use crate::{
    event::Miss, grammar::Grammar, handle::Ticket, pages::Tables, prefix::Units, reply::ReplySender,
    request::Request, speculation::Draft,
};

slotmap::new_key_type! {
    /// Where a sequence is in the engine's own books; users never see it. Used once: a place that somebody else has
    /// taken meanwhile is not found by it.
    pub(crate) struct SequenceId;
}

/// A request's choice: its tokens, how far they are computed, and the pages that hold them.
///
/// Everything the scheduler does follows from two numbers: `launched` catches up with [`Sequence::target`].
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    /// What was asked, shared by all choices of a request.
    pub(crate) request: Arc<Request>,
    /// Prompt and collected tokens; placeholders where content is given.
    pub(crate) tokens: Vec<u32>,
    /// Those that are text, where some are not: a placeholder was never said, so nothing is guessed or penalised by it.
    pub(crate) text: Option<Vec<u32>>,
    /// The form of the answer and how far it has got; from its first seat on.
    pub(crate) grammar: Option<Grammar>,
    /// This choice's own seed: random numbers are a function of it and the position.
    pub(crate) seed: u64,
    /// What it guesses to come next.
    pub(crate) draft: Draft,
    /// Prompt positions whose log-probabilities were told, if this choice tells them: the first of a request does.
    pub(crate) scored: Option<usize>,
    /// Mirostat's state for the next token.
    pub(crate) mirostat_mu: f32,
    /// Place in line: smaller goes first. Never changes, so the first in line always moves on.
    pub(crate) line: i64,
    /// The choice whose prompt pages this one waits for, so that a prompt is computed once.
    pub(crate) leader: Option<SequenceId>,
    /// Pages and slot, while running.
    pub(crate) seat: Option<Seat>,
    /// Positions in launched steps; at most `target()`, and the draft in flight.
    pub(crate) launched: usize,
    /// Positions whose keys and values are collected; at most `launched`.
    pub(crate) computed: usize,
    /// Tokens sampled by steps that are not collected yet.
    pub(crate) sampled_ahead: usize,
    /// Steps that name this sequence's pages.
    pub(crate) steps_in_flight: usize,
    /// Give the seat up when the last step in flight is collected.
    pub(crate) leave: Option<Leave>,
    /// Where events go; the receiver may be gone.
    pub(crate) reply: ReplySender,
    /// Its place in the bounded queue, until it is first seated.
    pub(crate) ticket: Option<Ticket>,
    /// Prompt tokens found in the prefix cache when it was first seated.
    pub(crate) cached_tokens: Option<usize>,
    /// Of those, the ones whose pages were brought back.
    pub(crate) restored_tokens: usize,
    /// Why no more were.
    pub(crate) miss: Option<Miss>,
    /// Whether pages of its prefix are being brought back.
    pub(crate) restoring: Restoring,
}

/// Pages of a prefix that are kept beyond the device's memory, on their way back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Restoring {
    /// Nobody has looked whether there are any.
    Unknown,
    /// They are being read, and the sequence waits for them.
    Waits,
    /// They are there, or there were none. So many tokens had been here before.
    Done {
        /// Tokens found without them; `None` where nothing was brought back.
        before: Option<usize>,
    },
}

/// What a running sequence holds.
pub(crate) struct Seat {
    pub(crate) slot: u32,
    pub(crate) tables: Tables,
}

/// Why a sequence gives up its seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// Its pages are needed by somebody before it in line; it waits and comes back.
    Preempted,
    /// It has had its last event.
    Ended,
}

impl Sequence {
    /// Tokens of the prompt.
    pub(crate) fn prompt_len(&self) -> usize {
        self.request.prompt.len()
    }

    /// Collected tokens after the prompt.
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len()
    }

    /// Whether this token ends the answer.
    pub(crate) fn ends_with(&self, token: u32) -> bool {
        self.request.sampling.end_tokens.contains(&token)
    }

    /// Positions that should be computed: all tokens known or being sampled.
    pub(crate) fn target(&self) -> usize {
        (self.tokens.len() + self.sampled_ahead).min(self.positions_max())
    }

    /// Positions that will ever be computed.
    pub(crate) fn positions_max(&self) -> usize {
        self.request.positions_max()
    }

    /// Positions of the prompt whose log-probabilities have to be told, `position` and later.
    pub(crate) fn unscored(&self, position: usize) -> Range<usize> {
        // The log-probability of a token comes from the position before it.
        let end = self.prompt_len() - 1;
        self.scored.map_or(end..end, |scored| scored.max(position).min(end)..end)
    }

    /// What was said so far, in order.
    pub(crate) fn text(&self) -> &[u32] {
        self.text.as_ref().unwrap_or(&self.tokens)
    }

    /// One more token was collected.
    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
        if let Some(text) = &mut self.text {
            text.push(token);
        }
    }

    /// What is read at the first so many positions.
    pub(crate) fn units(&self, positions: usize) -> Units<'_> {
        Units { tokens: &self.tokens[..positions], pieces: &self.request.pieces }
    }

    /// What may be taken from the prefix cache: positions that are still to be told have to be computed.
    pub(crate) fn cacheable(&self) -> Units<'_> {
        let unscored = self.unscored(0);
        self.units(if unscored.is_empty() { self.tokens.len() } else { unscored.start + 1 })
    }

    /// Whether more than its newest token is to be computed.
    pub(crate) fn is_reading(&self) -> bool {
        self.leave.is_none() && self.target() > self.launched + 1
    }

    /// Whether it has had its last event.
    pub(crate) fn has_ended(&self) -> bool {
        self.leave == Some(Leave::Ended)
    }

    /// Whether nothing is asked for but how likely the prompt was.
    pub(crate) fn only_scores(&self) -> bool {
        self.request.max_tokens == 0 && !self.request.embeds
    }

    /// Whether a step that ends at `position` must sample: it reaches the newest token.
    pub(crate) fn samples_at(&self, position: usize) -> bool {
        position == self.tokens.len() + self.sampled_ahead
    }
}
