//! How fast a model file runs on the CPU, as one line of JSON for each number of threads: what `cargo xtask bench-peers`
//! puts beside another engine.
//!
//! `cargo run --release -p fornax-model --example speed -- MODEL THREADS,... [SIMD] [times]`
//!
//! Prefill: a prompt of 512 tokens in one step. Decode: 64 greedy tokens behind a prompt of 32. Streams: eight
//! sequences, 32 greedy tokens each, behind prompts of 32. Each once, after a warm-up: whoever compares takes turns and
//! medians. The model is loaded once, for the most threads.
//!
//! With `times` each figure is followed by where its time went, a line for each operation: what a step spends in it, in
//! how many regions that threads share, what of it the caller computed there, and what it then waited for the others.
//! What is in none of them is computed by the caller alone.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark prints, and stops at what goes wrong"
)]

use std::path::Path;
use std::time::{Duration, Instant};

use fornax_compute::cpu::{Cpu, CpuOptions, Simd};
use fornax_compute::{
    Backend, Batch, KvDType, KvGroup, KvSpec, Memory, PAGE_TOKENS, PageId, Row, RowState, SampleRow,
    Sampling, Token,
};
use fornax_format::Checkpoint;
use fornax_model::{Config, Limits, Model, load};

const CONTEXT: usize = 1024;
const STREAMS: usize = 8;

struct Rig {
    backend: Cpu,
    model: Box<dyn Model<Cpu>>,
    kv: fornax_compute::cpu::Kv,
    groups: Vec<KvGroup>,
    vocab: u32,
}

impl Rig {
    /// Computes `tokens` of the first sequences, each at position `start`, and samples greedily if wanted.
    fn step(&mut self, start: usize, tokens: &[Vec<Token>], wanted: bool) {
        let mut batch = Batch::default();
        for (slot, tokens) in tokens.iter().enumerate() {
            let pages = CONTEXT / PAGE_TOKENS;
            let table =
                |_: &KvGroup| (0..pages).map(|page| PageId((1 + slot * pages + page) as u32)).collect();
            let (states, paged): (Vec<_>, Vec<_>) =
                self.groups.iter().partition(|group| group.kind.is_state());
            let row = Row {
                slot: slot as u32,
                start: start as u32,
                len: tokens.len() as u32,
                pages: paged.into_iter().map(table).collect(),
                wanted: wanted.into(),
            };
            batch.push(row, tokens.iter().copied());
            let own = PageId(1 + slot as u32);
            let state = RowState { from: (start > 0).then_some(own), to: own, saves: Vec::new() };
            if !states.is_empty() {
                batch.states.push(vec![state; states.len()]);
            }
        }
        let mut step = self.backend.begin(&batch).unwrap();
        self.model.forward(&self.backend, &mut self.kv, &step).unwrap();
        let sampling = Sampling::greedy();
        let plain = SampleRow::plain(self.vocab, &sampling);
        let row = |slot| SampleRow { wanted: slot, slot, position: 1, ..plain.clone() };
        if wanted {
            let rows: Vec<_> = (0..tokens.len() as u32).map(row).collect();
            self.backend.sample(&mut step, self.model.logits(), &rows).unwrap();
        }
        self.backend.finish(step).unwrap();
    }

    fn prompt(&mut self, streams: usize, tokens: usize) {
        let prompt: Vec<_> = (0..tokens as u32).map(|i| Token::Known(i * 7919 % 32000)).collect();
        self.step(0, &vec![prompt; streams], true);
    }

    /// Tokens per second of all streams together.
    fn decode(&mut self, streams: usize, tokens: usize) -> f64 {
        self.prompt(streams, 32);
        let start = Instant::now();
        self.decode_behind(streams, tokens);
        (streams * tokens) as f64 / start.elapsed().as_secs_f64()
    }

    /// Behind prompts of 32.
    fn decode_behind(&mut self, streams: usize, tokens: usize) {
        for token in 0..tokens {
            let sampled: Vec<_> = (0..streams as u32).map(|slot| vec![Token::Sampled(slot)]).collect();
            self.step(32 + token, &sampled, true);
        }
    }
}

