//! Who may be chosen at all.

use std::iter::repeat;

use super::SampleRow;
use super::whole::STRETCH;

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

    pub(super) fn contains(self, id: usize) -> bool {
        self.mask.is_none_or(|mask| mask.get(id / 32).is_some_and(|word| word >> (id % 32) & 1 == 1))
    }

    /// The logits of a stretch of ids, `first` the first of them; negative infinity where it is not allowed. `room` is
    /// for a copy, where one is needed.
    pub(super) fn stretch<'b>(
        self,
        logits: &'b [f32],
        first: usize,
        room: &'b mut [f32; STRETCH],
    ) -> &'b [f32] {
        let logits = &logits[first..logits.len().min(first + STRETCH)];
        let Some(mask) = self.mask else { return logits };
        let words = mask.get(first / 32..).unwrap_or_default().iter().copied().chain(repeat(0));
        let room = &mut room[..logits.len()];
        for ((to, from), word) in room.chunks_mut(32).zip(logits.chunks(32)).zip(words) {
            for (bit, (to, &from)) in to.iter_mut().zip(from).enumerate() {
                *to = if word >> bit & 1 == 1 { from } else { f32::NEG_INFINITY };
            }
        }
        room
    }

    /// The allowed ids with their logits.
    pub(super) fn each(self, logits: &[f32]) -> impl Iterator<Item = (usize, f32)> {
        logits.iter().copied().enumerate().filter(move |(id, _)| self.contains(*id))
    }
}
