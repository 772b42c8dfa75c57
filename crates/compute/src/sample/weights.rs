//! How much a logit weighs beside the largest, and sums of that over a vocabulary.
//!
//! In f64, for log-probabilities and the rarer filters; what top-p and the draw go by is in `whole.rs`. A vocabulary
//! may have 150,000 tokens. So the exponential is plain arithmetic that becomes vector instructions, and sums run in
//! [`LANES`] lanes whatever the machine has: the same bits everywhere.

use std::f64::consts::{LN_2, LOG2_E};

use super::kept::Logit;
use crate::cpu::widest::{Work, widest};

/// Sums that are added up side by side.
const LANES: usize = 8;

/// Weights relative to a largest logit, at a temperature.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weights {
    largest: f64,
    /// One divided by the temperature.
    coldness: f64,
}

impl Weights {
    /// `temperature` is above 0.
    pub(super) fn new(largest: f32, temperature: f64) -> Weights {
        Weights { largest: f64::from(largest), coldness: 1.0 / temperature }
    }

    /// A logit's distance to the largest: the logarithm of its weight.
    #[inline(always)]
    pub(super) fn log(self, logit: f32) -> f64 {
        (f64::from(logit) - self.largest) * self.coldness
    }

    /// The logit whose weight has this logarithm, or the one beside it.
    pub(super) fn logit_at(self, log: f64) -> f32 {
        (self.largest + log / self.coldness) as f32
    }

    /// A probability times a constant: the largest logit weighs 1.
    #[inline(always)]
    pub(super) fn of(self, logit: f32) -> f64 {
        exp(self.log(logit))
    }

    /// The weight of all these logits.
    pub(super) fn total(self, logits: &[f32]) -> f64 {
        widest(Sum { items: logits, weights: self })
    }

    /// The weight of all tokens with these keys.
    pub(super) fn total_of_keys(self, keys: &[u64]) -> f64 {
        widest(Sum { items: keys, weights: self })
    }
}

/// e^x for x up to 0, right to some 1e-15 of itself; 0 where that is below 1e-307.
#[inline(always)]
pub(super) fn exp(x: f64) -> f64 {
    // Added to a small number it leaves the nearest integer in the lowest bits.
    const TO_INTEGER: f64 = 1.5 * (1_u64 << 52) as f64;
    // LN_2 in two parts: products of the first with small integers are exact.
    const LN_2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    const LOWEST: f64 = -1021.0 * LN_2;
    let clamped = x.max(LOWEST);
    let shifted = clamped * LOG2_E + TO_INTEGER;
    let integer = shifted - TO_INTEGER;
    let rest = clamped - integer * LN_2_HIGH - integer * LN_2_LOW; // at most LN_2 / 2 in size
    // 1 + r + r^2/2! + ..., the last term below 1e-17.
    const INVERSE_FACTORIALS: [f64; 13] = [
        1.0 / 6_227_020_800.0,
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        1.0 / 2.0,
        1.0,
    ];
    let mut power = INVERSE_FACTORIALS[0];
    for factor in &INVERSE_FACTORIALS[1..] {
        power = power * rest + factor;
    }
    let mantissa = power * rest + 1.0;
    // 2^integer: the integer's low bits moved to where the exponent is.
    let two_to = f64::from_bits((shifted.to_bits().wrapping_add(1023)) << 52);
    if x < LOWEST { 0.0 } else { mantissa * two_to }
}

/// The weight of all items, to be computed on the widest vectors there are.
struct Sum<'a, T> {
    items: &'a [T],
    weights: Weights,
}

impl<T: Logit> Work for Sum<'_, T> {
    type Result = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        sum(self.items, self.weights)
    }
}

/// The weight of all `items`.
#[inline(always)]
fn sum(items: &[impl Logit], weights: Weights) -> f64 {
    let mut sums = [0.0; LANES];
    let mut block = [0.0; 32 * LANES];
    for items in items.chunks(block.len()) {
        // Two loops that each do one thing: both become vectors.
        for (weight, item) in block.iter_mut().zip(items) {
            *weight = weights.of(item.logit());
        }
        for lanes in block[..items.len()].chunks(LANES) {
            for (sum, weight) in sums.iter_mut().zip(lanes) {
                *sum += weight;
            }
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::kept;

    #[test]
    fn the_exponential_is_that_of_the_standard_library() {
        let check = |x: f64| {
            let (got, wanted) = (exp(x), x.exp());
            assert!((got - wanted).abs() <= 4e-16 * wanted, "e^{x} = {wanted:e}, not {got:e}");
        };
        check(0.0);
        for step in 1..200_000 {
            check(-f64::from(step) * 0.003_527);
            check(-f64::from(step) * 1e-7);
        }
        assert_eq!([exp(-800.0), exp(f64::NEG_INFINITY), exp(f64::MIN)], [0.0; 3]);
    }

    #[test]
    fn every_width_sums_to_the_same_bits() {
        for count in [0, 1, 7, 8, 9, 1000, 1003] {
            let logits: Vec<f32> = (0..count).map(|id| -((id * 37 % 101) as f32) * 0.37).collect();
            let keys: Vec<u64> = logits.iter().zip(0..).map(|(&logit, id)| kept::key(logit, id)).collect();
            let weights = Weights::new(1.25, 0.7);
            let wanted = sum(&logits, weights);
            assert_eq!(weights.total(&logits).to_bits(), wanted.to_bits(), "{count}");
            assert_eq!(weights.total_of_keys(&keys).to_bits(), wanted.to_bits(), "{count}");
            let one_by_one: f64 = logits.iter().map(|&logit| ((f64::from(logit) - 1.25) / 0.7).exp()).sum();
            assert!((wanted - one_by_one).abs() <= 1e-13 * one_by_one, "{count}");
        }
    }
}
