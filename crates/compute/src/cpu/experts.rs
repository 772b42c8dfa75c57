//! Experts: who chooses whom, where each choice has its row, and the sum of what the chosen say.
//!
//! Rows of one expert lie side by side, so that its weights are read once in a step, whatever the tokens; experts that
//! nobody chose are not read. A row's product does not depend on its neighbours, and a token's experts are added up in
//! the order of their numbers: so a token's result does not depend on the batch.

use std::cmp::Ordering;
use std::ops::Range;

use super::exp::exp;
use crate::batch::below;
use crate::{Error, Shares};

/// Chooses the experts of one token: as many numbers as `chosen` has room for, ascending, then their weights.
pub(super) fn route(shares: Shares, logits: &[f32], chosen: &mut [f32]) {
    let (numbers, weights) = chosen.split_at_mut(chosen.len() / 2);
    let mut last = None;
    for number in numbers.iter_mut() {
        let later = |&expert: &usize| last.is_none_or(|last| rank(logits, last, expert) == Ordering::Less);
        let next = (0..logits.len()).filter(later).min_by(|&a, &b| rank(logits, a, b));
        last = next;
        *number = next.expect("no more are chosen than there are") as f32;
    }
    // No two are equal.
    numbers.sort_unstable_by(f32::total_cmp);

    let logit = |number: &f32| logits[index(*number)];
    let largest = numbers.iter().map(logit).fold(f32::NEG_INFINITY, f32::max);
    for (weight, number) in weights.iter_mut().zip(numbers.iter()) {
        *weight = exp(logit(number) - largest);
    }
    let sum: f32 = match shares {
        Shares::OfAll => logits.iter().map(|logit| exp(logit - largest)).sum(),
        Shares::OfChosen => weights.iter().sum(),
    };
    weights.iter_mut().for_each(|weight| *weight /= sum);
}

/// Multiplies the weights in rows of numbers, then weights, by what `scales` has at the numbers.
pub(super) fn scale_chosen<'a>(
    rows: impl Iterator<Item = &'a mut [f32]>,
    scales: &[f32],
) -> Result<(), Error> {
    for chosen in rows {
        let (numbers, weights) = chosen.split_at_mut(chosen.len() / 2);
        for (weight, number) in weights.iter_mut().zip(numbers.iter()) {
            below("expert", index(*number), scales.len())?;
            *weight *= scales[index(*number)];
        }
    }
    Ok(())
}

/// An expert's number, which `route` wrote.
#[expect(
    clippy::cast_sign_loss,
    reason = "what is below zero is no number of an expert, and what is too large is refused"
)]
fn index(number: f32) -> usize {
    number as usize
}

/// The larger logit is before the smaller one, and of equal ones the lower number. A NaN has a place too, the first: it
/// becomes the token's weights, and is found in the logits of the model.
fn rank(logits: &[f32], a: usize, b: usize) -> Ordering {
    // The sum makes one zero of the two.
    let key = |expert: usize| logits[expert] + 0.0;
    key(b).total_cmp(&key(a)).then(a.cmp(&b))
}

/// A row for each expert of each token, those of one expert side by side. Its tables keep their capacity and grow to the
/// largest step once, at eight bytes for each expert of a token.
#[derive(Default)]
pub(super) struct Places {
    /// How many experts a token has.
    each: usize,
    /// Where each expert's rows begin, and the end of the last.
    starts: Vec<u32>,
    /// By token and choice.
    places: Vec<u32>,
    /// By place.
    tokens: Vec<u32>,
}

impl Places {
    /// Deals out the rows of a step. `chosen` is what `route` wrote, `each` experts a token.
    pub(super) fn fill(&mut self, chosen: &[f32], each: usize, experts: usize) -> Result<(), Error> {
        self.each = each;
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        let numbers = || chosen.chunks_exact(2 * each.max(1)).map(|row| &row[..each]);
        for &number in numbers().flatten() {
            below("expert", index(number), experts)?;
            self.starts[index(number) + 1] += 1;
        }
        let mut end = 0;
        for start in &mut self.starts {
            end += *start;
            *start = end;
        }
        self.places.clear();
        self.tokens.clear();
        self.tokens.resize(end as usize, 0);
        // Each start moves to its end, which is the next one's start.
        for (token, numbers) in numbers().enumerate() {
            for &number in numbers {
                let place = &mut self.starts[index(number)];
                self.tokens[*place as usize] = token as u32;
                self.places.push(*place);
                *place += 1;
            }
        }
        self.starts.rotate_right(1);
        self.starts[0] = 0;
        Ok(())
    }

