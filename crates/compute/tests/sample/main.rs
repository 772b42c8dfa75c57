//! Sampling against a second implementation (`make_vectors.py`), against exact distributions, and at its edges.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod edges;
mod neutral;
mod parameters;
mod vectors;

use fornax_compute::{SampleRow, SampleScratch, Sampled, Sampling, sample};

/// A row without history or mask.
fn row(vocab: usize, sampling: &Sampling) -> SampleRow<'_> {
    SampleRow::plain(vocab.try_into().unwrap(), sampling)
}

fn once(logits: &[f32], row: &SampleRow<'_>) -> Sampled {
    sample(logits, row, &mut SampleScratch::default())
}

/// What many positions draw.
fn drawn(logits: &[f32], row: &SampleRow<'_>, positions: u32) -> Vec<u32> {
    let mut scratch = SampleScratch::default();
    (0..positions)
        .map(|position| {
            let got = sample(logits, &SampleRow { position, ..row.clone() }, &mut scratch);
            assert_eq!(got.fault, None, "{row:?}");
            got.token
        })
        .collect()
}
