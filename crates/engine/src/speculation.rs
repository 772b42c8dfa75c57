//! Drafts: tokens guessed from what was already said, computed in the step that computes one token anyway.
//!
//! A draft changes nothing but the speed. Every position samples with its own random numbers, from logits that do not
//! depend on how many positions a step has, so a draft that agrees is what would have been chosen, and the first that
//! does not is dropped with everything after it.

use std::fmt;

use crate::{pace::Pace, sequence::Sequence};
use fornax_compute::Mirostat;

/// Guesses what follows these tokens, at most this many.
pub type Drafter = Box<dyn FnMut(&[u32], usize) -> Vec<u32> + Send>;

/// When answers are drafted.
#[derive(Default)]
pub enum Speculation {
    /// Never.
    Off,
    /// From repetitions in the sequence itself, where measured steps and this answer's luck so far promise a gain.
    #[default]
    WhereItHelps,
    /// Whatever this guesses is tried; for tests and measurements.
    Always(Drafter),
}

impl fmt::Debug for Speculation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Speculation::Off => "Off",
            Speculation::WhereItHelps => "WhereItHelps",
            Speculation::Always(_) => "Always",
        })
    }
}

/// Most tokens of a draft: luck this long is rare, and every one of them is computed.
pub(crate) const DRAFT_MAX: usize = 8;

/// With more streams than this a step is busy enough, and looking for repetitions is not free.
const STREAMS_MAX: usize = 16;

/// Tokens before a place that must agree with the newest ones before what follows there is guessed again; of several
/// places the one with the longest agreement, up to the second number, wins, and of those the newest.
const AGREEMENT: std::ops::RangeInclusive<usize> = 2..=4;

/// What follows the newest earlier place where the last tokens stand. A repetition that runs into the end goes on
/// around.
pub fn look_up(tokens: &[u32], count: usize) -> Vec<u32> {
    let Some((&last, before)) = tokens.split_last() else { return Vec::new() };
    let mut best = (*AGREEMENT.start() - 1, 0);
    for (at, _) in before.iter().enumerate().rev().filter(|&(_, &token)| token == last) {
        let same = before[..at].iter().rev().zip(before.iter().rev()).take_while(|(a, b)| a == b);
        let agreement = 1 + same.take(*AGREEMENT.end() - 1).count();
        if agreement > best.0 {
            best = (agreement, at);
        }
        if agreement == *AGREEMENT.end() {
            break;
        }
    }
    if !AGREEMENT.contains(&best.0) {
        return Vec::new();
    }
    let mut draft: Vec<u32> = Vec::with_capacity(count);
    for from in best.1 + 1..best.1 + 1 + count {
        draft.push(tokens.get(from).copied().unwrap_or_else(|| draft[from - tokens.len()]));
    }
    draft
}

/// A sequence's guess about its own future, and how often its guesses were right.
#[derive(Debug)]
pub(crate) struct Draft {
    /// What should come next.
    guess: Vec<u32>,
    /// The share of guessed tokens that were right, newest weighted most. Guesses that were not computed count too:
    /// whether they were right is seen for free.
    luck: f64,
    /// Tokens of the guess in the step in flight.
    pub(crate) in_flight: usize,
}

impl Draft {
    pub(crate) fn new() -> Draft {
        // Half: the first guesses are worth trying wherever steps are cheap.
        Draft { guess: Vec::new(), luck: 0.5, in_flight: 0 }
    }

    /// The tokens of the guess that are computed in the step in flight.
    pub(crate) fn launched(&self) -> &[u32] {
        &self.guess[..self.in_flight]
    }

    /// A token was chosen; whether it was the guessed one.
    pub(crate) fn observe(&mut self, token: u32) -> bool {
        let Some(&guessed) = self.guess.first() else { return false };
        let right = guessed == token;
        self.luck = 0.9 * self.luck + if right { 0.1 } else { 0.0 };
        if right {
            self.guess.remove(0);
        } else {
            self.guess.clear();
        }
        right
    }
}

/// Makes guesses, and decides how many tokens of them are computed.
pub(crate) struct Speculator {
    speculation: Speculation,
    pace: Pace,
}

impl Speculator {
    pub(crate) fn new(speculation: Speculation) -> Speculator {
        Speculator { speculation, pace: Pace::new(0.0) }
    }

    /// A step of `tokens` tokens took so long.
    pub(crate) fn observe(&mut self, tokens: usize, seconds: f64) {
        self.pace.observe(tokens, seconds);
    }

    /// Whether guesses are made beside so many streams.
    pub(crate) fn proposes(&self, streams: usize) -> bool {
        match self.speculation {
            Speculation::Off => false,
            Speculation::WhereItHelps => streams <= STREAMS_MAX,
            Speculation::Always(_) => true,
        }
    }

