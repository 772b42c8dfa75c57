//! Model checking of the hand-over between callers and the engine's thread: random and adversarial schedules of the
//! code that ships. Built only with `RUSTFLAGS="--cfg shuttle"`; `cargo xtask prove hand-over` runs it.
#![cfg_attr(shuttle, expect(clippy::unwrap_used, reason = "a test stops at the first surprise"))]
#![cfg(shuttle)]

use std::{sync::Arc, time::Duration};

use fornax_compute::{KvGroup, KvKind, Sampling};
use fornax_engine::{
    Engine, EngineOptions, Event, Handle, QueueLimits, Refusal, Request, StepLimits,
    fake::{Fake, FakeOptions},
};
use shuttle::thread;

/// Schedules tried per scheduler and test.
const SCHEDULES: usize = 2000;

fn check(body: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(body.clone(), SCHEDULES);
    shuttle::check_pct(body, SCHEDULES, 3);
}

/// Starts an engine on a thread of its own; it ends when the last handle is gone.
fn start(requests_max: usize) -> (Handle, thread::JoinHandle<()>) {
    let (sender, receiver) = shuttle::sync::mpsc::channel();
    let thread = thread::spawn(move || {
        let fake = Fake::new(FakeOptions {
            groups: vec![KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 4 }],
            limits: StepLimits { tokens_max: 8, wanted_max: 2, slots: 2 },
            depth: 1,
            vocab: 10,
            faults: Box::new(|| None),
        });
        let queue = QueueLimits { requests_max, tokens_max: 100 };
        let options = EngineOptions { queue, ..EngineOptions::new(60, Arc::new(|| Duration::ZERO)) };
        let (engine, handle) = Engine::new(Box::new(fake), options);
        sender.send(handle).unwrap();
        engine.run();
    });
    (receiver.recv().unwrap(), thread)
}

fn request(max_tokens: usize) -> Request {
    Request::new(vec![1, 2], max_tokens, Sampling::greedy())
}

#[test]
fn every_caller_gets_its_last_event_and_the_engine_stops() {
    check(|| {
        let (handle, engine) = start(8);
        let callers: Vec<_> = (1..=2)
            .map(|max_tokens| {
                let handle = handle.clone();
                thread::spawn(move || {
                    let events = handle.complete(request(max_tokens)).unwrap().remove(0);
                    assert!(matches!(events.last(), Some(Event::End { .. })), "{events:?}");
                    assert_eq!(events.len(), max_tokens + 2);
                })
            })
            .collect();
        drop(handle);
        for caller in callers {
            caller.join().unwrap();
        }
        engine.join().unwrap();
    });
}

#[test]
fn a_reply_dropped_at_any_moment_ends_its_request_and_nobody_elses() {
    check(|| {
        let (handle, engine) = start(8);
        let gone = handle.submit(request(40)).unwrap();
        let kept = handle.clone();
        let caller = thread::spawn(move || kept.complete(request(3)).unwrap().remove(0).len());
        drop(gone);
        assert_eq!(caller.join().unwrap(), 5);
        drop(handle);
        engine.join().unwrap();
    });
}

#[test]
fn a_full_queue_refuses_and_empties_again() {
    check(|| {
        let (handle, engine) = start(1);
        let first = handle.submit(request(2)).unwrap();
        let second = handle.submit(request(1));
        assert!(matches!(second, Ok(_) | Err(Refusal::QueueFull { .. })));
        for mut reply in first.into_iter().chain(second.into_iter().flatten()) {
            while reply.recv().is_some() {}
        }
        assert!(handle.submit(request(1)).is_ok(), "answered requests leave the queue");
        drop(handle);
        engine.join().unwrap();
    });
}
