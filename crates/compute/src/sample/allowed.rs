//! Who may be chosen at all.

use super::SampleRow;

/// The ids that mask, lists and `min_tokens` leave.
#[derive(Clone, Copy)]
pub(super) struct Allowed<'a> {
    /// One bit per token; `None` allows all.
    mask: Option<&'a [u32]>,
}

impl<'a> Allowed<'a> {
    /// The row's own mask where nothing else restricts it; otherwise `words` becomes the mask.
    pub(super) fn of(row: &SampleRow<'a>, words: &'a mut Vec<u32>) -> Allowed<'a> {
        let sampling = row.sampling;
        let ends: &[u32] = if row.generated < sampling.min_tokens { &sampling.end_tokens } else { &[] };
        let own = Allowed { mask: row.mask };
        if sampling.allowed_token_ids.is_none() && sampling.bad_words.is_empty() && ends.is_empty() {
            return own;
        }
        words.clear();
        let count = row.vocab.div_ceil(32) as usize;
        match (&sampling.allowed_token_ids, row.mask) {
            (Some(ids), _) => {
                words.resize(count, 0);
                for &id in ids.iter().filter(|id| own.contains(**id as usize)) {
                    words[id as usize / 32] |= 1 << (id % 32);
                }
            }
            (None, Some(mask)) => words.extend(mask.iter().take(count)),
            (None, None) => words.resize(count, u32::MAX),
        }
        let generated = row.generated_history();
        let completed = sampling.bad_words.iter().filter_map(|word| {
            let (last, before) = word.split_last()?;
            generated.ends_with(before).then_some(*last)
        });
        for id in completed.chain(ends.iter().copied()) {
            if let Some(word) = words.get_mut(id as usize / 32) {
                *word &= !(1 << (id % 32));
            }
        }
        Allowed { mask: Some(words) }
    }

    /// One bit per token; `None` allows all.
    pub(super) fn mask(self) -> Option<&'a [u32]> {
        self.mask
    }

    /// Whether nothing is forbidden.
    pub(super) fn is_everybody(self) -> bool {
        self.mask.is_none()
    }

    pub(super) fn contains(self, id: usize) -> bool {
        self.mask.is_none_or(|mask| mask.get(id / 32).is_some_and(|word| word >> (id % 32) & 1 == 1))
    }

    /// The allowed ids with their logits.
    pub(super) fn each(self, logits: &[f32]) -> impl Iterator<Item = (usize, f32)> {
        logits.iter().copied().enumerate().filter(move |(id, _)| self.contains(*id))
    }
}
