//! How much a logit weighs beside the largest, as a whole number: what top-p cuts by and what a draw goes through.
//!
//! Every device computes the same number from the same logit, in f32 operations that round once each, and sums of whole
//! numbers are the same in any order: so the same token is drawn everywhere, however many threads look for it. A weight
//! is right to 2e-7 of itself, and 2e-7 more for each time that it is half of the largest; what is less likely than
//! 2^-41 of the largest weighs nothing.

use std::f64::consts::LOG2_E;

use super::kept::Logit;
use crate::cpu::widest::{Work, widest};

/// The largest logit's weight is 2^40: so many weights add up to at most 2^52, which f64 holds exactly.
pub(super) const STRETCH: usize = 4096;
const ONE_BITS: u32 = 40;
/// One divided by the largest weight.
const UNIT: f64 = 1.0 / (1_u64 << ONE_BITS) as f64;

/// How often a weight halves while its logit falls by 1, at a temperature above 0.
pub fn halvings(temperature: f64) -> f32 {
    ((LOG2_E / temperature) as f32).min(f32::MAX)
}

/// Weights relative to a largest logit, at a temperature.
#[derive(Clone, Copy, Debug)]
pub(super) struct Whole {
    largest: f32,
    halvings: f32,
}

impl Whole {
    /// `temperature` is above 0.
    pub(super) fn new(largest: f32, temperature: f64) -> Whole {
        Whole { largest, halvings: halvings(temperature) }
    }

    /// The same temperature beside another logit.
    pub(super) fn beside(self, largest: f32) -> Whole {
        Whole { largest, ..self }
    }

    /// Of a logit, negative infinity included, that is not above the largest.
    #[inline(always)]
    pub(super) fn of(self, logit: f32) -> u64 {
        #[expect(clippy::cast_sign_loss, reason = "it is not negative")]
        let weight = self.rounded(logit) as u64;
        weight
    }

    /// `total`, of weights relative to `logit`, relative to the largest.
    pub(super) fn scaled(self, total: u64, logit: f32) -> u64 {
        let share = total as f64 * f64::from(self.unrounded(logit)) * UNIT;
        #[expect(clippy::cast_sign_loss, reason = "it is not negative")]
        let scaled = share.round_ties_even() as u64;
        scaled
    }

    /// Of all these logits together.
    pub(super) fn total(self, logits: &[f32]) -> u64 {
        widest(Sum { items: logits, weights: self })
    }

    /// Of all tokens with these keys together.
    pub(super) fn total_of_keys(self, keys: &[u64]) -> u64 {
        widest(Sum { items: keys, weights: self })
    }

    #[inline(always)]
    fn rounded(self, logit: f32) -> f64 {
        // Added to a smaller number it rounds it to an integer.
        const TO_INTEGER: f64 = 1.5 * (1_u64 << 52) as f64;
        f64::from(self.unrounded(logit)) + TO_INTEGER - TO_INTEGER
    }

    /// 2^40 times 2^x, where x is by how many halvings the logit is below the largest.
    #[inline(always)]
    fn unrounded(self, logit: f32) -> f32 {
        // Added to a small number it leaves the nearest integer in the lowest bits.
        const TO_INTEGER: f32 = 1.5 * (1_u32 << 23) as f32;
        const LOWEST: f32 = -64.0;
        // 2^rest for rests up to 1/2 in size, right to 1e-7 of itself.
        const POWERS: [f32; 5] = [
            f32::from_bits(0x3aad_dd06),
            f32::from_bits(0x3c1e_7544),
            f32::from_bits(0x3d63_5ba9),
            f32::from_bits(0x3e75_fcde),
            f32::from_bits(0x3f31_7215),
        ];
        let x = (logit - self.largest) * self.halvings;
        let x = if x > LOWEST { x } else { LOWEST };
        let shifted = x + TO_INTEGER;
        let rest = x - (shifted - TO_INTEGER);
        let mut power = POWERS[0];
        for factor in &POWERS[1..] {
            power = power * rest + factor;
        }
        let mantissa = power * rest + 1.0;
        // The integer's low bits moved to where the exponent is.
        let exponent = (shifted.to_bits() << 23).wrapping_add(ONE_BITS << 23);
        f32::from_bits(mantissa.to_bits().wrapping_add(exponent))
    }
}

/// The largest of some logits; negative infinity if there are none.
pub(super) fn largest(logits: &[f32]) -> f32 {
    widest(Largest(logits))
}

/// The weight of all items, to be computed on the widest vectors there are.
struct Sum<'a, T> {
    items: &'a [T],
    weights: Whole,
}

impl<T: Logit> Work for Sum<'_, T> {
    type Result = u64;

    #[inline(always)]
    fn run(self) -> u64 {
        const LANES: usize = 16;
        let mut total = 0;
        let mut block = [0.0; 16 * LANES];
        for items in self.items.chunks(STRETCH) {
            let mut sums = [0.0; LANES];
            for items in items.chunks(block.len()) {
                // Two loops that each do one thing: both become vectors.
                for (weight, item) in block.iter_mut().zip(items) {
                    *weight = self.weights.rounded(item.logit());
                }
                for lanes in block[..items.len()].chunks(LANES) {
                    for (sum, weight) in sums.iter_mut().zip(lanes) {
                        *sum += weight;
                    }
                }
            }
            #[expect(clippy::cast_sign_loss, reason = "it is not negative")]
            let sum = sums.iter().sum::<f64>() as u64;
            total += sum;
        }
        total
    }
}

/// The largest of some logits, likewise.
struct Largest<'a>(&'a [f32]);

impl Work for Largest<'_> {
    type Result = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        const LANES: usize = 32;
        let more = |a: f32, b: f32| if b > a { b } else { a };
        let (whole, rest) = self.0.as_chunks::<LANES>();
        let mut most = [f32::NEG_INFINITY; LANES];
        for logits in whole {
            for (most, &logit) in most.iter_mut().zip(logits) {
                *most = more(*most, logit);
            }
        }
        most.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| more(a, b))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::kept;

    /// Against the standard library's exponential, in f64.
    #[test]
    fn weights_are_as_right_as_they_are_said_to_be() {
        for temperature in [0.05, 0.7, 1.0, 3.0] {
            let weights = Whole::new(7.25, temperature);
            for step in 0..400_000 {
                let logit = 7.25 - step as f32 * 7.1e-5 * temperature as f32;
                let log = (f64::from(logit) - 7.25) / temperature;
                let (got, wanted) = (weights.of(logit) as f64 * UNIT, log.exp());
                let bound = wanted * 2e-7 * (1.0 - log * LOG2_E) + UNIT / 2.0;
                assert!((got - wanted).abs() <= bound, "{logit} at {temperature}: {got:e}, not {wanted:e}");
            }
            assert_eq!(weights.of(7.25), 1 << 40);
            assert_eq!(weights.of(f32::NEG_INFINITY), 0);
        }
    }

    #[test]
    fn every_width_and_order_sums_to_the_same_number() {
        for count in [0, 1, 7, 8, 9, 1000, 4096, 9001] {
            let logits: Vec<f32> = (0..count).map(|id| -((id * 37 % 101) as f32) * 0.17).collect();
            let keys: Vec<u64> =
                logits.iter().enumerate().rev().map(|(id, &logit)| kept::key(logit, id)).collect();
            let weights = Whole::new(0.0, 0.7);
            let wanted: u64 = logits.iter().map(|&logit| weights.of(logit)).sum();
            assert_eq!([weights.total(&logits), weights.total_of_keys(&keys)], [wanted; 2], "{count}");
        }
    }
}
