//! Log-probabilities under the model itself.

use super::kept::{id, key};
use super::weights::Weights;

/// That of the chosen token, and the `count` most likely tokens with theirs.
pub(super) fn of(
    logits: &[f32],
    token: usize,
    count: usize,
    top: &mut Vec<u64>,
) -> (Option<f32>, Vec<(u32, f32)>) {
    let weights = Weights::new(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max), 1.0);
    let ln_sum = weights.total(logits).ln();
    let logprob = |id: usize| (weights.log(logits[id]) - ln_sum) as f32;
    most_likely(logits, count, top);
    (Some(logprob(token)), top.iter().map(|&key| (id(key) as u32, logprob(id(key)))).collect())
}

/// Few enough that inserting in order beats selecting: after the first few, almost every token is one comparison.
fn most_likely(logits: &[f32], count: usize, top: &mut Vec<u64>) {
    top.clear();
    if count == 0 {
        return;
    }
    for (id, &logit) in logits.iter().enumerate() {
        let key = key(logit, id);
        if top.len() == count {
            if top[count - 1] <= key {
                continue;
            }
            top.pop();
        }
        top.insert(top.partition_point(|other| *other < key), key);
    }
}
