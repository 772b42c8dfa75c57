//! Mirostat: keeps the surprise of the text near a target (Basu et al., "Mirostat", 2021).

use super::allowed::Allowed;
use super::kept::{self, Kept, Ordered, key};
use super::weights::Weights;
use super::{Mirostat, SampleRow, Sampling};

/// How many of the most likely tokens the first version fits its Zipf distribution to.
const FITTED: usize = 100;

/// What the row's `mu` lets through, at the row's temperature.
pub(super) fn kept<'a>(
    logits: &'a [f32],
    allowed: Allowed<'_>,
    best: usize,
    row: &SampleRow<'_>,
    keys: &'a mut Vec<u64>,
) -> Kept<'a> {
    let temperature = f64::from(row.sampling.temperature);
    let weights = Weights::new(logits[best], temperature);
    let mu = f64::from(row.mirostat_mu);
    keys.clear();
    if row.sampling.mirostat == Mirostat::V2 {
        keys.extend(allowed.each(logits).map(|(id, logit)| key(logit, id)));
        let ln_total = weights.total_of_keys(keys).ln();
        let surprise = |logit| (ln_total - weights.log(logit)) / std::f64::consts::LN_2;
        keys.retain(|&key| surprise(kept::logit(key)) <= mu);
        if keys.is_empty() {
            keys.push(key(logits[best], best));
        }
        return Kept { logits, order: Ordered::new(keys), temperature };
    }
    keys.extend(allowed.each(logits).map(|(id, logit)| key(logit, id)));
    let mut order = Ordered::new(keys);
    // How fast probability falls with the rank: the exponent of the Zipf distribution that fits best.
    let (mut products, mut squares) = (0.0, 0.0);
    let mut previous = 0.0;
    for rank in 1..FITTED.min(order.items().len()) {
        let next = order.get(rank).map_or(previous, |key| weights.log(kept::logit(key)));
        let step = ((rank + 1) as f64 / rank as f64).ln();
        products += step * (previous - next);
        squares += step * step;
        previous = next;
    }
    let exponent: f64 = products / squares;
    let beyond_one = exponent - 1.0;
    let count =
        (beyond_one * mu.exp2() / (1.0 - f64::from(row.vocab).powf(-beyond_one))).powf(1.0 / exponent);
    // Casting takes NaN, which a single candidate gives, for 0.
    #[expect(clippy::cast_sign_loss, reason = "below one is one")]
    order.truncate((count as usize).max(1));
    Kept { logits, order, temperature }
}

/// Moves `mu` by how far the surprise of a token of this probability was from the target.
pub(super) fn next_mu(sampling: &Sampling, mu: f32, probability: f64) -> f32 {
    let error = -probability.max(f64::MIN_POSITIVE).log2() - f64::from(sampling.mirostat_tau);
    ((f64::from(mu) - f64::from(sampling.mirostat_eta) * error) as f32).clamp(f32::MIN, f32::MAX)
}
