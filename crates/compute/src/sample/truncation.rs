//! Which candidates stay: the filters other than mirostat, and the temperature they end in.

use std::ops::AddAssign;

use super::Sampling;
use super::allowed::Allowed;
use super::crew::Crew;
use super::kept::{Kept, NEAR, Ordered, key, logit};
use super::weights::{Weights, exp};
use super::whole::{STRETCH, Whole};

/// All tokens that may be chosen.
#[derive(Clone, Copy)]
pub(super) struct Candidates<'a> {
    /// Adjusted.
    pub(super) logits: &'a [f32],
    pub(super) allowed: Allowed<'a>,
    /// The most likely.
    pub(super) best: usize,
}

impl<'a> Candidates<'a> {
    /// The weight of all candidates.
    fn total(&self, crew: &impl Crew) -> u64 {
        let mut totals = vec![0; self.logits.len().div_ceil(STRETCH)];
        crew.set(&mut totals, |stretch| {
            let mut room = [0.0; STRETCH];
            self.whole().total(self.allowed.stretch(self.logits, stretch * STRETCH, &mut room))
        });
        totals.iter().sum()
    }

    /// Fills `keys` with the likeliest candidates that together weigh at least `enough`, or with all: whatever is
    /// decided by the order up to there needs no others.
    fn likeliest(&self, enough: f64, keys: &mut Vec<u64>) {
        for bound in NEAR.map(|distance| self.weights().logit_at(distance)) {
            let near = self.allowed.each(self.logits).filter(|(_, logit)| *logit >= bound);
            keys.clear();
            keys.extend(near.map(|(id, logit)| key(logit, id)));
            if self.whole().total_of_keys(keys) as f64 >= enough {
                return;
            }
        }
        keys.clear();
        keys.extend(self.allowed.each(self.logits).map(|(id, logit)| key(logit, id)));
    }

