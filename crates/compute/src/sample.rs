//! Choosing a token: an operation of every backend, and its scalar reference.

use crate::{Error, philox};

/// What one sampled row asks for.
#[derive(Clone, Debug)]
pub struct SampleRow<'a> {
    /// Which logits row of the step.
    pub wanted: u32,
    /// The sequence slot whose next token this is.
    pub slot: u32,
    /// The absolute position the chosen token will have. With the seed it fixes the random numbers: they are a
    /// function of (seed, position, draw), not a stream, so preemption and resuming change nothing.
    pub position: u32,
    /// The request's seed.
    pub seed: u64,
    /// 0 is greedy: no division, no random number.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop what is less likely than this share of the most likely; 0 keeps all.
    pub min_p: f32,
    /// Tokens that exist: rows of the head beyond it are padding and can never be chosen.
    pub vocab: u32,
    /// One bit per token, set where it is allowed; `None` allows all. Tokens beyond its end are not allowed.
    pub mask: Option<&'a [u32]>,
}

impl SampleRow<'_> {
    /// Refuses parameters that mean nothing: for the edge where a request comes in.
    pub fn check(&self) -> Result<(), Error> {
        let unit = 0.0..=1.0;
        for (name, value, valid, wanted) in [
            (
                "temperature",
                self.temperature,
                self.temperature >= 0.0 && self.temperature.is_finite(),
                "finite and not negative",
            ),
            ("top_p", self.top_p, unit.contains(&self.top_p), "between 0 and 1"),
            ("min_p", self.min_p, unit.contains(&self.min_p), "between 0 and 1"),
        ] {
            if !valid {
                return Err(Error::SampleParameter { name, value, wanted });
            }
        }
        Ok(())
    }

    fn allows(&self, id: usize) -> bool {
        self.mask.is_none_or(|mask| mask.get(id / 32).is_some_and(|word| word >> (id % 32) & 1 == 1))
    }
}

/// What came out for one sampled row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// The chosen token. Meaningless when `fault` is set.
    pub token: u32,
    /// Its log-probability under the model: softmax over the vocabulary before temperature and truncation.
    pub logprob: f32,
    /// A logit was NaN or infinite, or nothing was allowed: no token was chosen.
    pub fault: bool,
}

impl Sampled {
    /// No token could be chosen.
    pub const FAULT: Sampled = Sampled { token: 0, logprob: f32::NEG_INFINITY, fault: true };
}

/// Memory that [`sample`] uses again and again: after a first call with the same vocabulary it allocates nothing.
#[derive(Debug, Default)]
pub struct SampleScratch {
    /// Candidates as keys whose ascending order is (most likely, then lowest id).
    keys: Vec<u64>,
}

/// The specification of the sampling operation. A backend's own version chooses the same tokens.
///
/// Candidates are the ids below `vocab` that the mask allows. Temperature 0 takes the largest logit, the lowest id
/// among equals. Otherwise:
///
/// 1. divide by the temperature, softmax over *all* candidates;
/// 2. order by (most likely, then lowest id);
/// 3. cut that order after the first `top_k`, after the first whose running sum reaches `top_p`, and before the first
///    below `min_p` times the most likely. Each filter sees the probabilities of step 1 (nothing is renormalised in
///    between), so the shortest of the three decides and their order does not matter. The most likely always stays;
/// 4. renormalise what is kept and take the first whose running sum exceeds [`uniform`](crate::uniform) of
///    (seed, position, 0).
///
/// A fault is: a NaN or infinity in any logit below `vocab` (masked or not: the model is broken), fewer logits than
/// `vocab`, no candidate, or parameters that [`SampleRow::check`] refuses.
pub fn sample(logits: &[f32], row: &SampleRow<'_>, scratch: &mut SampleScratch) -> Sampled {
    let Some(logits) = logits.get(..row.vocab as usize) else { return Sampled::FAULT };
    if row.check().is_err() || logits.iter().any(|logit| !logit.is_finite()) {
        return Sampled::FAULT;
    }
    let Some(best) = largest_allowed(logits, row) else { return Sampled::FAULT };
    let token = if row.temperature == 0.0 { best } else { draw(logits, row, best, scratch) };
    Sampled { token: token as u32, logprob: log_probability(logits, token), fault: false }
}

