//! What is added to and taken from logits before a token is chosen.

use super::{SampleRow, dry, last};

/// Memory that is used again and again.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    logits: Vec<f32>,
    /// How often each token occurred: all zero between calls.
    counts: Vec<u32>,
    dry: dry::Scratch,
}

impl Scratch {
    /// For [`changes`].
    pub(super) fn counts(&mut self) -> &mut Vec<u32> {
        &mut self.counts
    }
}

/// What a parameter does to a token's logit, in f64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// A bias is added.
    Add(f64),
    /// Positive logits are divided by this, others multiplied.
    Repeat(f64),
    /// The first is subtracted, then the second.
    Subtract(f64, f64),
}

impl Change {
    /// The changed logit, rounded once; what would leave the finite numbers stops at the last of them.
    fn apply(self, logit: &mut f32) {
        let before = f64::from(*logit);
        let after = match self {
            Change::Add(bias) => before + bias,
            Change::Repeat(penalty) if before > 0.0 => before / penalty,
            Change::Repeat(penalty) => before * penalty,
            Change::Subtract(first, second) => before - first - second,
        };
        *logit = (after as f32).clamp(f32::MIN, f32::MAX);
    }
}

/// The model's own logits where nothing is to be changed; otherwise a changed copy.
pub(super) fn adjusted<'a>(raw: &'a [f32], row: &SampleRow<'_>, scratch: &'a mut Scratch) -> &'a [f32] {
    let sampling = row.sampling;
    let dry = sampling.dry_multiplier > 0.0;
    if !sampling.adjusts() && !dry {
        return raw;
    }
    let Scratch { logits, counts, dry: dry_scratch } = scratch;
    logits.clear();
    logits.extend_from_slice(raw);
    changes(row, counts, |token, change| change.apply(&mut logits[token as usize]));
    if dry {
        for repeat in dry::repeats(sampling, row.history, dry_scratch) {
            if let Some(logit) = logits.get_mut(repeat.token as usize) {
                Change::Subtract(repeat.penalty, 0.0).apply(logit);
            }
        }
    }
    logits
}

/// Every change but DRY's, one after the other, of tokens that exist. `counts` is all zero between calls.
pub(super) fn changes(row: &SampleRow<'_>, counts: &mut Vec<u32>, mut change: impl FnMut(u32, Change)) {
    let sampling = row.sampling;
    for &(token, bias) in &sampling.logit_bias {
        change(token, Change::Add(f64::from(bias)));
    }
    if !sampling.penalises() {
        return;
    }
    let vocab = row.vocab as usize;
    counts.resize(counts.len().max(vocab), 0);
    let known = |token: &&u32| (**token as usize) < vocab;
    let window = last(row.history, sampling.repeat_last_n);
    if sampling.repetition_penalty != 1.0 {
        let penalty = f64::from(sampling.repetition_penalty);
        count(window.iter().filter(known), counts);
        for &token in window {
            if taken(counts, token) > 0 {
                change(token, Change::Repeat(penalty));
            }
        }
    }
    let (presence, frequency) = (f64::from(sampling.presence_penalty), f64::from(sampling.frequency_penalty));
    if presence != 0.0 || frequency != 0.0 {
        let generated = last(window, Some(row.generated));
        count(generated.iter().filter(known), counts);
        for &token in generated {
            let times = taken(counts, token);
            if times > 0 {
                change(token, Change::Subtract(f64::from(times) * frequency, presence));
            }
        }
    }
}

fn count<'a>(tokens: impl Iterator<Item = &'a u32>, counts: &mut [u32]) {
    tokens.for_each(|&token| counts[token as usize] += 1);
}

/// How often a token was counted, once: asked again it is 0, as it must be when the next row comes.
fn taken(counts: &mut [u32], token: u32) -> u32 {
    counts.get_mut(token as usize).map_or(0, std::mem::take)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sampling;

    /// Probabilities that llama.cpp's own tests (tests/test-sampling.cpp) expect, with the 1e-5 that they allow.
    fn check(before: &[f32], history: &[u32], sampling: &Sampling, after: &[f64]) {
        let raw: Vec<f32> = before.iter().map(|p| p.ln()).collect();
        let plain = SampleRow::plain(raw.len() as u32, sampling);
        let row = SampleRow { history, generated: history.len() as u32, ..plain };
        let mut scratch = Scratch::default();
        // Twice: nothing may be left over from the first time.
        for _ in 0..2 {
            let weights: Vec<f64> =
                adjusted(&raw, &row, &mut scratch).iter().map(|&logit| f64::from(logit).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (weight, wanted) in weights.iter().zip(after) {
                assert!((weight / total - wanted).abs() < 1e-5, "{history:?}: {weights:?}, wanted {after:?}");
            }
        }
    }

    #[test]
    fn penalties_are_llama_cpps() {
        let repeat = Sampling { repetition_penalty: 50.0, ..Sampling::default() };
        check(&[0.2; 5], &[0], &repeat, &[0.0, 0.25, 0.25, 0.25, 0.25]);
        check(&[0.2; 5], &[0, 1, 2], &repeat, &[0.0, 0.0, 0.0, 0.5, 0.5]);
        check(&[0.2; 5], &[0, 1, 2, 0, 0], &repeat, &[0.0, 0.0, 0.0, 0.5, 0.5]);
        let both = Sampling { frequency_penalty: 5.0, presence_penalty: 5.0, ..Sampling::default() };
        check(&[0.2; 5], &[0], &both, &[0.000_011, 0.249_997, 0.249_997, 0.249_997, 0.249_997]);
        check(&[0.2; 5], &[0, 1, 2], &both, &[0.000_023, 0.000_023, 0.000_023, 0.499_966, 0.499_966]);
        check(&[0.2; 5], &[0, 1, 2, 0, 0], &both, &[0.0, 0.000_023, 0.000_023, 0.499_977, 0.499_977]);
    }

    #[test]
    fn dry_is_llama_cpps() {
        let dry = |dry_multiplier, dry_allowed_length, dry_sequence_breakers| Sampling {
            dry_multiplier,
            dry_base: 1.1,
            dry_allowed_length,
            dry_sequence_breakers,
            ..Sampling::default()
        };
        check(&[0.25; 4], &[0, 1], &dry(1.0, 2, vec![]), &[0.25; 4]);
        let after = [0.296_923, 0.296_923, 0.109_232, 0.296_923];
        check(&[0.25; 4], &[0, 1, 2, 0, 1], &dry(1.0, 2, vec![]), &after);
        check(&[0.2; 5], &[0, 1, 3, 4, 0, 1], &dry(1.0, 2, vec![vec![3]]), &[0.2; 5]);
        let after = [0.241_818, 0.241_818, 0.032_727, 0.241_818, 0.241_818];
        check(&[0.2; 5], &[0, 1, 2, 0, 1], &dry(2.0, 2, vec![]), &after);
        check(&[0.2; 5], &[0, 1, 2, 3, 4, 0, 1], &dry(1.0, 4, vec![]), &[0.2; 5]);
    }
}
