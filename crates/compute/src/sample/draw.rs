//! The draw: a token of those that are left, by its weight.
//!
//! Ids are taken in stretches. The weights of a stretch are relative to its largest logit, so that a stretch needs to
//! be looked at only once; beside each other, stretches weigh their totals relative to the largest of all. A random
//! number is so first a stretch and then a token of it, the first by id whose running sum exceeds what is left.

use super::allowed::Allowed;
use super::crew::Crew;
use super::kept::{id, logit};
use super::whole::{STRETCH, Whole, largest};

/// Memory that is used again and again.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    stretches: Vec<Stretch>,
    /// Of tokens that are given as keys: their logits, stretch by stretch.
    logits: Vec<f32>,
    /// And those of one stretch, by id.
    tokens: Vec<(usize, f32)>,
}

/// What is known of some ids that follow each other.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    /// Negative infinity where there is no candidate.
    largest: f32,
    /// Of the weights relative to it.
    total: u64,
    /// How many come before, where they are sorted.
    end: usize,
}

const NOBODY: Stretch = Stretch { largest: f32::NEG_INFINITY, total: 0, end: 0 };

/// A token of all that are allowed: at least one.
pub(super) fn of_all(
    crew: &impl Crew,
    logits: &[f32],
    allowed: Allowed<'_>,
    temperature: f64,
    random: u64,
    scratch: &mut Scratch,
) -> usize {
    let weights = Whole::new(0.0, temperature);
    let stretches = &mut scratch.stretches;
    stretches.clear();
    stretches.resize(logits.len().div_ceil(STRETCH), NOBODY);
    crew.set(stretches, |stretch| {
        let mut room = [0.0; STRETCH];
        Stretch::of(allowed.stretch(logits, stretch * STRETCH, &mut room), weights)
    });
    let (chosen, beyond) = choose(stretches, weights, random);
    let first = chosen * STRETCH;
    let mut room = [0.0; STRETCH];
    let of_it = allowed.stretch(logits, first, &mut room);
    let weights = weights.beside(stretches[chosen].largest);
    exceeding((first..).zip(of_it.iter().copied()), weights, beyond)
}

/// A token of those with these keys: at least one.
pub(super) fn of_keys(keys: &[u64], temperature: f64, random: u64, scratch: &mut Scratch) -> usize {
    let weights = Whole::new(0.0, temperature);
    let Scratch { stretches, logits, tokens } = scratch;
    sort_by_stretch(keys, stretches, logits);
    let mut start = 0;
    for stretch in &mut *stretches {
        let end = stretch.end;
        *stretch = Stretch::of(&logits[start..end], weights);
        start = end;
    }
    let (chosen, beyond) = choose(stretches, weights, random);
    let of_it = keys.iter().map(|&key| (id(key), logit(key))).filter(|(id, _)| id / STRETCH == chosen);
    tokens.clear();
    tokens.extend(of_it);
    tokens.sort_unstable_by_key(|(id, _)| *id);
    exceeding(tokens.iter().copied(), weights.beside(stretches[chosen].largest), beyond)
}

/// The logits of all keys, stretch by stretch, in no order within one; and where each stretch ends.
fn sort_by_stretch(keys: &[u64], stretches: &mut Vec<Stretch>, logits: &mut Vec<f32>) {
    stretches.clear();
    for &key in keys {
        let stretch = id(key) / STRETCH;
        if stretch >= stretches.len() {
            stretches.resize(stretch + 1, NOBODY);
        }
        stretches[stretch].end += 1;
    }
    // First where each begins; each logit then moves it on.
    let mut start = 0;
    for stretch in &mut *stretches {
        (stretch.end, start) = (start, start + stretch.end);
    }
    logits.clear();
    logits.resize(keys.len(), 0.0);
    for &key in keys {
        let stretch = &mut stretches[id(key) / STRETCH];
        logits[stretch.end] = logit(key);
        stretch.end += 1;
    }
}

impl Stretch {
    /// Of its logits.
    fn of(logits: &[f32], weights: Whole) -> Stretch {
        let largest = largest(logits);
        if largest == f32::NEG_INFINITY {
            return NOBODY;
        }
        Stretch { largest, total: weights.beside(largest).total(logits), end: 0 }
    }
}

/// The stretch that a random number gives, and what a running sum of its weights has to exceed.
fn choose(stretches: &[Stretch], weights: Whole, random: u64) -> (usize, u64) {
    let largest = stretches.iter().fold(f32::NEG_INFINITY, |largest, stretch| largest.max(stretch.largest));
    let weights = weights.beside(largest);
    let scaled = |stretch: &Stretch| match stretch.total {
        0 => 0,
        total => weights.scaled(total, stretch.largest),
    };
    let total: u64 = stretches.iter().map(scaled).sum();
    let mut left = ((u128::from(random) * u128::from(total)) >> 64) as u64;
    for (at, stretch) in stretches.iter().enumerate() {
        let share = scaled(stretch);
        if left < share {
            #[expect(clippy::cast_sign_loss, reason = "it is not negative")]
            let beyond = (left as f64 * (stretch.total as f64 / share as f64)) as u64;
            return (at, beyond.min(stretch.total - 1));
        }
        left -= share;
    }
    unreachable!("what is left is less than the total {total}")
}

/// The first token whose running sum of weights exceeds `beyond`.
fn exceeding(mut tokens: impl Iterator<Item = (usize, f32)>, weights: Whole, beyond: u64) -> usize {
    let mut sum = 0;
    let found = tokens.find(|&(_, logit)| {
        sum += weights.of(logit);
        sum > beyond
    });
    found.expect("the weights of the stretch together exceed it").0
}
