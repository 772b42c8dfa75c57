//! Engines whose steps depend on nothing but lengths: what private inference asks for.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::time::Duration;

use fornax_compute::{KvGroup, KvKind, Sampling};
use fornax_engine::fake::{Fake, FakeOptions};
use fornax_engine::{Engine, EngineOptions, Event, Request, Speculation, StepLimits, Turn};

/// Tokens of a prompt, of which so many were found in the cache when it was asked a second time.
fn cached(prefix_reuse: bool) -> usize {
    let fake = Fake::new(FakeOptions {
        groups: vec![KvGroup { layers: 1, kind: KvKind::pairs(1, 1), window: None, pages: 100 }],
        limits: StepLimits { tokens_max: 64, wanted_max: 4, slots: 4 },
        depth: 0,
        vocab: 50,
        faults: Box::new(|| None),
    });
    let options = EngineOptions {
        prefix_reuse,
        speculation: Speculation::Off,
        ..EngineOptions::new(400, Arc::new(|| Duration::ZERO))
    };
    let (mut engine, handle) = Engine::new(Box::new(fake), options);
    let prompt: Vec<u32> = (0..100).map(|i| i * 7 % 50).collect();
    let mut last = usize::MAX;
    for _ in 0..2 {
        let mut replies = handle.submit(Request::new(prompt.clone(), 5, Sampling::greedy())).unwrap();
        while engine.turn() == Turn::Worked {}
        engine.assert_consistent();
        let mut reply = replies.pop().unwrap();
        let events: Vec<Event> = std::iter::from_fn(|| reply.recv()).collect();
        assert!(matches!(events.last(), Some(Event::End { .. })), "{events:?}");
        let Event::Started { cached_tokens, .. } = events[0] else { panic!("{events:?}") };
        last = cached_tokens;
    }
    last
}

#[test]
fn without_reuse_a_prompt_that_was_there_before_is_computed_like_any_other() {
    assert_eq!(cached(false), 0);
    assert!(cached(true) >= 64, "with it most of the prompt is found");
}
