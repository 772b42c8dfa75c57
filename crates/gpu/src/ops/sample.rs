//! Choosing tokens.
//!
//! What most requests ask for is chosen on the device (`sample.cu`) and stays there for the next step: greedy choice,
//! temperature, top-k, top-p, min-p, penalties, bias, masks and lists of tokens. Rows that ask for more, or for the
//! likelihoods of several tokens, have their logits read back and given to the specification itself, so that there is one
//! meaning of each parameter.

use std::collections::HashMap;

use fornax_compute::{Change, Error, SampleRow, SampleScratch, sample, uniform};

use super::fits;
use crate::cuda::Cuda;
use crate::driver::Arg;
use crate::memory::{Buf, int};
use crate::program::Key;
use crate::step::{
    BINS_BYTES, CHANGES_MAX, Chosen, DeviceChange, DeviceRow, MASK_BYTES, Outcome, SCANS, Slot, VOCAB_MAX,
};

/// Threads of a block of `draw`, and its dynamic shared memory: twice the totals of as many bins, and two lists of keys.
const DRAW_THREADS: u32 = 1024;
const DRAW_SHARED: u32 = DRAW_THREADS * (2 * 20 + 2 * 8);

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
        let mut times = HashMap::new();
        for row in rows {
            row.check()?;
            below("sampled row", row.wanted as usize, slot.wanted)?;
            below("slot", row.slot as usize, slots)?;
            *times.entry(row.wanted).or_insert(0usize) += 1;
        }
        let earlier = slot.results.iter().filter(|outcome| matches!(outcome, Outcome::Device { .. })).count();
        let mut chosen = Vec::new();
        let mut scratch = SampleScratch::default();
        for row in rows {
            let index = earlier + chosen.len();
            // Logits are changed where they lie: whoever changes them is alone.
            let alone = times[&row.wanted] == 1 || !row.sampling.adjusts();
            let staged = match on_device(row, logits.columns) && alone && index < slots {
                true => self.staged(slot, index, row, &mut scratch),
                false => None,
            };
            let outcome = if let Some(staged) = staged {
                chosen.push(staged);
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
        if !chosen.is_empty() {
            self.choose(slot, logits, earlier, &chosen)?;
        }
        let mut has = self.has_sampled.borrow_mut();
        for row in rows.iter().filter(|row| row.given.is_none()) {
            has[row.slot as usize] = true;
        }
        slot.done.record()?;
        slot.behind.set(true);
        Ok(())
    }

    /// A row as the kernels take it; its mask and its changes are staged beside it. `None` where the changes find no room.
    fn staged(
        &self,
        slot: &mut Slot,
        index: usize,
        row: &SampleRow<'_>,
        scratch: &mut SampleScratch,
    ) -> Option<DeviceRow> {
        let sampling = row.sampling;
        let mut changes: Vec<DeviceChange> = Vec::new();
        row.changes(scratch, |token, change| changes.push(device_change(token, change)));
        if changes.len() > CHANGES_MAX - slot.changes {
            return None;
        }
        // Those of a token together, in their order.
        changes.sort_by_key(|change| change.token);
        let first = slot.changes;
        slot.changes += changes.len();
        let at = self.changes_at() + first * size_of::<DeviceChange>();
        let bytes: &[u8] = bytemuck::cast_slice(&changes);
        slot.staged_rows.bytes_mut()[at..][..bytes.len()].copy_from_slice(bytes);

        let mut words = Vec::new();
        let allowed = row.allowed(&mut words);
        let at = self.masks_at() + index * MASK_BYTES;
        if let Some(words) = allowed {
            let bytes: &[u8] = bytemuck::cast_slice(words);
            slot.staged_rows.bytes_mut()[at..][..bytes.len()].copy_from_slice(bytes);
        }
        let greedy = sampling.temperature == 0.0;
        Some(DeviceRow {
            wanted: row.wanted.cast_signed(),
            slot: row.slot.cast_signed(),
            vocab: row.vocab.cast_signed(),
            mask_words: allowed.map_or(0, |words| int(words.len())),
            mask: slot.rows.pointer() + at as u64,
            random: uniform(row.seed, row.position, 0),
            coldness: if greedy { 0.0 } else { 1.0 / f64::from(sampling.temperature) },
            top_p: f64::from(sampling.top_p),
            log_min_p: f64::from(sampling.min_p).ln(),
            top_k: i32::try_from(sampling.top_k).unwrap_or(i32::MAX),
            changes: [int(first), int(slot.changes)],
            pad: 0,
        })
    }

    /// Masks lie behind the rows, and changes behind them.
    fn masks_at(&self) -> usize {
        self.has_sampled.borrow().len() * size_of::<DeviceRow>()
    }

    fn changes_at(&self) -> usize {
        self.masks_at() + self.has_sampled.borrow().len() * MASK_BYTES
    }

    fn choose(&self, slot: &mut Slot, logits: &Buf, first: usize, rows: &[DeviceRow]) -> Result<(), Error> {
        let row_bytes = size_of::<DeviceRow>();
        let bytes: &[u8] = bytemuck::cast_slice(rows);
        slot.staged_rows.bytes_mut()[first * row_bytes..][..bytes.len()].copy_from_slice(bytes);
        let start = slot.rows.pointer();
        let send = |at: usize, bytes: usize| {
            self.device.write_pinned("sample", start + at as u64, &slot.staged_rows, at, bytes)
        };
        send(first * row_bytes, bytes.len())?;
        for (index, row) in rows.iter().enumerate().filter(|(_, row)| row.mask_words > 0) {
            send(
                self.masks_at() + (first + index) * MASK_BYTES,
                row.mask_words.cast_unsigned() as usize * 4,
            )?;
        }
        let change_bytes = size_of::<DeviceChange>();
        let changes_at = self.changes_at();
        let changed = rows.first().map_or(0, |row| row.changes[0]).cast_unsigned() as usize..slot.changes;
        send(changes_at + changed.start * change_bytes, changed.len() * change_bytes)?;

        let to = start + (first * row_bytes) as u64;
        let scans = slot.scans.pointer() + (first * SCANS * 20) as u64;
        let chosen = slot.chosen.pointer() + (first * size_of::<Chosen>()) as u64;
        let bins = self.bins.pointer() + (first * BINS_BYTES) as u64;
        let (logits, columns) = (Arg::Pointer(logits.pointer()), Arg::Int(int(logits.columns)));
        let [to, scans, chosen, bins, sampled, changes] =
            [to, scans, chosen, bins, self.sampled.pointer(), start + changes_at as u64].map(Arg::Pointer);
        let launch = |name, grid: [usize; 2], block, args: &[Arg<'_>]| {
            let function = self.programs.function(&Key::plain("sample.cu"), name)?;
            self.launch("sample", function, [grid[0], grid[1], 1], block, args)
        };
        let count = rows.len();
        if !changed.is_empty() {
            launch("adjust", [count, 1], (256, 0), &[logits, columns, to, changes])?;
        }
        launch("scan", [SCANS, count], (256, 0), &[logits, columns, to, scans])?;
        if rows.iter().any(|row| row.coldness > 0.0) {
            launch("weigh", [SCANS, count], (512, 0), &[logits, columns, to, scans, bins])?;
            let args = [logits, columns, to, scans, bins, sampled, chosen];
            launch("draw", [count, 1], (DRAW_THREADS, DRAW_SHARED), &args)?;
        } else {
            launch("choose", [count, 1], (32, 0), &[logits, columns, to, scans, sampled, chosen])?;
        }
        if !changed.is_empty() {
            launch("restore", [count, 1], (256, 0), &[logits, columns, to, changes])?;
        }
        let bytes = (first + count) * size_of::<Chosen>();
        self.device.read_pinned("sample", slot.chosen.pointer(), slot.staged_chosen.room().part(0, bytes))
    }
}

/// Whether the kernels know everything that a row asks for.
fn on_device(row: &SampleRow<'_>, columns: usize) -> bool {
    let s = row.sampling;
    !s.is_rare()
        && s.top_n_sigma == 0.0
        && row.given.is_none()
        && row.vocab as usize <= columns
        && row.vocab <= VOCAB_MAX
        // Log-probabilities are those of the logits before any change.
        && s.top_logprobs.is_none_or(|count| count == 0 && !s.adjusts())
        // A mask without words allows nothing; the kernels take it for none.
        && row.mask.is_none_or(|mask| !mask.is_empty() && mask.len() * 4 <= MASK_BYTES)
}

fn device_change(token: u32, change: Change) -> DeviceChange {
    let (kind, values) = match change {
        Change::Add(bias) => (0, [bias, 0.0]),
        Change::Repeat(penalty) => (1, [penalty, 0.0]),
        Change::Subtract(first, second) => (2, [first, second]),
    };
    DeviceChange { token, kind, before: [0; 2], values }
}
