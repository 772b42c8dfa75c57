//! An encoder in the engine: texts are computed whole, whatever the budget, and nobody's pages are used again.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::{path::Path, sync::Arc, time::Duration};

use fornax_compute::{
    KvDType, KvSpec, Memory, Sampling,
    cpu::{Activations, Cpu, CpuOptions},
};
use fornax_engine::{Engine, EngineOptions, Event, Handle, Local, LocalParts, Request, StepLimits, Turn};
use fornax_format::Checkpoint;
use fornax_model::{Config, Limits};

/// Less than two of the texts.
const TOKENS_MAX: usize = 80;

fn engine() -> (Engine, Handle) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/bert");
    let checkpoint = Checkpoint::open(&path).unwrap();
    let config = Config::read(&checkpoint).unwrap();
    let activations = Activations::Float;
    let options =
        CpuOptions { threads: 2, activations, tokens_max: TOKENS_MAX, slots: 4, ..CpuOptions::default() };
    let backend = Cpu::new(options).unwrap();
    let limits = Limits { tokens_max: TOKENS_MAX, wanted_max: 4 };
    let model = fornax_model::load(&checkpoint, &config, &backend, limits, &mut |_, _| {}).unwrap();
    let groups = config.kv_groups(13);
    let kv = backend.alloc_kv(&KvSpec { groups: groups.clone(), dtype: KvDType::F32 }).unwrap();
    let local = Local::new(LocalParts {
        backend,
        model,
        kv,
        groups,
        limits: StepLimits { tokens_max: TOKENS_MAX, wanted_max: 4, slots: 4 },
        depth: 0,
        vocab: u32::try_from(config.vocab).unwrap(),
    });
    Engine::new(Box::new(local), EngineOptions::new(96, Arc::new(|| Duration::ZERO)))
}

fn text(len: u32) -> Request {
    let prompt = (0..len).map(|i| 3 + (i * 37 + 11) % 97).collect();
    Request { embeds: true, ..Request::new(prompt, 0, Sampling::greedy()) }
}

fn embeddings(engine: &mut Engine, handle: &Handle, texts: &[u32]) -> Vec<Vec<f32>> {
    let mut replies: Vec<_> = texts.iter().flat_map(|len| handle.submit(text(*len)).unwrap()).collect();
    while engine.turn() == Turn::Worked {}
    let embedding = |events: Vec<Event>| match &events[..] {
        [Event::Started { .. }, Event::Embedding(values), Event::End { .. }] => values.clone(),
        other => panic!("{other:?}"),
    };
    replies.iter_mut().map(|reply| embedding(std::iter::from_fn(|| reply.recv()).collect())).collect()
}

#[test]
fn texts_are_computed_whole_and_have_the_same_bits_alone_and_among_others() {
    // The longest fills a step; one is asked for twice, and the second time finds nothing of the first.
    let texts = [70, 33, 80, 1, 64, 70, 12];
    let (mut engine, handle) = engine();
    let together = embeddings(&mut engine, &handle, &texts);
    assert_eq!(together[0], together[5]);
    for (len, together) in texts.iter().zip(&together) {
        assert_eq!(&embeddings(&mut engine, &handle, &[*len])[0], together, "{len} tokens");
    }
    let stats = handle.stats();
    assert_eq!(stats.prefix_hits, 0);
    assert!(stats.pages.iter().all(|pages| pages.referenced == 0));
    engine.assert_consistent();
}

#[test]
fn what_does_not_fit_a_step_and_answers_are_refused() {
    let (_engine, handle) = engine();
    let refused = |request: Request| handle.submit(request).err().unwrap().to_string();
    assert!(refused(text(81)).contains("the prompt has 81 tokens; the context holds 80"));
    let answer = Request::new(vec![5, 6], 3, Sampling::greedy());
    assert!(refused(answer).contains("this model makes embeddings and no answers"));
}
