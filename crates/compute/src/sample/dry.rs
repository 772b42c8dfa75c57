//! DRY: which tokens would continue a repetition, and by how much that is penalised.
//!
//! Named by its author p-e-w "Don't Repeat Yourself" (text-generation-webui, 2024). The history ends with some
//! sequence; where the same sequence stands earlier, the token after it there is the one that would repeat more.

use super::{Sampling, last};

/// Memory that is used again and again.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// For each place, counted from the end of the history: how many tokens up to it are those of the end.
    matches: Vec<u32>,
    /// Tokens and the length of the repetition that they continue.
    continued: Vec<(u32, u32)>,
}

/// A token and what its logit loses.
pub(super) struct Repeat {
    pub(super) token: u32,
    pub(super) penalty: f64,
}

/// The tokens that would continue a repetition of at least `dry_allowed_length`, each once, with its longest.
pub(super) fn repeats<'a>(
    sampling: &'a Sampling,
    history: &[u32],
    scratch: &'a mut Scratch,
) -> impl Iterator<Item = Repeat> + 'a {
    let Scratch { matches, continued } = scratch;
    let history = last(history, sampling.dry_penalty_last_n);
    let breakers = &sampling.dry_sequence_breakers;
    continued.clear();
    let longest = unbroken(history, breakers);
    if longest >= sampling.dry_allowed_length {
        match_lengths(history, matches);
        for (back, &length) in matches.iter().enumerate().skip(1) {
            let length = length.min(longest);
            if length >= sampling.dry_allowed_length {
                continued.push((history[history.len() - back], length));
            }
        }
    }
    // The longest of each token comes last.
    continued.sort_unstable();
    let (multiplier, base) = (f64::from(sampling.dry_multiplier), f64::from(sampling.dry_base));
    let allowed = sampling.dry_allowed_length;
    continued
        .chunk_by(|a, b| a.0 == b.0)
        .map(|same| same[same.len() - 1])
        .filter(|(token, _)| !breakers.iter().any(|breaker| breaker[..] == [*token]))
        .map(move |(token, length)| Repeat {
            token,
            penalty: multiplier * base.powf(f64::from(length - allowed)),
        })
}

/// How many tokens stand after the last breaker.
fn unbroken(history: &[u32], breakers: &[Vec<u32>]) -> u32 {
    let after = (0..history.len()).find(|after| {
        let before = &history[..history.len() - after];
        breakers.iter().any(|breaker| before.ends_with(breaker))
    });
    after.unwrap_or(history.len()) as u32
}

/// The Z-algorithm over the history read backwards: linear also in a text of a single repeated token.
fn match_lengths(history: &[u32], matches: &mut Vec<u32>) {
    let count = history.len();
    let back = |place: usize| history[count - 1 - place];
    matches.clear();
    matches.resize(count, 0);
    // The match that reaches furthest: where it begins and ends.
    let (mut begin, mut end) = (0, 0);
    for place in 1..count {
        let mut length = if place < end { (matches[place - begin] as usize).min(end - place) } else { 0 };
        while place + length < count && back(length) == back(place + length) {
            length += 1;
        }
        if place + length > end {
            (begin, end) = (place, place + length);
        }
        matches[place] = length as u32;
    }
}
