//! The order of a device's work: the next step is launched before the last one's tokens are read, prompts and streams
//! share steps, and nobody's reading is waited for.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fornax_compute::{Batch, Error, KvGroup, KvKind, Output, SampleRow, Sampling};
use fornax_engine::fake::{Fake, FakeOptions};
use fornax_engine::{
    Engine, EngineOptions, Event, Handle, QueueLimits, Request, Runner, Speculation, StepLimits, Turn,
};

/// What a runner was asked for, in order. Steps are numbered as they are launched.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Call {
    /// The lengths of its rows.
    Launch(usize, Vec<u32>),
    Sample(usize),
    Collect(usize),
}

/// A fake that remembers, and whose steps take a time.
struct Watched {
    fake: Fake,
    calls: Rc<RefCell<Vec<Call>>>,
    launched: usize,
    collected: usize,
    clock: Arc<AtomicU64>,
    /// Microseconds of a step and of each of its tokens; the device is busy until `free`.
    cost: (u64, u64),
    free: Rc<Cell<u64>>,
    ends: Vec<u64>,
}

impl Runner for Watched {
    fn launch(&mut self, batch: &Batch) -> Result<(), Error> {
        let rows = batch.rows.iter().map(|row| row.len).collect();
        self.calls.borrow_mut().push(Call::Launch(self.launched, rows));
        self.launched += 1;
        let begins = self.free.get().max(self.clock.load(Ordering::Relaxed));
        self.free.set(begins + self.cost.0 + self.cost.1 * batch.tokens.len() as u64);
        self.ends.push(self.free.get());
        self.fake.launch(batch)
    }

    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<(), Error> {
        self.calls.borrow_mut().push(Call::Sample(self.launched - 1));
        self.fake.sample(rows)
    }

    fn hidden(&mut self, wanted: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        self.fake.hidden(wanted)
    }

    fn collect(&mut self) -> Result<Output, Error> {
        self.calls.borrow_mut().push(Call::Collect(self.collected));
        self.clock.fetch_max(self.ends[self.collected], Ordering::Relaxed);
        self.collected += 1;
        self.fake.collect()
    }

    fn reset(&mut self) {
        self.fake.reset();
    }

    fn depth(&self) -> usize {
        self.fake.depth()
    }

    fn limits(&self) -> StepLimits {
        self.fake.limits()
    }

    fn groups(&self) -> &[KvGroup] {
        self.fake.groups()
    }

    fn vocab(&self) -> u32 {
        self.fake.vocab()
    }
}

/// An engine over a device whose steps take so many microseconds, and for each token so many more.
fn engine(cost: (u64, u64), tokens_max: usize) -> (Engine, Handle, Rc<RefCell<Vec<Call>>>) {
    let fake = Fake::new(FakeOptions {
        groups: vec![KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 2000 }],
        limits: StepLimits { tokens_max, wanted_max: 300, slots: 256 },
        depth: 1,
        vocab: 50,
        faults: Box::new(|| None),
    });
    let (calls, clock) = (Rc::new(RefCell::default()), Arc::new(AtomicU64::new(1)));
    let watched = Watched {
        fake,
        calls: Rc::clone(&calls),
        launched: 0,
        collected: 0,
        clock: Arc::clone(&clock),
        cost,
        free: Rc::default(),
        ends: Vec::new(),
    };
    let options = EngineOptions {
        queue: QueueLimits { requests_max: 300, tokens_max: 1 << 20 },
        speculation: Speculation::Off,
        ..EngineOptions::new(8000, Arc::new(move || Duration::from_micros(clock.load(Ordering::Relaxed))))
    };
    let (engine, handle) = Engine::new(Box::new(watched), options);
    (engine, handle, calls)
}

/// Prompts of different lengths have nothing in common.
fn request(prompt: usize, tokens: usize) -> Request {
    let prompt = (0..prompt).map(|at| ((at * 7 + prompt / 1000) % 50) as u32).collect();
    Request::new(prompt, tokens, Sampling::greedy())
}