fn largest_allowed(logits: &[f32], row: &SampleRow<'_>) -> Option<usize> {
    let mut best = None;
    let mut largest = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > largest && row.allows(id) {
            (best, largest) = (Some(id), logit);
        }
    }
    best
}

fn log_probability(logits: &[f32], token: usize) -> f32 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
    (f64::from(logits[token]) - largest - sum.ln()) as f32
}

fn draw(logits: &[f32], row: &SampleRow<'_>, best: usize, scratch: &mut SampleScratch) -> usize {
    let (largest, temperature) = (f64::from(logits[best]), f64::from(row.temperature));
    // A probability times a constant: the most likely weighs 1.
    let weight = |id: usize| ((f64::from(logits[id]) - largest) / temperature).exp();

    // Min-p needs no order, so what it drops is never sorted; nor is what can never be drawn.
    let min_p = f64::from(row.min_p);
    let (mut total, mut candidates_total) = (0.0, 0.0);
    scratch.keys.clear();
    for (id, &logit) in logits.iter().enumerate() {
        if row.allows(id) {
            let weight = weight(id);
            total += weight;
            if weight >= min_p && weight > 0.0 {
                candidates_total += weight;
                scratch.keys.push(key(logit, id));
            }
        }
    }

    let mut ordered = Ordered { keys: &mut scratch.keys, sorted: 0 };
    let enough = if row.top_p < 1.0 { f64::from(row.top_p) * total } else { f64::INFINITY };
    let at_most = if row.top_k == 0 { usize::MAX } else { row.top_k as usize };
    let (kept, kept_total) = if enough == f64::INFINITY && at_most >= ordered.keys.len() {
        (ordered.keys.len(), candidates_total)
    } else {
        let (mut kept, mut sum) = (0, 0.0);
        while let Some(id) = ordered.id(kept).filter(|_| kept < at_most && (kept == 0 || sum < enough)) {
            sum += weight(id);
            kept += 1;
        }
        (kept, sum)
    };

    let wanted = philox::uniform(row.seed, row.position, 0) * kept_total;
    let mut sum = 0.0;
    let mut chosen = best;
    for rank in 0..kept {
        // Rounding may leave the running sum a hair below `wanted` at the end: then the last one is it.
        chosen = ordered.id(rank).expect("kept counts candidates");
        sum += weight(chosen);
        if sum > wanted {
            break;
        }
    }
    chosen
}

/// Ascending keys are descending logits, then ascending ids.
fn key(logit: f32, id: usize) -> u64 {
    // Adding zero makes -0 equal to 0. Flipping the sign bit, or all bits of a negative number, makes the order of
    // the bits the order of the numbers.
    let bits = (logit + 0.0).to_bits();
    let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(!ascending) << 32 | id as u64
}

/// Candidates that are sorted only as far as somebody looks: most draws end within the first few of 150,000.
struct Ordered<'a> {
    keys: &'a mut [u64],
    sorted: usize,
}

impl Ordered<'_> {
    /// The id of the candidate with this rank.
    fn id(&mut self, rank: usize) -> Option<usize> {
        if rank >= self.keys.len() {
            return None;
        }
        while rank >= self.sorted {
            let rest = &mut self.keys[self.sorted..];
            let more = (self.sorted * 7).max(64).min(rest.len());
            if more < rest.len() {
                rest.select_nth_unstable(more);
            }
            rest[..more].sort_unstable();
            self.sorted += more;
        }
        Some((self.keys[rank] & u64::from(u32::MAX)) as usize)
    }
}
