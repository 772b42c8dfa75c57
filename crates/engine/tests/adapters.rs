//! Requests of different adapters share steps and change no bit of each other's answers, and no page of one is
//! another's.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::{path::Path, sync::Arc, time::Duration};

use fornax_compute::{
    KvDType, KvSpec, Memory, Sampling,
    cpu::{Cpu, CpuOptions},
};
use fornax_engine::{
    Engine, EngineOptions, Event, Handle, Local, LocalParts, Reply, Request, StepLimits, Turn,
};
use fornax_format::{AdapterFiles, Checkpoint};
use fornax_model::{Adapter, Config, Limits};

const SLOTS: usize = 6;

fn engine() -> (Engine, Handle) {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    let checkpoint = Checkpoint::open(&fixtures.join("llama")).unwrap();
    let config = Config::read(&checkpoint).unwrap();
    let adapter = |name: &str| {
        Adapter::new(name, AdapterFiles::open(&fixtures.join("adapters").join(name)).unwrap()).unwrap()
    };
    let adapters = [adapter("llama-qv"), adapter("llama-all")];
    let backend =
        Cpu::new(CpuOptions { threads: 2, tokens_max: 64, slots: SLOTS, depth: 0, ..CpuOptions::default() })
            .unwrap();
    let limits = Limits { tokens_max: 64, wanted_max: SLOTS };
    let model =
        fornax_model::load_with(&checkpoint, &config, &adapters, &backend, limits, &mut |_, _| {}).unwrap();
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
