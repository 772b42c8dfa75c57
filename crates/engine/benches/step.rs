//! What the engine itself costs per step: a runner that computes nothing, so that only scheduling, page tables and
//! events remain. `cargo bench -p fornax-engine --bench step`
#![expect(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use fornax_compute::{Batch, Error, KvGroup, KvKind, Output, SampleRow, Sampled, Sampling};
use fornax_engine::{Engine, EngineOptions, Event, QueueLimits, Reply, Request, Runner, StepLimits};

const CONTEXT: usize = 4096;

/// Computes nothing.
struct Null {
    groups: Vec<KvGroup>,
    limits: StepLimits,
    sampled: Vec<Sampled>,
}

impl Runner for Null {
    fn launch(&mut self, batch: &Batch) -> Result<(), Error> {
        black_box(batch);
        Ok(())
    }

    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<(), Error> {
        self.sampled = rows
            .iter()
            .map(|_| Sampled { token: 1, logprob: None, top: Vec::new(), mu: 0.0, fault: None })
            .collect();
        Ok(())
    }

    fn hidden(&mut self, wanted: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        Ok(vec![Vec::new(); wanted.len()])
    }

    fn collect(&mut self) -> Result<Output, Error> {
        Ok(Output { sampled: std::mem::take(&mut self.sampled) })
    }

    fn reset(&mut self) {}

    fn depth(&self) -> usize {
        0
    }

    fn limits(&self) -> StepLimits {
        self.limits
    }

    fn groups(&self) -> &[KvGroup] {
        &self.groups
    }

    fn vocab(&self) -> u32 {
        1000
    }
}

/// An engine in which `sequences` requests with 1,024-token prompts are decoding.
fn decoding(sequences: usize) -> (Engine, Vec<Reply>) {
    let null = Null {
        groups: vec![KvGroup {
            layers: 1,
            kind: KvKind::pairs(1, 1),
            window: None,
            pages: 1 + sequences * CONTEXT.div_ceil(fornax_compute::PAGE_TOKENS),
        }],
        limits: StepLimits { tokens_max: 1 << 20, wanted_max: sequences, slots: sequences },
        sampled: Vec::new(),
    };
    let queue = QueueLimits { requests_max: sequences, tokens_max: usize::MAX };
    let options = EngineOptions { queue, ..EngineOptions::new(CONTEXT, Arc::new(|| Duration::ZERO)) };
    let (mut engine, handle) = Engine::new(Box::new(null), options);
    let replies = (0..sequences)
        .flat_map(|own| {
            let own = u32::try_from(own).expect("few");
            let prompt = (0..1024).map(|token| (token + own) % 1000).collect();
            let request = Request::new(prompt, CONTEXT - 1024, Sampling::greedy());
            handle.submit(request).expect("room for all")
        })
        .collect();
    engine.turn();
    (engine, replies)
}

/// Turns of one measurement: what is left of the context after the prompt, all of them decoding.
const TURNS: usize = 2048;

/// Rows between two readings of the events, which other threads do in a server and which are not counted here.
const ROWS_READ: usize = 2048;

/// Tokens of a prompt that is there already, but for its last page.
const SHARED: usize = 10_240;

/// Microseconds from a submitted prompt of [`SHARED`] tokens, found in the prefix cache, to its first token.
fn prefix_hit() -> f64 {
    let pages = 2 + 2 * SHARED / fornax_compute::PAGE_TOKENS;
    let null = Null {
        groups: vec![KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages }],
        limits: StepLimits { tokens_max: 1 << 20, wanted_max: 1, slots: 1 },
        sampled: Vec::new(),
    };
    let options = EngineOptions::new(SHARED + 1, Arc::new(|| Duration::ZERO));
    let (mut engine, handle) = Engine::new(Box::new(null), options);
    let prompt: Vec<u32> = (0..SHARED).map(|token| (token * token % 997) as u32).collect();
    let mut ask = || {
        let request = Request::new(prompt.clone(), 1, Sampling::greedy());
        let began = Instant::now();
        let mut reply = handle.submit(request).expect("room").remove(0);
        engine.turn();
        let elapsed = began.elapsed();
        let events: Vec<Event> = std::iter::from_fn(|| reply.try_recv()).collect();
        let Some(Event::Started { cached_tokens, .. }) = events.first() else { panic!("{events:?}") };
        (*cached_tokens, elapsed.as_secs_f64() * 1e6)
    };
    assert_eq!(ask().0, 0);
    let hits: Vec<(usize, f64)> = (0..100).map(|_| ask()).collect();
    assert!(hits.iter().all(|(cached, _)| *cached == SHARED - fornax_compute::PAGE_TOKENS));
    hits.into_iter().map(|(_, micros)| micros).fold(f64::INFINITY, f64::min)
}

fn main() {
    println!("sequences  microseconds per step (best and median of 9 measurements of {TURNS} steps)");
    for sequences in [1, 64, 256, 512] {
        let mut micros: Vec<f64> = (0..9)
            .map(|_| {
                let (mut engine, mut replies) = decoding(sequences);
                let mut elapsed = Duration::ZERO;
                let turns = (ROWS_READ / sequences).min(TURNS / 4);
                for _ in 0..TURNS / turns {
                    let began = Instant::now();
                    for _ in 0..turns {
                        black_box(engine.turn());
                    }
                    elapsed += began.elapsed();
                    for reply in &mut replies {
                        while reply.try_recv().is_some() {}
                    }
                }
                elapsed.as_secs_f64() * 1e6 / TURNS as f64
            })
            .collect();
        micros.sort_by(f64::total_cmp);
        println!("{sequences:9}  {:.1}  {:.1}", micros[0], micros[micros.len() / 2]);
    }
    println!("a prompt of {SHARED} tokens found in the prefix cache: {:.1} microseconds", prefix_hit());
}
