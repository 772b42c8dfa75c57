//! Requests of different adapters share steps and change no bit of each other's answers, and no page of one is
//! another's.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use fornax_compute::{
    KvDType, KvSpec, Memory, Sampling,
    cpu::{Cpu, CpuOptions},
};
use fornax_engine::{
    AdapterRefusal, Engine, EngineOptions, Event, Handle, Local, LocalParts, Refusal, Reply, Request,
    StepLimits, Turn,
};
use fornax_format::{AdapterFiles, Checkpoint};
use fornax_model::{Adapter, AdapterRoom, Config, Limits};

const SLOTS: usize = 6;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures")
}

fn adapter(name: &str) -> Adapter {
    Adapter::new(name, AdapterFiles::open(&fixtures().join("adapters").join(name)).unwrap()).unwrap()
}

fn engine() -> (Engine, Handle) {
    engine_with(&[adapter("llama-qv"), adapter("llama-all")], AdapterRoom::default())
}

fn engine_with(adapters: &[Adapter], room: AdapterRoom) -> (Engine, Handle) {
    engine_of("llama", adapters, room)
}

fn engine_of(base: &str, adapters: &[Adapter], room: AdapterRoom) -> (Engine, Handle) {
    let checkpoint = Checkpoint::open(&fixtures().join(base)).unwrap();
    let mut config = Config::read(&checkpoint).unwrap();
    config.adapter_room = room;
    let backend =
        Cpu::new(CpuOptions { threads: 2, tokens_max: 64, slots: SLOTS, depth: 0, ..CpuOptions::default() })
            .unwrap();
    let limits = Limits { tokens_max: 64, wanted_max: SLOTS };
    let model =
        fornax_model::load_with(&checkpoint, &config, adapters, &backend, limits, &mut |_, _| {}).unwrap();
    let groups = config.kv_groups(64);
    let kv = backend.alloc_kv(&KvSpec { groups: groups.clone(), dtype: KvDType::F16 }).unwrap();
    let local = Local::new(LocalParts {
        backend,
        model,
        kv,
        groups,
        limits: StepLimits { tokens_max: 64, wanted_max: SLOTS, slots: SLOTS },
        depth: 0,
        vocab: u32::try_from(config.vocab).unwrap(),
    });
    Engine::new(Box::new(local), EngineOptions::new(200, Arc::new(|| Duration::ZERO)))
}

/// The same prompt of three pages, for each adapter and for none.
fn request(adapter: Option<u32>) -> Request {
    let prompt = (0..100).map(|i| (i * 37 + 11) % 97).collect();
    Request { adapter, ..Request::new(prompt, 20, Sampling { top_logprobs: Some(0), ..Sampling::greedy() }) }
}

/// Tokens with the bits of their log-probabilities, and how many tokens of the prompt were found computed.
fn answer(reply: &mut Reply) -> (Vec<(u32, u32)>, usize) {
    let (mut tokens, mut cached) = (Vec::new(), 0);
    while let Some(event) = reply.recv() {
        match event {
            Event::Started { cached_tokens, .. } => cached = cached_tokens,
            Event::Token { token, logprob, .. } => tokens.push((token, logprob.unwrap().to_bits())),
            Event::Failed(failure) => panic!("{failure}"),
            _ => {}
        }
    }
    (tokens, cached)
}

#[test]
fn adapters_share_steps_but_neither_bits_nor_pages() {
    let chosen = [None, Some(0), Some(1)];
    let alone = chosen.map(|adapter| {
        let (mut engine, handle) = engine();
        let mut replies = handle.submit(request(adapter)).unwrap();
        while engine.turn() == Turn::Worked {}
        answer(&mut replies[0]).0
    });
    assert!(alone[0] != alone[1] && alone[1] != alone[2] && alone[0] != alone[2]);
    let (mut engine, handle) = engine();
    // One behind the other first: whoever took the pages of the one before would answer as it did.
    for (adapter, wanted) in chosen.into_iter().zip(&alone) {
        let mut replies = handle.submit(request(adapter)).unwrap();
        while engine.turn() == Turn::Worked {}
        assert_eq!(answer(&mut replies[0]), (wanted.clone(), 0), "{adapter:?}");
    }
    // Then all at once, which find what each has computed itself.
    let mut replies: Vec<Reply> =
        chosen.iter().flat_map(|&adapter| handle.submit(request(adapter)).unwrap()).collect();
    while engine.turn() == Turn::Worked {}
    for (reply, wanted) in replies.iter_mut().zip(&alone) {
        assert_eq!(answer(reply), (wanted.clone(), 96));
    }
    engine.assert_consistent();
    let refused = handle.submit(request(Some(2))).err().unwrap().to_string();
    assert_eq!(refused, "adapter is 2; wanted below the number of adapters");
}