#[test]
fn the_next_step_is_launched_before_the_last_ones_tokens_are_read() {
    let (mut engine, handle, calls) = engine((1000, 1), 512);
    let mut reply = handle.submit(request(3, 4)).unwrap().remove(0);
    let mut told = Vec::new();
    let mut turn = Turn::Worked;
    while turn == Turn::Worked {
        turn = engine.turn();
        let tokens =
            std::iter::from_fn(|| reply.try_recv()).filter(|event| matches!(event, Event::Token { .. }));
        told.push((tokens.count(), calls.borrow().len()));
    }
    let launch = |step, rows: &[u32]| Call::Launch(step, rows.to_vec());
    let wanted = [
        launch(0, &[3]),
        Call::Sample(0),
        launch(1, &[1]),
        Call::Collect(0),
        Call::Sample(1),
        launch(2, &[1]),
        Call::Collect(1),
        Call::Sample(2),
        launch(3, &[1]),
        Call::Collect(2),
        Call::Sample(3),
        Call::Collect(3),
    ];
    assert_eq!(*calls.borrow(), wanted);
    // Each token is told in the turn that reads it, when the step after it is under way.
    assert_eq!(told.iter().map(|(tokens, _)| tokens).sum::<usize>(), 4, "{told:?}");
    assert_eq!(told[1], (1, 5), "{told:?}");
}

#[test]
fn a_prompt_shares_its_steps_with_streams_and_makes_none_of_them_wait() {
    // 4 ms for a step and 25 us for a token: a prompt of 6000 alone would have steps of 2048.
    let (mut engine, handle, calls) = engine((4000, 25), 2048);
    let streams: Vec<_> = (0..20).flat_map(|_| handle.submit(request(5, 400)).unwrap()).collect();
    let lone = handle.submit(request(5000, 1)).unwrap();
    for _ in 0..20 {
        engine.turn();
    }
    let long = handle.submit(request(6000, 2)).unwrap();
    let before = calls.borrow().len();
    for _ in 0..12 {
        engine.turn();
    }
    let calls = calls.borrow();
    let steps: Vec<&Vec<u32>> = calls[before..]
        .iter()
        .filter_map(|call| match call {
            Call::Launch(_, rows) => Some(rows),
            _ => None,
        })
        .collect();
    let chunks: Vec<u32> =
        steps.iter().filter_map(|rows| rows.iter().copied().max().filter(|&len| len > 1)).collect();
    assert_eq!(chunks.iter().sum::<u32>(), 6000, "{chunks:?}");
    assert!(chunks.len() > 3, "cut shorter than a step could be: {chunks:?}");
    // 40 ms less 4 for the step and 0.5 for the streams, at 25 us.
    assert!(chunks.iter().all(|&len| len <= 1440), "{chunks:?}");
    for rows in steps {
        // Once its prompt is computed, the long one is a stream itself.
        let streams = rows.iter().filter(|&&len| len == 1).count();
        assert!((20..=21).contains(&streams), "every stream is in every step: {rows:?}");
    }
    drop((streams, lone, long));
}

#[test]
fn what_nobody_reads_holds_nobody_up_and_waiting_is_told_from_working() {
    let (mut engine, handle, calls) = engine((7000, 1), 512);
    let replies: Vec<_> = (0..256).flat_map(|_| handle.submit(request(2, 30)).unwrap()).collect();
    while engine.turn() == Turn::Worked {}
    let launched = calls.borrow().iter().filter(|call| matches!(call, Call::Launch(..))).count();
    // One for the prompts, and one for each further token.
    assert_eq!(launched, 30);
    for mut reply in replies {
        let events: Vec<Event> = std::iter::from_fn(|| reply.try_recv()).collect();
        assert_eq!(events.len(), 32, "it was started, told 30 tokens and ended");
    }
    let stats = handle.stats();
    // The fake's clock moves only while a step is waited for.
    assert_eq!((stats.steps, stats.busy), (30, Duration::ZERO));
    assert_eq!(stats.waited, Duration::from_micros(30 * 7000 + 512 + 29 * 256));
}
