//! How many tokens a step may have.

use std::time::Duration;

use crate::pace::Pace;

/// A step should last about this long: short enough that cancels are heard and a new prompt is soon begun, long enough
/// that the cost of a step is spread over many tokens.
const STEP: Duration = Duration::from_millis(100);

/// And where streams wait for their next token meanwhile, so long: they should not stutter. So long, too, where several
/// owners ask: whoever comes next waits for the step under way.
const STEP_BESIDE: Duration = Duration::from_millis(40);

/// Or this many times what a step costs without any token, if that is longer: at most an eighth of the time goes into it,
/// unless the step would be longer than [`STEP`].
const STEP_BESIDE_COSTS: f64 = 8.0;

/// Fewer are never scheduled: a slow device would otherwise spend its time on step overhead.
const TOKENS_MIN: usize = 16;

/// And so few of an owner where streams of another wait; or one, where its own streams take as much already.
const TOKENS_MIN_OF_STRANGERS: usize = 4;

/// Steps tell how long a token takes when their lengths vary by half of their mean: a few streams more or less say
/// nothing about a prompt.
const DISTINCT: f64 = 0.25;

/// What a step is for, besides the tokens of prompts that it may have.
#[derive(Debug, Clone, Default)]
pub(crate) struct Beside {
    /// Streams that wait for one token.
    pub(crate) streams: usize,
    /// How many of them are its own, for each owner of prompts, where a stream of another owner waits; else none.
    pub(crate) strangers: Vec<usize>,
    /// Whether requests have come from more than one owner.
    pub(crate) several: bool,
}

/// What owners who have had much lately may have of a step in which others want something: so much of what the others'
/// streams take. With less, whoever asks for much would get nearly nothing of a machine that is never idle; with more, the
/// others would notice it.
const PART_OF_GUESTS: f64 = 0.25;

/// How much less of a step's prompts an owner with so many streams gets than one without: they are not among the streams of
/// others, and take a part already.
pub(crate) fn taken(own: usize) -> usize {
    2 * own
}

fn least_of_strangers(own: usize, streams: usize) -> usize {
    if own > 0 && own >= streams.saturating_sub(own) { 1 } else { TOKENS_MIN_OF_STRANGERS }
}

/// Adapts the token budget to what steps have cost.
#[derive(Debug)]
pub(crate) struct Budget {
    tokens_max: usize,
    pace: Pace,
}

impl Budget {
    pub(crate) fn new(tokens_max: usize) -> Self {
        Budget { tokens_max, pace: Pace::new(DISTINCT) }
    }

