//! Experts: who chooses whom, where each choice has its row, and the sum of what the chosen say.
//!
//! Rows of one expert lie side by side, so that its weights are read once in a step, whatever the tokens; experts that
//! nobody chose are not read. A row's product does not depend on its neighbours, and a token's experts are added up in
//! the order of their numbers: so a token's result does not depend on the batch.

use std::cmp::Ordering;
use std::ops::Range;

use super::exp::exp;
use super::recurrence::softplus;
use crate::batch::below;
use crate::{Error, Groups, ROUTED_MAX, Routing, Scores, Shares};

/// Chooses the experts of one token: as many numbers as `chosen` has room for, ascending, then their weights.
pub(super) fn route(routing: &Routing, logits: &[f32], correction: Option<&[f32]>, chosen: &mut [f32]) {
    let (numbers, weights) = chosen.split_at_mut(chosen.len() / 2);
    let mut room = [0.0; ROUTED_MAX];
    let ranked = if routing.chooses_by_score(correction.is_some()) {
        let ranked = &mut room[..logits.len()];
        rank_by_score(routing, logits, correction, ranked);
        ranked
    } else {
        // The larger logit has the larger score.
        logits
    };
    let mut last = None;
    for number in numbers.iter_mut() {
        let next = next(ranked, last);
        last = next;
        *number = next.expect("no more are chosen than there are") as f32;
    }
    // No two are equal.
    numbers.sort_unstable_by(f32::total_cmp);
    weigh(routing, logits, numbers, weights);
}

/// The best behind `last`.
fn next(values: &[f32], last: Option<usize>) -> Option<usize> {
    let later = |&one: &usize| last.is_none_or(|last| rank(values, last, one) == Ordering::Less);
    (0..values.len()).filter(later).min_by(|&a, &b| rank(values, a, b))
}

/// What experts are chosen by: their scores with the correction, and minus infinity outside the token's groups.
fn rank_by_score(routing: &Routing, logits: &[f32], correction: Option<&[f32]>, ranked: &mut [f32]) {
    match routing.scores {
        Scores::Softmax => {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = logits.iter().map(|logit| exp(logit - largest)).sum();
            let scores = logits.iter().map(|logit| exp(logit - largest) / sum);
            ranked.iter_mut().zip(scores).for_each(|(ranked, score)| *ranked = score);
        }
        scores => ranked.iter_mut().zip(logits).for_each(|(ranked, logit)| *ranked = alone(scores, *logit)),
    }
    if let Some(correction) = correction {
        ranked.iter_mut().zip(correction).for_each(|(ranked, correction)| *ranked += correction);
    }
    let Some(Groups { count, chosen, by_two }) = routing.groups else { return };
    let each = ranked.len() / count;
    let mut room = [0.0; ROUTED_MAX];
    let groups = &mut room[..count];
    for (group, ranked) in groups.iter_mut().zip(ranked.chunks_exact(each)) {
        let best = next(ranked, None);
        let value = |expert: Option<usize>| expert.map_or(f32::NEG_INFINITY, |expert| ranked[expert]);
        *group = if by_two { value(best) + value(next(ranked, best)) } else { value(best) };
    }
    let last = (0..chosen).fold(None, |last, _| next(groups, last));
    for (group, ranked) in ranked.chunks_exact_mut(each).enumerate() {
        if last.is_some_and(|last| rank(groups, last, group) == Ordering::Less) {
            ranked.fill(f32::NEG_INFINITY);
        }
    }
}