    /// Guesses anew what follows a sequence that has no guess left.
    pub(crate) fn propose(&mut self, sequence: &mut Sequence) {
        // A form forces tokens by itself, and mirostat's state is known only one token at a time.
        let drafts = sequence.grammar.is_none() && sequence.request.sampling.mirostat == Mirostat::Off;
        if !drafts || !sequence.draft.guess.is_empty() {
            return;
        }
        sequence.draft.guess = match &mut self.speculation {
            Speculation::Off => return,
            Speculation::WhereItHelps => look_up(sequence.text(), DRAFT_MAX),
            Speculation::Always(drafter) => drafter(sequence.text(), DRAFT_MAX),
        };
        sequence.draft.guess.truncate(DRAFT_MAX);
    }

    /// How many tokens of its guess a sequence should compute in a step of this many streams.
    pub(crate) fn count(&self, draft: &Draft, streams: usize) -> usize {
        let guessed = draft.guess.len();
        match self.speculation {
            Speculation::Off => 0,
            Speculation::Always(_) => guessed,
            Speculation::WhereItHelps => worth(self.pace.fit(), draft.luck, streams).min(guessed),
        }
    }

    /// Whether a sequence should wait for the token in flight rather than go on without its guess.
    pub(crate) fn worth_waiting(&self, draft: &Draft, streams: usize) -> bool {
        // Waiting leaves the device idle for a moment: one more token must not be all that is hoped for.
        self.count(draft, streams) > 2
    }
}

/// The length up to which one more drafted token still gains more than it costs, where a step and each of its tokens
/// take so long. With luck `p` the i-th is needed with probability p^i; then it saves its sequence's share of a step.
fn worth(fit: Option<(f64, f64)>, luck: f64, streams: usize) -> usize {
    let Some((step, token)) = fit else {
        // Nothing is known: the first drafts measure.
        return 2;
    };
    let saved = step / streams.max(1) as f64 + token;
    let needed = std::iter::successors(Some(luck), |needed| Some(needed * luck)).take(DRAFT_MAX);
    needed.take_while(|needed| needed * saved > token).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_is_what_followed_the_longest_and_newest_agreement() {
        let check = |tokens: &[u32], count, wanted: &[u32]| assert_eq!(look_up(tokens, count), wanted);
        check(&[], 4, &[]);
        check(&[7], 4, &[]);
        check(&[1, 2, 3, 9, 3], 4, &[]); // one token agrees: too little
        check(&[1, 2, 3, 4, 5, 1, 2], 2, &[3, 4]);
        check(&[1, 2, 3, 4, 5, 1, 2], 4, &[3, 4, 5, 1]);
        check(&[8, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2, &[3, 9]); // three agree before two do
        check(&[1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2, &[4, 8]); // of equals the newest
        check(&[5, 6, 5, 6], 5, &[5, 6, 5, 6, 5]); // around
        check(&[4, 4, 4], 3, &[4, 4, 4]);
    }

    #[test]
    fn drafts_are_as_long_as_they_pay() {
        let check = |per_step: f64, per_token: f64, luck, streams, wanted| {
            let mut pace = Pace::new(0.0);
            for tokens in [1, 1, 30, 1, 3, 1] {
                pace.observe(tokens, per_step + per_token * tokens as f64);
            }
            let got = worth(pace.fit(), luck, streams);
            assert_eq!(got, wanted, "{per_step} {per_token} {luck} {streams}");
        };
        check(1.0, 0.001, 0.9, 1, 8); // tokens are nearly free
        check(1.0, 1.0, 0.9, 1, 6); // 0.9^6 * 2 > 1 > 0.9^7 * 2
        check(1.0, 1.0, 0.5, 1, 0); // a half-right guess only breaks even
        check(0.0, 1.0, 1.0, 1, 0); // a step costs nothing but its tokens
        check(1.0, 0.1, 0.5, 1, 3);
        check(1.0, 0.1, 0.5, 16, 0); // sixteen streams share the step
    }

    #[test]
    fn luck_follows_what_was_right_even_when_nothing_was_computed() {
        let mut draft = Draft::new();
        for token in 0..40 {
            draft.guess = vec![token, token + 1];
            assert!(draft.observe(token));
            assert_eq!(draft.guess, [token + 1]);
        }
        assert!(draft.luck > 0.95);
        for token in 0..40 {
            draft.guess = vec![token];
            assert!(!draft.observe(token + 1) && draft.guess.is_empty());
        }
        assert!(draft.luck < 0.05);
        assert!(!draft.observe(3), "nothing was guessed");
    }
}
