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
    /// Whatever the model that drafts guesses is tried, up to eight tokens at once; for tests and measurements.
    AlwaysByModel,
}

impl fmt::Debug for Speculation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Speculation::Off => "Off",
            Speculation::WhereItHelps => "WhereItHelps",
            Speculation::Always(_) => "Always",
            Speculation::AlwaysByModel => "AlwaysByModel",
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
    /// Who guessed it.
    pub(crate) by: Guesser,
    /// The share of tokens guessed from repetitions that were right, newest weighted most. Guesses that were not
    /// computed count too: whether they were right is seen for free.
    luck: f64,
    /// The same of what the model guessed; `None` before it has guessed anything here.
    model_luck: Option<f64>,
    /// Tokens of the guess in the step in flight.
    pub(crate) in_flight: usize,
    /// How many of them were right, as far as that is known.
    pub(crate) right: usize,
}

/// Who guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Guesser {
    /// Repetitions in the sequence itself, or what a test puts in their place.
    Repetition,
    /// The model that drafts.
    Model,
}

impl Draft {
    pub(crate) fn new() -> Draft {
        // Half: the first guesses are worth trying wherever steps are cheap.
        Draft {
            guess: Vec::new(),
            by: Guesser::Repetition,
            luck: 0.5,
            model_luck: None,
            in_flight: 0,
            right: 0,
        }
    }

    /// Guessed tokens that are left.
    pub(crate) fn guess(&self) -> &[u32] {
        &self.guess
    }

    /// Takes over what the model guessed.
    pub(crate) fn guessed(&mut self, tokens: Vec<u32>) {
        if !tokens.is_empty() {
            (self.guess, self.by) = (tokens, Guesser::Model);
        }
    }

    /// A token was appended that nobody was asked about.
    pub(crate) fn forced(&mut self, token: u32) {
        if self.guess.first() == Some(&token) {
            self.guess.remove(0);
        } else {
            self.guess.clear();
        }
    }

    /// How much of it goes into the step that is put together.
    pub(crate) fn launch(&mut self, tokens: usize) {
        (self.in_flight, self.right) = (tokens, 0);
    }

    /// The tokens of the guess that are computed in the step in flight.
    pub(crate) fn launched(&self) -> &[u32] {
        &self.guess[..self.in_flight]
    }

    /// A token was chosen; whether it was the guessed one.
    pub(crate) fn observe(&mut self, token: u32) -> bool {
        let Some(&guessed) = self.guess.first() else { return false };
        let right = guessed == token;
        let luck = match self.by {
            Guesser::Repetition => &mut self.luck,
            Guesser::Model => self.model_luck.get_or_insert(MODEL_LUCK),
        };
        *luck = 0.9 * *luck + if right { 0.1 } else { 0.0 };
        if right {
            self.guess.remove(0);
        } else {
            self.guess.clear();
        }
        right
    }
}

/// What a model's guesses are taken for before any was seen.
const MODEL_LUCK: f64 = 0.7;

/// A guess of the model has to promise this much more than going on without it: what promises less is noise.
const WORTH_ASKING: f64 = 1.03;

/// How many more tokens an answer is expected to have at least, where its bound allows them.
const TOKENS_AHEAD: usize = 64;

/// Makes guesses, and decides how many tokens of them are computed.
pub(crate) struct Speculator {
    speculation: Speculation,
    /// Whether a form's forced tokens are appended without being asked about.
    forces: bool,
    pace: Pace,
    /// How often the model's guesses were right in the answers so far, for those that begin.
    model_luck: f64,
}

/// What is to be decided about asking the model for a guess.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// Seconds for a step of the model and for each of its tokens, once that is known.
    pub(crate) model: Option<(f64, f64)>,
    /// Streams that share a step.
    pub(crate) streams: usize,
    /// Tokens that the model would have to read first, the newest one included.
    pub(crate) missing: usize,
    /// Tokens said so far.
    pub(crate) generated: usize,
    /// Tokens that may still come.
    pub(crate) left: usize,
}

