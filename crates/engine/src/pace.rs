//! What steps cost: seconds for the step and seconds for each of its tokens, fitted to the steps seen.

/// A line through the newest steps.
#[derive(Debug)]
pub(crate) struct Pace {
    /// Steps say something about single tokens when the variance of their lengths is this share of the squared mean.
    distinct: f64,
    /// Decayed sums: weight, x, y, x*x, x*y.
    sums: [f64; 5],
    /// (per step, per token), kept while steps are too much alike to tell them apart.
    fit: Option<(f64, f64)>,
}

impl Pace {
    pub(crate) fn new(distinct: f64) -> Pace {
        Pace { distinct, sums: [0.0; 5], fit: None }
    }

    /// A step of this many tokens took this long.
    pub(crate) fn observe(&mut self, tokens: usize, seconds: f64) {
        let tokens = tokens as f64;
        let seen = [1.0, tokens, seconds, tokens * tokens, tokens * seconds];
        for (sum, seen) in self.sums.iter_mut().zip(seen) {
            // Some thirty steps count: clocks and neighbours change.
            *sum = 0.97 * *sum + seen;
        }
        let [weight, x, y, xx, xy] = self.means();
        debug_assert!((weight - 1.0).abs() < 1e-9);
        let variance = xx - x * x;
        if variance > 0.1 && variance > self.distinct * x * x {
            let token = ((xy - x * y) / variance).max(0.0);
            self.fit = Some(((y - token * x).max(0.0), token));
        }
    }

    /// Seconds for a step and for each of its tokens, once steps could be told apart.
    pub(crate) fn fit(&self) -> Option<(f64, f64)> {
        self.fit
    }

    /// The same, scaled to what steps take now; before they could be told apart, as if there were nothing but tokens.
    /// `None` before the first step.
    pub(crate) fn now(&self) -> Option<(f64, f64)> {
        if self.sums[0] == 0.0 {
            return None;
        }
        let [_, x, y, ..] = self.means();
        let (step, token) = self.fit.unwrap_or((0.0, y / x.max(1.0)));
        let expected = step + token * x;
        let scale = if expected > 0.0 { y / expected } else { 1.0 };
        Some((step * scale, token * scale))
    }

    fn means(&self) -> [f64; 5] {
        self.sums.map(|sum| sum / self.sums[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pace: &Pace, wanted: (f64, f64)) {
        let got = pace.now().expect("steps were seen");
        let near = |got: f64, wanted: f64| (got - wanted).abs() <= 1e-3 * wanted.max(1e-6);
        assert!(near(got.0, wanted.0) && near(got.1, wanted.1), "{got:?}, not {wanted:?}");
    }

    #[test]
    fn a_line_is_found_and_kept_while_steps_are_alike() {
        let mut pace = Pace::new(0.25);
        assert_eq!(pace.now(), None);
        pace.observe(500, 1.0);
        // Nothing tells a step from its tokens.
        check(&pace, (0.0, 0.002));
        let mut pace = Pace::new(0.25);
        for tokens in [1, 32, 700, 33] {
            pace.observe(tokens, 0.004 + 2e-5 * tokens as f64);
        }
        check(&pace, (0.004, 2e-5));
        // Streams come and go, and their steps take what they take: that says nothing about long steps.
        for round in 0u32..200 {
            let noise = 1e-4 * f64::from((round * 7) % 5) / 4.0 - 5e-5;
            pace.observe(31 + (round % 3) as usize, 0.004 + 2e-5 * 32.0 + noise);
        }
        let (step, token) = pace.now().expect("steps were seen");
        assert!((0.0038..0.0042).contains(&step) && (1.9e-5..2.1e-5).contains(&token), "{step} {token}");
    }

    #[test]
    fn a_machine_that_slows_down_is_seen_even_by_steps_that_are_alike() {
        let mut pace = Pace::new(0.25);
        for tokens in [1, 400, 1, 400] {
            pace.observe(tokens, 0.01 + 1e-4 * tokens as f64);
        }
        for _ in 0..400 {
            pace.observe(400, 2.0 * (0.01 + 1e-4 * 400.0));
        }
        let (step, token) = pace.now().expect("steps were seen");
        assert!((0.0999..0.1001).contains(&(step + 400.0 * token)), "{step} {token}");
    }
}