/// Runs it with every operation timed and prints what they took, a step.
fn with_times(rig: &mut Rig, what: &str, steps: usize, run: impl Fn(&mut Rig)) {
    rig.backend.start_times();
    let start = Instant::now();
    run(rig);
    let all = start.elapsed();
    let us = |time: Duration| time.as_secs_f64() * 1e6 / steps as f64;
    println!("{what}, us a step on {} threads: {:.1}", rig.backend.threads_for_few(), us(all));
    let mut times = rig.backend.times();
    times.sort_by_key(|(_, time)| std::cmp::Reverse(time.all));
    let between = all.saturating_sub(times.iter().map(|(_, time)| time.all).sum());
    for (name, time) in times {
        println!(
            "  {name:<16} {:>9.1} in {:>6.1} calls, {:>6.1} regions: computed {:>9.1}, waited {:>8.1}, alone {:>8.1}",
            us(time.all),
            time.calls as f64 / steps as f64,
            time.regions as f64 / steps as f64,
            us(time.shared),
            us(time.waited),
            us(time.all.saturating_sub(time.shared + time.waited))
        );
    }
    println!("  {:<16} {:>9.1}", "between them", us(between));
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let threads: Vec<usize> = arguments[2].split(',').map(|count| count.parse().unwrap()).collect();
    let (mut simd, mut timed) = (Simd::detect(), false);
    for argument in &arguments[3..] {
        match Simd::present().find(|simd| simd.name() == *argument) {
            Some(named) => simd = named,
            None if argument == "times" => timed = true,
            None => panic!("{argument} is no instruction set of this machine"),
        }
    }
    let start = Instant::now();
    let checkpoint = Checkpoint::open(Path::new(&arguments[1])).unwrap();
    let config = Config::read(&checkpoint).unwrap();
    let most = threads.iter().copied().max().unwrap();
    let options =
        CpuOptions { threads: most, simd, tokens_max: 512, slots: STREAMS, ..CpuOptions::default() };
    let backend = Cpu::new(options).unwrap();
    let limits = Limits { tokens_max: 512, wanted_max: STREAMS };
    let model = load(&checkpoint, &config, &backend, limits, &mut |_, _| {}).unwrap();
    let mut groups = config.kv_groups(1 + STREAMS * CONTEXT / PAGE_TOKENS);
    // A sequence has one state, however long it is.
    let states = groups.iter_mut().filter(|group| group.kind.is_state());
    states.for_each(|group| group.pages = 1 + STREAMS);
    let kv = backend.alloc_kv(&KvSpec { groups: groups.clone(), dtype: KvDType::F16 }).unwrap();
    let load = start.elapsed().as_secs_f64();
    let mut rig = Rig { backend, model, kv, groups, vocab: config.vocab as u32 };

    for threads in threads {
        rig.backend.use_threads(threads);
        // Weights and caches are touched before anything counts.
        rig.decode(1, 8);
        let start = Instant::now();
        rig.prompt(1, 512);
        let prefill = 512.0 / start.elapsed().as_secs_f64();
        let (decode, streams) = (rig.decode(1, 64), rig.decode(STREAMS, 32));
        println!(
            "{{\"threads\": {threads}, \"load_s\": {load:.3}, \"prefill\": {prefill:.1}, \"decode\": {decode:.1}, \
             \"streams\": {streams:.1}, \"resident_mib\": {:.1}, \"simd\": \"{}\"}}",
            resident_kilobytes() / 1024.0,
            simd.name()
        );
        if timed {
            with_times(&mut rig, "a prompt of 512", 1, |rig| rig.prompt(1, 512));
            rig.prompt(1, 32);
            with_times(&mut rig, "decode", 64, |rig| rig.decode_behind(1, 64));
            rig.prompt(STREAMS, 32);
            with_times(&mut rig, "8 streams", 32, |rig| rig.decode_behind(STREAMS, 32));
        }
    }
}

fn resident_kilobytes() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(f64::NAN)
}
