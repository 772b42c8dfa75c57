//! What choosing a token costs: `cargo bench -p fornax-compute --bench sample`.

#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::{hint::black_box, time::Instant};

use fornax_compute::{SampleRow, SampleScratch, Sampling, SplitMix64, sample};

/// How wide logits spread: a flat distribution, and one in which few tokens have most of the weight.
const SPREADS: [(&str, f32); 2] = [("flat", 0.1), ("peaked", 3.0)];

fn main() {
    let plain = || Sampling { temperature: 1.0, ..Sampling::default() };
    let ways = [
        ("greedy", Sampling::greedy()),
        ("temperature 1", plain()),
        ("top-k 40", Sampling { top_k: 40, ..plain() }),
        ("top-p 0.95", Sampling { top_p: 0.95, ..plain() }),
        ("min-p 0.05", Sampling { min_p: 0.05, ..plain() }),
        ("typical 0.9", Sampling { typical_p: 0.9, ..plain() }),
        ("20 log-probabilities", Sampling { top_logprobs: Some(20), ..Sampling::greedy() }),
    ];
    println!("{:>7} {:<7} {:<21} {:>8}", "vocab", "logits", "sampling", "us");
    for vocab in [49_152, 151_936] {
        for (name, spread) in SPREADS {
            let logits = logits(vocab as usize, spread);
            for (way, sampling) in &ways {
                println!("{vocab:>7} {name:<7} {way:<21} {:>8.1}", micros(&logits, vocab, sampling));
            }
        }
    }
}

/// Sums of uniform numbers: nearly a normal distribution.
fn logits(vocab: usize, spread: f32) -> Vec<f32> {
    let mut random = SplitMix64(7);
    let mut uniform = || random.below(1 << 20) as f32 / (1 << 20) as f32 - 0.5;
    (0..vocab).map(|_| (0..12).map(|_| uniform()).sum::<f32>() * spread).collect()
}

/// The median of some draws at different positions.
fn micros(logits: &[f32], vocab: u32, sampling: &Sampling) -> f64 {
    let mut scratch = SampleScratch::default();
    let mut times: Vec<f64> = (0..101)
        .map(|position| {
            let row = SampleRow { position, seed: 5, ..SampleRow::plain(vocab, sampling) };
            let began = Instant::now();
            black_box(sample(black_box(logits), &row, &mut scratch));
            began.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