    /// Tokens for the next step. There is room for all streams.
    ///
    /// Prompts beside streams of their own owner make a step longer, up to a length at which nothing stutters. Prompts
    /// of somebody else have no claim to that: each of their owners gets as much of the step as the streams of others
    /// take, and its own streams are a part of that.
    pub(crate) fn tokens(&self, beside: &Beside) -> usize {
        let &Beside { streams, ref strangers, several } = beside;
        let least = match strangers.len() {
            0 => TOKENS_MIN,
            _ => TOKENS_MIN.min(strangers.iter().map(|own| least_of_strangers(*own, streams)).sum()),
        };
        let least = least.saturating_add(streams).min(self.tokens_max);
        let Some((step, token)) = self.pace.now() else { return self.tokens_max };
        let (longest, short) = (STEP.as_secs_f64(), STEP_BESIDE.as_secs_f64());
        let beside = short.max(STEP_BESIDE_COSTS * step).min(longest);
        let seconds = match (streams, strangers.len()) {
            (0, _) if several => beside,
            (0, _) => longest,
            (_, 0) => beside,
            _ => {
                let part = |own: &usize| {
                    let (taken, least) = (taken(*own) as f64, least_of_strangers(*own, streams) as f64);
                    (step + token * (streams as f64 - taken)).max(token * least)
                };
                beside.min(step + token * streams as f64 + strangers.iter().map(part).sum::<f64>())
            }
        };
        #[expect(
            clippy::cast_sign_loss,
            clippy::cast_possible_truncation,
            reason = "a positive quotient; `as` saturates"
        )]
        let fitting = ((seconds - step).max(0.0) / token.max(1e-9)) as usize;
        fitting.clamp(least, self.tokens_max)
    }

    /// Tokens of the next step for owners who have had much, beside so many streams of the others: one at least.
    pub(crate) fn guests(&self, streams: usize) -> usize {
        let Some((step, token)) = self.pace.now() else { return 1 };
        let seconds = PART_OF_GUESTS * (step + token * streams as f64);
        #[expect(
            clippy::cast_sign_loss,
            clippy::cast_possible_truncation,
            reason = "a positive quotient; `as` saturates"
        )]
        let fitting = (seconds / token.max(1e-9)) as usize;
        fitting.clamp(1, self.tokens_max)
    }

    /// Seconds that so many tokens of prompts take, once steps were seen.
    pub(crate) fn seconds(&self, tokens: usize) -> Option<f64> {
        self.pace.now().map(|(step, token)| {
            let steps = tokens.div_ceil(self.tokens_max);
            step * steps as f64 + token * tokens as f64
        })
    }

    /// A step of `tokens` took `elapsed`.
    pub(crate) fn observe(&mut self, tokens: usize, elapsed: Duration) {
        self.pace.observe(tokens, elapsed.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_steps_shrink_the_budget_and_fast_ones_restore_it() {
        let mut budget = Budget::new(512);
        assert_eq!(budget.tokens(&Beside::default()), 512);
        let mut steps = |tokens: usize, elapsed: Duration| {
            for _ in 0..300 {
                budget.observe(tokens, elapsed);
            }
            budget.tokens(&Beside::default())
        };
        assert!(steps(100, Duration::from_millis(400)).abs_diff(25) <= 1);
        assert_eq!(steps(100, Duration::from_secs(60)), TOKENS_MIN);
        assert_eq!(steps(100, Duration::from_micros(100)), 512);
    }

    /// A 7B on a large GPU: 4 ms for the weights, 25 us for each token of a prompt.
    #[test]
    fn prompts_are_cut_shorter_where_streams_wait() {
        let mut budget = Budget::new(2048);
        let check = |budget: &Budget, streams: usize, wanted: usize| {
            let got = budget.tokens(&Beside { streams, ..Beside::default() });
            assert!(got.abs_diff(wanted) <= 1, "{streams} streams: {got}, not {wanted}");
        };
        for tokens in [2048, 32, 32, 2048, 32] {
            budget.observe(tokens, Duration::from_micros(4000 + 25 * tokens as u64));
        }
        check(&budget, 0, 2048);
        check(&budget, 1, 1440);
        check(&budget, 64, 1440);
        // A slow one: 60 ms for a step and 10 for a token. There is room for every stream, and some more.
        let mut budget = Budget::new(256);
        for tokens in [64, 3, 3, 64] {
            budget.observe(tokens, Duration::from_millis(60 + 10 * tokens as u64));
        }
        check(&budget, 0, TOKENS_MIN);
        check(&budget, 8, TOKENS_MIN + 8);
        check(&budget, 300, 256);
    }

    /// The same GPU, with several owners.
    #[test]
    fn prompts_of_strangers_take_as_much_of_a_step_as_the_streams() {
        let mut budget = Budget::new(2048);
        for tokens in [2048, 32, 32, 2048, 32] {
            budget.observe(tokens, Duration::from_micros(4000 + 25 * tokens as u64));
        }
        let check = |streams: usize, strangers: usize, wanted: usize| {
            let got = budget.tokens(&Beside { streams, strangers: vec![0; strangers], several: true });
            assert!(
                got.abs_diff(wanted) <= 1,
                "{streams} streams, {strangers} strangers: {got}, not {wanted}"
            );
        };
        // 4 ms and 100 us for the streams, as much for the prompts: 164 tokens of them.
        check(4, 1, 4 + 164);
        check(4, 3, 4 + 3 * 164);
        // Until nothing would stutter but for them.
        check(4, 100, 1440);
        // Nobody waits; the next to come should not wait for long.
        check(0, 0, 1440);
        // Where a step costs nothing but its tokens: a few for each, whatever else.
        let mut budget = Budget::new(256);
        for _ in 0..9 {
            budget.observe(16, Duration::from_millis(160));
        }
        for (streams, strangers, wanted) in [(1, 1, 5), (1, 2, 9), (1, 9, 17), (8, 1, 12)] {
            let strangers = vec![0; strangers];
            assert_eq!(budget.tokens(&Beside { streams, strangers, several: true }), wanted);
        }
    }

    #[test]
    fn guests_make_a_step_longer_by_a_quarter_of_what_streams_take() {
        let mut budget = Budget::new(2048);
        assert_eq!(budget.guests(4), 1);
        // The GPU of above: 4 ms for the step cost as much as 160 tokens.
        for tokens in [2048, 32, 32, 2048, 32] {
            budget.observe(tokens, Duration::from_micros(4000 + 25 * tokens as u64));
        }
        assert!(budget.guests(1).abs_diff(40) <= 1 && budget.guests(40).abs_diff(50) <= 1);
        // Where tokens are what costs, one is all.
        let mut budget = Budget::new(256);
        for tokens in [64, 8, 8, 64, 8] {
            budget.observe(tokens, Duration::from_micros(3000 + 1000 * tokens as u64));
        }
        assert_eq!([1, 2, 5].map(|streams| budget.guests(streams)), [1, 1, 2]);
    }

    /// The same, where one of those with prompts has streams already: what they take is part of what it may have.
    #[test]
    fn streams_of_ones_own_are_part_of_what_prompts_may_take() {
        let mut budget = Budget::new(2048);
        // 6 ms for a step and 2 for a token.
        for tokens in [64, 8, 8, 64, 8] {
            budget.observe(tokens, Duration::from_micros(6000 + 2000 * tokens as u64));
        }
        let check = |streams: usize, strangers: &[usize], wanted: usize| {
            let beside = Beside { streams, strangers: strangers.to_vec(), several: true };
            let got = budget.tokens(&beside);
            assert!(got.abs_diff(wanted) <= 1, "{beside:?}: {got}, not {wanted}");
        };
        // A step of one stream takes 8 ms: four tokens of somebody else's prompt.
        check(1, &[0], 1 + 4);
        // Three streams of the same owner beside another's take more than that: its prompt moves on, and no more.
        check(4, &[3], 4 + 1);
        // One of each: 6 ms are left of what the other's stream takes.
        check(2, &[1], 2 + 3);
        // Another prompt beside it has its whole part.
        check(4, &[3, 0], 4 + 1 + 7);
    }
}