    /// The experts that somebody chose, and their rows.
    pub(super) fn taken(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let rows = self.starts.windows(2).map(|ends| ends[0] as usize..ends[1] as usize);
        rows.enumerate().filter(|(_, rows)| !rows.is_empty())
    }

    /// Whose row it is.
    pub(super) fn token(&self, place: usize) -> usize {
        self.tokens[place] as usize
    }

    /// The rows of a token, in the order of its experts' numbers.
    pub(super) fn of(&self, token: usize) -> &[u32] {
        &self.places[token * self.each..][..self.each]
    }
}

/// `out` += the weighted sum of some rows, in the order in which they are given.
pub(super) fn combine(places: &[u32], weights: &[f32], rows: &[f32], out: &mut [f32]) {
    /// Sums that stay in registers.
    const CHUNK: usize = 64;
    let columns = out.len();
    for (chunk, out) in out.chunks_mut(CHUNK).enumerate() {
        let mut sums = [0.0_f32; CHUNK];
        for (&place, &weight) in places.iter().zip(weights) {
            let row = &rows[place as usize * columns + chunk * CHUNK..][..out.len()];
            sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value);
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_logits_win_and_ties_go_to_the_lowest_numbers() {
        let check = |logits: &[f32], wanted: &[f32]| {
            let mut chosen = vec![f32::NAN; 2 * wanted.len()];
            route(Shares::OfChosen, logits, &mut chosen);
            assert_eq!(chosen[..wanted.len()], *wanted, "{logits:?}");
        };
        check(&[0.0, 3.0, 1.0, 2.0], &[1.0, 3.0]);
        check(&[1.0, 1.0, 1.0, 1.0], &[0.0, 1.0]);
        check(&[2.0, 1.0, 3.0, 1.0, 1.0], &[0.0, 1.0, 2.0]);
        check(&[-0.0, 0.0, -1.0], &[0.0]);
        check(&[0.0, -0.0, -1.0], &[0.0]);
        check(&[f32::NEG_INFINITY, -5.0], &[1.0]);
        check(&[7.0], &[0.0]);
        check(&[3.0, 1.0, 2.0], &[0.0, 1.0, 2.0]);
    }

    #[test]
    fn a_logit_that_is_no_number_spoils_the_weights_and_nothing_else() {
        for logits in [[f32::NAN; 4], [0.0, f32::NAN, 1.0, 2.0], [f32::INFINITY, 0.0, f32::INFINITY, 0.0]] {
            for shares in [Shares::OfAll, Shares::OfChosen] {
                let mut chosen = [0.0; 4];
                route(shares, &logits, &mut chosen);
                assert!(chosen[0] < chosen[1] && chosen[1] < 4.0, "{chosen:?}");
                assert!(chosen[2..].iter().any(|weight| weight.is_nan()), "{logits:?} {chosen:?}");
            }
        }
    }

    #[test]
    fn rows_of_an_expert_lie_side_by_side_and_everyone_finds_theirs() {
        let mut places = Places::default();
        // The second fill is smaller: nothing of the first may be left.
        places.fill(&[0.0, 3.0, 0.5, 0.5].repeat(9), 2, 4).unwrap();
        places.fill(&[1.0, 3.0, 0.5, 0.5, 0.0, 3.0, 0.5, 0.5, 0.0, 1.0, 0.5, 0.5], 2, 5).unwrap();
        let taken: Vec<_> = places.taken().collect();
        assert_eq!(taken, [(0, 0..2), (1, 2..4), (3, 4..6)]);
        assert_eq!((0..6).map(|place| places.token(place)).collect::<Vec<_>>(), [1, 2, 0, 2, 0, 1]);
        assert_eq!((0..3).map(|token| places.of(token)).collect::<Vec<_>>(), [[2, 4], [0, 5], [1, 3]]);
        assert!(places.fill(&[5.0, 1.0], 1, 5).is_err());
    }
}