impl Speculator {
    pub(crate) fn new(speculation: Speculation, forces: bool) -> Speculator {
        Speculator { speculation, forces, pace: Pace::new(0.0), model_luck: MODEL_LUCK }
    }

    /// Whether a form's forced tokens are appended without being asked about.
    pub(crate) fn forces(&self) -> bool {
        self.forces
    }

    /// An answer has ended.
    pub(crate) fn ended(&mut self, draft: &Draft) {
        match draft.model_luck {
            Some(luck) => self.model_luck = 0.8 * self.model_luck + 0.2 * luck,
            // The next text may be one that the model knows better: after some tens of them it is tried again.
            None => self.model_luck += 0.02 * (MODEL_LUCK - self.model_luck).max(0.0),
        }
    }

    /// How many tokens the model should guess of a sequence, and how many it should read for that at most. `None` where
    /// that promises nothing.
    pub(crate) fn asks_model(&self, draft: &Draft, offer: &Offer) -> Option<Asking> {
        match self.speculation {
            Speculation::Off | Speculation::Always(_) => return None,
            Speculation::AlwaysByModel => {
                return Some(Asking { count: DRAFT_MAX, chunk: usize::MAX })
                    .filter(|_| draft.guess.is_empty());
            }
            Speculation::WhereItHelps => {}
        }
        let has_guessed = draft.by == Guesser::Model && !draft.guess.is_empty();
        if offer.streams > STREAMS_MAX || has_guessed {
            return None;
        }
        let (Some((step, token)), Some((model_step, model_token))) = (self.pace.fit(), offer.model) else {
            // Nothing is known: the first guesses measure.
            return Some(Asking { count: 2, chunk: offer.missing }).filter(|_| draft.guess.is_empty());
        };
        let streams = offer.streams.max(1) as f64;
        let cost = Cost { step: step / streams, token, model_step: model_step / streams, model_token };
        let luck = draft.model_luck.unwrap_or(self.model_luck);
        let drafted = worth(self.pace.fit(), draft.luck, offer.streams).min(draft.guess.len());
        let without = cost.pace(draft.luck, drafted).max(cost.pace(0.0, 0));
        let best = (1..=DRAFT_MAX).map(|count| (cost.pace_by_model(luck, count), count));
        let (pace, count) = best.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
        let chunk = step_worth(step, model_token);
        let reading = (offer.missing - 1) as f64 * model_token;
        let ahead = offer.left.min(offer.generated.max(TOKENS_AHEAD)) as f64;
        let gain = ahead * (1.0 / without - 1.0 / pace);
        (pace > WORTH_ASKING * without && gain > reading).then_some(Asking { count, chunk })
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
            Speculation::AlwaysByModel => false,
        }
    }

    /// Guesses anew what follows a sequence that has no guess left.
    pub(crate) fn propose(&mut self, sequence: &mut Sequence) {
        if !may_draft(sequence) || !sequence.draft.guess.is_empty() {
            return;
        }
        sequence.draft.by = Guesser::Repetition;
        sequence.draft.guess = match &mut self.speculation {
            Speculation::Off | Speculation::AlwaysByModel => return,
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
            Speculation::Always(_) | Speculation::AlwaysByModel => guessed,
            // It was decided before they were guessed.
            Speculation::WhereItHelps if draft.by == Guesser::Model => guessed,
            Speculation::WhereItHelps => worth(self.pace.fit(), draft.luck, streams).min(guessed),
        }
    }

    /// Whether a sequence should wait for the token in flight rather than go on without its guess.
    pub(crate) fn worth_waiting(&self, draft: &Draft, streams: usize) -> bool {
        // Waiting leaves the device idle for a moment: one more token must not be all that is hoped for.
        self.count(draft, streams) > 2
    }
}