    /// What the filters leave. `xtc_random` is asked for only where XTC is on.
    pub(super) fn kept(
        self,
        crew: &impl Crew,
        sampling: &Sampling,
        xtc_random: impl FnOnce() -> f64,
        keys: &'a mut Vec<u64>,
        distances: &mut Vec<(u64, u64)>,
    ) -> Kept<'a> {
        let floor = self.floor(sampling);
        let enough = if sampling.top_p < 1.0 {
            // A share of all candidates, those below the floor included.
            let enough = f64::from(sampling.top_p) * self.total(crew) as f64;
            self.likeliest(enough, keys);
            keys.retain(|&key| f64::from(logit(key)) >= floor);
            Some(enough)
        } else {
            let above = self.allowed.each(self.logits).filter(|(_, logit)| f64::from(*logit) >= floor);
            keys.clear();
            keys.extend(above.map(|(id, logit)| key(logit, id)));
            None
        };
        let mut order = Ordered::new(keys);
        self.cut(sampling, enough, &mut order);
        if sampling.typical_p < 1.0 {
            self.pick_typical(f64::from(sampling.typical_p), &mut order, distances);
        }
        if sampling.xtc_probability > 0.0 && xtc_random() < f64::from(sampling.xtc_probability) {
            self.exclude_top(f64::from(sampling.xtc_threshold), &mut order);
        }
        let temperature = self.temperature(sampling, order.items());
        Kept { logits: self.logits, order, temperature }
    }

    fn weights(&self) -> Weights {
        Weights::new(self.logits[self.best], 1.0)
    }

    /// What top-p cuts by.
    fn whole(&self) -> Whole {
        Whole::new(self.logits[self.best], 1.0)
    }

    fn weight(&self, key: u64) -> f64 {
        self.weights().of(logit(key))
    }

    /// Min-p and top-n-sigma need no order: what lies below is never sorted.
    fn floor(&self, sampling: &Sampling) -> f64 {
        let largest = f64::from(self.logits[self.best]);
        let mut floor = largest + f64::from(sampling.min_p).ln();
        if sampling.top_n_sigma > 0.0 {
            floor = floor.max(largest - f64::from(sampling.top_n_sigma) * self.deviation());
        }
        floor
    }

    /// The standard deviation of the candidates' logits.
    fn deviation(&self) -> f64 {
        let (mut count, mut sum) = (0.0, 0.0);
        let weights = self.weights();
        for (_, logit) in self.allowed.each(self.logits) {
            count += 1.0;
            sum += weights.log(logit);
        }
        let mean = sum / count;
        let squares = self.allowed.each(self.logits).map(|(_, logit)| (weights.log(logit) - mean).powi(2));
        (squares.sum::<f64>() / count).sqrt()
    }

    /// Top-k and top-p: the shorter decides.
    fn cut(&self, sampling: &Sampling, enough: Option<f64>, order: &mut Ordered<'_, u64>) {
        let at_most = if sampling.top_k == 0 { usize::MAX } else { sampling.top_k as usize };
        if let Some(enough) = enough {
            let whole = self.whole();
            let reached = reaching(order, |key| whole.of(logit(key)), |sum: u64| sum as f64 >= enough);
            order.truncate(reached.min(at_most));
        } else if at_most < order.items().len() {
            order.truncate(at_most);
        }
    }

    /// Puts those with the most typical surprise in place of all.
    fn pick_typical(&self, share: f64, order: &mut Ordered<'_, u64>, distances: &mut Vec<(u64, u64)>) {
        let spread = self.spread(order.items());
        distances.clear();
        // A surprise less the mean surprise: the logarithm of the sum falls out. Bits of numbers that are not
        // negative have their order.
        distances.extend(order.items().iter().map(|&key| {
            let distance = (self.weights().log(logit(key)) - spread.mean).abs();
            (distance.to_bits(), key)
        }));
        let mut by_distance = Ordered::new(distances);
        let picked =
            reaching(&mut by_distance, |(_, key)| self.weight(key), |sum: f64| sum >= share * spread.total);
        by_distance.truncate(picked);
        order.replace(by_distance.items().iter().map(|(_, key)| *key));
    }

    /// XTC: drops all that reach the threshold but the least likely of them.
    fn exclude_top(&self, threshold: f64, order: &mut Ordered<'_, u64>) {
        let limit = threshold * self.spread(order.items()).total;
        let mut likely = 0;
        while order.get(likely).is_some_and(|key| self.weight(key) >= limit) {
            likely += 1;
        }
        order.skip(likely.saturating_sub(1));
    }

    /// The temperature, moved by how even the rest is.
    fn temperature(&self, sampling: &Sampling, keys: &[u64]) -> f64 {
        let (temperature, range) = (f64::from(sampling.temperature), f64::from(sampling.dynatemp_range));
        if range == 0.0 || keys.len() < 2 {
            return temperature;
        }
        let spread = self.spread(keys);
        let entropy = spread.total.ln() - spread.mean;
        let share = (entropy / (keys.len() as f64).ln()).clamp(0.0, 1.0);
        let (low, high) = ((temperature - range).max(0.0), temperature + range);
        low + (high - low) * share.powf(f64::from(sampling.dynatemp_exponent))
    }

    fn spread(&self, keys: &[u64]) -> Spread {
        let (mut total, mut sum) = (0.0, 0.0);
        for &key in keys {
            let log_weight = self.weights().log(logit(key));
            let weight = exp(log_weight);
            total += weight;
            sum += weight * log_weight;
        }
        Spread { total, mean: sum / total }
    }
}

/// How weight is spread over some tokens.
struct Spread {
    total: f64,
    /// The mean logarithm of a weight, by weight.
    mean: f64,
}

/// How many it takes, and at least one, until their weights together are enough.
fn reaching<T: Copy + Ord, W: Copy + Default + AddAssign>(
    order: &mut Ordered<'_, T>,
    weight: impl Fn(T) -> W,
    enough: impl Fn(W) -> bool,
) -> usize {
    let (mut count, mut sum) = (0, W::default());
    while (count == 0 || !enough(sum))
        && let Some(item) = order.get(count)
    {
        sum += weight(item);
        count += 1;
    }
    count
}
