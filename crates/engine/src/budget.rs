//! How many tokens a step may have.

use std::time::Duration;

/// A step should last about this long: short enough that streams stay smooth and cancels are heard, long enough that
/// the cost of a step is spread over many tokens.
const STEP: Duration = Duration::from_millis(100);

/// Fewer are never scheduled: a slow device would otherwise spend its time on step overhead.
const TOKENS_MIN: usize = 16;

/// Adapts the token budget to what steps have cost.
#[derive(Debug)]
pub(crate) struct Budget {
    tokens_max: usize,
    /// Microseconds per token, smoothed; `None` before the first large enough step.
    cost_us: Option<f64>,
}

impl Budget {
    pub(crate) fn new(tokens_max: usize) -> Self {
        Budget { tokens_max, cost_us: None }
    }

    /// Tokens for the next step.
    pub(crate) fn tokens(&self) -> usize {
        let Some(cost_us) = self.cost_us else { return self.tokens_max };
        #[expect(
            clippy::cast_sign_loss,
            clippy::cast_possible_truncation,
            reason = "a positive quotient; `as` saturates"
        )]
        let fitting = (STEP.as_micros() as f64 / cost_us.max(1e-3)) as usize;
        fitting.clamp(TOKENS_MIN.min(self.tokens_max), self.tokens_max)
    }

    /// A step of `tokens` took `elapsed`. Small steps say more about overhead than about tokens.
    pub(crate) fn observe(&mut self, tokens: usize, elapsed: Duration) {
        if tokens < TOKENS_MIN {
            return;
        }
        let cost_us = elapsed.as_secs_f64() * 1e6 / tokens as f64;
        self.cost_us = Some(self.cost_us.map_or(cost_us, |old| 0.7 * old + 0.3 * cost_us));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_steps_shrink_the_budget_and_fast_ones_restore_it() {
        let mut budget = Budget::new(512);
        assert_eq!(budget.tokens(), 512);
        for _ in 0..50 {
            budget.observe(100, Duration::from_millis(400));
        }
        assert_eq!(budget.tokens(), 25);
        for _ in 0..50 {
            budget.observe(100, Duration::from_secs(60));
        }
        assert_eq!(budget.tokens(), TOKENS_MIN);
        for _ in 0..100 {
            budget.observe(100, Duration::from_micros(100));
        }
        assert_eq!(budget.tokens(), 512);
    }
}