/// What to ask of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asking {
    /// Tokens to guess.
    pub(crate) count: usize,
    /// Tokens to read before that, in one turn.
    pub(crate) chunk: usize,
}

/// A sequence's share of what steps cost, in seconds.
struct Cost {
    step: f64,
    token: f64,
    model_step: f64,
    model_token: f64,
}

impl Cost {
    /// Tokens a second with a guess of `count` that costs nothing itself.
    fn pace(&self, luck: f64, count: usize) -> f64 {
        expected(luck, count) / self.verifying(count)
    }

    /// The same with one that the model makes token by token.
    fn pace_by_model(&self, luck: f64, count: usize) -> f64 {
        let guessing = count as f64 * (self.model_step + self.model_token);
        expected(luck, count) / (self.verifying(count) + guessing)
    }

    fn verifying(&self, count: usize) -> f64 {
        // A clock that has not moved yet must not make anything infinite.
        (self.step + self.token * (count + 1) as f64).max(1e-9)
    }
}

/// Tokens of a step that verifies `count` guessed ones, each right so often.
fn expected(luck: f64, count: usize) -> f64 {
    std::iter::successors(Some(1.0), |needed| Some(needed * luck)).take(count + 1).sum()
}

/// Tokens that a model reads in as long as a step takes.
fn step_worth(step: f64, model_token: f64) -> usize {
    #[expect(clippy::cast_sign_loss, reason = "durations are not negative")]
    let tokens = (step / model_token.max(1e-9)).min(1e6) as usize;
    tokens.max(1)
}

/// Whether guesses about a sequence can be verified: mirostat's state is known only one token at a time.
pub(crate) fn may_draft(sequence: &Sequence) -> bool {
    sequence.request.sampling.mirostat == Mirostat::Off
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
    fn a_model_is_asked_where_its_guesses_pay_and_not_where_they_lose() {
        let check = |model: (f64, f64), luck: f64, offer: Offer, wanted: Option<usize>| {
            let mut speculator = Speculator::new(Speculation::WhereItHelps, true);
            for tokens in [1, 30, 1, 3, 1] {
                speculator.observe(tokens, 1.0 + 0.1 * tokens as f64);
            }
            let draft = Draft { model_luck: Some(luck), luck: 0.0, ..Draft::new() };
            let asked = speculator.asks_model(&draft, &Offer { model: Some(model), ..offer });
            assert_eq!(asked.map(|asking| asking.count), wanted, "{model:?} {luck} {offer:?}");
        };
        let alone = Offer { model: None, streams: 1, missing: 1, generated: 50, left: 500 };
        check((0.1, 0.02), 0.9, alone, Some(7));
        check((0.1, 0.02), 0.4, alone, Some(1));
        check((0.1, 0.02), 0.1, alone, None); // it is hardly ever right
        check((1.0, 0.1), 0.9, alone, None); // it takes as long as the larger one
        check((0.1, 0.02), 0.9, Offer { missing: 3000, ..alone }, None); // more to read than can be won
        check((0.1, 0.02), 0.9, Offer { missing: 200, ..alone }, Some(7));
        check((0.1, 0.02), 0.9, Offer { missing: 3000, generated: 400, ..alone }, Some(7)); // a long answer
        check((0.1, 0.02), 0.9, Offer { missing: 200, left: 3, ..alone }, None); // it is nearly over
        check((0.1, 0.02), 0.9, Offer { streams: 17, ..alone }, None);
    }

    #[test]
    fn a_model_that_was_wrong_is_tried_again_after_some_tens_of_answers() {
        let mut speculator = Speculator::new(Speculation::WhereItHelps, true);
        let wrong = Draft { model_luck: Some(0.0), ..Draft::new() };
        (0..20).for_each(|_| speculator.ended(&wrong));
        assert!(speculator.model_luck < 0.05);
        (0..50).for_each(|_| speculator.ended(&Draft::new()));
        assert!(speculator.model_luck > 0.4);
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
