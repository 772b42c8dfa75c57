//! Choosing tokens.
//!
//! Greedy rows, with or without a grammar mask, are chosen on the device and stay there for the next step. Every other
//! row's logits are read back and given to the specification itself, so that there is one meaning of each parameter.

use fornax_compute::{Error, SampleRow, SampleScratch, sample};

use super::fits;
use crate::cuda::Cuda;
use crate::driver::Arg;
use crate::memory::{Buf, int};
use crate::program::Key;
use crate::step::{Chosen, GreedyRow, MASK_BYTES, Outcome, SCANS, Slot};

impl Cuda {
    pub(crate) fn op_sample(
        &self,
        slot: &mut Slot,
        logits: &Buf,
        rows: &[SampleRow<'_>],
    ) -> Result<(), Error> {
        fits("sample", "logits", logits, (slot.wanted, logits.columns))?;
        let slots = self.has_sampled.borrow().len();
        let below = |what, got: usize, count: usize| match got < count {
            true => Ok(()),
            false => Err(Error::BatchLimit { what, got, limit: count.saturating_sub(1) }),
        };
        for row in rows {
            row.check()?;
            below("sampled row", row.wanted as usize, slot.wanted)?;
            below("slot", row.slot as usize, slots)?;
        }
        let earlier = slot.results.iter().filter(|outcome| matches!(outcome, Outcome::Device { .. })).count();
        let mut greedy = Vec::new();
        let mut scratch = SampleScratch::default();
        for row in rows {
            let index = earlier + greedy.len();
            let outcome = if on_device(row, logits.columns) && index < slots {
                greedy.push(self.staged(slot, index, row));
                let logprob = row.sampling.top_logprobs.is_some();
                Outcome::Device { index, logprob, mu: row.mirostat_mu }
            } else {
                let mut values = vec![0f32; logits.columns];
                let from = logits.pointer() + (row.wanted as usize * logits.columns * 4) as u64;
                self.device.read("sample", from, bytemuck::cast_slice_mut(&mut values))?;
                let sampled = sample(&values, row, &mut scratch);
                if row.given.is_none() {
                    let to = self.sampled.pointer() + u64::from(row.slot) * 4;
                    self.device.write("sample", to, &sampled.token.to_le_bytes())?;
                }
                Outcome::Known(sampled)
            };
            slot.results.push(outcome);
        }
        if !greedy.is_empty() {
            self.choose(slot, logits, earlier, &greedy)?;
        }
        let mut has = self.has_sampled.borrow_mut();
        for row in rows.iter().filter(|row| row.given.is_none()) {
            has[row.slot as usize] = true;
        }
        slot.done.record()
    }

    /// A row as the kernel takes it; its mask is staged beside it.
    fn staged(&self, slot: &mut Slot, index: usize, row: &SampleRow<'_>) -> GreedyRow {
        let mut mask = 0;
        if let Some(words) = row.mask {
            let at = self.masks_at() + index * MASK_BYTES;
            let bytes: &[u8] = bytemuck::cast_slice(words);
            slot.staged_greedy.bytes_mut()[at..][..bytes.len()].copy_from_slice(bytes);
            mask = slot.greedy.pointer() + at as u64;
        }
        GreedyRow {
            wanted: row.wanted.cast_signed(),
            slot: row.slot.cast_signed(),
            vocab: row.vocab.cast_signed(),
            // A mask without words allows nothing: one word of zeros says the same.
            mask_words: row.mask.map_or(0, |words| int(words.len())),
            mask,
        }
    }

    /// Masks lie behind the rows.
    fn masks_at(&self) -> usize {
        self.has_sampled.borrow().len() * size_of::<GreedyRow>()
    }

    fn choose(&self, slot: &mut Slot, logits: &Buf, first: usize, rows: &[GreedyRow]) -> Result<(), Error> {
        let row_bytes = size_of::<GreedyRow>();
        let bytes: &[u8] = bytemuck::cast_slice(rows);
        slot.staged_greedy.bytes_mut()[first * row_bytes..][..bytes.len()].copy_from_slice(bytes);
        let to = slot.greedy.pointer() + (first * row_bytes) as u64;
        self.device.write_pinned("sample", to, &slot.staged_greedy, first * row_bytes, bytes.len())?;
        for (index, row) in rows.iter().enumerate().filter(|(_, row)| row.mask_words > 0) {
            let at = self.masks_at() + (first + index) * MASK_BYTES;
            let bytes = row.mask_words.cast_unsigned() as usize * 4;
            self.device.write_pinned("sample", row.mask, &slot.staged_greedy, at, bytes)?;
        }
        let scans = slot.scans.pointer() + (first * SCANS * 20) as u64;
        let chosen = slot.chosen.pointer() + (first * size_of::<Chosen>()) as u64;
        let key = Key::plain("sample.cu");
        let args = [
            Arg::Pointer(logits.pointer()),
            Arg::Int(int(logits.columns)),
            Arg::Pointer(to),
            Arg::Pointer(scans),
        ];
        self.launch(
            "sample",
            self.programs.function(&key, "scan")?,
            [SCANS, rows.len(), 1],
            (256, 0),
            &args,
        )?;
        let args = [
            Arg::Pointer(logits.pointer()),
            Arg::Int(int(logits.columns)),
            Arg::Pointer(to),
            Arg::Pointer(scans),
            Arg::Pointer(self.sampled.pointer()),
            Arg::Pointer(chosen),
        ];
        self.launch("sample", self.programs.function(&key, "choose")?, [rows.len(), 1, 1], (32, 0), &args)?;
        let bytes = (first + rows.len()) * size_of::<Chosen>();
        self.device.read_pinned("sample", slot.chosen.pointer(), &slot.staged_chosen, bytes)
    }
}

/// Whether the kernel knows everything that a row asks for.
fn on_device(row: &SampleRow<'_>, columns: usize) -> bool {
    let s = row.sampling;
    let waits = row.generated < s.min_tokens && !s.end_tokens.is_empty();
    s.temperature == 0.0
        && row.given.is_none()
        && row.vocab as usize <= columns
        && s.logit_bias.is_empty()
        && (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.0, 0.0, 0.0)
        && s.dry_multiplier == 0.0
        && s.allowed_token_ids.is_none()
        && s.bad_words.is_empty()
        && !waits
        && s.top_logprobs.unwrap_or(0) == 0
        && row.mask.is_none_or(|mask| !mask.is_empty() && mask.len() * 4 <= MASK_BYTES)
}
