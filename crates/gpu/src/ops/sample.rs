//! Choosing tokens.
//!
//! What most requests ask for is chosen on the device (`sample.cu`) and stays there for the next step: greedy choice,
//! temperature, top-k, top-p, min-p, penalties, bias, masks and lists of tokens. Rows that ask for more, or for the
//! likelihoods of several tokens, have their logits read back and given to the specification itself, so that there is
//! one meaning of each parameter.

use fornax_compute::{
    Change, Error, SampleRow, SampleScratch, Sampled, halvings, operands, random_bits, sample,
};

use crate::abi::Constant;
use crate::cuda::Cuda;
use crate::driver::Arg;
use crate::grid::Grid;
use crate::memory::{Buf, int};
use crate::program::Key;
use crate::step::{
    BINS_BYTES, CHANGES_MAX, Chosen, DeviceChange, DeviceRow, MASK_BYTES, Outcome, STRETCHES_BYTES, Slot,
    VOCAB_MAX,
};

/// Tokens of a stretch, and threads of a block that holds one.
const STRETCH: u32 = 4096;
const STRETCH_THREADS: usize = 256;
/// Threads of a block of `cut`, and its dynamic shared memory: totals of as many bins twice, and a list of keys.
const CUT_THREADS: usize = 1024;
const CUT_SHARED: usize = CUT_THREADS * (2 * 12 + 4 * 8);
/// Threads of a block that changes a row's logits.
const CHANGE_THREADS: usize = 256;
/// Blocks that fill the device when bins are added up; each block costs the time of adding its bins to the row's.
const WEIGHING: usize = 1056;

pub(super) const CONSTANTS: &[Constant] = &[
    Constant::new("sample.cu", "STRETCH", STRETCH as usize),
    Constant::new("sample.cu", "THREADS", STRETCH_THREADS),
    Constant::new("sample.cu", "BINS", CUT_THREADS),
    Constant::new("sample.cu", "LISTED", 4 * CUT_THREADS),
];