#[test]
fn over_states_an_adapter_shares_steps_but_neither_bits_nor_states() {
    let engine = || engine_of("qwen35", &[adapter("qwen35-some")], AdapterRoom::default());
    let chosen = [None, Some(0)];
    let alone = chosen.map(|adapter| {
        let (mut engine, handle) = engine();
        let mut replies = handle.submit(request(adapter)).unwrap();
        while engine.turn() == Turn::Worked {}
        answer(&mut replies[0]).0
    });
    assert_ne!(alone[0], alone[1]);
    let (mut engine, handle) = engine();
    // One behind the other: what went on from the other's state would answer as it did. Then several at once, which go
    // on from their own.
    for (adapter, wanted) in chosen.into_iter().zip(&alone) {
        let mut replies = handle.submit(request(adapter)).unwrap();
        while engine.turn() == Turn::Worked {}
        assert_eq!(answer(&mut replies[0]), (wanted.clone(), 0), "{adapter:?}");
    }
    let both = |adapter| handle.submit(Request { choices: 2, ..request(adapter) }).unwrap();
    let mut replies: Vec<Reply> = chosen.into_iter().flat_map(both).collect();
    while engine.turn() == Turn::Worked {}
    for (index, reply) in replies.iter_mut().enumerate() {
        let (got, cached) = answer(reply);
        assert_eq!(got, alone[index / 2], "answer {index}");
        assert!(cached > 0, "answer {index} goes on from a state of its own adapter");
    }
    engine.assert_consistent();
}

/// An answer of the adapter alone, which the model was loaded with.
fn alone(number: Option<u32>) -> Vec<(u32, u32)> {
    let (mut engine, handle) = engine();
    let mut replies = handle.submit(request(number)).unwrap();
    while engine.turn() == Turn::Worked {}
    answer(&mut replies[0]).0
}

/// Loads one while the engine turns.
fn load(engine: &mut Engine, handle: &Handle, name: &str) -> Result<u32, AdapterRefusal> {
    let (adapter, handle) = (adapter(name), handle.clone());
    let loading = thread::spawn(move || handle.load_adapter(adapter));
    while !loading.is_finished() {
        engine.turn();
    }
    loading.join().unwrap()
}

#[test]
fn adapters_come_and_go_while_requests_run_and_nobody_gets_anothers() {
    let (plain, qv, all) = (alone(None), alone(Some(0)), alone(Some(1)));
    let room = AdapterRoom { adapters: 1, rank: 4 };
    let (mut engine, handle) = engine_with(&[], room);
    let refused = handle.submit(request(Some(0))).err().unwrap().to_string();
    assert_eq!(refused, "adapter is 0; wanted an adapter that is loaded");
    // One that runs while the adapter comes: not a bit of it changes.
    let mut before = handle.submit(request(None)).unwrap();
    for _ in 0..5 {
        engine.turn();
    }
    let first = load(&mut engine, &handle, "llama-qv").unwrap();
    let mut with = handle.submit(request(Some(first))).unwrap();
    while engine.turn() == Turn::Worked {}
    assert_eq!(answer(&mut before[0]).0, plain);
    assert_eq!(answer(&mut with[0]), (qv.clone(), 0), "none of the model's own pages");
    let full = load(&mut engine, &handle, "llama-all").unwrap_err();
    assert!(matches!(full, AdapterRefusal::Full { places: 1, taken: 1 }), "{full}");
    // It is unloaded while it is used: who has it keeps it, and its place is taken until then.
    let mut keeps = handle.submit(request(Some(first))).unwrap();
    for _ in 0..3 {
        engine.turn();
    }
    assert!(handle.unload_adapter(first) && !handle.unload_adapter(first));
    let gone = handle.submit(request(Some(first))).err();
    assert!(matches!(gone, Some(Refusal::Parameter { name: "adapter", .. })), "{gone:?}");
    while engine.turn() == Turn::Worked {}
    assert_eq!(answer(&mut keeps[0]), (qv, 96), "its own pages");
    // Another in its place, under another number: it finds no page of the first.
    let second = load(&mut engine, &handle, "llama-all").unwrap();
    assert!(second != first);
    let mut replies = handle.submit(request(Some(second))).unwrap();
    while engine.turn() == Turn::Worked {}
    assert_eq!(answer(&mut replies[0]), (all, 0));
    engine.assert_consistent();
}

#[test]
fn an_adapter_that_has_no_room_or_is_for_another_model_changes_nothing() {
    let (mut engine, handle) = engine_with(&[], AdapterRoom { adapters: 2, rank: 3 });
    let refused = |engine: &mut Engine, name: &str, words: &str| {
        let said = load(engine, &handle, name).unwrap_err().to_string();
        assert!(said.contains(words), "{said}");
    };
    refused(&mut engine, "llama-qv", "its rank is 4; there is room for adapters of rank 3");
    refused(&mut engine, "phi3-fused", "phi3-fused");
    let loaded = load(&mut engine, &handle, "llama-all").unwrap();
    let mut replies = handle.submit(request(Some(loaded))).unwrap();
    while engine.turn() == Turn::Worked {}
    assert_eq!(answer(&mut replies[0]).0, alone(Some(1)));
    // Without room there is none for any.
    let (mut engine, handle) = self::engine();
    let said = load(&mut engine, &handle, "llama-all").unwrap_err().to_string();
    assert!(said.contains("loaded without room for adapters that come later"), "{said}");
    drop(engine);
    assert!(matches!(
        handle.load_adapter(adapter("llama-all")),
        Err(AdapterRefusal::Engine(Refusal::Closed))
    ));
}