/// The weights of the chosen, in their order.
fn weigh(routing: &Routing, logits: &[f32], numbers: &[f32], weights: &mut [f32]) {
    let logit = |number: &f32| logits[index(*number)];
    // What the score of a single expert would be a share of.
    let mut all = 1.0;
    match routing.scores {
        Scores::Softmax => {
            let of_all = routing.weighs_by_all();
            let over_chosen = numbers.iter().map(logit).fold(f32::NEG_INFINITY, f32::max);
            let largest =
                if of_all { logits.iter().copied().fold(over_chosen, f32::max) } else { over_chosen };
            let powers = numbers.iter().map(|number| exp(logit(number) - largest));
            weights.iter_mut().zip(powers).for_each(|(weight, power)| *weight = power);
            if of_all {
                all = logits.iter().map(|logit| exp(logit - largest)).sum();
            }
        }
        scores => {
            let scores = numbers.iter().map(|number| alone(scores, logit(number)));
            weights.iter_mut().zip(scores).for_each(|(weight, score)| *weight = score);
        }
    }
    let sum = match routing.shares {
        Shares::OfAll => all,
        Shares::OfChosen => {
            let sum = weights.iter().sum::<f32>() + routing.added * all;
            // Not `max`, which takes any number for a NaN.
            if sum < routing.least * all { routing.least * all } else { sum }
        }
    };
    weights.iter_mut().for_each(|weight| *weight = *weight / sum * routing.scale);
}

/// A score that looks at no other logit.
fn alone(scores: Scores, logit: f32) -> f32 {
    match scores {
        Scores::SqrtSoftplus => softplus(logit).sqrt(),
        Scores::Sigmoid | Scores::Softmax => 1.0 / (1.0 + exp(-logit)),
    }
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

/// The larger value is before the smaller one, and of equal ones the lower number. A NaN has a place too, the first: it
/// becomes the token's weights, and is found in the logits of the model.
fn rank(values: &[f32], a: usize, b: usize) -> Ordering {
    // The sum makes one zero of the two.
    let key = |expert: usize| values[expert] + 0.0;
    key(b).total_cmp(&key(a)).then(a.cmp(&b))
}

/// A row for each expert of each token, those of one expert side by side. Its tables keep their capacity and grow to
/// the largest step once, at eight bytes for each expert of a token.
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
            route(&Routing::plain(logits.len(), wanted.len(), Shares::OfChosen), logits, None, &mut chosen);
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
                route(&Routing::plain(4, 2, shares), &logits, None, &mut chosen);
                assert!(chosen[0] < chosen[1] && chosen[1] < 4.0, "{chosen:?}");
                assert!(chosen[2..].iter().any(|weight| weight.is_nan()), "{logits:?} {chosen:?}");
            }
        }
        let groups = Some(Groups { count: 2, chosen: 1, by_two: true });
        for scores in [Scores::Softmax, Scores::Sigmoid, Scores::SqrtSoftplus] {
            let routing = Routing { scores, groups, ..Routing::plain(4, 2, Shares::OfChosen) };
            for logits in [[f32::NAN; 4], [0.0, f32::NAN, 1.0, 2.0], [f32::NAN, 0.0, -f32::NAN, 9.0]] {
                let mut chosen = [0.0; 4];
                route(&routing, &logits, Some(&[0.5, -0.5, 0.0, 0.0]), &mut chosen);
                assert!(chosen[0] < chosen[1] && chosen[1] < 4.0, "{chosen:?}");
            }
        }
    }

    #[test]
    fn a_correction_chooses_and_does_not_weigh() {
        let routing =
            Routing { scores: Scores::Sigmoid, scale: 2.0, ..Routing::plain(3, 2, Shares::OfChosen) };
        let mut chosen = [0.0; 4];
        route(&routing, &[0.0, 3.0, 0.0], Some(&[1.0, -1.0, 0.5]), &mut chosen);
        assert_eq!(chosen, [0.0, 2.0, 1.0, 1.0]);
    }

    #[test]
    fn groups_are_as_good_as_their_best_expert_or_as_their_two_best() {
        let check = |by_two: bool, wanted: [f32; 2]| {
            let groups = Some(Groups { count: 2, chosen: 1, by_two });
            let routing =
                Routing { scores: Scores::Sigmoid, groups, ..Routing::plain(6, 2, Shares::OfChosen) };
            let mut chosen = [0.0; 4];
            route(&routing, &[-9.0, 2.0, -9.0, 1.0, -2.0, 1.0], None, &mut chosen);
            assert_eq!(chosen[..2], wanted);
        };
        check(false, [0.0, 1.0]);
        check(true, [3.0, 5.0]);
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