impl Cuda {
    pub(crate) fn op_sample(
        &self,
        slot: &mut Slot,
        logits: &Buf,
        rows: &[SampleRow<'_>],
    ) -> Result<(), Error> {
        operands::fits("sample", "logits", logits, (slot.wanted, logits.columns))?;
        let slots = self.has_sampled.borrow().len();
        let below = |what, got: usize, count: usize| match got < count {
            true => Ok(()),
            false => Err(Error::BatchLimit { what, got, limit: count.saturating_sub(1) }),
        };
        // How often each row of logits is used.
        let mut times = vec![0u32; slot.wanted];
        for row in rows {
            row.check()?;
            below("sampled row", row.wanted as usize, slot.wanted)?;
            below("slot", row.slot as usize, slots)?;
            times[row.wanted as usize] += 1;
        }
        let earlier = slot.results.iter().filter(|outcome| matches!(outcome, Outcome::Device { .. })).count();
        let first_mask = slot.mask_words;
        let mut chosen = Vec::with_capacity(rows.len());
        let mut scratch = SampleScratch::default();
        for row in rows {
            let index = earlier + chosen.len();
            // Logits are changed in place, so a row that changes them must be their only user.
            let alone = !row.sampling.adjusts() || times[row.wanted as usize] == 1;
            let staged = match on_device(row, logits.columns) && alone && index < slots {
                true => self.staged(slot, row, &mut scratch),
                false => None,
            };
            let outcome = if let Some(staged) = staged {
                chosen.push(staged);
                let logprob = row.sampling.top_logprobs.is_some();
                Outcome::Device { index, logprob, mu: row.mirostat_mu }
            } else {
                Outcome::Known(self.sample_on_host(logits, row, &mut scratch)?)
            };
            slot.results.push(outcome);
        }
        if !chosen.is_empty() {
            self.choose(slot, logits, earlier, first_mask, &chosen)?;
        }
        let mut has = self.has_sampled.borrow_mut();
        for row in rows.iter().filter(|row| row.given.is_none()) {
            has[row.slot as usize] = true;
        }
        slot.done.record()?;
        slot.behind.set(true);
        Ok(())
    }

    /// Reads a row's logits, and tells the device which token was chosen.
    fn sample_on_host(
        &self,
        logits: &Buf,
        row: &SampleRow<'_>,
        scratch: &mut SampleScratch,
    ) -> Result<Sampled, Error> {
        let mut values = vec![0f32; logits.columns];
        let from = logits.pointer() + (row.wanted as usize * logits.columns * 4) as u64;
        self.device.read("sample", from, bytemuck::cast_slice_mut(&mut values))?;
        let sampled = sample(&values, row, scratch);
        if row.given.is_none() {
            let to = self.sampled.pointer() + u64::from(row.slot) * 4;
            self.device.write("sample", to, &sampled.token.to_le_bytes())?;
        }
        Ok(sampled)
    }

    /// A row as the kernels take it; its mask and its changes are staged beside it. `None` where there is no room for
    /// the changes.
    fn staged(&self, slot: &mut Slot, row: &SampleRow<'_>, scratch: &mut SampleScratch) -> Option<DeviceRow> {
        let sampling = row.sampling;
        let mut changes: Vec<DeviceChange> = Vec::new();
        row.changes(scratch, |token, change| changes.push(device_change(token, change)));
        if changes.len() > CHANGES_MAX - slot.changes {
            return None;
        }
        // The changes of one token together, in their order.
        changes.sort_by_key(|change| change.token);
        let first = slot.changes;
        slot.changes += changes.len();
        let at = self.changes_at() + first * size_of::<DeviceChange>();
        let bytes: &[u8] = bytemuck::cast_slice(&changes);
        slot.staged_rows.bytes_mut()[at..][..bytes.len()].copy_from_slice(bytes);

        let mut words = Vec::new();
        let allowed = row.allowed(&mut words);
        let at = self.masks_at() + slot.mask_words * 4;
        if let Some(words) = allowed {
            let bytes: &[u8] = bytemuck::cast_slice(words);
            slot.staged_rows.bytes_mut()[at..][..bytes.len()].copy_from_slice(bytes);
            slot.mask_words += words.len();
        }
        let greedy = sampling.temperature == 0.0;
        Some(DeviceRow {
            wanted: row.wanted.cast_signed(),
            slot: row.slot.cast_signed(),
            vocab: row.vocab.cast_signed(),
            mask_words: allowed.map_or(0, |words| int(words.len())),
            mask: slot.rows.pointer() + at as u64,
            random: random_bits(row.seed, row.position, 0),
            top_p: f64::from(sampling.top_p),
            log_min_p: f64::from(sampling.min_p).ln(),
            halvings: if greedy { 0.0 } else { halvings(f64::from(sampling.temperature)) },
            top_k: i32::try_from(sampling.top_k).unwrap_or(i32::MAX),
            changes: [int(first), int(slot.changes)],
            logprob: i32::from(sampling.top_logprobs.is_some()),
            pad: 0,
        })
    }

    /// Masks come after the rows, and changes after the masks.
    fn masks_at(&self) -> usize {
        self.has_sampled.borrow().len() * size_of::<DeviceRow>()
    }

    fn changes_at(&self) -> usize {
        self.masks_at() + self.has_sampled.borrow().len() * MASK_BYTES
    }

    /// Chooses the tokens of rows that follow those of earlier calls for the step: `first` is how many rows and words
    /// of masks there were before.
    fn choose(
        &self,
        slot: &mut Slot,
        logits: &Buf,
        first: usize,
        first_mask: usize,
        rows: &[DeviceRow],
    ) -> Result<(), Error> {
        let row_bytes = size_of::<DeviceRow>();
        let bytes: &[u8] = bytemuck::cast_slice(rows);
        slot.staged_rows.bytes_mut()[first * row_bytes..][..bytes.len()].copy_from_slice(bytes);
        let start = slot.rows.pointer();
        let send = |at: usize, bytes: usize| match bytes {
            0 => Ok(()),
            _ => {
                self.device.write_pinned("sample", start + at as u64, slot.staged_rows.room().part(at, bytes))
            }
        };
        send(first * row_bytes, bytes.len())?;
        send(self.masks_at() + first_mask * 4, (slot.mask_words - first_mask) * 4)?;
        let change_bytes = size_of::<DeviceChange>();
        let changes_at = self.changes_at();
        let changed = rows.first().map_or(0, |row| row.changes[0]).cast_unsigned() as usize..slot.changes;
        send(changes_at + changed.start * change_bytes, changed.len() * change_bytes)?;

        let to = start + (first * row_bytes) as u64;
        let stretches = slot.stretches.pointer() + (first * STRETCHES_BYTES) as u64;
        let chosen = slot.chosen.pointer() + (first * size_of::<Chosen>()) as u64;
        let bins = self.bins.pointer() + (first * BINS_BYTES) as u64;
        let logits_buf = logits;
        let (logits, columns) = (Arg::Pointer(logits.pointer()), Arg::Int(int(logits.columns)));
        let [to, stretches, chosen, bins, sampled, changes] =
            [to, stretches, chosen, bins, self.sampled.pointer(), start + changes_at as u64]
                .map(Arg::Pointer);
        let launch = |name, grid: Grid, args: &[Arg<'_>]| {
            let function = self.programs.function(&program(["weigh", "cut"].contains(&name)), name)?;
            self.launch("sample", function, grid, args)
        };
        let count = rows.len();
        let longest = rows.iter().map(|row| row.vocab.cast_unsigned()).max().unwrap_or(0);
        let every = longest.div_ceil(STRETCH) as usize;
        let changing = Grid::new([count, 1, 1], CHANGE_THREADS);
        let stretched = |blocks| Grid::new([blocks, count, 1], STRETCH_THREADS);
        let drawn = |row: &&DeviceRow| row.halvings > 0.0;
        let is_cut = |row: &DeviceRow| row.top_k > 0 || row.top_p < 1.0;
        // Logits are changed in place, and changed back.
        self.op(slot, &[logits_buf], &[logits_buf], || {
            if !changed.is_empty() {
                launch("adjust", changing, &[logits, columns, to, changes])?;
            }
            launch("scan", stretched(every), &[logits, columns, to, stretches])?;
            let args = [logits, columns, to, stretches, bins];
            if rows.iter().filter(drawn).any(is_cut) {
                let blocks = (WEIGHING / count).clamp(8.min(every), every);
                launch("weigh", stretched(blocks), &args)?;
                let cut = Grid::new([count, 1, 1], CUT_THREADS).with_shared(CUT_SHARED);
                launch("cut", cut, &args)?;
            }
            if rows.iter().filter(drawn).any(|row| is_cut(row) || row.log_min_p > f64::NEG_INFINITY) {
                launch("keep", stretched(every), &args)?;
            }
            let args = [logits, columns, to, stretches, bins, sampled, chosen];
            launch("draw", Grid::new([count, 1, 1], STRETCH_THREADS), &args)?;
            if !changed.is_empty() {
                launch("restore", changing, &[logits, columns, to, changes])?;
            }
            Ok(())
        })
    }
}

/// The program of the kernels that find where rows are cut, or that of the others.
pub(crate) fn program(cuts: bool) -> Key {
    Key { unit: "sample.cu", defines: vec![format!("CUTS={}", i32::from(cuts))] }
}

/// Whether the kernels support everything that a row asks for.
fn on_device(row: &SampleRow<'_>, columns: usize) -> bool {
    let s = row.sampling;
    !s.is_rare()
        && s.top_n_sigma == 0.0
        && row.given.is_none()
        && row.vocab as usize <= columns
        && row.vocab <= VOCAB_MAX
        // Log-probabilities are those before any change of the logits.
        && s.top_logprobs.is_none_or(|count| count == 0 && !s.adjusts())
        // A mask without words allows nothing, but the kernels take it for no mask.
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
